"""Schedules as data, and their proof.

=============  ==========================================================
`steps`        operations, steps, programs as they are written
`contracts`    the promise of each collective; the orders of operands
`counting`     the one counter of rounds, messages and data
`drawing`      the step-by-rank grid
`laboratory`   what is asked of the laboratory, which is not known here
`verifier`     the proof that a schedule keeps its contract
`schedule`     what the other rooms read: all facts of the steps filled in; the text form,
               NCCL's words, and the order of reduction: as a sum, and by element
`compose`      programs made of programs: in parallel, renumbered, in place; an all-reduce in
               two parts, between which others can combine
=============  ==========================================================

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

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
