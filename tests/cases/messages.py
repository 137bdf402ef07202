"""The messages of a schedule, as tests count them."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from ringcoll.schedules import Schedule, Send, chunks_of_data

__all__ = ["Message", "distances", "far_traffic", "messages_of"]


class Message(NamedTuple):
    """A message of a schedule."""

    step: int
    source: int
    target: int
    chunks: tuple[int, ...]


def messages_of(schedule: Schedule) -> list[Message]:
    """All messages, by rank and step."""
    return [
        Message(number, rank, operation.peer, tuple(ref.chunk for ref in operation.refs))
        for rank in range(schedule.world_size)
        for number, step in enumerate(schedule.steps(rank))
        for operation in step
        if isinstance(operation, Send)
    ]


def distances(schedule: Schedule) -> list[set[int]]:
    """How far messages go on a ring of the ranks, for each step that has any."""
    far: dict[int, set[int]] = {}
    for step, source, target, _ in messages_of(schedule):
        away = (target - source) % schedule.world_size
        far.setdefault(step, set()).add(min(away, schedule.world_size - away))
    return [far[step] for step in sorted(far)]


def far_traffic(schedule: Schedule, ranks_per_host: int) -> Fraction:
    """Data sent from host to host, in n: the mean over all numbers of ranks of the first host."""
    messages = messages_of(schedule)
    chunks = sum(
        len(message.chunks)
        for offset in range(ranks_per_host)
        for message in messages
        if (message.source + offset) // ranks_per_host
        != (message.target + offset) // ranks_per_host
    )
    return Fraction(chunks, chunks_of_data(schedule) * ranks_per_host)
