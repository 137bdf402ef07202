"""Count what ranks do: the one counter for proofs, costs and predictions.

`count` looks at one step of one rank, `Tally` adds up the steps of all ranks, and `Counts` holds
the terms of the alpha-beta-gamma cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from itertools import pairwise, zip_longest
from typing import NamedTuple

from ringcoll.schedule.contracts import contract
from ringcoll.schedule.ir import Recv, RecvReduce, Reduce, Schedule, Send, Step

__all__ = ["Counts", "Tally", "chunks_of_data", "count", "packed_chunks", "tally_of"]


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
    >>> from ringcoll.schedule.ir import inp, out, recv_reduce, send
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


def packed_chunks(step: Step) -> int:
    """Chunks that a rank copies in a step because those of a message do not lie side by side."""
    return sum(
        len(operation.refs)
        for operation in step
        if isinstance(operation, Send | Recv)
        and any(
            first.buffer is not second.buffer or first.chunk + 1 != second.chunk
            for first, second in pairwise(operation.refs)
        )
    )


class Tally:
    """The sum of what ranks do, added up step by step; amounts of data are in chunks.

    Attributes
    ----------
    rounds, traffic, reduced
        As in `Counts`, in chunks.
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
        Chunks that all ranks copy, as those of a message do not lie side by side; `tally_of` counts them.
    """

    def __init__(self, world_size: int) -> None:
        self.rounds = self.traffic = self.reduced = 0
        self.posts = self.ports = self.in_flight = self.total_reduced = self.packed = 0
        self.sends, self.receives, self.sent = ([0] * world_size for _ in range(3))

    def add(self, steps: Iterable[tuple[int, Step]]) -> None:
        """Add one step of all ranks, or of those that do anything in it; each with its rank."""
        most_posts = most_moved = most_reduced = any_sends = 0
        for rank, step in steps:
            sends, receives, sent, received, reduced = count(step)
            any_sends += sends
            self.sends[rank] += sends
            self.receives[rank] += receives
            self.sent[rank] += sent
            self.total_reduced += reduced
            most_posts = max(most_posts, sends, receives)
            most_moved = max(most_moved, sent, received)
            most_reduced = max(most_reduced, reduced)
            self.in_flight = max(self.in_flight, sends + receives)
        self.rounds += any_sends > 0
        self.traffic += most_moved
        self.reduced += most_reduced
        self.posts += most_posts
        self.ports = max(self.ports, most_posts)

    def counts(self, chunks: int) -> Counts:
        """The terms of the cost, from the number of chunks in the whole data."""
        return Counts(self.rounds, Fraction(self.traffic, chunks), Fraction(self.reduced, chunks))


def tally_of(schedule: Schedule) -> Tally:
    """Add up all steps of a schedule."""
    tally = Tally(schedule.world_size)
    programs = (schedule.program(rank) for rank in range(schedule.world_size))
    for steps in zip_longest(*programs, fillvalue=Step()):
        tally.add(enumerate(steps))
        tally.packed += sum(map(packed_chunks, steps))
    return tally


def chunks_of_data(schedule: Schedule) -> int:
    """Chunks in the whole data: in the vector, or in all blocks of one rank."""
    rules, world_size = contract(schedule.collective), schedule.world_size
    per_block = rules.chunks_per_block(schedule.num_chunks, world_size)
    return per_block * (world_size if rules.num_blocks(world_size) > 1 else 1)
