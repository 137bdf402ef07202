"""The engine: runs the waves of all ranks against the links of a topology.

A rank's wave ends when the times of all its messages are known. On links that are never full they
are known when a message is posted, so ranks are run one after the other, without a queue of
events, until each waits for a message that is not posted yet. On other links a queue of
events, in order of time, begins and ends messages, and `ringcoll.simulation.flows` shares the
links. A step is produced when its rank comes to it, and a message is forgotten when it is taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from fractions import Fraction
from heapq import heappop, heappush
from typing import Any

from ringcoll.errors import ArgumentError, ScheduleError
from ringcoll.schedule.counting import chunks_of_data, tally_of
from ringcoll.schedule.ir import Schedule
from ringcoll.simulation.flows import Flows, SimulatedMessage
from ringcoll.simulation.results import PathStep, SimulatedRun, SimulatedSpan
from ringcoll.simulation.topology import Number, Topology, checked
from ringcoll.simulation.waves import RankWave, waves_of

__all__ = ["simulate"]

_MOST_NBYTES = 1 << 62
_MOST_SEGMENTS = 1 << 16
_MOST_TRACED = 1 << 20
"""Messages of a trace: a picture with more of them is some GiB."""

_BEGIN, _START, _END = range(3)  # of a rank's wave; of a message's way; of it

_PathNode = tuple[int, int | None, int, Any, Any, Any]
"""A `PathStep`, and the node before it."""


def _fraction(value: Number) -> Any:
    return Fraction(value)


def _float(value: Number) -> Any:
    return float(value)


class _SimulatedRank:
    """A rank, and its wave that is under way."""

    __slots__ = ("begin", "last", "pending", "rank", "receives", "sends", "slow", "wave", "waves")

    def __init__(self, rank: int, waves: Iterator[RankWave], slow: Number) -> None:
        self.rank, self.waves = rank, waves
        self.slow: Any = slow
        self.begin: Any = 0
        self.last: _PathNode | None = None
        self.wave: RankWave | None = None
        self.sends: list[SimulatedMessage] = []
        self.receives: list[SimulatedMessage | None] = []
        self.pending = 0  # messages of the wave whose times are not known


class _Simulation:
    def __init__(
        self,
        schedule: Schedule,
        nbytes: int,
        topology: Topology,
        segments: int,
        late: Mapping[int, Number],
        slowness: Mapping[int, Number],
        trace: bool,
    ) -> None:
        self.schedule, self.topology = schedule, topology
        costs = (topology.alpha_s, topology.overhead_s, topology.gamma_s_per_byte)
        numbers = [*costs, *late.values(), *slowness.values()]
        for link in topology.links:
            numbers += (link.fastest, link.latency_s)
        exact = not any(isinstance(value, float) for value in numbers)
        self.number = _fraction if exact else _float
        self.alpha, self.overhead, self.gamma = [self.number(cost) for cost in costs]
        self.unit = self.number(Fraction(nbytes, chunks_of_data(schedule) * segments))
        self.latency = [self.number(link.latency_s) for link in topology.links]
        self.flows = Flows(topology, self.number)
        self.shares = any(link.lanes is not None for link in topology.links)
        self.ranks = [
            _SimulatedRank(
                rank, waves_of(schedule, rank, segments), self.number(slowness.get(rank, 1))
            )
            for rank in range(schedule.world_size)
        ]
        self.late = [self.number(late.get(rank, 0)) for rank in range(schedule.world_size)]
        self.events: list[tuple[Any, int, int, Any, int]] = []
        self.ready: deque[tuple[_SimulatedRank, Any]] = deque()
        self.order = 0
        # From sender * world_size + receiver: messages without a receive, or receives without one.
        self.unpaired: dict[int, deque[Any]] = {}
        self.ends = [self.number(0)] * schedule.world_size
        self.waited = list(self.ends)
        self.loads = [0] * len(topology.links)
        self.messages = 0
        self.spans: list[SimulatedSpan] | None = [] if trace else None

    def run(self) -> None:
        for state, begin in zip(self.ranks, self.late, strict=True):
            self.go_on(state, begin)
        while self.ready:  # if no link is shared
            self.begin(*self.ready.popleft())
        events, flows = self.events, self.flows
        while events:
            now = events[0][0]
            while events and events[0][0] == now:
                _, _, kind, item, version = heappop(events)
                if kind == _BEGIN:
                    self.begin(item, now)
                elif kind == _START and item.nbytes:
                    flows.begin(item, now)
                elif kind == _START:
                    self.settle(item, now)
                elif version == item.version:
                    flows.end(item)
                    self.settle(item, now)
            if flows.changed:
                for end, message in flows.share(now):
                    self.push(end, _END, message, message.version)
        self.check_all_ended()

    def push(self, time: Any, kind: int, item: Any, version: int = 0) -> None:
        self.order += 1  # of equal times the first comes first
        heappush(self.events, (time, self.order, kind, item, version))

    def go_on(self, state: _SimulatedRank, time: Any) -> None:
        """Let a rank begin its next wave at a time."""
        if self.shares:
            self.push(time, _BEGIN, state)
        else:
            self.ready.append((state, time))

    def begin(self, state: _SimulatedRank, now: Any) -> None:
        """Post the messages of a rank's next wave."""
        state.wave = wave = next(state.waves, None)
        state.begin = now
        if wave is None:
            self.ends[state.rank] = now
            return
        state.pending = len(wave.sends)
        state.sends = []
        state.receives = []
        for position, (peer, chunks, _, _) in enumerate(wave.receives):
            message = self.paired(peer, state.rank, (state, position))
            state.receives.append(message)
            if message is None:
                state.pending += 1
                continue
            self.check_length(message, chunks)
            if message.left is None:
                state.pending += 1
                message.receiver = state
        if not state.pending:
            self.complete(state)
        start = now + state.slow * self.alpha
        for peer, chunks, step in wave.sends:
            message = SimulatedMessage(state, peer, chunks, step, chunks * self.unit, now)
            state.sends.append(message)
            self.post(message, start)
            start += state.slow * self.overhead

    def post(self, message: SimulatedMessage, start: Any) -> None:
        rank = message.sender.rank
        message.route = route = self.topology.route(rank, message.peer)
        message.latency = sum([self.latency[index] for index in route])
        self.messages += 1
        for index in route:
            self.loads[index] += message.chunks
        waiting = self.paired(rank, message.peer, message)
        if waiting is not None:
            receiver, position = waiting
            self.check_length(message, receiver.wave.receives[position][1])
            receiver.receives[position] = message
            message.receiver = receiver
        if self.shares:
            self.push(start, _START, message)
        else:
            rate = min([self.flows.fastest[index] for index in route])
            self.settle(message, start + message.nbytes / rate)

    def paired(self, sender: int, receiver: int, own: Any) -> Any:
        """The other end of a message, or ``None``: then the own end waits for it."""
        key = sender * self.schedule.world_size + receiver
        queue = self.unpaired.get(key)
        if queue is not None and isinstance(queue[0], SimulatedMessage) != isinstance(
            own, SimulatedMessage
        ):
            other = queue.popleft()
            if not queue:
                del self.unpaired[key]
            return other
        if queue is None:
            queue = self.unpaired[key] = deque()
        queue.append(own)
        return None

    def settle(self, message: SimulatedMessage, left: Any) -> None:
        """Note when the last byte of a message has left, and tell both ranks."""
        message.left = left
        message.arrival = left + message.latency
        for state in (message.sender, message.receiver):
            if state is not None:
                state.pending -= 1
                if not state.pending:
                    self.complete(state)

    def complete(self, state: _SimulatedRank) -> None:
        """Compute the end of a wave, all of whose messages have their times."""
        wave, gamma = state.wave, state.slow * self.gamma * self.unit
        assert wave is not None
        now = state.begin + wave.reduced * gamma
        self.note("reduce", state, -1, wave.step, state.begin, now)
        blamed: SimulatedMessage | None = None
        for message, (peer, chunks, step, reduces) in zip(
            state.receives, wave.receives, strict=True
        ):
            assert message is not None
            before = now
            if message.arrival > now:
                now, blamed = message.arrival, message
                self.waited[state.rank] += now - before
            self.note("receive", state, peer, step, before, now, message)
            if reduces:
                before, now = now, now + chunks * gamma
                self.note("reduce", state, peer, step, before, now, message)
        left = now
        for message in state.sends:
            self.note("send", state, message.peer, message.step, now, message.left, message)
            left = max(left, message.left)
        if left > now:
            self.note("leave", state, -1, wave.step, now, left)
            now, blamed = left, None
        state.last = (
            (state.rank, None, wave.step, state.begin, now, state.last)
            if blamed is None
            else (state.rank, blamed.sender.rank, blamed.step, blamed.posted, now, blamed.before)
        )
        state.sends, state.receives = [], []
        self.go_on(state, now)

    def note(
        self,
        kind: str,
        state: _SimulatedRank,
        peer: int,
        step: int,
        begin: Any,
        end: Any,
        message: SimulatedMessage | None = None,
    ) -> None:
        """Keep a time of a rank for the trace, if there is one."""
        if self.spans is not None and (message is not None or end > begin):
            nbytes, posted = (0, begin) if message is None else (message.nbytes, message.posted)
            self.spans.append(
                SimulatedSpan(kind, state.rank, peer, step, begin, end, nbytes, posted, state.begin)
            )

    def check_length(self, message: SimulatedMessage, chunks: int) -> None:
        if message.chunks != chunks:
            raise ScheduleError(
                f"step {message.step}: rank {message.sender.rank} sends {message.chunks} chunks to "
                f"rank {message.peer}, which expects {chunks}"
            )

    def check_all_ended(self) -> None:
        """Nobody waits for a message, and no message waits for a receive."""
        for key, (first, *_) in self.unpaired.items():
            sender, receiver = divmod(key, self.schedule.world_size)
            if isinstance(first, SimulatedMessage):
                raise ScheduleError(
                    f"step {first.step}: rank {receiver} does not receive a message of rank {sender}"
                )
            state, position = first
            raise ScheduleError(
                f"step {state.wave.receives[position][2]}: rank {receiver} waits for a message of "
                f"rank {sender}, which sends none"
            )

    def path(self) -> tuple[PathStep, ...]:
        """The critical path, from its beginning."""
        last = max(self.ranks, key=lambda state: self.ends[state.rank])
        steps = []
        node = last.last
        while node is not None:
            steps.append(PathStep(*node[:5]))
            node = node[5]
        return tuple(reversed(steps))


def simulate(
    schedule: Schedule,
    nbytes: int,
    topology: Topology,
    *,
    segments: int = 1,
    late: Mapping[int, Number] | None = None,
    slowness: Mapping[int, Number] | None = None,
    trace: bool = False,
) -> SimulatedRun:
    """Simulate a schedule on a topology; the model is that of `ringcoll.simulation`.

    The cost is about linear in the messages. A schedule should be verified before.

    Parameters
    ----------
    schedule
        The schedule, for as many ranks as the topology has.
    nbytes
        Size n of the whole data: the vector, or all blocks of one rank.
    topology
        The links, and the costs of a rank.
    segments
        Number of segments that each chunk is cut into.
    late
        Seconds by which ranks begin late, by rank.
    slowness
        Factors on ``alpha_s``, ``overhead_s`` and ``gamma_s_per_byte``, by rank: 2 is a rank that
        needs twice the time.
    trace
        Whether to keep all messages and waits, for `SimulatedRun.picture`.

    Returns
    -------
    SimulatedRun
        Times in seconds: of type float, or exact fractions if no number of the topology, of
        ``late`` and of ``slowness`` is a float.

    Raises
    ------
    ArgumentError
        The topology has another number of ranks, a number is out of range, the data do not fit
        in the memory of a rank, or there are too many messages for a trace.
    ScheduleError
        The collective is unknown, or sends and receives do not pair.

    Examples
    --------
    >>> from ringcoll.algorithms import schedule_of
    >>> from ringcoll.simulation import fat_tree
    >>> tree = fat_tree(4, ranks_per_leaf=2, bandwidth=1, oversubscription=2)
    >>> simulate(schedule_of("all_reduce", "recursive_doubling", 4), 12, tree).seconds
    Fraction(36, 1)
    """
    late, slowness = late or {}, slowness or {}
    if topology.world_size != schedule.world_size:
        raise ArgumentError(
            "the schedule is for another number of ranks",
            argument="topology",
            expected=f"{schedule.world_size} ranks",
            got=topology.world_size,
        )
    checked("nbytes", nbytes, whole=True, most=_MOST_NBYTES)
    checked("segments", segments, positive=True, whole=True, most=_MOST_SEGMENTS)
    for name, values in (("late", late), ("slowness", slowness)):
        for rank, value in values.items():
            checked(f"{name}[{rank}]", value, positive=name == "slowness")
            checked(f"a rank of {name}", rank, whole=True, most=schedule.world_size - 1)
    _check_memory(schedule, nbytes, topology)
    if trace and (messages := sum(tally_of(schedule).sends) * segments) > _MOST_TRACED:
        raise ArgumentError(
            "there are too many messages for a trace",
            argument="trace",
            expected=f"at most {_MOST_TRACED} messages",
            got=messages,
        )
    simulation = _Simulation(schedule, nbytes, topology, segments, late, slowness, trace)
    simulation.run()
    return SimulatedRun(
        schedule=schedule,
        nbytes=nbytes,
        topology=topology,
        segments=segments,
        seconds=max(simulation.ends),
        ends=tuple(simulation.ends),
        waited_s=tuple(simulation.waited),
        link_nbytes=tuple(chunks * simulation.unit for chunks in simulation.loads),
        path=simulation.path(),
        num_messages=simulation.messages,
        spans=None if simulation.spans is None else tuple(simulation.spans),
    )


def _check_memory(schedule: Schedule, nbytes: int, topology: Topology) -> None:
    """The data and the scratch slots have to fit, in place, in the memory of a rank."""
    needed = nbytes + schedule.num_slots * Fraction(nbytes, chunks_of_data(schedule))
    if topology.memory_nbytes is not None and needed > topology.memory_nbytes:
        raise ArgumentError(
            "the data and the scratch memory do not fit in the memory of a rank",
            argument="nbytes",
            expected=f"at most {topology.memory_nbytes} bytes together",
            got=-(-needed.numerator // needed.denominator),
        )
