"""Other systems' formats of schedules and networks. Pure: text or bytes in and out, and no files.

===============  ==========================================================
`msccl`          XML of MSCCL, out and in
`mscclpp`        execution plans of MSCCL++, JSON, out and in; a text of either format, in
`network_files`  networks: XML that NCCL writes, in
`places`         other systems' numbers of places, and steps cut at them
`levelling`      programs of thread blocks as a schedule
`documents`      elements of a small XML document, values of a JSON document
===============  ==========================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
