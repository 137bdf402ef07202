"""Sending what schedules say: from a call of a user to messages between processes.

==============  =========================================================
`machine`       settings, facts of the machine, stores, files
`reduction`     operators, and the engines that compute them
`transport`     messages between two ranks: one file a transport
`operation`     from a request to a flat list of instructions, which run
`watch`         who is alive, who waits for what, what is told
`group`         one rank's end of a group: meeting, queue, work
`collectives`   the public functions, their arguments, groups
`launch`        starting ranks
==============  =========================================================
"""
