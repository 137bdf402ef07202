"""Search for schedules that suit a topology. Pure: no torch, no I/O, no clock.

A schedule that a search finds is an ordinary schedule: it is proved, simulated, drawn, stored as
text and executed as those of `ringcoll.schedules.algorithms` are. A search knows ranks, the hops
between them, and what a hop carries in a *round*: the time of a chunk on the slowest hop.

==================  ==========================================================
`front`             `synthesize`: the schedules of a collective on a topology
`solvers`           the exact search, with proofs; a greedy search; trees that share out the links
`fitting`           `fit`: the fastest known schedule for each range of sizes
`hops`              hops, and near ranks; demands; moves of chunks become schedules
`bounds`            what no schedule is below; simulated times in the best segments
==================  ==========================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
