"""One rank's end of a group: how ranks meet, and how their operations follow one another.

==============  ==========================================================
`work`          what an asynchronous operation returns
`queue`         operations in the order of their calls; who runs them
`workspace`     working memory that the operations of a group share
`agreement`     what messages cost, measured; one table for all ranks
`communicator`  one rank's end of a group: meet, resolve, open, drive, finish
==============  ==========================================================

May be imported from outside: each module's ``__all__``.
"""
