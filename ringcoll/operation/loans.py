"""Which messages of a plan may be lent: read where they lie, by the reduction that needs them.

A lent message saves a copy, but its sender waits until the loan ends. So a rank may keep a loan only
where nobody can wait for it in a circle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from ringcoll.operation.instructions import Combine, Instruction, Move, Post, Wait
from ringcoll.operation.regions import Region, Space

_MOST_LENT = 8  # messages of one peer in a wave of which some may be lent
_RECEIVED = (Space.SCRATCH, Space.STAGING, Space.ARRIVING)  # where a message may be read just once


def loans(
    instructions: Sequence[Instruction], regions: Sequence[Region], waves: Sequence[int]
) -> dict[int, dict[int, int]]:
    """Messages that are read by a single reduction, and by nothing else; see `Plan.lent`.

    From the begin of the wave to the reduction a rank waits for no send of this wave or the next,
    and for no message of the next; and it posts no sends of the next. So a loan ends when all ranks
    have posted the wave, whatever becomes of the sends: nobody waits for a loan in a circle.
    """
    lent: dict[int, dict[int, int]] = {}
    arriving: dict[int, int] = {}  # from a message to its view
    posted = 0  # messages so far
    for begin, end in pairwise([*waves, len(instructions)]):
        first = posted  # of the messages that this wave posts
        waits = (item for item in instructions[begin:end] if isinstance(item, Wait))
        awaited = Counter(wait.peer for wait in waits if wait.is_receive)
        # Whether the rank has waited for none of its own sends of this wave. A transport may hold back
        # what follows a few messages that are lent, as they take its memory.
        is_free = max(awaited.values(), default=0) <= _MOST_LENT
        for index in range(begin, end):
            match instructions[index]:
                case Post(receives=receives, sends=sends):
                    for offset, (_, view, numel) in enumerate(receives):
                        if numel and regions[view].space in _RECEIVED:
                            arriving[posted + offset] = view
                    posted += len(receives) + len(sends)
                case Wait(message=message, is_receive=False) if message >= first:
                    is_free = False
                case Wait(message=message) if is_free and message in arriving:
                    view = arriving[message]
                    reader = _only_reader(instructions, regions, (index, end), view, first)
                    if reader is not None:
                        lent.setdefault(reader[0], {})[reader[1]] = message
    return lent


def _only_reader(
    instructions: Sequence[Instruction],
    regions: Sequence[Region],
    wait: tuple[int, int],
    view: int,
    first: int,
) -> tuple[int, int] | None:
    """The reduction that alone reads a view after a wait, and the view's position among its sources.

    ``wait`` has the index of the wait, and the end of its wave; ``first`` is the first message that
    the wave posts.
    """
    reader: tuple[int, int] | None = None
    for index in range(wait[0] + 1, len(instructions)):
        reads: tuple[int, ...]
        match instructions[index]:
            case Post(receives=receives, sends=sends):
                if reader is None and sends:
                    return None
                reads, writes = tuple(v for _, v, _ in sends), [v for _, v, _ in receives]
            case Wait(message=message, is_receive=is_receive):
                is_late = index >= wait[1] if is_receive else message >= first
                if reader is None and is_late:
                    return None
                continue
            case Move(into=into, source=source):
                reads, writes = (source,), [into]
            case Combine(into=into, sources=sources):
                reads, writes = sources, [into]
                others = [v for v in sources if v != view]
                if reader is None and len(others) == len(sources) - 1:
                    if any(regions[v].overlaps(regions[view]) for v in (into, *others)):
                        return None
                    reader = index, sources.index(view)
                    continue
        if any(regions[v].overlaps(regions[view]) for v in reads):
            return None
        if any(regions[v].overlaps(regions[view]) for v in writes):
            return reader if view in writes else None
    return reader
