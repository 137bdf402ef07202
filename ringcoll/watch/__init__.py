"""Watching: ranks find out who is alive and who waits for whom, and tell and show a failure.

===================  ==========================================================
`lives`              which ranks have ended, as far as that can be seen
`notices`            what ranks tell each other through the store when something takes too long
`announcement`       the failure that breaks a group, in the log and for torchrun, at once
`comparison`         calls compared through the store, where messages have no tags; each call, on request
`barrier`            a barrier in the store, which names the ranks that do not come
`progress`           what this rank does, as a record that the thread of operations writes
`diagnosis`          what is wrong, told from that record, the notices and the lives
`monitor`            looks around when a wait is long, breaks it, and tells the others the cause
`answers`            what a process says to others of its user that ask
`flight_recorder`    what the groups of a process do, for somebody who looks on from outside
`flight_report`      the same of all ranks, merged and in words
===================  ==========================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
