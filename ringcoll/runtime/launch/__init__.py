"""Ways to start ranks: as threads, as processes of this machine; and those that are there.

==============  ==========================================================
`plain_groups`  groups without torch's, of threads of this process
`processes`     a pool of processes that run functions, and what travels to them and back
`leash`         a program of one's own, which ends with this one
`adopted`       ranks that ``mpiexec`` or ``srun`` has started
==============  ==========================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
