"""One rank's end of a group: how ranks meet, and how their operations follow one another.

==============  ==========================================================
`work`          what an asynchronous operation returns
`queue`         operations in the order of their calls; who runs them
`workspace`     working memory that the operations of a group share
`agreement`     what messages cost, measured; one table for all ranks
`probing`       the messages between all pairs of ranks, measured
`refitting`     when operations have become slow: measured anew, and fitted
`communicator`  one rank's end of a group: meet, resolve, open, drive, finish
==============  ==========================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
