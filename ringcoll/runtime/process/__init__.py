"""Threads of the process: their begin and end, their calls, the lines of code that they are in.

=========  ===============================================================
`threads`  how threads start, end, and hear signals
`calls`    calls that may never return, each in a thread
`stacks`   the lines of code that threads are in
`tracers`  torch's tracers: torch.compile's, and execution trace observers
=========  ===============================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
