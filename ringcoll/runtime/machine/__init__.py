"""Facts of the machine and wishes of its user.

==========  ==========================================================
`settings`  the library's environment variables, and a user's time limits
`facts`     cores, memory, processor, addresses, sockets; which processes share a host
`files`     files that are read and replaced as a whole; strict JSON
==========  ==========================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
