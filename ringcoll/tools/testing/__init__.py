"""Tests of distributed code, without a cluster: a plugin of pytest.

Problem: a test of distributed code needs ranks. They have to be started, set up, compared and
ended, whatever the test does to them, and a failure has to show what went wrong on which rank.
`ranks` runs a test on processes of a pool that stays, or on threads; `given_collective` holds a
collective against its definition, by hypothesis. docs/testing.md shows both.

Pytest imports this room whenever it starts, so nothing heavy is imported before a test uses it.

===============  ==========================================================
`on_ranks`       `ranks`: a test, or a function, on ranks
`pool`           the processes, and the calls and answers between pytest and ranks
`collective`     `given_collective`: a collective against its definition
`inputs`         inputs that differ by rank and by index, and right answers of a reduction
`plugin`         the hooks of pytest
===============  ==========================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
