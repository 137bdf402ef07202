"""From a request to messages: how operations are compiled, bound, run and watched.

===================  ======================================================================
`regions`            where the data of a schedule lie: runs of elements
`instructions`       what a plan is made of
`loans`              messages that may be read where they lie
`plan`               one rank's part of a schedule, as a flat list of instructions
`stage`              the user's tensors as flat, contiguous ones, and back
`overlap`            whether elements of strided tensors share memory
`executor`           instructions bound to memory and to a transport, and run
`rehearsal`          a plan's local work done once, so that its kernels are loaded before its first message
`operation`          a call compiled: what is decided and bound without tensors
`queue`              operations in the order of their calls; who runs them
`memory`             working memory that the operations of a group share
`comparison`         calls compared through the store, where messages have no tags, or each
`agreement`          what messages cost, measured; one table for all ranks
`lives`              which ranks have ended, as far as that can be seen
`notices`            what ranks tell each other through the store when something takes too long
`monitor`            who tells it, and what follows: the wait is broken, with the cause in words
`announcement`       the failure that breaks a group, told at once
`flight_recorder`    what the groups of a process do, for who looks on from outside
`flight_report`      the same of all ranks, merged and in words
`monitored_barrier`  a barrier in the store, which names the ranks that do not come
`work`               what an asynchronous operation returns
`communicator`       one rank's end of a group: meet, resolve, open, drive, finish
===================  ======================================================================

May be imported from outside: each module's ``__all__``.
"""
