"""Facts of the machine and wishes of its user: settings, cores, streams, files. Above `cost`.

================  ==========================================================
`settings`        the environment's variables; nothing else reads them
`limits`          numbers and time limits of a user, of any class
`machine`         cores, processor and address, and which processes share a host
`shared_memory`   memory that processes share, sleep on a word of it, reads of another's memory
`shared_tensors`  tensors in memory that processes share: `ringcoll.empty_shared`
`tensor_memory`   the check that a tensor passes before its address is read
`stores`          waits for keys of a store
`answers`         what a process says to others of its user that ask
`lines`           connections whose end tells of a process's death on another host
`ending`          what comes last in a program; threads that start before
`sites`           lines of the user's code that make calls
`signals`         whether the program hears signals while it waits
`mailbox`         messages that arrive while their receiver sleeps
`peaks`           peaks of memory between two moments
`files`           files that are never seen incomplete
`streams`         CUDA streams: where a group's operations run on a GPU
`tuning`          the file that ``ringcoll tune`` writes
`schedule_files`  schedules in files, wherever an algorithm is named
`user_modules`    modules of a user that register algorithms
`untraced`        keeps torch.compile out of functions
`versions`        versions of the software beside the package
================  ==========================================================

May be imported from outside: each module's ``__all__``.
"""
