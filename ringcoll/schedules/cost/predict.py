"""The time that each algorithm of a collective will take, and its best number of segments.

Problem: say, before the first message, which algorithm will be done first, from a few numbers that
are measured in milliseconds.

Two times are lower bounds. They never overlap perfectly, so the prediction is the larger one plus a
fifth of the smaller one.

*The critical path*: ``rounds * alpha + further * overhead + (traffic * beta + reduced * gamma) *
n``, with the counts of `ringcoll.schedules.cost.counts` and, beyond these, the messages that a rank
posts in one step after the first, and the data that it copies because the chunks of a message do
not lie side by side. Here alpha and beta are those of two ranks that send back and forth while the
others wait.

*What all ranks do together*: with more ranks than cores, ranks take turns; on several hosts they
share a network card. So the same path costs more if all ranks are busy on it, as in a ring, than if
few are at a time, as in a tree. How much more is measured too: let every rank send to the next one,
all at once, and a step takes the *crowded* alpha and beta. In such a step each rank sends one
message. An algorithm in which a rank sends m messages and s n bytes on average therefore takes at
least ``m * crowded_alpha + s * n * crowded_beta``, plus what it reduces.

Segments: in the notation of `ringcoll.schedules.cost.counts.wavefront_counts`, T steps in S
segments are T + S - 1 waves, and from S = T on the traffic is exactly ``c + e / S``; c and e follow
from two counts and used for every S above 1.

Messages are counted on the schedule for as many ranks as takes a millisecond; for more of them,
what a rank does on average is taken to grow with the critical path as it did from half as many
ranks to these. Only arithmetic that IEEE 754 defines to the last bit is used, and of equal times
those without segments come first, then names decide: so all ranks get the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

from ringcoll.errors import ArgumentError
from ringcoll.schedules.algorithms import Algorithm, algorithms
from ringcoll.schedules.cost.counts import LinkCosts, wavefront_counts
from ringcoll.schedules.ir import OperandOrder, Schedule, Tally, chunks_of_data, contract, tally_of

# Ranks' steps that are counted for an algorithm: that takes a millisecond.
_COUNTED_STEPS = 512
_COUNTED_RANKS = (8, 32)  # at least, at most: a rank may have a message for each other one
# Chosen so, algorithms took 1.19 times as long as the fastest at their size; with 0 it was 1.22, by
# the path alone 1.28, by the built-in rules 1.25. (Geometric means over 6 collectives of 64 B to 16
# MiB, 2, 4 and 8 ranks on 2 busy cores, over gloo and UCX.)
_NO_OVERLAP = 0.2
# The model's own error, as a share: algorithms are predicted to take so much more or less than they
# do.
MODEL_ERROR = 0.2
_SEGMENTS = tuple(1 << power for power in range(11))
"""Numbers of segments that are tried. Up to 1024: a segment of 64 MiB is then 64 KiB."""
# Bytes of data up to which, and from which on, each byte costs the same.
_CACHED, _UNCACHED = 1 << 21, 1 << 25
_LARGEST_COST_S = 1e100  # times that are computed from larger costs may be no finite floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The costs of messages, bytes and reductions in a group.

    Parameters
    ----------
    alpha_s, beta_s_per_byte
        Seconds that a message takes, and each byte of it, between two ranks while the others wait.
    gamma_s_per_byte
        Seconds that a rank needs to reduce a byte with another.
    overhead_s
        Seconds for each further message that a rank posts in the same step.
    crowded_alpha_s, crowded_beta_s_per_byte, crowded_gamma_s_per_byte
        The same where all ranks send, receive and reduce at once.
    direct_from
        Bytes from which a message inside a host is read in its sender's memory, as that is the
        quicker of two ways there (`ringcoll.runtime.transport.Transport.direct_from`); 0 if that
        was not measured.
    slice_bytes
        Bytes of the slices in which longer messages are sent, as was measured to be quicker
        (`ringcoll.runtime.transport.Transport.slice_bytes`); 0 if they are sent whole.
    exchange_s, exchanges_to
        Seconds of a short message of each rank to all others
        (`ringcoll.runtime.transport.Transport.bind_exchange`), and bytes up to which messages go
        that way; 0 if they do not.
    cached_beta_s_per_byte, crowded_cached_beta_s_per_byte
        Seconds of a byte of data that fit into caches, up to 2 MiB; beta is then that of 32 MiB and
        more. 0 if there is no difference.

    Raises
    ------
    ArgumentError
        A cost is negative, not finite, or above 1e100.
    """

    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float
    overhead_s: float
    crowded_alpha_s: float
    crowded_beta_s_per_byte: float
    crowded_gamma_s_per_byte: float
    direct_from: int = 0
    slice_bytes: int = 0
    exchanges_to: int = 0
    exchange_s: float = 0.0
    cached_beta_s_per_byte: float = 0.0
    crowded_cached_beta_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value <= _LARGEST_COST_S:
                raise ArgumentError("no cost", name, ">= 0, finite", value)

    def at(self, nbytes: int) -> Parameters:
        """The costs for so many bytes: the time of all bytes is on a straight line in between."""
        if not self.cached_beta_s_per_byte or nbytes >= _UNCACHED:
            return self
        far = max(0, nbytes - _CACHED) / (_UNCACHED - _CACHED)

        def beta(cached: float, beyond: float) -> float:
            whole = cached * _CACHED + (beyond * _UNCACHED - cached * _CACHED) * far
            return whole / nbytes if far else cached

        return replace(
            self,
            beta_s_per_byte=beta(self.cached_beta_s_per_byte, self.beta_s_per_byte),
            crowded_beta_s_per_byte=beta(
                self.crowded_cached_beta_s_per_byte, self.crowded_beta_s_per_byte
            ),
        )

    @property
    def of_rank(self) -> tuple[float, float, float]:
        """Seconds that a busy rank adds: before a message, a further one, and to reduce a byte."""
        more_s = max(0.0, self.crowded_alpha_s - self.alpha_s)
        return more_s, self.overhead_s, self.crowded_gamma_s_per_byte

    @property
    def alone(self) -> LinkCosts:
        """The costs between two ranks while the others wait."""
        return LinkCosts(self.alpha_s, self.beta_s_per_byte, self.gamma_s_per_byte, self.overhead_s)

    @property
    def crowded(self) -> LinkCosts:
        """The costs where all ranks send, receive and reduce at once."""
        return LinkCosts(
            self.crowded_alpha_s, self.crowded_beta_s_per_byte, self.crowded_gamma_s_per_byte
        )


class Prediction(NamedTuple):
    """How long an algorithm is predicted to take.

    ``path_s`` is the critical path, ``crowded_s`` what all ranks do together; ``seconds`` is made
    of both. ``num_waits`` counts the synchronisations: how often, one after the other, a rank waits
    for another one. ``segment_bytes`` is ``None`` where the algorithm is not pipelined.
    """

    algorithm: str
    seconds: float
    path_s: float
    crowded_s: float
    num_waits: int
    num_segments: int
    segment_bytes: int | None


@dataclass(frozen=True, slots=True)
class _InSegments:
    """Amounts that depend on the number of segments S as ``whole + edge / S``."""

    steps: int
    traffic: float
    traffic_edge: float
    reduced: float
    reduced_edge: float
    further: float  # messages of a wave beyond the first, at the busiest rank


class _Means(NamedTuple):
    """The work of a rank, on average; amounts of data in n."""

    messages: float
    sent: float
    reduced: float
    packed: float = 0.0  # a copied byte costs as much as a reduced byte
    packed_in_segments: float = 0.0
    repeated: float = 0.0


@dataclass(frozen=True, slots=True)
class _Profile:
    """The work of an algorithm on so many ranks; amounts of data in n."""

    num_chunks: int
    rounds: int
    traffic: float
    reduced: float
    further: float  # messages that are posted in a step after its first, on the path
    means: _Means
    # Where data flow from or to a root: from 0.5, where ranks only send or only receive, to 1.
    two_way: float
    is_exchange: bool  # whether all steps are exchanges of one message of each rank with all others
    pieces: _InSegments | None

    def waits(self, num_segments: int) -> int:
        """How often, one after the other, a rank waits for another one: the steps, or the waves."""
        steps = self.rounds if num_segments == 1 or self.pieces is None else self.pieces.steps
        return steps + num_segments - 1 if steps else 0


def _means(schedule: Schedule, tally: Tally) -> _Means:
    """The average work of a rank."""
    world_size = schedule.world_size
    amounts = (
        sum(tally.sent),
        tally.total_reduced,
        tally.packed,
        tally.packed_in_segments,
        tally.repeated,
    )
    everything = chunks_of_data(schedule) * world_size
    return _Means(sum(tally.sends) / world_size, *(amount / everything for amount in amounts))


@lru_cache(maxsize=1024)
def _profile(entry: Algorithm, world_size: int) -> _Profile:
    counts, chunks = entry.counts(world_size), chunks_of_data(entry.schedule(world_size))
    traffic, reduced = float(counts.traffic), float(counts.reduced)
    few = _countable(entry, world_size)
    further, pieces, is_exchange, two_way = 0.0, None, False, 1.0
    if world_size == 1 or entry.restriction(few) or entry.restriction(max(1, few // 2)):
        # Nothing is sent; or it cannot be counted, and all ranks are taken to be busy.
        means = _Means(float(counts.rounds), traffic, reduced)
    else:
        schedule = entry.schedule(few)
        base, tally = entry.counts(few), tally_of(schedule)
        is_exchange = 0 < tally.exchanges == tally.rounds
        # As in a step in which a rank receives from all others.
        further = (tally.posts - base.rounds) * (world_size - 1) / (few - 1)
        if entry.pipelined:
            most = max(*tally.sends, *tally.receives)
            pieces = _pieces(schedule, base.rounds, counts.rounds, most)
        means = _means(schedule, tally)
        if tally.traffic and contract(entry.collective).rooted:
            two_way = tally.moved / (2 * tally.traffic)
        if few < world_size:
            fewer, half = entry.counts(few // 2), entry.schedule(few // 2)
            each: Iterator[tuple[Any, ...]] = zip(counts, base, fewer, strict=True)
            by_rounds, by_traffic, by_reduced = (
                (float(here), float(there), float(earlier)) for here, there, earlier in each
            )
            # In a direct exchange the messages grow with the ranks, and the rounds do not.
            if base.rounds == fewer.rounds:
                by_rounds = world_size, few, few // 2
            ways = (by_rounds, by_traffic, by_reduced, by_traffic, by_traffic, by_traffic)
            before = _means(half, tally_of(half))
            means = _Means(*map(_extrapolated, means, before, ways))
    return _Profile(
        chunks, counts.rounds, traffic, reduced, further, means, two_way, is_exchange, pieces
    )


def _countable(entry: Algorithm, world_size: int) -> int:
    """The number of ranks on which the algorithm's steps are counted."""
    least, most = _COUNTED_RANKS

    def is_short(ranks: int) -> bool:
        return ranks <= most and ranks * entry.counts(ranks).rounds <= _COUNTED_STEPS

    if is_short(world_size):
        return world_size
    few = min(world_size, least)
    while 2 * few <= world_size and is_short(2 * few):
        few *= 2
    return few


def _extrapolated(amount: float, before: float, places: tuple[float, float, float]) -> float:
    """Go on in a straight line to the first place, from points at the others, not below 0."""
    here, there, earlier = places
    if there == earlier:
        return amount
    return max(0.0, amount + (amount - before) * (here - there) / (there - earlier))


def _pieces(schedule: Schedule, steps: int, steps_now: int, most: int) -> _InSegments:
    """Amounts in segments, from a schedule of ``steps`` steps, for ``steps_now`` steps."""
    once, twice = wavefront_counts(schedule, steps), wavefront_counts(schedule, 2 * steps)
    traffic_edge = float(2 * steps * (once.traffic - twice.traffic))
    reduced_edge = float(2 * steps * (once.reduced - twice.reduced))
    stretch = (steps_now - 1) / (steps - 1) if steps > 1 else 1.0
    return _InSegments(
        steps_now,
        float(once.traffic) - traffic_edge / steps,
        traffic_edge * stretch,
        float(once.reduced) - reduced_edge / steps,
        reduced_edge * stretch,
        max(0.0, float(most - 1)),
    )


def _seconds(
    profile: _Profile, nbytes: int, costs: Parameters, num_segments: int
) -> tuple[float, float]:
    """The critical path, and what all ranks do together."""
    rounds = float(profile.waits(num_segments))
    traffic, reduced = profile.traffic, profile.reduced
    further, pieces, means = profile.further, profile.pieces, profile.means
    if num_segments > 1 and pieces is not None:
        traffic = pieces.traffic + pieces.traffic_edge / num_segments
        reduced = pieces.reduced + pieces.reduced_edge / num_segments
        further += (num_segments - 1) * pieces.further
    else:
        further *= num_segments
    # Segments of several chunks are copied to a message that may not fit into caches: as dear as to
    # send them.
    packed, cut = (0.0, means.packed_in_segments) if num_segments > 1 else (means.packed, 0.0)
    alone, crowded, messages = costs.alone, costs.crowded, means.messages * num_segments
    sent_nbytes = means.sent / max(1.0, means.messages) * nbytes  # in one message
    if profile.is_exchange and costs.exchanges_to and sent_nbytes <= costs.exchanges_to:
        alone = alone._replace(alpha_s=costs.exchange_s)
        crowded = crowded._replace(alpha_s=costs.exchange_s)
        further, messages = 0.0, rounds
    # Half of the cost of a byte is to write it, and half to read it. Where data flow one way in
    # slices, both are done at a time, of slices and of operations that follow each other; and what
    # several ranks read is written once.
    two_way = profile.two_way if costs.slice_bytes else 1.0
    path_s = alone.seconds(nbytes, rounds, traffic * two_way + cut, reduced + packed, further)
    spared = means.repeated / 2 if costs.slice_bytes else 0.0
    crowded_s = crowded.seconds(nbytes, messages, means.sent + cut - spared, means.reduced + packed)
    return path_s, crowded_s


def predict(entry: Algorithm, nbytes: int, world_size: int, costs: Parameters) -> Prediction:
    """Predict one algorithm, with the number of segments that suits it.

    Parameters
    ----------
    entry
        The algorithm; it has to run on so many ranks, and not to need to know the hosts.
    nbytes
        Size of the whole data: the vector, or all blocks of a rank.
    world_size, costs
        Number of ranks, and costs of messages and bytes.
    """
    profile, costs = _profile(entry, world_size), costs.at(nbytes)
    longest = -(-nbytes // profile.num_chunks)
    slices = max(1, -(-longest // costs.slice_bytes)) if costs.slice_bytes else 1
    is_free = profile.pieces is not None and nbytes
    timed: list[tuple[float, int, float, float]] = []
    for num_segments in (slices, *(n for n in _SEGMENTS if n > slices and is_free)):
        path_s, crowded_s = _seconds(profile, nbytes, costs, num_segments)
        seconds = max(path_s, crowded_s) + _NO_OVERLAP * min(path_s, crowded_s)
        timed.append((seconds, num_segments, path_s, crowded_s))
    seconds, num_segments, path_s, crowded_s = min(timed)
    segment_bytes = max(1, -(-longest // num_segments)) if entry.pipelined else None
    return Prediction(
        entry.name,
        seconds,
        path_s,
        crowded_s,
        profile.waits(num_segments),
        num_segments,
        segment_bytes,
    )


def predictions(
    collective: str, nbytes: int, world_size: int, costs: Parameters
) -> tuple[Prediction, ...]:
    """Predict every algorithm of the library that can run, the fastest first; see `predict`.

    An algorithm with a parameter is there several times, with the values that it offers. Algorithms
    that a program has registered are left out: other ranks may not have them. So are those that
    move blocks whose lengths not every rank knows, if these are needed, and those that depend on
    which rank is on which host: here messages cost the same everywhere.

    Examples
    --------
    >>> costs = Parameters(
    ...     alpha_s=1e-5, beta_s_per_byte=1e-9, gamma_s_per_byte=2e-10, overhead_s=5e-6,
    ...     crowded_alpha_s=1e-5, crowded_beta_s_per_byte=1e-9, crowded_gamma_s_per_byte=2e-10)
    >>> for nbytes in (4, 1 << 26):
    ...     best, second, *_ = predictions("all_reduce", nbytes, 8, costs)
    ...     print(best.algorithm, round(best.seconds * 1e6), "us, then", second.algorithm)
    recursive_doubling 36 us, then generalized=3
    rabenseifner 155093 us, then bine
    """
    entries = _predictable(collective, world_size)
    return _ranked((entry, predict(entry, nbytes, world_size, costs)) for entry in entries)


def _predictable(collective: str, world_size: int) -> list[Algorithm]:
    unequal = not contract(collective).common_lengths
    able = [
        entry
        for entry in algorithms(collective, world_size, variants=True)
        if not entry.needs_hosts and not (unequal and entry.equal_blocks)
    ]
    # A program may have replaced all entries of the library.
    return [entry for entry in able if entry.built_in] or able


def preferred(rows: Sequence[Prediction], costs: Parameters) -> Prediction:
    """Of `predictions`, the first, or one as good to the model that has at most half of its waits.

    The cost of a wait varies most, with everything else that the processors do: if a wait cost
    twice as much, the algorithm with half of the waits would be faster.
    """
    first, wait_s = rows[0], max(costs.alpha_s, costs.crowded_alpha_s)

    def is_faster(row: Prediction) -> bool:
        spared = first.num_waits - row.num_waits
        return 2 * spared >= first.num_waits and row.seconds - first.seconds < spared * wait_s

    return min(filter(is_faster, _close(rows)), key=lambda row: row.num_waits, default=first)


def _close(rows: Sequence[Prediction]) -> tuple[Prediction, ...]:
    return tuple(row for row in rows if row.seconds <= rows[0].seconds * (1 + MODEL_ERROR))


def fastest(
    collective: str, nbytes: int, world_size: int, costs: Parameters, order: OperandOrder
) -> tuple[Prediction, ...]:
    """The `predictions` with an order of operands that the model cannot tell from the first.

    To predict all takes some ten milliseconds in a program's first call. So each algorithm first
    gets a lower bound, of its rounds and traffic, and those whose bound is above a prediction are
    left out.
    """
    able = [entry for entry in _predictable(collective, world_size) if entry.order >= order]
    bounds = [(_least_s(entry, nbytes, world_size, costs), entry) for entry in able]
    rows: list[tuple[Algorithm, Prediction]] = []
    most_s = math.inf
    for least_s, entry in sorted(bounds, key=itemgetter(0)):
        if least_s > most_s:
            break
        row = predict(entry, nbytes, world_size, costs)
        rows.append((entry, row))
        most_s = min(most_s, row.seconds * (1 + MODEL_ERROR))
    return _close(_ranked(rows))


def _least_s(entry: Algorithm, nbytes: int, world_size: int, costs: Parameters) -> float:
    """A time that the critical path takes at least; in segments, for the rounds alone."""
    counts, costs = entry.counts(world_size), costs.at(nbytes)
    share = 0.5 if costs.slice_bytes else 1.0
    traffic, reduced = share * float(counts.traffic), float(counts.reduced)
    amounts = (0.0, 0.0) if entry.pipelined else (traffic, reduced)
    link = costs.alone
    if costs.exchanges_to:
        link = link._replace(alpha_s=min(link.alpha_s, costs.exchange_s))
    return link.seconds(nbytes, float(counts.rounds), *amounts)


def _ranked(rows: Iterable[tuple[Algorithm, Prediction]]) -> tuple[Prediction, ...]:
    """The predictions, the fastest first; of equal times, those without segments come first."""

    def place(pair: tuple[Algorithm, Prediction]) -> tuple[float, bool, float, bool, str]:
        entry, row = pair
        has_segments = row.segment_bytes is not None
        return row.seconds, entry.second_choice, row.path_s, has_segments, row.algorithm

    return tuple(row for _, row in sorted(rows, key=place))
