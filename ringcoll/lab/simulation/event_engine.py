"""The engine of events: it runs the waves of ranks against the links of a topology.

A rank's wave ends when the times of all its messages are known. On links that are never full these
times are known when a message is posted, so the engine runs one rank after the other, without a
queue of events, until each rank waits for a message that is not posted yet. On other links a queue
of events, in order of time, begins and ends messages. A step is produced when its rank comes to it,
and a message is forgotten when it is taken.

Messages that share a link have max-min fair rates. Only a *crowded* link, which has more messages
than lanes, makes one message slower than another. So a message that begins or ends changes only the
rates of the messages that crowded links join to it.

Where some ranks stand for all (`ringcoll.lab.simulation.symmetry`), only these ranks are run. The
rank that stands for the receiver of a message takes the message, and sees the sender at the same
distance.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Any

from ringcoll.errors import ScheduleError
from ringcoll.lab.simulation.lockstep import RankWave
from ringcoll.lab.simulation.results import PathStep, RunOutcome, RunSettings, SimulatedSpan
from ringcoll.lab.simulation.symmetry import Folding
from ringcoll.lab.simulation.topology import Number, Topology

_PathNode = tuple[int, int | None, int, Any, Any, Any]
"""A `PathStep` as the rank sees it that stands for others, and the node before it."""


@dataclass(eq=False, slots=True)
class SimulatedMessage:
    """A message on its way; ``left`` and ``arrival`` are ``None`` until its last byte has left."""

    sender: Any
    peer: int
    chunks: int
    step: int
    nbytes: Any
    posted: Any
    before: _PathNode | None = None  # of the sender, when it posts the message
    receiver: Any = None
    left: Any = None
    arrival: Any = None
    route: tuple[int, ...] = ()
    latency: Any = 0
    fastest: Any = 0
    remaining: Any = 0
    rate: Any = 0
    since: Any = 0
    version: int = 0


class Flows:
    """The messages on each link of a topology, and their rates; `Folding` explains crossings."""

    def __init__(
        self, topology: Topology, number: Callable[[Number], Any], crossings: Sequence[int]
    ) -> None:
        links = topology.links
        # One message on less than one lane is slow, but it shares the link with no other message.
        self.limit = [inf if link.lanes is None else max(link.lanes, 1) for link in links]
        self.capacity: list[Any] = [
            None if link.capacity is None else number(link.capacity) for link in links
        ]
        self.fastest: list[Any] = [number(link.fastest) for link in links]
        self.latency: list[Any] = [number(link.latency_s) for link in links]
        self.crossings = crossings
        # A dictionary is a set in order: sums of floats should not depend on addresses.
        self.users: list[dict[SimulatedMessage, int]] = [{} for _ in links]
        self.number = [0] * len(links)
        self.chunks = [0] * len(links)
        self.changed: dict[SimulatedMessage, None] = {}

    def lay(self, message: SimulatedMessage, route: tuple[int, ...]) -> None:
        """Tell a message its route, and count its bytes."""
        message.route = route
        latency, fastest = 0, inf
        for index in route:
            latency += self.latency[index]
            fastest = min(fastest, self.fastest[index])
            self.chunks[index] += message.chunks * self.crossings[index]
        message.latency, message.fastest = latency, fastest

    def begin(self, message: SimulatedMessage, now: Any) -> Any:
        """Let the bytes of a message move from now on; return its end if it shares no full link."""
        message.since, message.remaining = now, message.nbytes
        crowded = False
        for index in message.route:
            users, messages = self.users[index], self.crossings[index]
            users[message] = users.get(message, 0) + messages
            self.number[index] += messages
            crowded = crowded or self.number[index] > self.limit[index]
        if crowded:
            self.changed[message] = None
            return None
        message.rate = message.fastest
        return now + message.nbytes / message.rate

    def end(self, message: SimulatedMessage) -> None:
        """Take a message away whose last byte has left."""
        self.changed.pop(message, None)
        for index in message.route:
            crowded = self.number[index] > self.limit[index]
            users = self.users[index]
            self.number[index] -= users.pop(message, 0)
            if crowded:
                self.changed.update(dict.fromkeys(users))

    def share(self, now: Any) -> Iterable[tuple[Any, SimulatedMessage]]:
        """Give new rates where they have changed; yield the messages with their new ends."""
        joined = self._joined()
        for message, rate in self._rates(joined):
            if rate != message.rate:
                message.remaining -= message.rate * (now - message.since)
                message.since, message.rate = now, rate
                message.version += 1
                yield now + max(message.remaining, 0) / rate, message

    def _joined(self) -> dict[SimulatedMessage, None]:
        """The messages whose rates may change: those joined to a changed one by crowded links."""
        joined, self.changed = self.changed, {}
        waiting, seen = list(joined), set[int]()
        while waiting:
            for index in waiting.pop().route:
                if index not in seen and self.number[index] > self.limit[index]:
                    seen.add(index)
                    new = [other for other in self.users[index] if other not in joined]
                    joined.update(dict.fromkeys(new))
                    waiting += new
        return joined

    def _rates(
        self, active: dict[SimulatedMessage, None]
    ) -> Iterable[tuple[SimulatedMessage, Any]]:
        """Fill the links evenly until one is full; its messages keep their rates; and go on."""
        links = {index for message in active for index in message.route}
        links = {index for index in links if self.number[index] > self.limit[index]}
        room = {index: self.capacity[index] for index in sorted(links)}
        number = {index: self.number[index] for index in room}
        most = {message: message.fastest for message in active}
        while most:
            fair = min((room[index] / number[index] for index in room), default=None)
            slow = [message for message, rate in most.items() if fair is None or rate <= fair]
            rate_of = {message: most[message] for message in slow}
            if not slow:
                rate_of = {
                    message: fair
                    for index in room
                    if room[index] / number[index] == fair
                    for message in self.users[index]
                    if message in most
                }
            for message, rate in rate_of.items():
                yield message, rate
                del most[message]
                for index in dict.fromkeys(message.route):
                    if index in room:
                        messages = self.users[index][message]
                        room[index] -= rate * messages
                        number[index] -= messages
                        if not number[index]:
                            del room[index]


_BEGIN, _START, _END = range(3)  # of a rank's wave; of a wave's messages; of a message


@dataclass(eq=False, slots=True)
class _SimulatedRank:
    """A rank, and its wave that is under way."""

    rank: int
    waves: Iterator[RankWave]
    alpha: Any
    overhead: Any
    gamma: Any  # for a segment of a chunk
    begin: Any = 0
    last: _PathNode | None = None
    wave: RankWave | None = None
    sends: list[SimulatedMessage] = field(default_factory=list)
    receives: list[SimulatedMessage | None] = field(default_factory=list)
    pending: int = 0  # messages of the wave whose times are not known


class EventEngine:
    """One run of the waves of each rank that is run; ``trace`` keeps the times of all messages."""

    def __init__(
        self,
        settings: RunSettings,
        waves: Sequence[Iterator[RankWave]],
        folding: Folding,
        *,
        trace: bool = False,
    ) -> None:
        self.settings, self.folding = settings, folding
        self.world_size, self.period = settings.topology.world_size, folding.period
        self.flows = Flows(settings.topology, settings.number, folding.crossings)
        self.shares = any(link.lanes is not None for link in settings.topology.links)
        self.ranks = [
            _SimulatedRank(
                rank,
                own_waves,
                slow * settings.alpha,
                slow * settings.overhead,
                slow * settings.gamma * settings.unit,
            )
            for rank, (own_waves, slow) in enumerate(zip(waves, settings.slowness, strict=False))
        ]
        # Ranks that are alike do the same at the same time: the heap holds each time once, and the
        # events of a time are in the order in which they were made.
        self.times: list[Any] = []
        self.events: dict[Any, list[tuple[int, Any, int]]] = {}
        self.ready: deque[tuple[_SimulatedRank, Any]] = deque()
        # Messages without a receive, and receives without a message, by sender and receiver.
        self.posted: dict[int, deque[SimulatedMessage]] = {}
        self.expected: dict[int, deque[tuple[_SimulatedRank, int]]] = {}
        self.ends = [settings.number(0)] * self.period
        self.waited = list(self.ends)
        self.messages = 0
        self.spans: list[SimulatedSpan] | None = [] if trace else None

    def run(self) -> RunOutcome:
        """Run all ranks to their ends."""
        for state in self.ranks:
            self._go_on(state, self.settings.late[state.rank])
        while self.ready:  # if no link is shared
            self._begin(*self.ready.popleft())
        flows = self.flows
        while self.times:
            now = heappop(self.times)
            for kind, item, version in self.events[now]:  # which may grow
                if kind == _BEGIN:
                    self._begin(item, now)
                elif kind == _START:
                    self._start(item, now)
                elif version == item.version:
                    flows.end(item)
                    self._settle(item, now)
            del self.events[now]
            if flows.changed:
                for end, message in flows.share(now):
                    self._push(end, _END, message, message.version)
        self._check_all_ended()
        turns = self.world_size // self.period
        return RunOutcome(
            tuple(self.ends) * turns,
            tuple(self.waited) * turns,
            tuple([flows.chunks[index] for index in self.folding.standing_in]),
            self._path(),
            self.messages * turns,
            None if self.spans is None else tuple(self.spans),
        )

    def _push(self, time: Any, kind: int, item: Any, version: int = 0) -> None:
        events = self.events.get(time)
        if events is None:
            events = self.events[time] = []
            heappush(self.times, time)
        events.append((kind, item, version))

    def _go_on(self, state: _SimulatedRank, time: Any) -> None:
        """Let a rank begin its next wave at a time."""
        if self.shares:
            self._push(time, _BEGIN, state)
        else:
            self.ready.append((state, time))

    def _begin(self, state: _SimulatedRank, now: Any) -> None:
        """Post the messages of a rank's next wave."""
        state.wave = wave = next(state.waves, None)
        state.begin = now
        if wave is None:
            self.ends[state.rank] = now
            return
        state.pending = len(wave.sends)
        state.sends = []
        state.receives = [
            self._expect(state, position, peer, chunks)
            for position, (peer, chunks, _, _) in enumerate(wave.receives)
        ]
        if not state.pending:
            self._complete(state)
        start, starts = now + state.alpha, list[SimulatedMessage]()
        for peer, chunks, step in wave.sends:
            nbytes = chunks * self.settings.unit
            message = SimulatedMessage(state, peer, chunks, step, nbytes, now, state.last)
            state.sends.append(message)
            self._post(message)
            if not self.shares:
                self._settle(message, start + message.nbytes / message.fastest)
            elif state.overhead:
                self._push(start, _START, [message])
            else:
                starts.append(message)
            start += state.overhead
        if starts:
            self._push(start, _START, starts)

    def _expect(
        self, state: _SimulatedRank, position: int, peer: int, chunks: int
    ) -> SimulatedMessage | None:
        """The message that a rank takes, if it is posted; count it if its time is not known."""
        key = peer * self.period + state.rank
        queue = self.posted.get(key)
        if queue is None:
            state.pending += 1
            self.expected.setdefault(key, deque()).append((state, position))
            return None
        message = queue.popleft()
        if not queue:
            del self.posted[key]
        _check_length(message, chunks)
        if message.left is None:
            state.pending += 1
            message.receiver = state
        return message

    def _post(self, message: SimulatedMessage) -> None:
        rank, peer = message.sender.rank, message.peer
        route = self.settings.topology.route(rank, peer)
        if self.period < self.world_size:
            route = tuple([self.folding.standing_in[index] for index in route])
        self.flows.lay(message, route)
        self.messages += 1
        receiver = peer % self.period
        key = (rank - peer + receiver) % self.world_size * self.period + receiver
        queue = self.expected.get(key)
        if queue is None:
            self.posted.setdefault(key, deque()).append(message)
            return
        state, position = queue.popleft()
        if not queue:
            del self.expected[key]
        assert state.wave is not None
        _check_length(message, state.wave.receives[position][1])
        state.receives[position] = message
        message.receiver = state

    def _start(self, messages: list[SimulatedMessage], now: Any) -> None:
        """Let the first bytes of messages move."""
        for message in messages:
            if not message.nbytes:
                self._settle(message, now)
                continue
            end = self.flows.begin(message, now)
            if end is not None:
                self._push(end, _END, message)

    def _settle(self, message: SimulatedMessage, left: Any) -> None:
        """Note when the last byte of a message has left, and tell both ranks."""
        message.left = left
        message.arrival = left + message.latency
        for state in (message.sender, message.receiver):
            if state is not None:
                state.pending -= 1
                if not state.pending:
                    self._complete(state)

    def _complete(self, state: _SimulatedRank) -> None:
        """Compute the end of a wave, all of whose messages have their times."""
        wave, gamma = state.wave, state.gamma
        assert wave is not None
        now = state.begin + wave.reduced * gamma
        self._note("reduce", state, -1, wave.step, state.begin, now)
        blamed: SimulatedMessage | None = None
        waits_for = None
        for message, (peer, chunks, step, reduces) in zip(
            state.receives, wave.receives, strict=True
        ):
            assert message is not None
            before = now
            if message.arrival > now:
                now, blamed, waits_for = message.arrival, message, peer
                self.waited[state.rank] += now - before
            self._note("receive", state, peer, step, before, now, message)
            if reduces:
                before, now = now, now + chunks * gamma
                self._note("reduce", state, peer, step, before, now, message)
        left = now
        for message in state.sends:
            self._note("send", state, message.peer, message.step, now, message.left, message)
            left = max(left, message.left)
        if left > now:
            self._note("leave", state, -1, wave.step, now, left)
            now, blamed = left, None
        state.last = (
            (state.rank, None, wave.step, state.begin, now, state.last)
            if blamed is None
            else (state.rank, waits_for, blamed.step, blamed.posted, now, blamed.before)
        )
        state.sends, state.receives = [], []
        self._go_on(state, now)

    def _note(
        self,
        kind: str,
        state: _SimulatedRank,
        peer: int,
        step: int,
        begin: Any,
        end: Any,
        message: SimulatedMessage | None = None,
    ) -> None:
        """Keep a time of a rank, if there is a trace."""
        if self.spans is not None and (message is not None or end > begin):
            nbytes, posted = (0, begin) if message is None else (message.nbytes, message.posted)
            self.spans.append(
                SimulatedSpan(kind, state.rank, peer, step, begin, end, nbytes, posted, state.begin)
            )

    def _check_all_ended(self) -> None:
        """No rank waits for a message, and no message waits for a receive."""
        for key, messages in self.posted.items():
            sender, receiver = divmod(key, self.period)
            raise ScheduleError(
                f"step {messages[0].step}: rank {receiver} does not receive a message of "
                f"rank {sender}"
            )
        for key, ((state, position), *_) in self.expected.items():
            sender, receiver = divmod(key, self.period)
            assert state.wave is not None
            raise ScheduleError(
                f"step {state.wave.receives[position][2]}: rank {receiver} waits for a message of "
                f"rank {sender}, which sends none"
            )

    def _path(self) -> tuple[PathStep, ...]:
        """The critical path, from its beginning."""
        rank = max(range(self.period), key=self.ends.__getitem__)
        node = self.ranks[rank].last
        steps = []
        while node is not None:
            waits_for = node[1]
            if waits_for is not None:
                waits_for = (waits_for + rank - node[0]) % self.world_size
            steps.append(PathStep(rank, waits_for, *node[2:5]))
            rank = rank if waits_for is None else waits_for
            node = node[5]
        return tuple(reversed(steps))


def _check_length(message: SimulatedMessage, chunks: int) -> None:
    if message.chunks != chunks:
        raise ScheduleError(
            f"step {message.step}: rank {message.sender.rank} sends {message.chunks} chunks to "
            f"rank {message.peer}, which expects {chunks}"
        )
