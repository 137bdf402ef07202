"""All-reduce of sparse tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import ringcoll
from ringcoll import LocalGroup, run_threads
from ringcoll.errors import ArgumentError, MismatchError
from ringcoll.training.backend import ProcessGroup

worlds = st.sampled_from([1, 2, 3, 5])


@st.composite
def sparse_case(draw: Any) -> tuple[list[int], int, list[list[list[int]]]]:
    """A shape, how many of its dimensions are sparse, and each rank's indices (with repeats)."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    sparse_dim = draw(st.integers(1, len(shape)))
    index = st.tuples(*(st.integers(0, size - 1) for size in shape[:sparse_dim])).map(list)
    world_size = draw(worlds)
    ranks = [draw(st.lists(index, max_size=6)) for _ in range(world_size)]
    return shape, sparse_dim, ranks


def sparse(shape: list[int], sparse_dim: int, indices: list[list[int]], rank: int) -> Tensor:
    """A rank's tensor, uncoalesced."""
    where = torch.tensor(indices, dtype=torch.int64).view(-1, sparse_dim).t()
    values = torch.arange(len(indices) * torch.Size(shape[sparse_dim:]).numel()) + 100.0 * rank
    return torch.sparse_coo_tensor(
        where,
        values.view(len(indices), *shape[sparse_dim:]),
        shape,
        check_invariants=True,
    )


@pytest.mark.slow
@given(sparse_case(), st.sampled_from(["sum", "avg"]), st.booleans())
def test_sparse_tensors_are_added_up(case, op, async_op):
    shape, sparse_dim, ranks = case
    own = [sparse(shape, sparse_dim, indices, rank) for rank, indices in enumerate(ranks)]
    wanted = torch.stack([tensor.to_dense() for tensor in own]).sum(0)
    if op == "avg":
        wanted = wanted / len(ranks)

    def main(group: LocalGroup) -> Tensor:
        tensor = own[group.rank()]
        work = ringcoll.all_reduce(tensor, op, group, async_op)
        assert (work is not None) == async_op
        if work is not None:
            work.wait()
        return tensor

    results = run_threads(main, len(ranks))
    for tensor in results:
        assert tensor.is_coalesced()
        assert torch.equal(tensor.to_dense(), wanted)
        assert torch.equal(tensor.indices(), results[0].indices())


@pytest.mark.slow
@given(st.lists(st.booleans(), min_size=1, max_size=5), worlds, st.booleans())
def test_a_coalesced_call_takes_sparse_and_dense_tensors(kinds, world_size, async_op):
    def own(rank: int) -> list[Tensor]:
        dense = [torch.arange(4.0) * (number + rank) for number in range(len(kinds))]
        return [
            tensor.to_sparse() if is_sparse else tensor
            for tensor, is_sparse in zip(dense, kinds, strict=True)
        ]

    def main(group: LocalGroup) -> list[list[float]]:
        tensors = own(group.rank())
        work = ringcoll.all_reduce_coalesced(tensors, "sum", group, async_op)
        after = torch.full((2,), group.rank())
        ringcoll.all_reduce(after, group=group)
        assert after.tolist() == [sum(range(world_size))] * 2
        if work is not None:
            work.wait()
        assert [tensor.is_sparse for tensor in tensors] == kinds
        return [tensor.to_dense().tolist() for tensor in tensors]

    lists = zip(*map(own, range(world_size)), strict=True)
    wanted = [torch.stack([each.to_dense() for each in rank]).sum(0).tolist() for rank in lists]
    assert run_threads(main, world_size) == [wanted] * world_size


def test_sparse_tensors_of_different_shapes_are_a_mismatch():
    def main(group: LocalGroup) -> None:
        tensor = sparse([4 + (group.rank() == 1)], 1, [[0], [2]], group.rank())
        before = tensor.clone()
        with pytest.raises(MismatchError, match=r"shape \(4,\).*shape|shape \(5,\).*shape"):
            ringcoll.all_reduce(tensor, group=group)
        assert torch.equal(tensor.to_dense(), before.to_dense())

    run_threads(main, 2)


NARROW = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


def entries(
    numbers: Sequence[complex], dtype: torch.dtype, shape: tuple[int, ...] = (3,)
) -> Tensor:
    """Numbers that are all at the same place; the tensor is not coalesced."""
    where = torch.ones(1, len(numbers), dtype=torch.int64)
    return torch.sparse_coo_tensor(
        where, torch.tensor(numbers).to(dtype), shape, check_invariants=True
    )


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_narrow_sums_are_as_wide_as_those_of_dense_tensors(dtype: torch.dtype, op: str) -> None:
    """Between ranks, and between the entries of one rank for one place."""
    largest = min(torch.finfo(dtype).max / 2, 2.0**100)
    cases = [
        [[2048.0], [1.0], [1.0], [1.0], [1.0]],
        [[1.0, 1.0, 1.0, 1.0, 2048.0], [], [], [], []],
        [[largest]] * 5,
        [[largest] * 5, [-largest] * 5, [largest], [], []],
    ]

    def main(group: LocalGroup) -> list[list[float]]:
        found = []
        for numbers in cases:
            tensor = entries([*numbers[group.rank()]], dtype)
            ringcoll.all_reduce(tensor, op, group)
            assert tensor.dtype is dtype
            assert tensor.is_coalesced()
            found.append(tensor.to(torch.float32).to_dense().tolist())
        return found

    wanted = []
    for numbers in cases:
        total = sum(torch.tensor(own).to(dtype).float().sum() for own in numbers)
        divided = torch.as_tensor(total / (5 if op == "avg" else 1))
        wanted.append([0.0, divided.to(dtype).item(), 0.0])
    assert str(run_threads(main, 5)) == str([wanted] * 5)  # NaN is no equal of itself


def test_the_backend_adds_narrow_entries_as_wide() -> None:
    group = ProcessGroup(dist.HashStore(), 0, 1, timedelta(seconds=20))
    tensor = entries([1.0] * 4 + [2048.0], torch.float16)
    group.allreduce([tensor]).wait()
    assert tensor.to_dense().tolist() == [0.0, 2052.0, 0.0]
    ringcoll.close(group)


def test_averages_of_sparse_integers_are_those_of_dense_integers() -> None:
    def main(group: LocalGroup) -> list[int]:
        numbers = torch.tensor([(1 << 53) + 1 + group.rank(), -7])
        tensor = torch.sparse_coo_tensor(
            torch.tensor([[0, 2]]), numbers, (3,), check_invariants=True
        )
        ringcoll.all_reduce(tensor, "avg", group)
        return tensor.to_dense().tolist()

    assert run_threads(main, 2) == [[(1 << 53) + 1, 0, -7]] * 2


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_sparse_complex_numbers_are_added_by_parts(dtype: torch.dtype) -> None:
    def main(group: LocalGroup) -> list[complex]:
        numbers = [1 + 2j, complex(3, math.inf)] if group.rank() == 0 else [4 + 5j]
        tensor = entries(numbers, dtype)
        ringcoll.all_reduce(tensor, "avg", group)
        return tensor.values().tolist()

    assert run_threads(main, 2) == [[complex(4, math.inf)]] * 2


@pytest.mark.parametrize("what", ["dtype", "operator"])
def test_sparse_calls_that_differ_in_more_than_the_shape_are_a_mismatch(what: str) -> None:
    def main(group: LocalGroup) -> None:
        is_odd = group.rank() == 1
        dtype = torch.float16 if is_odd and what == "dtype" else torch.float32
        op = "avg" if is_odd and what == "operator" else "sum"
        with pytest.raises(MismatchError):
            ringcoll.all_reduce(entries([1.0], dtype), op, group)

    run_threads(main, 2)


@pytest.mark.parametrize("op", ["max", "product"])
def test_what_is_not_stored_has_no_part_in_other_operators(op: str):
    def main(group: LocalGroup) -> None:
        with pytest.raises(ArgumentError, match="sum or avg"):
            ringcoll.all_reduce(sparse([3], 1, [[0]], 0), op, group)

    run_threads(main, 2)


def test_a_groups_options_are_for_its_dense_tensors():
    options = ringcoll.Options(wire_dtype=torch.bfloat16, segment_bytes=64)
    group = ProcessGroup(dist.HashStore(), 0, 1, timedelta(seconds=20), options)
    tensor, dense = sparse([3], 1, [[0]], 0), torch.tensor([257.0])
    group.allreduce([tensor]).wait()
    group.allreduce([dense]).wait()
    assert tensor.to_dense().tolist() == sparse([3], 1, [[0]], 0).to_dense().tolist()
    assert dense.item() == 256.0, "rounded"
    ringcoll.close(group)
