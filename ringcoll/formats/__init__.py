"""Other systems' formats of schedules and networks. Pure: text or bytes in, text or bytes out; no files.

===============  ==========================================================
`msccl`          XML of MSCCL, out and in
`mscclpp`        execution plans of MSCCL++, JSON, out and in
`goal`           GOAL, for LogGOPSim and ATLAHS, out
`chakra`         execution traces of Chakra, for ASTRA-sim, out
`nccl_topology`  the GPUs of a host, XML that NCCL writes, in
`infragraph`     networks of InfraGraph, YAML or JSON, in
`reading`        a text of any format that can be read
`traffic`        what the ranks send and reduce, in bytes
`places`         other systems' numbers of places
`pieces`         schedules in the small steps of thread blocks
`blocks`         which step of a thread block waits for which
`block_events`   what thread blocks do, in order
`values`         what each place holds, and so the references of a schedule
`levelling`      events as a schedule
`components`     longest ways in a graph
`one_sided`      the events of a plan of MSCCL++
`xml`            elements of a small XML document
`tree`           values of a JSON document
===============  ==========================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
