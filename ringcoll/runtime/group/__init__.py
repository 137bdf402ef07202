"""One rank's end of a group: how ranks meet, and how their operations follow one another.

===============  ==========================================================
`queue`          operations in the order of their calls, their works, and the memory that they share
`message_costs`  what messages cost, measured
`agreement`      one table of costs for all ranks, when they meet
`communicator`   one rank's end of a group: meet, resolve, open, drive, finish
===============  ==========================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
