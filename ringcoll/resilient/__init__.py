"""Groups that go on without ranks that die, and take in new ones.

============  ======================================================================
`succession`  who goes on from a group: the rules
`membership`  who is in the group: what carries the rules, and how others join
`group`       a group that tries operations again, without the dead
`beginning`   how such a group begins, and how others join it
`state`       models and optimizers as bytes
`ddp`         torch's ``DistributedDataParallel`` on such a group
============  ======================================================================

May be imported from outside: what stands in ``__all__``.
"""

from ringcoll.resilient.beginning import join, start
from ringcoll.resilient.ddp import data_parallel
from ringcoll.resilient.group import Change, ResilientGroup

__all__ = ["Change", "ResilientGroup", "data_parallel", "join", "start"]
