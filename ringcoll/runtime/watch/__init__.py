"""Watching: ranks find out which ranks live, and which wait for which, and tell a failure.

===================  ==========================================================
`lives`              which ranks have ended, as far as that can be seen
`notices`            notes of ranks in the store, in the log, and in torchrun's error file
`diagnosis`          the record of this rank's operations; the cause of a failure
`monitor`            looks around when a wait is long, breaks it, tells the cause; compares calls
`phases`             phases of a step of training, and its waits, in the program's words
`waits`              says which rank waits long for a message of the user's own
`flight_recorder`    the state of a process's groups, which ``ringcoll dump`` reads from outside
`flight_report`      ``ringcoll dump``: processes ask each other for that state; it in words
===================  ==========================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
