"""Operations of several calls."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import ringcoll
from ringcoll import LocalGroup, run_threads
from ringcoll.errors import ArgumentError

shapes = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=4)
dtypes = st.sampled_from([torch.int64, torch.float32, torch.bfloat16, torch.complex64])
worlds = st.sampled_from([1, 2, 3, 5])


def numbers(shape: tuple[int, ...], rank: int, index: int, dtype: torch.dtype) -> Tensor:
    """Small integers that differ by rank, index and element; their sums are exact."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 7 + 10 * rank + 3 * index).to(dtype).view(shape)


def total(shape: tuple[int, ...], index: int, dtype: torch.dtype, world_size: int) -> Tensor:
    """The sum of `numbers` over the ranks."""
    parts = [numbers(shape, rank, index, dtype) for rank in range(world_size)]
    return torch.stack(parts).sum(0).to(dtype)


def finish(work: ringcoll.Work | None, async_op: bool) -> None:
    """Wait, if there is something to wait for."""
    assert (work is not None) == async_op
    if work is not None:
        assert work.get_future().wait() == work.result()


@pytest.mark.slow
@given(shapes, dtypes, worlds, st.booleans(), st.sampled_from(["ring", "tree", "auto"]))
def test_all_reduce_of_several(sizes, dtype, world_size, async_op, algorithm):
    def main(group: LocalGroup) -> None:
        tensors = [numbers(shape, group.rank(), i, dtype) for i, shape in enumerate(sizes)]
        work = ringcoll.all_reduce_coalesced(tensors, "sum", group, async_op, algorithm=algorithm)
        finish(work, async_op)
        for index, (tensor, shape) in enumerate(zip(tensors, sizes, strict=True)):
            assert torch.equal(tensor, total(shape, index, dtype, world_size))

    run_threads(main, world_size)


@pytest.mark.slow
@given(shapes, dtypes, worlds, st.booleans())
def test_all_gather_of_several(sizes, dtype, world_size, async_op):
    def main(group: LocalGroup) -> None:
        tensors = [numbers(shape, group.rank(), i, dtype) for i, shape in enumerate(sizes)]
        outputs = [torch.zeros(world_size, *shape, dtype=dtype) for shape in sizes]
        finish(ringcoll.all_gather_single_coalesced(outputs, tensors, group, async_op), async_op)
        lists = [[torch.zeros(shape, dtype=dtype) for shape in sizes] for _ in range(world_size)]
        finish(ringcoll.all_gather_coalesced(lists, tensors, group, async_op), async_op)
        for rank in range(world_size):
            for index, shape in enumerate(sizes):
                wanted = numbers(shape, rank, index, dtype)
                assert torch.equal(outputs[index][rank], wanted)
                assert torch.equal(lists[rank][index], wanted)

    run_threads(main, world_size)


@pytest.mark.slow
@given(shapes, dtypes, worlds, st.booleans())
def test_reduce_scatter_of_several(sizes, dtype, world_size, async_op):
    def main(group: LocalGroup) -> None:
        sources = [
            numbers((world_size, *shape), group.rank(), i, dtype) for i, shape in enumerate(sizes)
        ]
        outputs = [torch.zeros(shape, dtype=dtype) for shape in sizes]
        work = ringcoll.reduce_scatter_single_coalesced(outputs, sources, "sum", group, async_op)
        finish(work, async_op)
        for index, (output, shape) in enumerate(zip(outputs, sizes, strict=True)):
            wanted = total((world_size, *shape), index, dtype, world_size)[group.rank()]
            assert torch.equal(output, wanted)

    run_threads(main, world_size)


def test_one_bad_tensor_of_several_is_refused_before_anything_is_sent():
    def main(group: LocalGroup) -> None:
        tensors = [torch.ones(2), torch.ones(2, dtype=torch.bool)]
        with pytest.raises(ArgumentError, match="avg is not defined"):
            ringcoll.all_reduce_coalesced(tensors, "avg", group)
        assert tensors[0].tolist() == [1, 1]
        with pytest.raises(ArgumentError, match="at least 1"):
            ringcoll.all_reduce_coalesced([], group=group)
        ringcoll.all_reduce(tensors[0], group=group)
        assert tensors[0].tolist() == [2, 2]

    run_threads(main, 2)


def test_several_and_single_ones_keep_their_order():
    """An operation of three calls counts as three, on all ranks."""

    def main(group: LocalGroup) -> None:
        works = []
        tensors = [torch.full((3,), float(index)) for index in range(30)]
        for first in range(0, 30, 3):
            works.append(
                ringcoll.all_reduce_coalesced(
                    tensors[first : first + 3], group=group, async_op=True
                )
            )
            works.append(ringcoll.barrier(group, async_op=True))
        for work in works:
            assert work is not None
            work.wait()
        for index, tensor in enumerate(tensors):
            assert tensor.tolist() == [3 * index] * 3

    run_threads(main, 3)
