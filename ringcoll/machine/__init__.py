"""Facts of the machine and wishes of its user: settings, cores, stores, files.

================  ==========================================================
`settings`        the library's environment variables; nothing else reads them
`limits`          numbers and time limits of a user, of any class
`facts`           cores, processor and address, and which processes share a host
`stores`          waits for keys of a store
`lines`           connections whose end tells of a process's death on another host
`mailbox`         messages that arrive while their receiver sleeps
`ending`          what comes last in a program; threads that start before
`sites`           lines of the user's code that make calls
`signals`         whether the program hears signals while it waits
`peaks`           peaks of memory between two moments
`files`           files that are never seen incomplete
`tuning`          the file that ``ringcoll tune`` writes
`schedule_files`  schedules in files, wherever an algorithm is named
`user_modules`    modules of a user that register algorithms
`untraced`        keeps torch.compile out of functions
================  ==========================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
