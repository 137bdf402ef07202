"""Messages through memory that the ranks of one host share.

===========  ==========================================================
`memory`     shared memory and its layout, sleep on a word of it, reads of another process's memory
`tensors`    the memory of tensors, and tensors that processes share: `ringcoll.empty_shared`
`channel`    messages between two ranks, each of which writes to its own memory
`program`    programs laid out as words, for the interpreter in C, ``program.c``
`transport`  the ranks of one host: CPU tensors; and a message of each rank to all others
===========  ==========================================================
"""
