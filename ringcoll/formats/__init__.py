"""Other systems' formats of schedules. Pure: text or bytes in, text or bytes out; no files.

==============  ==========================================================
`msccl`         XML of MSCCL, out and in
`mscclpp`       execution plans of MSCCL++, JSON, out and in
`goal`          GOAL, for LogGOPSim and ATLAHS, out
`chakra`        execution traces of Chakra, for ASTRA-sim, out
`reading`       a text of any format that can be read
`traffic`       what the ranks send and reduce, in bytes
`places`        other systems' numbers of places
`pieces`        schedules in the small steps of thread blocks
`blocks`        which step of a thread block waits for which
`events`        what thread blocks do, in order
`values`        what each place holds, and so the references of a schedule
`levels`        events as a schedule
`components`    longest ways in a graph
`one_sided`     the events of a plan of MSCCL++
`xml`           elements of a small XML document
`tree`          values of a JSON document
==============  ==========================================================

May be imported from outside: ``__all__``.
"""

from ringcoll.formats.chakra import to_chakra
from ringcoll.formats.goal import to_goal
from ringcoll.formats.msccl import from_msccl, to_msccl
from ringcoll.formats.mscclpp import from_mscclpp, to_mscclpp
from ringcoll.formats.reading import schedule_in

__all__ = [
    "from_msccl",
    "from_mscclpp",
    "schedule_in",
    "to_chakra",
    "to_goal",
    "to_msccl",
    "to_mscclpp",
]
