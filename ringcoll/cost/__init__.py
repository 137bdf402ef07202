"""The costs of algorithms, and the choice between them. Pure: no torch, no I/O, no clock.

============  ==========================================================
`link_costs`  the costs of a link between two ranks
`counts`      lower bounds; costs in segments, and on hosts
`sentences`   a cost in sentences, beside the bounds
`dominance`   the algorithms that no other algorithm beats in every way
`predict`     how long every algorithm would take
`rules`       the grammar of rules: collective, range of bytes, algorithm
`fitted`      rules and schedules that were fitted to a network
`table`       costs and rules that all ranks of a group share
`choice`      the algorithm that ``"auto"`` stands for in one call
============  ==========================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
