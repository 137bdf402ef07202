"""Messages through memory that the ranks of one host share.

===========  ==========================================================
`memory`     memory that processes share, sleep on a word of it, reads of another's memory
`tensors`    tensors in memory that processes share: `ringcoll.empty_shared`
`layout`     where things lie in the memory of two ranks
`channel`    the memory of two ranks, as a channel for messages
`transport`  the ranks of one host: CPU tensors
===========  ==========================================================
"""
