"""What is sent: schedules, their proof, and the choice between them. No torch, no I/O, no clock.

============  ==========================================================
`ir`          steps as data, contracts, composition, the verifier, the text form
`algorithms`  one family a file, the registry, algorithms by name
`cost`        counts, bounds, prediction, rules, the choice
============  ==========================================================

Who writes an algorithm needs one import::

    from ringcoll.schedules import Step, grid, inp, out, recv, recv_reduce, register, send, verify
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
