"""Which messages are lent: rule by rule, on a few instructions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from ringcoll.runtime.operation import (
    Combine,
    Layout,
    Move,
    Post,
    Region,
    Space,
    Wait,
    compile_plan,
)
from ringcoll.runtime.operation.instructions import Instruction, loans
from ringcoll.schedules.algorithms import find

PEER, NUMEL = 1, 10
OUTPUT, INPUT, LAST, WITHIN_LAST, SCRATCH, ARRIVING = 20, 21, 22, 23, 24, 25
REGIONS = {number: Region(Space.STAGING, 0, 100 * number, NUMEL) for number in range(20)} | {
    OUTPUT: Region(Space.OUTPUT, 0, 0, NUMEL),
    INPUT: Region(Space.INPUT, 0, 0, NUMEL),
    LAST: Region(Space.STAGING, 0, 9000, NUMEL),
    WITHIN_LAST: Region(Space.STAGING, 0, 9005, NUMEL),
    SCRATCH: Region(Space.SCRATCH, 0, 0, NUMEL),
    ARRIVING: Region(Space.ARRIVING, 0, 0, NUMEL),
}
EVERY = [REGIONS[number] for number in range(len(REGIONS))]


def post(*receives: int, sends: Sequence[int] = (), numel: int = NUMEL) -> Post:
    return Post(
        tuple((PEER, view, numel) for view in receives),
        tuple((PEER, view, NUMEL) for view in sends),
    )


def came(message: int, peer: int = PEER) -> Wait:
    return Wait(message, peer, 0, is_receive=True)


def sent(message: int) -> Wait:
    return Wait(message, PEER, 0, is_receive=False)


def add(*sources: int, into: int = OUTPUT) -> Combine:
    return Combine(into, (INPUT, *sources), final=False)


Wave = Sequence[Instruction]
LENT: dict[str, tuple[list[Wave], dict[int, dict[int, int]]]] = {
    "one": ([[post(0), came(0), add(0)]], {2: {1: 0}}),
    "two, in one reduction": ([[post(0, 1), came(0), came(1), add(0, 1)]], {3: {1: 0, 2: 1}}),
    "two, in two reductions": (
        [[post(0, 1), came(0), add(0), came(1), add(1)]],
        {2: {1: 0}, 4: {1: 1}},
    ),
    "in a wave each": (
        [[post(0, sends=[9]), came(0), add(0), sent(1)], [post(1), came(2), add(1)]],
        {2: {1: 0}, 6: {1: 2}},
    ),
    "in scratch": ([[post(SCRATCH), came(0), add(SCRATCH)]], {2: {1: 0}}),
    "as it arrives": ([[post(ARRIVING), came(0), add(ARRIVING)]], {2: {1: 0}}),
    "the reduction is in place": (
        [[post(0), came(0), Combine(OUTPUT, (0, OUTPUT), final=True)]],
        {2: {0: 0}},
    ),
    # What is waited for meanwhile.
    "a message of the same wave": ([[post(0, 1), came(0), came(1), add(0)]], {3: {1: 0}}),
    "a send of the wave before": (
        [[post(sends=[9])], [post(0), came(1), sent(0), add(0)]],
        {4: {1: 1}},
    ),
    "a send of the wave before, first": (
        [[post(sends=[9])], [post(0), sent(0), came(1), add(0)]],
        {4: {1: 1}},
    ),
    "own sends afterwards": ([[post(0, sends=[9]), came(0), add(0), sent(1)]], {2: {1: 0}}),
    "sends posted afterwards": ([[post(0), came(0), add(0)], [post(sends=[9])]], {2: {1: 0}}),
    "receives posted meanwhile": ([[post(0), came(0)], [post(1), add(0)]], {3: {1: 0}}),
    "a message that came in the wave before": ([[post(0)], [came(0), add(0)]], {2: {1: 0}}),
    # Who else uses the memory.
    "the memory is received into again": (
        [[post(0), came(0), add(0)], [post(0), came(1), add(0)]],
        {2: {1: 0}, 5: {1: 1}},
    ),
    "the memory is written again, and then read": (
        [[post(0), came(0), add(0)], [Move(0, INPUT), Move(OUTPUT, 0)]],
        {2: {1: 0}},
    ),
    "other memory is read and written": (
        [[post(0), came(0), Move(2, 3), add(0), Move(4, 5), add(6, into=7)]],
        {3: {1: 0}},
    ),
    "as many of a peer as may be": (
        [[post(*range(8)), *map(came, range(8)), add(*range(8))]],
        {9: {1 + number: number for number in range(8)}},
    ),
    "more, of two peers": (
        [[post(*range(9)), *(came(each, 1 + each % 2) for each in range(9)), add(*range(9))]],
        {10: {1 + number: number for number in range(9)}},
    ),
}
"""Waves of instructions; by the index of a reduction, the message of each position that is lent."""

NOT_LENT: dict[str, list[Wave]] = {
    "nobody reads it": [[post(0), came(0)]],
    "it is empty": [[post(0, numel=0), came(0), add(0)]],
    "it arrives in the user's memory": [[post(OUTPUT), came(0), add(OUTPUT, into=2)]],
    "it is reduced before it came": [[post(0), add(0), came(0)]],
    "more of one peer than may be": [[post(*range(9)), *map(came, range(9)), add(*range(9))]],
    # What is waited for meanwhile.
    "an own send, first": [[post(0, sends=[9]), sent(1), came(0), add(0)]],
    "an own send, the only message of the wave, first": [
        [post(0)],
        [post(sends=[9]), sent(1), came(0), add(0)],
    ],
    "an own send": [[post(0, sends=[9]), came(0), sent(1), add(0)]],
    "an own send, the only message of the wave": [
        [post(0)],
        [post(sends=[9]), came(0), sent(1), add(0)],
    ],
    "a message of the next wave": [[post(0, 1), came(0)], [came(1), add(0)]],
    "sends are posted": [[post(0), came(0)], [post(sends=[9]), add(0)]],
    # Who else uses the memory.
    "it is sent on": [[post(0), came(0), add(0)], [post(sends=[0])]],
    "it is copied first": [[post(0), came(0), Move(OUTPUT, 0), add(0)]],
    "it is copied afterwards": [[post(0), came(0), add(0), Move(2, 0)]],
    "it is reduced again": [[post(0), came(0), add(0), add(0, into=2)]],
    "it is reduced twice at once": [[post(0), came(0), add(0, 0)]],
    "it is written before it is read": [[post(0), came(0), Move(0, INPUT), add(0)]],
    "the result is put over it": [[post(0), came(0), add(0, into=0)]],
    "another source overlaps it": [[post(LAST), came(0), add(LAST, WITHIN_LAST)]],
    "a part of it is read afterwards": [[post(LAST), came(0), add(LAST), Move(2, WITHIN_LAST)]],
    "a part of it is written, and all of it read": [
        [post(LAST), came(0), add(LAST), Move(WITHIN_LAST, INPUT), Move(2, LAST)]
    ],
}


def lent(waves: list[Wave]) -> dict[int, dict[int, int]]:
    starts = [sum(map(len, waves[:number])) for number in range(len(waves))]
    return loans([item for wave in waves for item in wave], EVERY, starts)


@pytest.mark.parametrize("name", LENT)
def test_a_message_that_a_single_reduction_reads_is_lent(name: str) -> None:
    waves, expected = LENT[name]
    assert lent(waves) == expected


@pytest.mark.parametrize("name", NOT_LENT)
def test_a_message_is_not_lent_if(name: str) -> None:
    assert lent(NOT_LENT[name]) == {}


class Counted(list[Any]):
    """A list that counts how often an item is taken from it."""

    taken = 0

    def __getitem__(self, index: Any) -> Any:
        items = super().__getitem__(index)
        self.taken += len(items) if isinstance(index, slice) else 1
        return items

    def __iter__(self) -> Iterator[Any]:
        self.taken += len(self)
        return super().__iter__()


@pytest.mark.parametrize(
    "collective, algorithm, world_size, rank",
    [("all_reduce", "ring", 4, 1), ("reduce", "binomial_tree", 2, 0)],
)
def test_the_work_grows_with_the_number_of_instructions(
    collective: str, algorithm: str, world_size: int, rank: int
) -> None:
    """Long operations have thousands of slices: nobody looks through all of them for each."""
    schedule = find(collective, algorithm).schedule(world_size)
    for segments in (64, 512):
        plan = compile_plan(schedule, rank, Layout(((0, 1 << 20),), in_place=True), segments)
        instructions, regions = Counted(plan.instructions), Counted(plan.regions)
        assert loans(instructions, regions, plan.waves)
        assert instructions.taken <= 10 * len(instructions)
        assert regions.taken <= 50 * len(regions)
