"""Groups that go on without ranks that die, and take in new ones.

============  ======================================================================
`succession`  who goes on from a group: the rules
`membership`  who is in the group: what carries the rules, and how others join
`group`       a group that tries operations again, without the dead: how it begins and is
              joined
============  ======================================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
