"""The engine of steps: all ranks do a step, then the next one, where no link is ever full.

Problem: an engine of events needs many minutes for 33 million messages. If no link can have more
messages than lanes, whatever the times are, then no message waits for a link, and the end of a step
is a maximum of a few sums. With turned programs (`ringcoll.lab.simulation.symmetry`) all ranks do
the same in a step, so each sum is one operation on a list with a number for each rank. Every rank
still has times of its own: ranks may be slow or late, and links may differ.

No link is ever full if its senders, each with the most messages that it has on the link in one
step, are no more than its lanes: a rank begins no step before its sends have left.

Cost: some 0.3 us a message, and 9 bytes of memory for each step of a rank (more if numbers are
fractions), from which the critical path is read.

Both engines take the steps of a rank as waves, which are produced lazily (`wave_of`).
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from operator import add, gt, sub
from typing import Any, NamedTuple

from ringcoll.errors import ScheduleError
from ringcoll.lab.simulation.results import PathStep, RunOutcome, RunSettings
from ringcoll.lab.simulation.topology import Topology
from ringcoll.schedules import Recv, RecvReduce, Reduce, Schedule, Send, Step

_MOST_RECEIVES = 254
"""Messages that a rank takes in a step: the number of the one that came last is one byte."""

_Senders = list[list[int]]
"""For each program and each of its receives in a step: the index of the send that it takes."""


def senders_of(programs: Sequence[Sequence[RankWave]], world_size: int) -> list[_Senders] | None:
    """The send that each receive takes, step by step; ``None`` if any is of another step."""
    if len({len(steps) for steps in programs}) > 1 or any(
        len(wave.receives) > _MOST_RECEIVES for steps in programs for wave in steps
    ):
        return None
    result = []
    for waves in zip(*programs, strict=True):
        senders = [_senders(waves, place, world_size) for place in range(len(programs))]
        num_sends = sum(len(wave.sends) for wave in waves)
        if None in senders or num_sends != sum(len(wave.receives) for wave in waves):
            return None
        result.append(senders)
    return result  # type: ignore[return-value]  # without `None`


def _senders(waves: Sequence[RankWave], place: int, world_size: int) -> list[int] | None:
    taken, senders = Counter[int](), []
    for distance, chunks, *_ in waves[place].receives:
        sends = waves[(place + distance) % len(waves)].sends
        own = [index for index, send in enumerate(sends) if send[0] == world_size - distance]
        left = own[taken[distance] :]
        if not left or sends[left[0]][1] != chunks:
            return None
        senders.append(left[0])
        taken[distance] += 1
    return senders


def never_full(topology: Topology, programs: Sequence[Sequence[RankWave]]) -> bool:
    """Whether no link can have more messages than lanes, whenever the ranks do their steps."""
    if all(link.lanes is None for link in topology.links):
        return True
    world_size = topology.world_size
    of_steps = [{tuple(peer for peer, *_ in wave.sends) for wave in steps} for steps in programs]
    number = [0] * len(topology.links)
    for rank in range(world_size):
        most = Counter[int]()
        for distances in of_steps[rank % len(programs)]:
            peers = ((rank + distance) % world_size for distance in distances)
            most |= Counter(index for peer in peers for index in topology.route(rank, peer))
        for index, messages in most.items():
            number[index] += messages
            lanes = topology.links[index].lanes
            if lanes is not None and number[index] > max(lanes, 1):
                return False
    return True


class LockstepEngine:
    """One run, in one segment, of turned programs; a column has a number of each of its ranks."""

    def __init__(
        self,
        settings: RunSettings,
        programs: Sequence[Sequence[RankWave]],
        senders: Sequence[_Senders],
    ) -> None:
        self.settings, self.programs, self.senders = settings, programs, senders
        self.world_size, self.period = settings.topology.world_size, len(programs)
        self.ends: list[Any] = list(settings.late)
        self.waited = [settings.number(0)] * self.world_size
        self.chunks = [0] * len(settings.topology.links)
        self.messages = 0
        self.ends_of_steps: list[Sequence[Any]] = []
        self.blamed_in_steps: list[bytes | bytearray] = []  # 0, or the number of a receive and 1
        self.slow = [settings.slowness[place :: self.period] for place in range(self.period)]
        self.alpha = [[slow * settings.alpha for slow in column] for column in self.slow]
        self.overhead = [[slow * settings.overhead for slow in column] for column in self.slow]
        self.seconds: dict[tuple[int, int, int], list[Any]] = {}
        self.latency: dict[tuple[int, int], list[Any]] = {}
        self.reducing: dict[tuple[int, int], list[Any]] = {}

    def run(self) -> RunOutcome:
        """Run all steps."""
        self._lay_routes()
        for waves, senders in zip(zip(*self.programs, strict=True), self.senders, strict=True):
            left = [self._left(place, wave) for place, wave in enumerate(waves)]
            blamed, ends = bytearray(self.world_size), list(self.ends)
            for place, of_program in enumerate(senders):
                every = slice(place, None, self.period)
                ends[every], blamed[every] = self._step(place, waves, of_program, left)
            self.ends = ends
            self.ends_of_steps.append(ends if self.settings.is_exact else array("d", ends))
            self.blamed_in_steps.append(blamed)
        of_all = tuple(self.ends), tuple(self.waited), tuple(self.chunks)
        return RunOutcome(*of_all, self._path(), self.messages, None)

    def _lay_routes(self) -> None:
        """Look up the rates and latencies of all messages, and count the bytes on the links."""
        settings, links = self.settings, self.settings.topology.links
        fastest = [settings.number(link.fastest) for link in links]
        latency = [settings.number(link.latency_s) for link in links]
        for place, steps in enumerate(self.programs):
            lengths: dict[int, Counter[int]] = {}
            for wave in steps:
                for distance, chunks, _ in wave.sends:
                    lengths.setdefault(distance, Counter())[chunks] += 1
            for distance, messages in lengths.items():
                routes = [
                    settings.topology.route(rank, (rank + distance) % self.world_size)
                    for rank in range(place, self.world_size, self.period)
                ]
                rates = [min([fastest[index] for index in route]) for route in routes]
                for chunks in messages:
                    nbytes = chunks * settings.unit
                    self.seconds[place, distance, chunks] = [nbytes / rate for rate in rates]
                latencies = [sum([latency[index] for index in route]) for route in routes]
                self.latency[place, distance] = latencies
                sent = sum(chunks * times for chunks, times in messages.items())
                self.messages += sum(messages.values()) * len(routes)
                for route in routes:
                    for index in route:
                        self.chunks[index] += sent

    def _left(self, place: int, wave: RankWave) -> list[list[Any]]:
        """When the last byte of each send has left: a column a send."""
        columns = []
        start = list(map(add, self.ends[place :: self.period], self.alpha[place]))
        for number, (distance, chunks, _) in enumerate(wave.sends):
            if number and self.settings.overhead:
                start = list(map(add, start, self.overhead[place]))
            columns.append(list(map(add, start, self.seconds[place, distance, chunks])))
        return columns

    def _step(
        self, place: int, waves: Sequence[RankWave], senders: list[int], left: list[list[list[Any]]]
    ) -> tuple[list[Any], bytes]:
        """The ends of a step, and the receive that came last: a column each."""
        every, wave = slice(place, None, self.period), waves[place]
        now = self._reduced(self.ends[every], place, wave.reduced)
        blamed = bytes(len(now))
        pairs = zip(wave.receives, senders, strict=True)
        for number, ((distance, chunks, _, reduces), index) in enumerate(pairs, start=1):
            turns, sender = divmod(place + distance, self.period)
            arrival = left[sender][index]
            latency = self.latency[sender, waves[sender].sends[index][0]]
            if any(latency):
                arrival = list(map(add, arrival, latency))
            arrival = arrival[turns:] + arrival[:turns]
            before = now
            now, blamed = _latest(now, arrival, blamed, number)
            if now is not before:
                self.waited[every] = map(add, self.waited[every], map(sub, now, before))
            if reduces:
                now = self._reduced(now, place, chunks)
        for column in left[place]:
            now, blamed = _latest(now, column, blamed, 0)
        return now, blamed

    def _reduced(self, now: list[Any], place: int, chunks: int) -> list[Any]:
        """The times after so many chunks are reduced."""
        if not chunks or not self.settings.gamma:
            return now
        column = self.reducing.get((place, chunks))
        if column is None:
            gamma, unit = self.settings.gamma, self.settings.unit
            column = [chunks * (slow * gamma * unit) for slow in self.slow[place]]
            self.reducing[place, chunks] = column
        return list(map(add, now, column))

    def _path(self) -> tuple[PathStep, ...]:
        """The critical path, from its beginning."""
        rank = max(range(self.world_size), key=self.ends.__getitem__)
        steps = []
        for number in reversed(range(len(self.ends_of_steps))):
            wave = self.programs[rank % self.period][number]
            if not (wave.sends or wave.receives or wave.reduced):
                continue
            before = self.ends_of_steps[number - 1] if number else self.settings.late
            end, waits_for = self.ends_of_steps[number][rank], None
            if blamed := self.blamed_in_steps[number][rank]:
                waits_for = (rank + wave.receives[blamed - 1][0]) % self.world_size
            begin = before[rank if waits_for is None else waits_for]
            steps.append(PathStep(rank, waits_for, number, begin, end))
            rank = rank if waits_for is None else waits_for
        return tuple(reversed(steps))


def _latest(
    now: list[Any], other: list[Any], blamed: bytes, number: int
) -> tuple[list[Any], bytes]:
    """The later of two times, for each rank; a number for the ranks that wait for the other one."""
    later = bytes(map(gt, other, now))
    waiting = later.count(1)
    if not waiting:
        return now, blamed
    if waiting == len(now):
        return other, bytes([number]) * len(now)
    blame = [number if is_later else old for is_later, old in zip(later, blamed, strict=True)]
    return list(map(max, now, other)), bytes(blame)


class RankWave(NamedTuple):
    """A rank's work in a wave; amounts of data are in chunks.

    ``sends`` holds peer, chunks and step of each message; ``receives`` holds peer, chunks, step,
    and whether the message is reduced. ``reduced`` is what the rank reduces in its own memory, and
    ``step`` the last step of the wave.
    """

    sends: list[tuple[int, int, int]]
    receives: list[tuple[int, int, int, bool]]
    reduced: int
    step: int


def wave_of(number: int, step: Step) -> RankWave:
    """A rank's work in one step; the peers are not checked."""
    sends: list[tuple[int, int, int]] = []
    receives: list[tuple[int, int, int, bool]] = []
    reduced = 0
    for operation in step:
        if type(operation) is Send:
            sends.append((operation.peer, len(operation.refs), number))
        elif type(operation) is RecvReduce:
            receives.append((operation.peer, len(operation.into), number, True))
        elif type(operation) is Recv:
            receives.append((operation.peer, len(operation.refs), number, False))
        elif type(operation) is Reduce:
            reduced += len(operation.sources) - 1
    return RankWave(sends, receives, reduced, number)


def waves_of(schedule: Schedule, rank: int, segments: int) -> Iterator[RankWave]:
    """Produce the waves in which a rank does anything that takes time, from few steps at once."""
    return in_segments(_checked(schedule, rank), segments)


def _checked(schedule: Schedule, rank: int) -> Iterator[RankWave]:
    world_size = schedule.world_size
    for number, step in enumerate(schedule.program(rank)):
        wave = wave_of(number, step)
        for peer, *_ in (*wave.sends, *wave.receives):
            if not 0 <= peer < world_size or peer == rank:
                raise ScheduleError(
                    f"rank {rank}, step {number}: {peer} is not another rank of {world_size}"
                )
        yield wave


def in_segments(steps: Iterable[RankWave], segments: int) -> Iterator[RankWave]:
    """Put together the steps of one time: segment j does step w - j in wave w."""
    if segments == 1:
        yield from filter(_does_anything, steps)
        return
    active: deque[tuple[int, RankWave]] = deque()  # the newest step first: it is of segment 0
    # A wave a step, and some at the end, in which the last steps' other segments follow.
    for wave, step in enumerate(chain(steps, repeat(None, segments - 1))):
        if step is not None and _does_anything(step):
            active.appendleft((wave, step))
        if active and active[-1][0] <= wave - segments:
            active.pop()
        if len(active) == 1:
            yield active[0][1]
        elif active:
            yield RankWave(
                [item for _, work in active for item in work.sends],
                [item for _, work in active for item in work.receives],
                sum(work.reduced for _, work in active),
                active[0][0],
            )


def _does_anything(wave: RankWave) -> bool:
    return bool(wave.sends or wave.receives or wave.reduced)
