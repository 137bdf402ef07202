"""How long each algorithm of a collective will take, and in how many segments it is best.

Problem: say, before anything is sent, which algorithm will be done first, from a few
numbers that are measured in milliseconds.

Two things bound the time from below. The larger one, and a fifth of the other, as they
never overlap perfectly, is the prediction.

*The critical path*: ``rounds * alpha + further * overhead + (traffic * beta + reduced *
gamma) * n``, with the counts of `ringcoll.cost` and, beyond these, the messages that a
rank posts in one step after the first, and the data that it copies because the chunks of
a message do not lie side by side. Here alpha and beta are those of two ranks that
send back and forth while the others wait.

*What all ranks do together*: with more ranks than cores, ranks take turns; on several
hosts they share a network card. So the same path costs more if all ranks are busy on it,
as in a ring, than if few are at a time, as in a tree. How much more is measured too: let
every rank send to the next one, all at once, and a step takes the *crowded* alpha and
beta. In such a step each rank sends one message. An algorithm in which a rank sends m
messages and s n bytes on average therefore takes at least ``m * crowded_alpha + s * n *
crowded_beta``, plus what it reduces.

Segments: in the notation of `ringcoll.cost.wavefront_counts`, T steps in S segments are T
+ S - 1 waves, and from S = T on the traffic is exactly ``c + e / S``; c and e are found
from two counts and used for every S above 1.

Messages are counted on the schedule for as many ranks as takes a millisecond; for more
of them, what a rank does on average is taken to grow with the critical path as it did
from half as many ranks to these. Only arithmetic that IEEE 754 defines to the
last bit is used, and of equal times those without segments come first, then names decide:
so all ranks get the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from ringcoll.algorithms import Algorithm, algorithms, schedule_of
from ringcoll.contracts import contract
from ringcoll.cost import formula_counts, wavefront_counts
from ringcoll.errors import ArgumentError
from ringcoll.schedule import Recv, RecvReduce, Reduce, Ref, Send

__all__ = ["Parameters", "Prediction", "comes_with_the_library", "predict", "predictions"]

# Ranks' steps that are counted for an algorithm: that takes a millisecond.
_COUNTED_STEPS = 512
_COUNTED_RANKS = (8, 32)  # at least, at most: a rank may have a message for each other one
# Chosen so, algorithms took 1.19 times as long as the fastest at their size; with 0 it was
# 1.22, by the path alone 1.28, by the built-in rules 1.25. (Geometric means over 6
# collectives of 64 B to 16 MiB, 2, 4 and 8 ranks on 2 busy cores, over gloo and UCX.)
_NO_OVERLAP = 0.2
_SEGMENTS = tuple(1 << power for power in range(11))
"""Numbers of segments that are tried. Up to 1024: a segment of 64 MiB is then 64 KiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """What a group's messages, bytes and reductions cost.

    Parameters
    ----------
    alpha_s, beta_s_per_byte
        Seconds that a message takes, and each byte of it, between two ranks while the
        others wait.
    gamma_s_per_byte
        Seconds that a rank needs to reduce a byte with another.
    overhead_s
        Seconds for each further message that a rank posts in the same step.
    crowded_alpha_s, crowded_beta_s_per_byte, crowded_gamma_s_per_byte
        The same where all ranks send, receive and reduce at once.

    Raises
    ------
    ArgumentError
        One of them is negative or not finite.
    """

    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float
    overhead_s: float
    crowded_alpha_s: float
    crowded_beta_s_per_byte: float
    crowded_gamma_s_per_byte: float

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 <= value < float("inf"):
                raise ArgumentError("no cost", argument=name, expected=">= 0, finite", got=value)


class Prediction(NamedTuple):
    """How long an algorithm is predicted to take.

    ``path_s`` is the critical path, ``crowded_s`` what all ranks do together; ``seconds``
    is made of both. ``segment_bytes`` is ``None`` where the algorithm is not pipelined.
    """

    algorithm: str
    seconds: float
    path_s: float
    crowded_s: float
    num_segments: int
    segment_bytes: int | None


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Amounts that depend on the number of segments S as ``whole + edge / S``."""

    steps: int
    traffic: float
    traffic_edge: float
    reduced: float
    reduced_edge: float
    further: float  # messages of a wave beyond the first, at the busiest rank


@dataclass(frozen=True, slots=True)
class _Profile:
    """What an algorithm does on so many ranks; amounts of data in n."""

    num_chunks: int
    rounds: int
    traffic: float
    reduced: float
    further: float  # messages that are posted in a step after its first, on the path
    messages_mean: float  # of a rank
    sent_mean: float
    reduced_mean: float
    packed_mean: float  # copied; a byte costs as much as one that is reduced
    pieces: _Pieces | None


class _Work(NamedTuple):
    """What ranks do, counted on a schedule."""

    posts: int  # messages of the busiest rank of each step, over the steps
    most: int  # messages of the busiest rank
    # Messages; data sent, reduced, and copied to or from a message; on average.
    of_a_rank: tuple[float, float, float, float]


def _work(entry: Algorithm, world_size: int) -> _Work:
    schedule = schedule_of(entry.collective, entry.name, world_size)
    messages = sent = reduced = packed = most = 0
    busiest: dict[int, int] = {}
    for rank in range(world_size):
        posted = taken = 0
        for number, step in enumerate(schedule.steps(rank)):
            sends = receives = 0
            for operation in step:
                match operation:
                    case Send(_, refs):
                        sends += 1
                        sent += len(refs)
                        packed += _packed(refs)
                    case Recv(_, refs):
                        receives += 1
                        packed += _packed(refs)
                    case RecvReduce(_, into):
                        receives += 1
                        reduced += len(into)
                    case Reduce(_, sources):
                        reduced += len(sources) - 1
                    case _:
                        pass
            if sends or receives:
                busiest[number] = max(busiest.get(number, 0), sends, receives)
            posted, taken = posted + sends, taken + receives
        messages += posted
        most = max(most, posted, taken)
    chunks = _chunks_of_n(entry, world_size) * world_size
    mean = (messages / world_size, sent / chunks, reduced / chunks, packed / chunks)
    return _Work(sum(busiest.values()), most, mean)


def _packed(refs: Sequence[Ref]) -> int:
    """Chunks of a message that have to be copied, as they do not lie side by side."""
    side_by_side = all(
        first.buffer is second.buffer and first.chunk + 1 == second.chunk
        for first, second in pairwise(refs)
    )
    return 0 if side_by_side else len(refs)


def _chunks_of_n(entry: Algorithm, world_size: int) -> int:
    """Chunks in the whole data: in the vector, or in all blocks of one rank."""
    rules, num_chunks = contract(entry.collective), entry.chunks(world_size)
    per_block = rules.chunks_per_block(num_chunks, world_size)
    return per_block * (world_size if rules.num_blocks(world_size) > 1 else 1)


@lru_cache(maxsize=1024)
def _profile(entry: Algorithm, world_size: int) -> _Profile:
    counts = formula_counts(entry, world_size)
    traffic, reduced = float(counts.traffic), float(counts.reduced)
    few = _countable(entry, world_size)
    if world_size == 1 or entry.restriction(few) or entry.restriction(max(1, few // 2)):
        # Nothing is sent; or it cannot be counted, and all ranks are taken to be busy.
        return _Profile(
            _chunks_of_n(entry, world_size),
            counts.rounds,
            traffic,
            reduced,
            further=0.0,
            messages_mean=float(counts.rounds),
            sent_mean=traffic,
            reduced_mean=reduced,
            packed_mean=0.0,
            pieces=None,
        )
    base, done = formula_counts(entry, few), _work(entry, few)
    messages, sent, moved, packed = done.of_a_rank
    if few < world_size:
        fewer = formula_counts(entry, few // 2)
        half = _work(entry, few // 2).of_a_rank
        messages = _extended(messages, half[0], counts.rounds, base.rounds, fewer.rounds)
        sent = _extended(sent, half[1], traffic, float(base.traffic), float(fewer.traffic))
        moved = _extended(moved, half[2], reduced, float(base.reduced), float(fewer.reduced))
        packed = _extended(packed, half[3], traffic, float(base.traffic), float(fewer.traffic))
    return _Profile(
        _chunks_of_n(entry, world_size),
        counts.rounds,
        traffic,
        reduced,
        # As in a step in which one rank hears from all.
        further=(done.posts - base.rounds) * (world_size - 1) / (few - 1),
        messages_mean=messages,
        sent_mean=sent,
        reduced_mean=moved,
        packed_mean=packed,
        pieces=_pieces(entry, world_size, few, done.most) if entry.pipelined else None,
    )


def _countable(entry: Algorithm, world_size: int) -> int:
    """The number of ranks on which the algorithm's steps are counted."""
    least, most = _COUNTED_RANKS
    if world_size <= most and world_size * entry.cost.rounds(world_size) <= _COUNTED_STEPS:
        return world_size
    few = min(world_size, least)
    while (
        2 * few <= min(world_size, most) and 2 * few * entry.cost.rounds(2 * few) <= _COUNTED_STEPS
    ):
        few *= 2
    return few


def _extended(amount: float, before: float, here: float, there: float, earlier: float) -> float:
    """Go on in a straight line from two points at ``earlier`` and ``there`` to ``here``."""
    if there == earlier:
        return amount
    return amount + (amount - before) * (here - there) / (there - earlier)


def _pieces(entry: Algorithm, world_size: int, few: int, most: int) -> _Pieces:
    schedule = schedule_of(entry.collective, entry.name, few)
    steps = formula_counts(entry, few).rounds
    once, twice = wavefront_counts(schedule, steps), wavefront_counts(schedule, 2 * steps)
    traffic_edge = float(2 * steps * (once.traffic - twice.traffic))
    reduced_edge = float(2 * steps * (once.reduced - twice.reduced))
    now = formula_counts(entry, world_size).rounds
    stretch = (now - 1) / (steps - 1) if steps > 1 else 1.0
    return _Pieces(
        now,
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
    rounds, traffic, reduced = float(profile.rounds), profile.traffic, profile.reduced
    further, pieces = profile.further, profile.pieces
    if num_segments > 1 and pieces is not None:
        rounds = float(pieces.steps + num_segments - 1)
        traffic = pieces.traffic + pieces.traffic_edge / num_segments
        reduced = pieces.reduced + pieces.reduced_edge / num_segments
        further += (num_segments - 1) * pieces.further
    reduced += profile.packed_mean
    path_s = (
        rounds * costs.alpha_s
        + further * costs.overhead_s
        + nbytes * (traffic * costs.beta_s_per_byte + reduced * costs.gamma_s_per_byte)
    )
    crowded_s = profile.messages_mean * num_segments * costs.crowded_alpha_s + nbytes * (
        profile.sent_mean * costs.crowded_beta_s_per_byte
        + (profile.reduced_mean + profile.packed_mean) * costs.crowded_gamma_s_per_byte
    )
    return path_s, crowded_s


def predict(entry: Algorithm, nbytes: int, world_size: int, costs: Parameters) -> Prediction:
    """Predict one algorithm, with the number of segments that suits it.

    Parameters
    ----------
    entry
        The algorithm; it has to run on so many ranks, and not to need to know the hosts.
    nbytes
        Size of the whole data: the vector, or all blocks of a rank.
    world_size
        Number of ranks.
    costs
        What messages and bytes cost.
    """
    profile = _profile(entry, world_size)
    best: tuple[float, int, float, float] | None = None
    for num_segments in _SEGMENTS if profile.pieces is not None and nbytes else (1,):
        path_s, crowded_s = _seconds(profile, nbytes, costs, num_segments)
        seconds = max(path_s, crowded_s) + _NO_OVERLAP * min(path_s, crowded_s)
        found = (seconds, num_segments, path_s, crowded_s)
        best = found if best is None or found < best else best
    assert best is not None
    seconds, num_segments, path_s, crowded_s = best
    segment_bytes = None
    if entry.pipelined:
        longest = -(-nbytes // profile.num_chunks)
        segment_bytes = max(1, -(-longest // num_segments))
    return Prediction(entry.name, seconds, path_s, crowded_s, num_segments, segment_bytes)


def comes_with_the_library(entry: Algorithm) -> bool:
    """Whether all ranks have an algorithm, proved and costed by tests."""
    return entry.program.__module__.startswith("ringcoll.algorithms.")


def predictions(
    collective: str, nbytes: int, world_size: int, costs: Parameters
) -> tuple[Prediction, ...]:
    """Predict every algorithm of the library that can run, the fastest first.

    Algorithms that a program has registered are left out: other ranks may not have them.
    So are those that move blocks whose lengths not every rank knows, if these are needed,
    and those that depend on which rank is on which host: here messages cost the same everywhere.

    Parameters
    ----------
    collective
        The collective.
    nbytes, world_size, costs
        As for `predict`.

    Examples
    --------
    >>> costs = Parameters(
    ...     alpha_s=1e-5, beta_s_per_byte=1e-9, gamma_s_per_byte=2e-10, overhead_s=5e-6,
    ...     crowded_alpha_s=1e-5, crowded_beta_s_per_byte=1e-9, crowded_gamma_s_per_byte=2e-10)
    >>> for nbytes in (4, 1 << 26):
    ...     best, second, *_ = predictions("all_reduce", nbytes, 8, costs)
    ...     print(best.algorithm, round(best.seconds * 1e6), "us, then", second.algorithm)
    recursive_doubling 36 us, then binomial_tree
    rabenseifner 155093 us, then ring
    """
    unequal = not contract(collective).common_lengths
    found = [
        predict(entry, nbytes, world_size, costs)
        for entry in algorithms(collective)
        if comes_with_the_library(entry)
        and not entry.needs_hosts
        and not (unequal and entry.equal_blocks)
        and not entry.restriction(world_size)
    ]
    return tuple(sorted(found, key=_order))


def _order(one: Prediction) -> tuple[float, float, bool, str]:
    """Of equals, one without segments first: they cost something, too."""
    return one.seconds, one.path_s, one.segment_bytes is not None, one.algorithm
