"""The public functions, their arguments, and the groups that they work in.

===============  ==========================================================
`functions`      the collectives, with torch.distributed's names and arguments
`calls`          the way of a call: key, look-up, run; prepared operations
`arguments`      checks of arguments by one rank: its own, and those that it asks other rooms for
`groups`         from a group that a user names to this rank's communicator
`own_groups`     groups that torch does not know: of threads, of MPI, of a store
`sharing`        tensors of a group move to shared memory
`sparse`         all-reduce of sparse tensors
`probe_call`     the network of a group, measured
`refit_call`     algorithms fitted to it
`explanation`    which algorithm would run, and why
===============  ==========================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
