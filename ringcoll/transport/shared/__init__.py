"""Messages through memory that the ranks of one host share.

===============  ==========================================================
`memory`         shared memory, sleep on a word of it, and reads of another process's memory
`tensors`        tensors in memory that processes share: `ringcoll.empty_shared`
`memory_layout`  where things lie in the memory of a rank
`channel`        messages between two ranks, each of which writes to its own memory
`board`          a message of each rank to all others
`transport`      the ranks of one host: CPU tensors
===============  ==========================================================
"""
