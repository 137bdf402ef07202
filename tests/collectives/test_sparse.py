"""All-reduce of sparse tensors."""

from __future__ import annotations

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
from ringcoll.backend.process_group import ProcessGroup
from ringcoll.errors import ArgumentError, MismatchError

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
