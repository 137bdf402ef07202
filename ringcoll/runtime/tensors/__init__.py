"""Checks of a user's tensors.

=========  ============================================================
`memory`   whether a tensor has memory, which holds its elements as they are
`overlap`  whether tensors share memory
=========  ============================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
