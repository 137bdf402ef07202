"""`fit`: the fastest schedule on a network for each range of sizes, registered or from a search.

The problem. For each of some sizes the least simulated time is wanted over the registered
algorithms, in rank order and in the order in which neighbours are near
(`ringcoll.lab.search.hops`), hierarchies over the hosts, and what the searches find. A winner holds
up to the geometric means with the sizes beside its own; ranges with the same winner are one. Each
winner is proved. Beside the times stands a lower bound (`ringcoll.lab.search.bounds`).

Cost: some 60 schedules are simulated for each size; more than 2^18 messages are not. The exact
search takes part on up to 8 ranks, if OR-Tools is installed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise, permutations
from math import inf, isqrt
from typing import NamedTuple

from ringcoll._package import __version__
from ringcoll.errors import ArgumentError, MissingExtraError, TooLargeError
from ringcoll.lab.search.bounds import (
    MIN_SPEEDUP,
    MOST_MESSAGES,
    LeastTime,
    RunTime,
    SearchTime,
    TimesOnNetwork,
    least_time,
)
from ringcoll.lab.search.front import synthesize, trees_of
from ringcoll.lab.search.hops import (
    demand_of,
    hops_of,
    hosts_named,
    near_order,
    near_ranks,
    phases_of,
)
from ringcoll.lab.simulation import Topology, topology_text
from ringcoll.schedules import Schedule, chunks_of_data, contract, estimated_messages, verify
from ringcoll.schedules.algorithms import algorithms, named, order_in_text
from ringcoll.schedules.cost import Fitted, Range, Rule, digest_of

SIZES = tuple(1 << power for power in range(10, 27, 2))
_SIZES_OF_MANY = (1 << 12, 1 << 18, 1 << 24)
_MOST_RANKS = 1 << 12  # all pairs of ranks are looked at
_MANY_RANKS = 64  # ranks from which there are fewer sizes
_EXACT_RANKS, _EFFORT = 8, 0.3  # ranks, and work for each question
_NEAR_NBYTES = 1 << 20
# Times the least latency, from which the simulator knows better than "auto": an algorithm waits
# some times for as long.
_LONG_DATA = 16
# With six ranks on two cores, 64 KiB took 1.3 times as long by a schedule that was simulated 1.07
# times as fast.
_LARGE_SPEEDUP = 1.5
_LOST_SHARE = 0.5  # of the speed before: within a busy host measured speeds vary by a third
_MOST_SLOWDOWN = 3.0  # times the least time in one segment, up to which more segments are tried
_LEVELS = ("ring", "two_shot", "recursive_doubling")
_TREES, _TREES_OF_MANY = 8, 4  # chunks


@dataclass(frozen=True)
class FitRange:
    """The winner of a range of sizes.

    Parameters
    ----------
    nbytes
        Range of bytes of the whole data.
    size
        The size at which it was simulated.
    winner
        Its time there.
    segment_bytes
        Bytes of a segment; ``None`` for whole chunks.
    plain
        The time of the fastest registered algorithm in rank order.
    bound
        Lower bound.
    is_even
        Whether all links have the same speed.
    """

    nbytes: Range
    size: int
    winner: SearchTime
    segment_bytes: int | None
    plain: SearchTime
    bound: LeastTime
    is_even: bool

    @property
    def gain(self) -> float:
        """How many times as fast as the fastest registered algorithm in rank order."""
        return self.plain.seconds / self.winner.seconds

    @property
    def least_s(self) -> float:
        """Lower bound in seconds, at the size."""
        return self.bound.seconds(self.size)

    @property
    def ratio(self) -> float:
        """Time of the winner in times of the bound."""
        return self.winner.seconds / self.least_s if self.least_s else inf

    @property
    def is_left(self) -> bool:
        """Whether ``"auto"`` is to choose, as it knows costs that the simulator does not.

        That is where data are short, unless the winner is far faster than all registered algorithms
        in rank order; and where it is hardly faster, and all links are equal.
        """
        if self.least_s < _LONG_DATA * self.bound.latency_s:
            return self.gain < _LARGE_SPEEDUP
        return self.gain < MIN_SPEEDUP and self.is_even

    @property
    def reason(self) -> str:
        """Why it won, in a sentence."""
        bound = f"{self.ratio:.2f} of the bound by {self.bound.reason(self.size)}"
        gain = f"{self.gain:.2f} times as fast as {self.plain.algorithm}"
        return f"{self.winner.algorithm}, {bound}, {gain}"


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The fastest schedules of a collective on a network.

    Parameters
    ----------
    collective, topology
        The collective and the topology that were fitted.
    ranges
        The winner of each range of sizes: of 0 bytes to any number, or of those around the sizes
        that were asked for.
    times
        All simulated times at each size, the fastest first; of what cannot win, in one segment.
    schedules
        The winners that were found by a search, by their names.
    left_out
        Registered algorithms with too many messages to be simulated.
    """

    collective: str
    topology: Topology
    ranges: tuple[FitRange, ...]
    times: dict[int, tuple[SearchTime, ...]]
    schedules: dict[str, Schedule]
    left_out: tuple[str, ...]

    @property
    def is_left(self) -> bool:
        """Whether all sizes are left to ``"auto"``."""
        return all(fitted.is_left for fitted in self.ranges)

    def fitted(self, date: str, before: Fitted | None = None) -> Fitted:
        """The rules and schedules, to be stored and used; others stay as they were ``before``.

        The others are those of other collectives. Sizes that are left to ``"auto"`` have no rule.

        Raises
        ------
        ArgumentError
            The fit before is for another network, or of another version of the library.
        """
        graph = f"# {self.topology.name}"
        with suppress(ArgumentError):  # a text cannot say it
            graph = topology_text(self.topology)
        hosts, ranks = hosts_named(self.topology), self.topology.world_size
        on_hosts = Range(1) if hosts is None else Range(len(set(hosts)), len(set(hosts)) + 1)
        rows = []
        for fitted in self.ranges:
            rule = Rule(
                collective=self.collective,
                nbytes=fitted.nbytes,
                algorithm=fitted.winner.algorithm,
                segment_bytes=fitted.segment_bytes,
                world_size=Range(ranks, ranks + 1),
                hosts=on_hosts,
            )
            rows += [(rule, fitted.reason)] * (not fitted.is_left)
        texts = {name: schedule.to_text() for name, schedule in self.schedules.items()}
        if before is not None:
            here = graph, hosts, __version__
            if (before.graph, before.hosts, before.version) != here:
                raise ArgumentError(
                    "the fit before is for another network, or of another version of ringcoll",
                    "before",
                )
            others = zip(before.rules, before.reasons, strict=True)
            rows = [row for row in others if row[0].collective != self.collective] + rows
            texts = dict(before.schedules) | texts
        names = {rule.algorithm for rule, _ in rows}
        return Fitted(
            world_size=ranks,
            hosts=hosts,
            graph=graph,
            date=date,
            rules=tuple(rule for rule, _ in rows),
            reasons=tuple(reason for _, reason in rows),
            schedules=tuple(pair for pair in texts.items() if pair[0] in names),
        )


class _Candidate(NamedTuple):
    name: str
    schedule: Schedule
    pipelined: bool
    is_plain: bool  # registered, in rank order
    is_stored: bool  # with its text

    @property
    def messages(self) -> int:
        return estimated_messages(self.schedule, MOST_MESSAGES)

    def stored(self) -> Schedule:
        """The schedule under a name with a hash of its text."""
        method = re.findall("[a-z_]*[a-z]", self.name)[0]  # of two_shot+ring, and of trees_4_6_1
        return replace(self.schedule, algorithm=f"fitted_{method}_{digest_of(self.schedule)}")


def fit(
    collective: str,
    topology: Topology,
    *,
    sizes: Sequence[int] | None = None,
    exact: bool = True,
    seed: int = 0,
    advance: Callable[[str], object] = lambda name: None,
) -> Fit:
    r"""Find the fastest schedules of a collective on a network.

    Parameters
    ----------
    collective
        Name of the collective; of one with a root, for rank 0 as the root.
    topology
        The network.
    sizes
        Bytes of the whole data at which schedules are simulated; by default 1 KiB to 64 MiB, on
        more than 64 ranks three of them.
    exact
        Whether the exact search takes part, which may take some seconds.
    seed
        Seed of the searches.
    advance
        Called with the name of each schedule that is simulated.

    Raises
    ------
    ArgumentError
        There is nothing to send, or a size is below 1.
    ScheduleError
        There is no such collective.
    TooLargeError
        Every schedule has too many messages.

    Examples
    --------
    >>> from ringcoll.lab.simulation import topology_from_text
    >>> cables = "0 -- 2 10 1" "\n" "2 -- 1 10 1" "\n" "1 -- 3 10 1" "\n" "3 -- 0 1 1"
    >>> best = fit("all_reduce", topology_from_text(cables), sizes=[1 << 24]).ranges[0]
    >>> round(best.winner.seconds / best.least_s, 2), best.plain.algorithm, round(best.gain, 1)
    (1.12, 'binary_tree', 2.0)
    """
    rules = contract(collective)
    if topology.world_size < 2:
        raise ArgumentError("one rank sends nothing", "topology", "2 ranks", 1)
    usual = _SIZES_OF_MANY if topology.world_size > _MANY_RANKS else SIZES
    asked = sorted(set(sizes or usual))
    if asked[0] < 1:
        raise ArgumentError("no size", "sizes", "bytes, at least 1", asked[0])
    if topology.world_size > _MOST_RANKS:
        raise TooLargeError(
            f"a fit to {topology.world_size} ranks is too large: it looks at all pairs of ranks; "
            f"{_MOST_RANKS} ranks would do", most=_MOST_RANKS,
        )  # fmt: skip
    candidates = list(_registered(collective, topology))
    if phases_of(collective) and not rules.rooted:
        candidates += _searched(collective, topology, exact, seed)
    left_out = tuple(each.name for each in candidates if each.messages > MOST_MESSAGES)
    if len(left_out) == len(candidates):
        raise TooLargeError(
            f"every {collective} on {topology.world_size} ranks has too many messages to simulate",
            most=MOST_MESSAGES,
        )
    bound = least_time(collective, topology)
    is_even = len({limit.speed for limit in hops_of(topology).limits}) == 1
    by_name = {candidate.name: candidate for candidate in candidates}
    times_on = TimesOnNetwork(topology)
    times: dict[int, tuple[SearchTime, ...]] = {}
    stored: dict[str, Schedule] = {}
    ranges: list[FitRange] = []
    for size, nbytes in zip(asked, _ranges(asked, is_open=not sizes), strict=True):
        times[size] = tuple(sorted(_times(candidates, times_on, size, advance)))
        winner, plain = _winners(times[size], by_name)
        candidate = by_name[winner.algorithm]
        verify(candidate.schedule)
        if candidate.is_stored:
            schedule = candidate.stored()
            stored[schedule.algorithm] = schedule
            winner = winner._replace(algorithm=schedule.algorithm)
        segment_bytes = None
        if candidate.pipelined or winner.segments > 1:
            chunk = -(-size // chunks_of_data(candidate.schedule))
            segment_bytes = max(1, -(-chunk // winner.segments))
        same, first = (winner.algorithm, segment_bytes), nbytes.first
        if ranges and (ranges[-1].winner.algorithm, ranges[-1].segment_bytes) == same:
            first = ranges.pop().nbytes.first
        whole = Range(first, nbytes.end)
        ranges.append(FitRange(whole, size, winner, segment_bytes, plain, bound, is_even))
    return Fit(
        collective=collective,
        topology=topology,
        ranges=tuple(ranges),
        times=times,
        schedules=stored,
        left_out=left_out,
    )


def _ranges(sizes: Sequence[int], *, is_open: bool) -> Iterator[Range]:
    """The range of each size, up to the geometric means with its neighbours.

    Together they reach from 0 to any size, or from half the first size to twice the last one.
    """
    between = [max(isqrt(low * high), low + 1) for low, high in pairwise(sizes)]
    first, last = (0, None) if is_open else (sizes[0] // 2, 2 * sizes[-1])
    yield from map(Range, [first, *between], [*between, last])


def _winners(
    times: Sequence[SearchTime], by_name: dict[str, _Candidate]
) -> tuple[SearchTime, SearchTime]:
    """The winner, and the fastest in rank order.

    Of the nearly fastest, none slower than the fastest in rank order, the fewest messages win.
    """
    plain = next(time for time in times if by_name[time.algorithm].is_plain)
    limit_s = min(MIN_SPEEDUP * times[0].seconds, plain.seconds)
    close = [time for time in times if time.seconds <= limit_s]
    winner = min(close, key=lambda time: (by_name[time.algorithm].messages * time.segments, time))
    return winner, plain


def _times(
    candidates: Sequence[_Candidate],
    times_on: TimesOnNetwork,
    nbytes: int,
    advance: Callable[[str], object],
) -> Iterator[SearchTime]:
    """The time of each candidate, in its best number of segments if that may make it the fastest.

    It may not if it is slow in one segment, and not meant for more; or if its busiest link alone
    takes as long as the fastest so far: in rank order for one in rank order, else nearly so.
    """
    runs: list[tuple[_Candidate, RunTime]] = []
    for candidate in candidates:
        if candidate.messages <= MOST_MESSAGES:
            advance(candidate.name)
            runs.append((candidate, times_on.run(candidate.schedule, nbytes)))
    runs.sort(key=lambda pair: pair[1].seconds)
    best_s, best_plain_s = inf, inf  # of all, and of those in rank order
    for candidate, run in runs:
        name, seconds, segments = candidate.name, run.seconds, 1
        is_meant = candidate.pipelined or seconds < _MOST_SLOWDOWN * runs[0][1].seconds
        limit_s = best_plain_s if candidate.is_plain else best_s / MIN_SPEEDUP
        if is_meant and run.busiest_s < limit_s:
            best = times_on.best(candidate.schedule, nbytes, candidate.messages)
            seconds, segments = best.seconds, best.segments
        best_s = min(best_s, seconds)
        if candidate.is_plain:
            best_plain_s = min(best_plain_s, seconds)
        yield SearchTime(seconds, name, segments)


def slower_links(before: Topology, now: Topology) -> tuple[str, ...]:
    """The links of a network that make ways between ranks clearly slower than before, in words.

    They are those on the way that has lost the most, and on ways that have lost half as much.
    """
    lost: dict[str, tuple[float, float, float]] = {}  # share that is left, GB/s before and now
    for pair in permutations(range(now.world_size), 2):
        was = min(float(before.links[index].fastest) for index in before.route(*pair))
        link = min((now.links[index] for index in now.route(*pair)), key=lambda link: link.fastest)
        speed = float(link.fastest)
        row = speed / was, was / 1e9, speed / 1e9
        lost[link.name] = min(row, lost.get(link.name, (inf, inf, inf)))
    limit = min(_LOST_SHARE, 2 * min((share for share, _, _ in lost.values()), default=1.0))
    return tuple(
        f"{name}, {was:.3g} to {speed:.3g} GB/s"
        for name, (share, was, speed) in lost.items()
        if share < limit
    )


def _registered(collective: str, topology: Topology) -> Iterator[_Candidate]:
    """Registered algorithms, in rank order and near order, and hierarchies over the hosts."""
    world_size = topology.world_size
    order = near_order(topology, _NEAR_NBYTES)
    in_order = "" if order == tuple(range(world_size)) else f"~{order_in_text(order)}"
    hosts = near_ranks(topology)
    several = 1 < len(set(hosts)) < world_size
    names = [entry.name for entry in algorithms(collective, world_size)]
    names += [f"{name}{in_order}" for name in names if in_order]
    names += [f"{inside}+{across}" for inside in _LEVELS for across in _LEVELS if several]
    for name in names:
        for entry in named(name, collective):
            is_stored = entry.needs_hosts or not entry.built_in
            if (
                name.startswith("fitted_")
                or (is_stored and contract(collective).rooted)
                or (entry.needs_hosts and not several)
            ):
                continue
            yield _Candidate(
                name,
                entry.schedule(world_size, hosts=hosts if entry.needs_hosts else None),
                entry.pipelined,
                is_plain=not set(name) & set("~+"),
                is_stored=is_stored,
            )


def _searched(collective: str, topology: Topology, exact: bool, seed: int) -> Iterator[_Candidate]:
    """The schedules that the searches find."""
    world_size = topology.world_size
    for_all = demand_of(phases_of(collective)[0][0], world_size).for_all
    most = _TREES_OF_MANY if world_size > _MANY_RANKS else _TREES
    for schedule in trees_of(collective, topology, most) if for_all else ():
        yield _Candidate(schedule.algorithm, schedule, True, False, True)
    methods = [("greedy", 1)] * (for_all and world_size <= _MANY_RANKS)
    methods += [("exact", 2)] * (exact and world_size <= _EXACT_RANKS)
    for method, most_chunks in methods:
        with suppress(TooLargeError, MissingExtraError):
            front = synthesize(
                collective, topology, method=method, most_chunks=most_chunks, more_steps=1,
                effort=_EFFORT, seed=seed,
            )  # fmt: skip
            for _, schedule in front.points:
                yield _Candidate(schedule.algorithm, schedule, False, False, True)
