"""Sending what schedules say: from a call of a user to messages between processes.

==============  =========================================================
`machine`       settings, facts of the machine, files
`process`       threads of the process, their calls, and the lines that they are in
`rendezvous`    how processes reach each other: stores, lines, mailboxes
`user_files`    algorithms and tables of costs in files of a user
`tensors`       checks of a user's tensors: memory, overlap
`reduction`     operators, and the engines that compute them
`transport`     messages between two ranks: one file a transport
`operation`     from a request to a flat list of instructions, which run
`watch`         which ranks live, which wait for what, and how failures are told
`group`         one rank's end of a group: meeting, queue, work
`collectives`   the public functions, their arguments, groups
`launch`        starting ranks
==============  =========================================================

Other wings need a few names again and again, which are here as well::

    from ringcoll.runtime import Ranks, as_group, cores
"""

from ringcoll._package import late_door

__getattr__, __dir__ = late_door(__name__, __file__)
