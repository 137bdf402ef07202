"""Collectives leave the version of a tensor as it is, so that autograd may have saved the tensor.

torch's own leave it, too, whatever the tensor's length, dtype and strides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ringcoll
from ringcoll import LocalGroup, run_threads

K = 2
Make = Callable[[int, torch.dtype], Tensor]
PLACES: dict[str, Make] = {
    "contiguous": lambda numel, dtype: torch.zeros(numel, dtype=dtype),
    "strided": lambda numel, dtype: torch.zeros(3 * numel, dtype=dtype)[1::3],
    "transposed": lambda numel, dtype: torch.zeros(2, numel // 2, dtype=dtype).t(),
    "negative": lambda numel, dtype: torch._neg_view(torch.zeros(numel, dtype=dtype)),
}


def calls(
    group: LocalGroup, new: Callable[[int], Tensor], is_async: bool
) -> dict[str, list[Tensor]]:
    """Make every call; return the tensors that each of them has written, in pairs with their values."""
    written: dict[str, list[Tensor]] = {}

    def call(name: str, outputs: list[Tensor], function: Callable[..., object]) -> None:
        before = [tensor._version for tensor in outputs]
        for _ in range(5):  # until the places of the tensors are known
            work = function()
            if is_async:
                assert isinstance(work, ringcoll.Work)
                work.wait()
        assert [tensor._version for tensor in outputs] == before, name
        written[name] = outputs

    api: Any = ringcoll
    options = {"group": group, "async_op": is_async}
    two, four = [new(4), new(4)], [new(4) for _ in range(4)]
    one, out, whole, source = new(4), new(4), new(8), new(8)
    here = group.rank() == 0
    call("all_reduce", [one], lambda: api.all_reduce(one, **options))
    call("avg", [one], lambda: api.all_reduce(one, "avg", **options))
    call("out", [out], lambda: api.all_reduce(one, out=out, **options))
    call("coalesced", two, lambda: api.all_reduce_coalesced(two, **options))
    call("reduce", [one], lambda: api.reduce(one, 0, **options))
    call("broadcast", [one], lambda: api.broadcast(one, 0, **options))
    call("all_gather", two, lambda: api.all_gather(two, one, **options))
    call("all_gather_single", [whole], lambda: api.all_gather_single(whole, one, **options))
    gathered = two if here else None
    call("gather", two, lambda: api.gather(one, gathered, 0, **options))
    call("scatter", [one], lambda: api.scatter(one, gathered, 0, **options))
    call("reduce_scatter", [one], lambda: api.reduce_scatter(one, two, **options))
    call("reduce_scatter_single", [one], lambda: api.reduce_scatter_single(one, source, **options))
    call("all_to_all", four[:2], lambda: api.all_to_all(four[:2], four[2:], **options))
    call("all_to_all_single", [whole], lambda: api.all_to_all_single(whole, source, **options))
    prepared = api.all_reduce.plan(one, **options)
    call("prepared", [one], prepared)
    return written


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_no_collective_moves_a_version(place: str, is_async: bool) -> None:
    def main(group: LocalGroup) -> None:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint16):
            if place == "negative" and dtype is torch.uint16:
                continue
            for scale in (1, 5000):
                calls(group, lambda numel: PLACES[place](numel * scale, dtype), is_async)  # noqa: B023

    run_threads(main, K)


@pytest.mark.parametrize("numel", [3, 30_000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_parameter_is_reduced_between_forward_and_backward(
    numel: int, dtype: torch.dtype, is_async: bool
) -> None:
    def main(group: LocalGroup) -> Any:
        weight = torch.full((numel,), group.rank() + 1.0, dtype=dtype, requires_grad=True)
        entry = torch.full((numel,), group.rank() + 2.0, dtype=dtype)
        loss = (weight * weight * entry).sum()
        for tensor in (weight, entry):
            work = ringcoll.all_reduce(tensor, "sum", group, is_async)
            if work is not None:
                work.wait()
        with torch.no_grad():
            ringcoll.broadcast(weight, 0, group)
        loss.backward()
        assert weight.grad is not None
        return weight.grad.unique().tolist()

    grads = run_threads(main, K)
    assert all(len(each) == 1 for each in grads)


def test_sparse_sums_and_messages() -> None:
    def main(group: LocalGroup) -> list[float]:
        sparse = torch.eye(3).to_sparse()
        before = sparse._version
        ringcoll.all_reduce(sparse, group=group)
        assert sparse._version == before
        arrived, peer = torch.zeros(3), 1 - group.rank()
        works = [
            group.irecv(arrived, peer),
            group.isend(torch.full((3,), group.rank() + 1.0), peer),
        ]
        for work in works:
            work.wait()
        assert arrived._version == 0
        return [*sparse.to_dense().diagonal().tolist(), *arrived.tolist()]

    assert run_threads(main, K) == [[2.0] * 3 + [2.0] * 3, [2.0] * 3 + [1.0] * 3]
