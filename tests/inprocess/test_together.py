"""Operations of several calls: coalesced ones, sparse tensors; and the monitored barrier."""

from __future__ import annotations

import time
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
from ringcoll.backend import ProcessGroup
from ringcoll.errors import ArgumentError, CollectiveTimeoutError, MismatchError

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


# --- coalesced ------------------------------------------------------------------------


@given(shapes, dtypes, worlds, st.booleans(), st.sampled_from(["ring", "tree", "auto"]))
def test_all_reduce_of_several(sizes, dtype, world_size, async_op, algorithm):
    def main(group: LocalGroup) -> None:
        tensors = [numbers(shape, group.rank(), i, dtype) for i, shape in enumerate(sizes)]
        work = ringcoll.all_reduce_coalesced(tensors, "sum", group, async_op, algorithm=algorithm)
        finish(work, async_op)
        for index, (tensor, shape) in enumerate(zip(tensors, sizes, strict=True)):
            assert torch.equal(tensor, total(shape, index, dtype, world_size))

    run_threads(main, world_size)


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


# --- sparse ---------------------------------------------------------------------------


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


def test_sparse_tensors_of_different_shapes_are_a_mismatch():
    def main(group: LocalGroup) -> None:
        tensor = sparse([4 + (group.rank() == 1)], 1, [[0], [2]], group.rank())
        before = tensor.clone()
        with pytest.raises(MismatchError, match=r"shape \(4,\).*shape|shape \(5,\).*shape"):
            ringcoll.all_reduce(tensor, group=group)
        assert torch.equal(tensor.to_dense(), before.to_dense())

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


# --- the monitored barrier ------------------------------------------------------------


def test_a_monitored_barrier_waits_for_everybody():
    left = [0.0] * 3

    def main(group: LocalGroup) -> None:
        for slow in range(3):
            if group.rank() == slow:
                time.sleep(0.1)
                left[slow] = time.monotonic()
            ringcoll.monitored_barrier(group, timeout=20)
            assert time.monotonic() >= left[slow]

    run_threads(main, 3)


@pytest.mark.parametrize("wait_all_ranks", [False, True])
def test_a_monitored_barrier_names_who_is_missing(wait_all_ranks: bool):
    def main(group: LocalGroup) -> str:
        text = ""
        if group.rank() in (0, 2):
            with pytest.raises(CollectiveTimeoutError) as caught:
                ringcoll.monitored_barrier(group, timeout=0.3, wait_all_ranks=wait_all_ranks)
            text = str(caught.value)
        else:
            time.sleep(0.8)
            # Who comes too late is told what came of it.
            with pytest.raises(CollectiveTimeoutError):
                ringcoll.monitored_barrier(group, timeout=0.3)
        ringcoll.barrier(group)  # the group works
        return text

    texts = run_threads(main, 4)
    named = "Ranks 1, 3" if wait_all_ranks else "Rank 1"
    assert texts[0].startswith(f"{named} failed to pass monitoredBarrier in 300 ms")
    assert named in texts[2]


def test_a_monitored_barrier_without_rank_0():
    def main(group: LocalGroup) -> None:
        if group.rank():
            with pytest.raises(CollectiveTimeoutError, match="rank 1: rank 0 failed") as caught:
                ringcoll.monitored_barrier(group, timeout=0.2)
            assert caught.value.peer == 0

    run_threads(main, 2)


def test_old_keys_of_monitored_barriers_are_deleted():
    """Keys in the store do not grow with the number of barriers."""
    counts: list[int] = []

    def main(group: LocalGroup) -> None:
        store: Any = group.communicator._store
        for number in range(20):
            ringcoll.monitored_barrier(group, timeout=20)
            ringcoll.barrier(group)
            if group.rank() == 0 and number in (4, 19):
                counts.append(store.num_keys())
            ringcoll.barrier(group)

    run_threads(main, 2)
    assert counts[1] <= counts[0] + 1
