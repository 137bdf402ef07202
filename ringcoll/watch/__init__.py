"""Watching: ranks find out who is alive and who waits for whom, and tell and show a failure.

===================  ==========================================================
`flight_recorder`    what this rank does, as a record; what the groups of a process do
`lives`              which ranks have ended, as far as that can be seen
`notices`            what ranks tell through the store, the log, and torchrun's error file
`diagnosis`          what is wrong, told from that record, the notices and the lives
`monitor`            looks around when a wait is long, breaks it, tells the cause; compares calls
`flight_report`      how processes ask each other for it; the same of all ranks, in words
===================  ==========================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
