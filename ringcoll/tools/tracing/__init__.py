"""Where the time goes: a picture of all ranks on one clock, and its summary.

Problem: an operation, or a training step, is slow, and nobody sees whether ranks wait for each
other, move bytes, reduce, or compute. `trace` notes every send, receive, wait, reduction and copy
of the operations of a group, and the phases of `ringcoll.runtime.watch.phases`; rank 0 writes a
file that Perfetto reads.

Cost: nothing without a trace. With a trace, two looks at the clock and a small tuple for each
instruction; docs/trace.md has the microseconds.

==============  ==========================================================
`block`         `trace`: the traced block, from its begin to the file
`recorder`      notes what a rank does
`records`       the notes of a rank
`clocks`        one clock for all ranks, from the messages between them
`trace_events`  the picture, for Perfetto
`summary`       the numbers of operations and phases, and sentences on them
==============  ==========================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
