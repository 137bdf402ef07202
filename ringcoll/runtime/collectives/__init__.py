"""The public functions, their arguments, and the groups that they work in.

===========  ==========================================================
`functions`  the collectives, with torch.distributed's names and arguments
`calls`      the way of a call: key, look-up, run; prepared operations; sparse tensors
`arguments`  checks of arguments by one rank: its own, and those that it asks other rooms for
`groups`     the groups that users name, torch's and our own, and this rank's communicator of each;
             tensors of a group move to shared memory
`choosing`   which algorithm runs, and why, in words
===========  ==========================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
