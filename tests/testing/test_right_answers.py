"""`ringcoll.tools.testing`: definitions against the reference of this library's own tests."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringcoll.errors import ArgumentError
from ringcoll.tools.testing import given_collective, inputs, ranks
from ringcoll.tools.testing.collective import DTYPES
from ringcoll.tools.testing.inputs import operators, reduced
from tests.cases import reference

PAIRS = [(dtype, op) for dtype in DTYPES for op in operators(dtype)]


@pytest.mark.parametrize("kind", ["exact", "rough"])
@pytest.mark.parametrize("dtype, op", PAIRS, ids=str)
def test_reductions(dtype, op, kind):
    exact = kind == "exact"
    tensors = [inputs.values(dtype, 9, rank=rank, kind=kind, op=op) for rank in range(3)]
    mine = reduced(op, tensors, exact=exact)
    other = reference.reduced(op, tensors, exact=exact)
    if mine.bound is None:
        assert torch.equal(mine.value, other.value.to(dtype))
        assert other.bound is None
        return
    assert (mine.value - other.value).abs().max() <= 1e-2 * mine.value.abs().max()
    assert (
        mine.bound.max()
        <= 0.1 * torch.stack([t.abs().to(mine.bound.dtype) for t in tensors]).sum(0).max()
    )
    assert bool((mine.bound > 0).all())


def own_sum(tensor: torch.Tensor) -> float:
    dist.all_reduce(tensor)
    return tensor.item() * 10 + dist.get_rank()


@pytest.mark.processes
def test_values_of_the_ranks():
    assert ranks(3).run(own_sum, torch.tensor(2)) == [60, 61, 62]
    assert ranks(2, backend="gloo").run(own_sum, tensor=torch.tensor(2)) == [40, 41]
    assert ranks(2).run(operator.add, 1, 2) == [3, 3]
    assert ranks(2).run(lambda: dist.get_rank() + 0) == [0, 1]  # by cloudpickle
    tensor = torch.tensor(2)
    assert ranks(2, threads=True).run(own_sum, tensor) == [40, 41]
    assert tensor.item() == 2, "each rank has a copy"


def test_refused():
    nonsense: tuple[Any, ...] = (0, -1, "4", None, own_sum)
    for wrong in nonsense:
        with pytest.raises(ArgumentError, match="world_size"):
            ranks(wrong)
    with pytest.raises(ArgumentError, match="timeout_s"):
        ranks(2, timeout_s=0)
    with pytest.raises(ArgumentError, match="all_reduce, reduce_scatter"):
        given_collective("all_sum")
    with pytest.raises(ArgumentError, match=r"no such operator.*expected sum, avg.*got \['prod'\]"):
        given_collective(ops=("sum", "prod"))


def exchanged(name, tensor, op=None):
    out = tensor.new_empty(tensor.numel() // dist.get_world_size())
    if name == "reduce_scatter":
        dist.reduce_scatter_tensor(out, tensor, op)
        return out
    if name == "all_gather":
        out = tensor.new_empty(tensor.numel() * dist.get_world_size())
        dist.all_gather_into_tensor(out, tensor)
        return out
    if name == "broadcast":
        dist.broadcast(tensor, 0)
        return tensor
    out = torch.empty_like(tensor)
    dist.all_to_all_single(out, tensor)
    return out


@pytest.mark.processes
@given_collective("reduce_scatter", world_sizes=(3,), max_examples=40)
def test_reduce_scatter(tensor, op):
    return exchanged("reduce_scatter", tensor, op)


@pytest.mark.processes
@pytest.mark.parametrize("name", ["all_gather"])
@given_collective("all_gather", world_sizes=(2,), max_examples=20)
def test_all_gather(name, tensor):
    return exchanged(name, tensor)


@pytest.mark.processes
@given_collective(
    "broadcast",
    world_sizes=(3,),
    dtypes=(torch.int64, torch.bfloat16),
    backend="gloo",
    max_examples=20,
)
def test_broadcast(tensor):
    return exchanged("broadcast", tensor)


@pytest.mark.processes
@given_collective("all_to_all", world_sizes=(2,), max_examples=20)
def test_all_to_all(tensor):
    return exchanged("all_to_all", tensor)
