"""Simulation of schedules over topologies. Pure: no torch, no I/O, no clock.

Problem: say how long a schedule takes on a network that is not here, which links are full, and
who waits for whom. The engine executes the steps of every rank; a schedule needs nothing for it.

The model of a rank. A rank runs *waves*, as the executor does: with S segments, segment j does step
w - j in wave w; with one segment a wave is a step. (In segments, the executor does steps in which
no rank sends with the step before them; here they are waves of their own, so a run may end one
later.) A wave begins when the rank's previous wave has ended, and a wave with nothing to do takes
no time. In a wave

- the rank posts all its sends at once. The bytes of the first message begin to move after
  ``alpha_s``, those of each further message ``overhead_s`` later than those before it;
- the rank reduces what lies in its own memory;
- the rank takes its messages in program order, and reduces each after its arrival, if the
  operation asks for it. A reduced byte costs ``gamma_s_per_byte``. Copies cost nothing;
- the wave ends when all its messages are taken, and the last byte of each of its sends has left.

The model of a message. A message does not wait for its receiver. Its bytes move at once over all
links of its route, at the rate of the slowest; it arrives the sum of the links' latencies after
its last byte has left. A link has *lanes*: one message uses at most one lane, and messages
beyond the number of lanes share the link. Rates are max-min fair: no message can have more
without taking it from one that has no more (D. Bertsekas and R. Gallager, "Data Networks", 1992,
section 6.5.2). Chunks have equal lengths, in fractions of a byte if need be.

So a message of m bytes that shares no link takes ``alpha + m * beta`` seconds, where alpha is
``alpha_s`` and the latencies of the route, and beta is one over the bandwidth: the model of
`ringcoll.schedules.cost.counts`. A sender is busy for ``alpha_s + m * beta``, and not for the
latencies. If all numbers are integers or fractions, times are exact.

The same run can be found in three ways, which the tests hold equal: all messages by events; all
ranks step by step, where no link can be full; or the events of a few ranks that stand for all,
where the programs and the network are proved to be alike. `simulate` takes the fastest.

===============  ==========================================================
`topology`       ranks, links and routes; links that have failed
`shapes`         crossbars, rings, tori, fat trees, hosts, dragonflies
`texts`          topologies by text: shapes, real machines, graphs of a link a line
`measured`       what is measured of a group, and the topology that explains it
`symmetry`       programs that are one, turned, and networks that look the same
`event_engine`   times of messages that share links: all messages by events
`lockstep`       times of messages where no link is ever full: all ranks step by step
`simulate_call`  `simulate`: checks the call, and takes an engine
`results`        a run's numbers, times, loads and path; the picture, for Perfetto
===============  ==========================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
