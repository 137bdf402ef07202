"""Where chunks, slots and segments lie: no element is lost, and none has two places."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ringcoll.errors import ScheduleError
from ringcoll.runtime.operation.instructions import (
    ALIGNMENT,
    Layout,
    Memory,
    Region,
    Space,
    Supply,
    joined,
)
from ringcoll.schedules import inp, out, tmp
from ringcoll.schedules.algorithms import schedule_of

IN, OUT = Space.INPUT, Space.OUTPUT


def test_regions_that_share_an_element() -> None:
    region = Region(IN, 0, 10, 5)
    for offset, numel, shares in [
        (0, 10, False), (0, 11, True), (10, 5, True), (12, 1, True), (14, 9, True), (15, 9, False),
        (9, 1, False), (0, 99, True),
    ]:  # fmt: skip
        other = Region(IN, 0, offset, numel)
        assert region.overlaps(other) is shares, other
        assert other.overlaps(region) is shares, other
    assert not region.overlaps(region._replace(space=OUT))
    assert not region.overlaps(region._replace(tensor=1))


def test_adjacent_regions_are_joined() -> None:
    first, second, third = Region(IN, 0, 0, 3), Region(IN, 0, 3, 4), Region(IN, 0, 7, 1)
    assert joined([first, second, third]) == [Region(IN, 0, 0, 8)]
    assert joined([second, first]) == [second, first]
    assert joined([first, third]) == [first, third]
    assert joined([first, second._replace(tensor=1)]) == [first, second._replace(tensor=1)]
    assert joined([first, second._replace(space=OUT)]) == [first, second._replace(space=OUT)]
    assert joined([]) == []


def test_empty_regions_are_left_out_unless_all_are_empty() -> None:
    first, second = Region(IN, 0, 0, 3), Region(IN, 0, 3, 4)
    none, nothing = Region(OUT, 0, 5, 0), Region(IN, 0, 9, 0)
    assert joined([none, first, nothing, second, none]) == [Region(IN, 0, 0, 7)]
    assert joined([none, nothing]) == [nothing]
    assert joined([none]) == [none]


def test_working_memory_is_aligned_as_its_operands() -> None:
    assert ALIGNMENT % 64 == 0, "bytes of a line of the cache, for dtypes of one byte"
    supply = Supply(Space.STAGING, 2)
    like = Region(IN, 0, ALIGNMENT + 7, 5)
    assert supply.take(5, like) == Region(Space.STAGING, 2, 7, 5)
    assert supply.used == ALIGNMENT
    assert supply.take(ALIGNMENT - 6, like) == Region(
        Space.STAGING, 2, ALIGNMENT + 7, ALIGNMENT - 6
    )
    assert supply.used == supply.most == 3 * ALIGNMENT
    supply.used = 0
    assert supply.take(ALIGNMENT, like._replace(offset=0)).offset == 0
    assert (supply.used, supply.most) == (ALIGNMENT, 3 * ALIGNMENT)
    assert Supply(Space.PACKING).take(1, like).tensor == 0


@pytest.mark.parametrize("numel", [0, 1, 4, 5, 11, 1000])
@pytest.mark.parametrize("segments", [1, 2, 3, 7])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_chunks_and_segments_cover_a_vector_once(
    numel: int, segments: int, world_size: int
) -> None:
    schedule = schedule_of("all_reduce", "ring", world_size)
    memory = Memory(schedule, 0, Layout(((0, numel),)), segments)
    regions = [
        memory.region(inp(chunk), segment)
        for chunk in range(schedule.num_chunks)
        for segment in range(segments)
    ]
    covered = [e for each in regions for e in range(each.offset, each.offset + each.numel)]
    assert covered == list(range(numel))
    assert {(each.space, each.tensor) for each in regions} == {(IN, 0)}
    chunks = [
        sum(each.numel for each in regions[i * segments : (i + 1) * segments])
        for i in range(schedule.num_chunks)
    ]
    assert max(chunks) - min(chunks) <= 1
    assert chunks == sorted(chunks, reverse=True)
    for i in range(schedule.num_chunks):
        pieces = [each.numel for each in regions[i * segments : (i + 1) * segments]]
        assert max(pieces) - min(pieces) <= 1


@pytest.mark.parametrize("segments", [1, 3])
@pytest.mark.parametrize("numel", [1, 200, 1000])
def test_slots_of_scratch_are_apart(segments: int, numel: int) -> None:
    schedule = schedule_of("all_reduce", "direct", 4)
    memory = Memory(schedule, 1, Layout(((0, numel),)), segments)
    regions = [
        memory.region(tmp(slot, 0), segment)
        for slot in range(schedule.num_slots)
        for segment in range(segments)
    ]
    assert all(each.space is Space.SCRATCH and each.tensor == 0 for each in regions)
    assert all(each.offset % ALIGNMENT == 0 for each in regions)
    assert all(first.offset + first.numel <= second.offset for first, second in pairwise(regions))
    assert regions[-1].offset + regions[-1].numel <= memory.scratch_numel
    longest = -(-numel // segments)
    aligned = -(-longest // ALIGNMENT) * ALIGNMENT
    assert memory.scratch_numel == schedule.num_slots * segments * aligned


LENGTHS = ((0, 3), (1, 5), (2, 2))


def test_blocks_lie_end_to_end_or_are_tensors_of_their_own() -> None:
    schedule = schedule_of("all_gather", "ring", 3)
    memory = Memory(schedule, 1, Layout(LENGTHS), 1)
    assert memory.region(inp(1), 0) == Region(IN, 0, 0, 5)
    assert [memory.region(out(i), 0) for i in range(3)] == [
        Region(OUT, 0, 0, 3), Region(OUT, 0, 3, 5), Region(OUT, 0, 8, 2),
    ]  # fmt: skip
    memory = Memory(schedule, 1, Layout(LENGTHS, split_output=True), 1)
    assert [memory.region(out(i), 0) for i in range(3)] == [
        Region(OUT, 0, 0, 3), Region(OUT, 1, 0, 5), Region(OUT, 2, 0, 2),
    ]  # fmt: skip


def test_in_place_a_block_lies_in_the_larger_side() -> None:
    memory = Memory(schedule_of("all_gather", "ring", 3), 1, Layout(LENGTHS, in_place=True), 1)
    assert memory.region(inp(1), 0) == memory.region(out(1), 0) == Region(OUT, 0, 3, 5)
    scatter = schedule_of("reduce_scatter", "ring", 3)
    memory = Memory(scatter, 1, Layout(LENGTHS, split_input=True, in_place=True), 1)
    assert memory.region(inp(1), 0) == memory.region(out(1), 0) == Region(IN, 1, 0, 5)
    assert memory.region(inp(2), 0) == Region(IN, 2, 0, 2)
    memory = Memory(scatter, 1, Layout(LENGTHS), 1)
    assert memory.region(out(1), 0) == Region(OUT, 0, 0, 5)
    memory = Memory(schedule_of("all_reduce", "ring", 2), 0, Layout(((0, 8),), in_place=True), 1)
    assert memory.region(inp(1), 0) == memory.region(out(1), 0) == Region(OUT, 0, 4, 4)


def test_a_length_that_a_rank_does_not_know_is_named() -> None:
    schedule = schedule_of("gather", "binomial_tree", 4)
    memory = Memory(schedule, 2, Layout(((2, 5),)), 1)
    assert memory.region(inp(2), 0).numel == 5
    with pytest.raises(ScheduleError, match="the length of chunk 3 is not known"):
        memory.region(tmp(0, 3), 0)
