"""The versions of tensors, by which autograd sees that a tensor it has saved is written.

They move where torch's gloo moves them, whatever the tensor's length, dtype and strides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ringcoll
from ringcoll import LocalGroup, run_threads
from tests.programs.versions import ROOT, moves, moves_here

K = 2
Make = Callable[[int, torch.dtype], Tensor]
PLACES: dict[str, Make] = {
    "contiguous": lambda numel, dtype: torch.zeros(numel, dtype=dtype),
    "strided": lambda numel, dtype: torch.zeros(3 * numel, dtype=dtype)[1::3],
    "transposed": lambda numel, dtype: torch.zeros(2, numel // 2, dtype=dtype).t(),
    "negative": lambda numel, dtype: torch._neg_view(torch.zeros(numel, dtype=dtype)),
}


# The tensors of each call, and whether their versions move.
MOVES = {
    "all_reduce": [False],
    "all_reduce, max": [False],
    "reduce": [False],
    "broadcast": [False],
    "all_reduce_coalesced": [True, True],
    "all_reduce_coalesced, of one": [True],
    "all_reduce_coalesced, of long ones": [True, True],
    "all_gather": [False, True, True],
    "all_gather, in its place": [True, True],
    "all_gather_coalesced": [False, True, True],
    "all_gather_single": [False, True],
    "gather": [False, True, True],
    "scatter": [False, False, False],
    "reduce_scatter": [True, False, False],
    "reduce_scatter_single": [True, False],
    "all_to_all": [True, True, False, False],
    "all_to_all_single": [False, False],
}


def expected(rank: int) -> dict[str, list[bool]]:
    return MOVES if rank == ROOT else MOVES | {"gather": [False] * 3}


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint16])
def test_versions_move(dtype: torch.dtype, place: str, is_async: bool) -> None:
    def main(group: LocalGroup) -> None:
        for scale in (1, 5000):
            new = lambda numel: PLACES[place](numel * scale, dtype)  # noqa: B023, E731
            found = moves(ringcoll, group.rank(), group, new, is_async=is_async)
            known = expected(group.rank())
            assert found == {name: known[name] for name in found}

    if place == "negative" and dtype is torch.uint16:
        pytest.skip("torch has no such tensor")
    run_threads(main, K)


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["gloo", "ringcoll"])
def test_versions_move_where_those_of_torch_do(pool, backend: str) -> None:
    for rank, tables in enumerate(pool(K, backend=backend).run(moves_here)):
        assert len(tables) == 8 if backend == "gloo" else 4
        known = expected(rank) | {"sparse": [True]}
        for found in tables:
            assert found == {name: known[name] for name in found}


def test_versions_of_results_beside_their_inputs_move() -> None:
    def main(group: LocalGroup) -> None:
        for function in (ringcoll.all_reduce, ringcoll.scan):
            for prepared in (False, True):
                tensor, out = torch.ones(4), torch.zeros(4)
                call = function.plan(tensor, group=group, out=out) if prepared else None
                for run in range(5):
                    call() if call is not None else function(tensor, group=group, out=out)
                    assert (tensor._version, out._version) == (0, run + 1)

    run_threads(main, K)


def test_what_inference_mode_has_made_has_no_version() -> None:
    def main(group: LocalGroup) -> list[float]:
        with torch.inference_mode():
            whole = torch.zeros(2)
            for _ in range(5):
                ringcoll.all_gather_single(whole, torch.full((1,), group.rank() + 1.0), group)
        return whole.tolist()

    assert run_threads(main, K) == [[1.0, 2.0]] * K


@pytest.mark.parametrize("numel", [2, 30_000])
@pytest.mark.parametrize("is_async", [False, True])
def test_what_is_gathered_over_a_tensor_that_backward_needs_is_an_error(
    numel: int, is_async: bool
) -> None:
    """As with torch's gloo; the gradient would be that of other values."""

    def main(group: LocalGroup) -> None:
        weight = torch.ones(K * numel, requires_grad=True)
        saved = torch.ones(K * numel)
        loss = (weight * saved).sum()
        work = ringcoll.all_gather_single(saved, torch.full((numel,), 5.0), group, is_async)
        if work is not None:
            work.wait()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

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
        ringcoll.all_reduce(sparse, group=group)
        assert sparse._version == 1
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
