"""Schedules as data, and their proof.

=============  ==========================================================
`steps`        operations, steps, programs as they are written
`contracts`    the promise of each collective; the orders of operands
`counting`     the one counter of rounds, messages and data
`drawing`      the step-by-rank grid
`outside`      functions of the laboratory, which the core does not know
`verifier`     the proof that a schedule keeps its contract
`schedule`     schedules with all facts of their steps; their text form, NCCL's words, and
               the order of reduction: as a sum, and by element
`compose`      programs made of programs: in parallel, renumbered, in place; an all-reduce in
               two parts, between which others can combine
=============  ==========================================================
"""

from ringcoll._package import late_door

__getattr__, __dir__ = late_door(__name__, __file__)
