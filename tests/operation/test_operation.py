"""How a request is resolved: who says how long segments are, and what ranks compare."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import ringcoll
from ringcoll import LocalGroup, run_threads
from ringcoll.errors import ArgumentError
from ringcoll.runtime.operation.operation import Operation, Request, resolve
from ringcoll.runtime.transport import costs_of
from ringcoll.schedules import (
    OperandOrder,
    Program,
    Schedule,
    Step,
    contract,
    copy,
    inp,
    out,
    recv_reduce,
    reduce,
    send,
    tmp,
    verify,
)
from ringcoll.schedules.algorithms import find
from ringcoll.schedules.cost import built_in

WORLD_SIZE = 2
TABLE = built_in("gloo", costs_of("gloo"), WORLD_SIZE)


def request(
    collective: str = "all_reduce",
    lengths: tuple[tuple[int, int], ...] = ((0, 1 << 20),),
    **more: Any,
) -> Request:
    algorithm = more.pop("algorithm", "ring")
    entry = None if algorithm == "auto" else algorithm
    values: dict[str, Any] = {
        "contract": contract(collective),
        "algorithm": algorithm,
        "entry": find(collective, entry) if isinstance(entry, str) else entry,
        "rank": 1,
        "world_size": WORLD_SIZE,
        "root": 0,
        "lengths": lengths,
        "packed": (),
        "operator": "sum",
        "order": OperandOrder.ANY,
        "segment_bytes": None,
        "split_input": False,
        "split_output": False,
        "in_place": False,
        "posts_early": True,
    }
    values |= dict.fromkeys(("dtype", "work_dtype", "wire_dtype"), torch.float32) | more
    return Request(**values)


@pytest.mark.parametrize("algorithm", ["ring", "auto"])
def test_the_caller_says_how_long_segments_are(algorithm: str) -> None:
    """Four MiB in two chunks of two; also where the choice of an algorithm would cut them otherwise."""
    found = {
        asked: resolve(request(algorithm=algorithm, segment_bytes=asked), TABLE, None).plan
        for asked in (1 << 18, 1 << 19, 1 << 21)
    }
    for asked, plan in found.items():
        per_chunk = (1 << 22) // plan.schedule.num_chunks
        assert plan.segments == per_chunk // asked


@pytest.mark.parametrize("algorithm", ["ring", "double_tree", "auto"])
def test_long_chunks_are_cut_into_slices(algorithm: str) -> None:
    """Four MiB; a pipelined algorithm has shorter segments, if these are predicted to be quicker."""
    sliced = replace(TABLE, parameters=replace(TABLE.parameters, slice_bytes=100_000))
    plan = resolve(request(algorithm=algorithm), sliced, None).plan
    least = -((-1 << 22) // (plan.schedule.num_chunks * 100_000))
    assert plan.segments == least if algorithm != "auto" else plan.segments >= least
    asked = request(algorithm=algorithm, segment_bytes=1 << 22)
    assert resolve(asked, sliced, None).plan.segments == 1, "the call says how long segments are"


@pytest.mark.parametrize(
    "collective,lengths,numel",
    [
        ("all_gather", ((0, 5), (1, 6)), 5 + 6),
        ("gather", ((0, 5), (1, 6)), 5 + 6),
        ("broadcast", ((0, 7),), 7),
        ("all_to_all", ((1, 2), (2, 3), (3, 5)), 3 + 5),  # what rank 1 sends, and not what it gets
    ],
)
def test_how_many_bytes_decide(
    collective: str, lengths: tuple[tuple[int, int], ...], numel: int
) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        asked = request(collective, lengths, wire_dtype=dtype, algorithm="auto")
        assert asked.nbytes == numel * dtype.itemsize


@pytest.mark.parametrize(
    "asked,words",
    [
        ({"segment_bytes": 1 << 21}, "sum, float32, 1048576 elements, algorithm ring"),
        (
            {"segment_bytes": 1 << 19},
            "sum, float32, 1048576 elements, algorithm ring, 4 segments",
        ),
        (
            {"wire_dtype": torch.bfloat16, "segment_bytes": 1 << 20},
            "sum, float32, 1048576 elements, sent as bfloat16, computed in float32, algorithm ring",
        ),
        ({"packed": (3, 1048573)}, "sum, float32, 3+1048573 elements, algorithm ring"),
    ],
    ids=["one segment", "four segments", "narrow", "packed"],
)
def test_what_ranks_compare(asked: dict[str, Any], words: str) -> None:
    resolved = resolve(request(**asked), None, None)
    assert resolved.description == f"all_reduce({words})"


def test_what_ranks_compare_of_blocks() -> None:
    blocks = {"collective": "all_gather", "operator": ""}
    equal = resolve(request(lengths=((0, 5), (1, 5)), **blocks), None, None)
    assert equal.description == "all_gather(float32, 5 x 2 elements, algorithm ring)"
    other = resolve(request(lengths=((0, 5), (1, 6)), **blocks), None, None)
    assert other.description == "all_gather(float32, 5+6 elements, algorithm ring)"
    assert equal.signature != other.signature
    # Ranks know each its own lengths only.
    own = request("all_to_all", ((1, 2), (2, 3), (3, 5)), operator="", algorithm="pairwise")
    resolved = resolve(own, None, None)
    assert resolved.description == (
        "all_to_all(float32, its own number of elements, algorithm pairwise)"
    )
    assert resolved.plan.segments == 1


def test_what_needs_blocks_of_equal_length_says_so() -> None:
    own = request("all_to_all", ((1, 2), (2, 3), (3, 5)), operator="", algorithm="bruck")
    with pytest.raises(ArgumentError, match=r"rank 1: .*bruck all_to_all needs blocks of equal"):
        resolve(own, None, None)


# --- what an operation remembers ----------------------------------------------------------


def only_operation(group: LocalGroup) -> Operation:
    (operation,) = group.communicator.operations.values()
    assert isinstance(operation, Operation)
    return operation


def test_places_at_which_tensors_come_again_are_remembered_and_old_ones_forgotten() -> None:
    def main(group: LocalGroup) -> None:
        first, second, third = (torch.ones(30_000) for _ in range(3))

        def bound_after(tensor: Tensor, times: int) -> int:
            for _ in range(times):
                ringcoll.all_reduce(tensor, group=group)
            return len(only_operation(group).bindings)

        assert bound_after(first, 3) == 0
        assert bound_after(first, 1) == 1
        # Two places: what was not used in four runs is forgotten when the next is bound.
        assert bound_after(second, 4) == 2
        assert bound_after(third, 4) == 2
        kept = {places[0] for places in only_operation(group).bindings}
        assert kept == {second.data_ptr(), third.data_ptr()}

    run_threads(main, 2)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_place_that_is_copied_to_itself(in_place: bool) -> None:
    def program(rank: int) -> Program:
        reduced = recv_reduce(1 - rank, out(0), inp(0))
        yield Step(copy(tmp(0, 0), inp(0)), send(1 - rank, inp(0)), reduced)
        yield Step(copy(tmp(0, 0), tmp(0, 0)), reduce(out(0), out(0)))
        yield Step(copy(out(0), out(0)))

    schedule = Schedule("all_reduce", "copied", 2, 1, 1, program)
    verify(schedule)

    def main(group: LocalGroup) -> list[float]:
        tensor = torch.arange(5.0) * 10 ** group.rank()
        output = tensor if in_place else torch.zeros(5)
        ringcoll.all_reduce(tensor, group=group, algorithm=schedule, out=output)
        return output.tolist()

    assert run_threads(main, 2) == [[0.0, 11.0, 22.0, 33.0, 44.0]] * 2


def test_tensors_that_are_copied_first_leave_no_binding() -> None:
    """It would hold memory as long as the tensors themselves."""

    def main(group: LocalGroup) -> None:
        tensor = torch.ones(200, 300).t()
        for _ in range(8):
            ringcoll.all_reduce(tensor, group=group)
        assert not only_operation(group).bindings

    run_threads(main, 2)


def test_bindings_belong_to_a_stream() -> None:
    def main(group: LocalGroup) -> None:
        tensor = torch.ones(30_000)
        for _ in range(4):
            ringcoll.all_reduce(tensor, group=group)
        operation = only_operation(group)
        for key, bound in ((None, 1), ("a stream", 0)):
            operation.move(key)
            assert len(operation.bindings) == bound
        ringcoll.all_reduce(tensor, group=group)
        operation.move("a stream")
        assert len(operation.bindings) == 1

    run_threads(main, 2)
