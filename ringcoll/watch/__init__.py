"""Watching: ranks find out who is alive and who waits for whom, and tell and show a failure.

===================  ==========================================================
`lives`              which ranks have ended, as far as that can be seen
`notices`            what ranks tell each other through the store when something takes too long
`announcement`       the failure that breaks a group, told at once
`comparison`         calls compared through the store, where messages have no tags, or each
`barrier`            a barrier in the store, which names the ranks that do not come
`monitor`            who tells it, and what follows: the wait is broken, with the cause in words
`answers`            what a process says to others of its user that ask
`flight_recorder`    what the groups of a process do, for who looks on from outside
`flight_report`      the same of all ranks, merged and in words
===================  ==========================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
