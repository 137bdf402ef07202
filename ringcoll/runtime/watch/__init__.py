"""Watching: ranks find out who is alive and who waits for whom, and tell and show a failure.

===================  ==========================================================
`lives`              which ranks have ended, as far as that can be seen
`notices`            what ranks tell through the store, the log, and torchrun's error file
`diagnosis`          what this rank does, as a record; what is wrong, from it, notices and lives
`monitor`            looks around when a wait is long, breaks it, tells the cause; compares calls
`phases`             what a step of training does, and for whom it waits, in the program's words
`waits`              says who waits long for a message of the user's own
`flight_recorder`    what the groups of a process do, for somebody who looks on from outside
`flight_report`      how processes ask each other for it; the same of all ranks, in words
===================  ==========================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
