"""Search for schedules that suit a topology. Pure: no torch, no I/O, no clock.

A schedule that a search finds is an ordinary schedule: it is proved, simulated, drawn, stored as text
and executed as those of `ringcoll.algorithms` are. A search knows ranks, the hops between them, and what a hop
carries in a *round*: the time of a chunk on the slowest hop.

==================  ==========================================================
`front`             `synthesize`: the schedules of a collective on a topology
`sccl`              the exact search, with proofs; needs OR-Tools
`greedy`            chunks and links matched step by step, for large graphs
`packing`           trees that share out the links, for large data in many segments
`near_ranks`        ranks of one host, below one switch, or joined by fast hops
`placing`           orders of ranks in which neighbours are near
`fitting`           `fit`: the fastest schedule for each range of sizes, of all that are registered or found
`build`             moves of chunks become schedules, also backwards
`demand`            what a collective demands, from its contract
`hops`              the hops of a topology, and what they share
`bounds`            steps and rounds that no schedule is below
`least_time`        seconds that no schedule is below
`flow`              maximum flows, for the bounds
`times_on_network`  how long schedules take on a topology, in their best numbers of segments
`registered`        the same for the registered algorithms, which a search has to beat
==================  ==========================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
