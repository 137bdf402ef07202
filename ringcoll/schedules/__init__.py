"""Schedules, their proof, and the choice between them. No torch, no I/O, no clock.

============  ==========================================================
`ir`          steps as data, contracts, composition, the verifier, the text form
`algorithms`  one family a file, the registry, algorithms by name
`cost`        counts, bounds, prediction, rules, the choice
============  ==========================================================

A module with an algorithm needs one import::

    from ringcoll.schedules import Step, grid, inp, out, recv, recv_reduce, register, send, verify

Words that mean one thing in the whole package
----------------------------------------------
block
    The data that a rank gives to, or gets from, a collective: the whole vector of an
    all-reduce, the share of one rank in an all-gather.
chunk
    The unit of a schedule: an equal share of a block, known by its index.
segment
    A piece of a chunk. The segments of a chunk are pipelined: at the same time, they are in
    different steps.
slot
    The place of one chunk in scratch memory.
step
    The operations that ranks do at the same time. Steps are global: a message is sent and
    received in the same step.
round
    A step in which a rank sends.
phase
    A run of steps with one purpose, such as the reduce-scatter in an all-reduce.
wave
    The steps of several segments that are under way at the same time: segment j does step
    w - j in wave w.
region
    A run of elements in one tensor: the place of one segment of a chunk.
"""

from ringcoll._package import late_door

__getattr__, __dir__ = late_door(__name__, __file__)
