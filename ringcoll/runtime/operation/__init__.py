"""From a request to messages: how a call is compiled, bound to memory, and run.

==============  ==========================================================
`instructions`  what a plan is made of: regions of memory, instructions; messages to lend
`plan`          one rank's part of a schedule, as a flat list of instructions
`stage`         the user's tensors as flat ones, and back
`executor`      instructions bound to memory and to a transport, and run
`operation`     a call compiled, and its bindings to memory
==============  ==========================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
