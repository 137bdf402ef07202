"""The costs of algorithms, and the choice between them. Pure: no torch, no I/O, no clock.

=========  ==========================================================
`counts`   costs of links; lower bounds; costs in segments, on hosts, in words
`predict`  how long every algorithm would take
`rules`    which algorithm runs when, and the text of rules
`table`    costs, rules and fits that all ranks of a group share
`choice`   the algorithm that ``"auto"`` stands for in one call
=========  ==========================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
