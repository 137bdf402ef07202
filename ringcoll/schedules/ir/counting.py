"""Count what ranks do: the one counter for proofs, costs and predictions.

`count` looks at one step of one rank, `Tally` adds up the steps of all ranks, and `Counts` holds
the terms of the alpha-beta-gamma cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fractions import Fraction
from itertools import pairwise, zip_longest
from typing import NamedTuple

from ringcoll.errors import TooLargeError
from ringcoll.schedules.ir.contracts import LARGEST_WORLD, contract
from ringcoll.schedules.ir.steps import Recv, RecvReduce, Reduce, Send, Step, Written, num_places


class Counts(NamedTuple):
    """The terms of the alpha-beta-gamma cost; n is the size of the whole data.

    Parameters
    ----------
    rounds
        Number of steps, or of waves, in which a rank sends.
    traffic
        Sum over the rounds of the most that any rank sends or receives, in n.
    reduced
        Sum over the rounds of the most that any rank reduces, in n.
    """

    rounds: int
    traffic: Fraction
    reduced: Fraction


def count(step: Step) -> tuple[int, int, int, int, int]:
    """Count what one rank does in one step.

    Returns
    -------
    tuple of int
        Messages sent, messages received, chunks sent, chunks received, chunks reduced.

    Examples
    --------
    >>> from ringcoll.schedules import inp, out, recv_reduce, send
    >>> count(Step(send(1, inp(0), inp(1)), send(2, inp(0)), recv_reduce(1, out(0), inp(0))))
    (2, 1, 3, 1, 1)
    """
    sends = receives = sent = received = reduced = 0
    for operation in step:
        # A `match` takes five times as long, and the verifier counts millions of steps.
        if type(operation) is Send:
            sends += 1
            sent += len(operation.refs)
        elif type(operation) is RecvReduce:
            receives += 1
            received += len(operation.into)
            reduced += len(operation.into)
        elif type(operation) is Recv:
            receives += 1
            received += len(operation.refs)
        elif type(operation) is Reduce:
            reduced += len(operation.sources) - 1
    return sends, receives, sent, received, reduced


_SMALL_WORLD = 1 << 7  # ranks up to which the work of a schedule of short steps is not estimated
_SAMPLED_RANKS = 8  # ranks, beside the root, from which the work of all is estimated
MOST_STEPS = 1 << 18
"""Steps of a rank whose program is read before it is proved: with more, it may have no end."""
_MOST_WORK = 5 << 20
"""Chunks that all ranks send and receive in a schedule that is run on symbols. A chunk takes 5 us
and 120 bytes, and more for its set of ranks: it is a ring on 1,024 ranks, half a minute, 0.5 GiB.
"""


def estimated(schedule: Written, weigh: Callable[[Step], int], most: int) -> int:
    """Estimate the sum of a weight over all steps, from those of the root and of some other ranks.

    The sum is not counted on far above ``most``.
    """
    root, world_size = schedule.root, schedule.world_size
    # Spread as by chance: every 4,096th rank, say, is at the top of most trees.
    others = sorted(
        {(root + 1 + 40_503 * place) % world_size for place in range(_SAMPLED_RANKS)} - {root}
    )
    of_root = of_others = 0
    for index, rank in enumerate((root, *others)):
        share = (world_size - 1) / index if index else 1.0  # ranks for which one stands
        weight = 0
        try:
            for number, step in enumerate(schedule.program(rank)):
                weight += weigh(step)
                if (of_others + weight) * share > 2 * most or number > MOST_STEPS:
                    return 2 * most
        except TooLargeError:
            raise
        except Exception:  # noqa: BLE001, S110  # for the verifier to report
            pass
        if index:
            of_others += weight
        else:
            of_root = weight
    return of_root + int(of_others * (world_size - 1) / max(1, len(others)))


def estimated_messages(schedule: Written, most: int) -> int:
    """Estimate the messages of all ranks, as `estimated` does."""
    return estimated(schedule, lambda step: count(step)[0], most)


def moved(step: Step) -> int:
    """Chunks that a rank moves in a step, in eighths: to go on to the next step takes one."""
    return 8 * sum(count(step)[2:4]) or 1


def _is_small(schedule: Written) -> bool:
    world_size = schedule.world_size
    return world_size <= _SMALL_WORLD and world_size * schedule.num_chunks <= _SMALL_WORLD**2


def check_end(schedule: Written, number: int) -> None:
    """Refuse a program that has so many steps that it may have no end."""
    most = MOST_STEPS // schedule.world_size if _is_small(schedule) else MOST_STEPS
    if number > most:
        raise _too_large(schedule, f"its programs have more than {most:,} steps, or no end", most)


def _too_large(schedule: Written, reason: str, most: int) -> TooLargeError:
    about = f"{schedule.algorithm} {schedule.collective} on {schedule.world_size} ranks"
    return TooLargeError(f"{about} is too large: {reason}", most=most)


def check_work(schedule: Written) -> None:
    """Refuse a schedule that is too large to be run on symbols, before that begins.

    Raises
    ------
    TooLargeError
        The ranks send and receive far too many chunks.
    """
    world_size = schedule.world_size
    if _is_small(schedule):
        return
    most = int(_MOST_WORK / (1 + world_size / 16384))  # a chunk's set of ranks has a bit for each
    if world_size > LARGEST_WORLD:
        needed = world_size * schedule.num_chunks
    elif (needed := num_places(schedule)) <= most:
        needed = estimated(schedule, moved, 8 * most) // 8
    if needed > most:
        reason = f"the ranks move about {needed:,} chunks or more, expected at most {most:,}"
        raise _too_large(schedule, reason, _MOST_WORK)


def packed_chunks(step: Step, *, in_segments: bool = False) -> int:
    """Chunks that a rank copies in a step, as those of a message do not lie side by side.

    Segments never do.
    """
    return sum(
        len(operation.refs)
        for operation in step
        if isinstance(operation, Send | Recv)
        and any(
            in_segments or first.buffer is not second.buffer or first.chunk + 1 != second.chunk
            for first, second in pairwise(operation.refs)
        )
    )


class Tally:
    """The sum of what ranks do, added up step by step; amounts of data are in chunks.

    Attributes
    ----------
    rounds, traffic, reduced
        As in `Counts`, in chunks.
    moved
        Sum over the steps of the most chunks that any rank sends and receives together.
    posts
        Sum over the steps of the most messages that any rank sends, or receives.
    ports
        Most messages that one rank sends, or receives, in one step.
    in_flight
        Most messages that one rank posts in one step.
    total_reduced
        Chunks that all ranks reduce.
    sends, receives, sent
        Messages sent, messages received and chunks sent, by rank.
    packed
        Chunks that all ranks copy, as those of a message do not lie side by side, in one segment
        and in several.
    repeated
        Chunks that ranks send in a step in which they send them to another rank, too.
    exchanges
        Steps in which all ranks exchange one message with all others. `tally_of` counts these four.
    """

    def __init__(self, world_size: int) -> None:
        self.rounds = self.traffic = self.moved = self.reduced = 0
        self.posts = self.ports = self.in_flight = self.total_reduced = self.packed = 0
        self.packed_in_segments = self.repeated = self.exchanges = 0
        self.sends, self.receives, self.sent = ([0] * world_size for _ in range(3))

    def add(self, steps: Iterable[tuple[int, Step]]) -> None:
        """Add one step of all ranks, or of those that do anything in it; each with its rank."""
        most_posts = most_sent = most_moved = most_reduced = any_sends = 0
        for rank, step in steps:
            sends, receives, sent, received, reduced = count(step)
            any_sends += sends
            self.sends[rank] += sends
            self.receives[rank] += receives
            self.sent[rank] += sent
            self.total_reduced += reduced
            most_posts = max(most_posts, sends, receives)
            most_sent = max(most_sent, sent, received)
            most_moved = max(most_moved, sent + received)
            most_reduced = max(most_reduced, reduced)
            self.in_flight = max(self.in_flight, sends + receives)
        self.rounds += any_sends > 0
        self.traffic += most_sent
        self.moved += most_moved
        self.reduced += most_reduced
        self.posts += most_posts
        self.ports = max(self.ports, most_posts)

    def counts(self, chunks: int) -> Counts:
        """The terms of the cost, from the number of chunks in the whole data."""
        return Counts(self.rounds, Fraction(self.traffic, chunks), Fraction(self.reduced, chunks))


def tally_of(schedule: Written) -> Tally:
    """Add up all steps of a schedule."""
    check_work(schedule)
    tally = Tally(schedule.world_size)
    programs = (schedule.program(rank) for rank in range(schedule.world_size))
    for steps in zip_longest(*programs, fillvalue=Step()):
        tally.add(enumerate(steps))
        tally.packed += sum(map(packed_chunks, steps))
        tally.packed_in_segments += sum(packed_chunks(step, in_segments=True) for step in steps)
        tally.repeated += sum(map(_repeated_chunks, steps))
        tally.exchanges += all(sends_alike(step, schedule.world_size) for step in steps)
    return tally


def sends_alike(step: Step, world_size: int) -> bool:
    """Whether a rank sends one message to every other rank, and receives one from each."""
    sends = {operation.peer: operation.refs for operation in step if type(operation) is Send}
    if len(sends) != world_size - 1 or len(set(sends.values())) != 1:
        return False
    counts = count(step)
    sources = {operation.peer for operation in step if isinstance(operation, Recv | RecvReduce)}
    return counts[0] == counts[1] == len(sources) == world_size - 1


def _repeated_chunks(step: Step) -> int:
    sent = [operation.refs for operation in step if isinstance(operation, Send)]
    return sum(map(len, sent)) - sum(map(len, set(sent)))


def chunks_of_data(schedule: Written) -> int:
    """Chunks in the whole data: in the vector, or in all blocks of one rank."""
    rules, world_size = contract(schedule.collective), schedule.world_size
    per_block = rules.chunks_per_block(schedule.num_chunks, world_size)
    return per_block * (world_size if rules.num_blocks(world_size) > 1 else 1)
