"""Facts of the machine and wishes of its user: settings, cores, stores, files.

================  ==========================================================
`settings`        the library's environment variables, and a user's time limits
`facts`           cores, memory, processor, address; which processes share a host
`stores`          waits for keys of a store
`lines`           connections that tell of deaths on other hosts, and bring messages
`program`         the program around the library: its lines, its signals, its end
`observers`       who looks at torch's operators beside its profiler
`files`           files, also with schedules; a user's modules with algorithms
`tuning`          the file that ``ringcoll tune`` writes
================  ==========================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
