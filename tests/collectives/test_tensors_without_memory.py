"""Tensors without memory of their own: what stands behind them is used, or the call is refused.

A refused call has sent nothing: the next call of the group gives the right values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ringcoll
from ringcoll import LocalGroup, run_threads
from ringcoll.errors import ArgumentError
from tests.fakes.without_memory import WITHOUT, Wrapper, pending

K = 2


def new(numel: int = 4) -> Tensor:
    return torch.zeros(numel)


Function = Callable[[LocalGroup, Any], object]
# Each with the odd tensor as an input, or as an output.
FUNCTIONS: dict[str, Function] = {
    "all_reduce": lambda group, odd: ringcoll.all_reduce(odd, group=group),
    "all_reduce, out": lambda group, odd: ringcoll.all_reduce(new(), group=group, out=odd),
    "all_reduce, asynchronous": lambda group, odd: ringcoll.all_reduce(odd, "sum", group, True),
    "all_reduce_coalesced": lambda group, odd: ringcoll.all_reduce_coalesced(
        [new(), odd], group=group
    ),
    "all_reduce, prepared": lambda group, odd: ringcoll.all_reduce.plan(odd, group=group),
    "reduce": lambda group, odd: ringcoll.reduce(odd, 0, group=group),
    "broadcast": lambda group, odd: ringcoll.broadcast(odd, 0, group),
    "all_gather": lambda group, odd: ringcoll.all_gather([new(), new()], odd, group),
    "all_gather, into": lambda group, odd: ringcoll.all_gather([new(), odd], new(), group),
    "all_gather_single": lambda group, odd: ringcoll.all_gather_single(new(8), odd, group),
    "all_gather_coalesced": lambda group, odd: ringcoll.all_gather_coalesced(
        [[new()], [odd]], [new()], group
    ),
    "gather": lambda group, odd: ringcoll.gather(
        odd, [new(), new()] if group.rank() == 0 else None, 0, group
    ),
    "scatter": lambda group, odd: ringcoll.scatter(
        odd, [new(), new()] if group.rank() == 0 else None, 0, group
    ),
    "reduce_scatter": lambda group, odd: ringcoll.reduce_scatter(odd, [new(), new()], group=group),
    "reduce_scatter, from": lambda group, odd: ringcoll.reduce_scatter(
        new(), [odd, new()], group=group
    ),
    "reduce_scatter_single": lambda group, odd: ringcoll.reduce_scatter_single(
        odd, new(8), group=group
    ),
    "all_to_all": lambda group, odd: ringcoll.all_to_all([new(), new()], [new(), odd], group),
    "all_to_all_single": lambda group, odd: ringcoll.all_to_all_single(new(), odd, group=group),
    "send": lambda group, odd: group.isend(odd, 1 - group.rank()),
    "receive": lambda group, odd: group.irecv(odd, 1 - group.rank()),
}


@pytest.mark.parametrize("says", WITHOUT)
def test_a_tensor_without_memory_is_refused_by_every_function(says: str) -> None:
    def main(group: LocalGroup) -> None:
        for name, function in FUNCTIONS.items():
            odd = WITHOUT[says](torch.arange(4.0))
            with pytest.raises(ArgumentError, match=r"says|memory|data|stands|initialized|sent"):
                function(group, odd)
            value = torch.full((3,), group.rank() + 1.0)
            ringcoll.all_reduce(value, group=group)
            assert value.tolist() == [3.0] * 3, name

    run_threads(main, K)


@pytest.mark.parametrize("numel", [3, 20_000])  # short tensors are copied
def test_a_pending_tensor_is_waited_for_by_every_collective(numel: int) -> None:
    def main(group: LocalGroup) -> list[float]:
        own = torch.arange(float(K * numel)) + 10 * group.rank()
        here, found = own[:numel].clone(), list[Tensor]()
        reduced = pending(here)
        ringcoll.all_reduce(reduced, group=group)
        found.append(torch.zeros(numel) + reduced)
        outputs = [new(numel) for _ in range(K)]
        ringcoll.all_gather(outputs, pending(here), group)
        found += outputs
        ringcoll.all_gather_single(both := new(K * numel), pending(here), group)
        found.append(both)
        ringcoll.reduce_scatter_single(block := new(numel), pending(own), group=group)
        found.append(block)
        ringcoll.all_to_all_single(exchanged := new(K * numel), pending(own), group=group)
        found.append(exchanged)
        ringcoll.broadcast(sent := pending(here), 1, group)
        found.append(torch.zeros(numel) + sent)
        work = group.isend(pending(here), 1 - group.rank())
        group.irecv(arrived := new(numel), 1 - group.rank()).wait()
        work.wait()
        found.append(arrived)
        return [float(tensor.double().sum()) for tensor in found]

    ramp = sum(range(numel))
    ramp_1 = ramp + 10 * numel
    all_1 = sum(range(K * numel)) + 10 * numel * K
    for rank, sums in enumerate(run_threads(main, K)):
        block = 2 * (ramp + rank * numel * numel) + 10 * numel
        exchanged = 2 * (ramp + rank * numel * numel) + 10 * numel
        gathered = [ramp, ramp_1, ramp + ramp_1]
        other = ramp if rank else ramp_1
        assert sums == [ramp + ramp_1, *gathered, block, exchanged, ramp_1, other], all_1


def test_a_wrapper_is_reduced_where_its_tensor_lies() -> None:
    def main(group: LocalGroup) -> tuple[list[float], int]:
        inner = torch.arange(6.0).view(2, 3).t() + group.rank()
        ringcoll.all_reduce(Wrapper(inner), group=group)
        ringcoll.all_reduce.plan(Wrapper(inner), "max", group)()
        ringcoll.all_reduce(inner, group=group, out=Wrapper(out := torch.zeros(3, 2)))
        return out.t().flatten().tolist(), len(group.communicator.operations)

    # As a plain tensor of its kind, so that the group remembers the call.
    assert run_threads(main, K) == [([2 * (2 * n + 1.0) for n in range(6)], 2)] * K


@pytest.mark.parametrize("numel", [3, 20_000])
def test_a_storage_that_is_freed_after_calls_of_its_kind(numel: int) -> None:
    def main(group: LocalGroup) -> None:
        kept = torch.ones(numel)
        for _ in range(6):  # until its place is known
            ringcoll.all_reduce(kept, group=group)
        kept.untyped_storage().resize_(0)
        with pytest.raises(ArgumentError, match="its storage was freed"):
            ringcoll.all_reduce(kept, group=group)
        kept.untyped_storage().resize_(4 * numel)
        kept.fill_(group.rank() + 1)
        ringcoll.all_reduce(kept, group=group)
        assert kept.unique().tolist() == [3.0]

    run_threads(main, K)


@pytest.mark.parametrize("numel", [3, 20_000])
@pytest.mark.parametrize("following", [False, True])
def test_a_storage_that_is_freed_under_a_prepared_call(numel: int, following: bool) -> None:
    def main(group: LocalGroup) -> None:
        first, kept = torch.ones(numel, dtype=torch.int64), torch.ones(numel)
        call = ringcoll.all_reduce.plan(kept, group=group)
        if following:
            call = ringcoll.all_reduce_coalesced.plan([first, kept], group=group)
        for freed in (kept, first)[: 1 + following]:
            call()
            nbytes = freed.untyped_storage().nbytes()
            freed.untyped_storage().resize_(0)
            with pytest.raises(ArgumentError, match="its storage was freed"):
                call()
            freed.untyped_storage().resize_(nbytes)
        first.fill_(0)
        kept.fill_(group.rank() + 1)
        call()
        assert kept.unique().tolist() == [3.0]

    run_threads(main, K)


def test_a_factor_without_memory() -> None:
    def main(group: LocalGroup) -> None:
        for says in ("FakeTensor", "storage of 0 bytes", "has no data"):
            op = ringcoll.premul_sum(WITHOUT[says](torch.ones(1)))
            with pytest.raises(ArgumentError, match="'op'"):
                ringcoll.all_reduce(new(), op, group)
        ringcoll.barrier(group)

    run_threads(main, K)


def test_sparse_tensors_without_memory() -> None:
    def main(group: LocalGroup) -> None:
        for part in (Tensor._indices, Tensor._values):
            sparse = torch.eye(3).to_sparse()
            part(sparse).untyped_storage().resize_(0)
            with pytest.raises(ArgumentError, match="its storage was freed"):
                ringcoll.all_reduce(sparse, group=group)
        whole = torch.eye(3).to_sparse()
        ringcoll.all_reduce(whole, group=group)
        assert whole.to_dense().tolist() == (K * torch.eye(3)).tolist()

    run_threads(main, K)


def test_messages_of_views_that_are_not_plain_are_refused() -> None:
    def main(group: LocalGroup) -> None:
        for odd in (
            torch.arange(8.0)[::2],
            torch.zeros(3, dtype=torch.complex64).conj(),
            torch._neg_view(torch.ones(3)),
        ):
            for start in (group.isend, group.irecv):
                with pytest.raises(ArgumentError, match="a contiguous tensor"):
                    start(odd, 1 - group.rank())
        ringcoll.barrier(group)

    run_threads(main, K)


NO_COPY = [
    getattr(torch, name)
    for name in (
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
        "float4_e2m1fn_x2",
        "bits1x8",
        "bits2x4",
        "bits4x2",
        "bits8",
        "bits16",
        "qint8",
        "quint8",
        "qint32",
        "quint4x2",
    )
    if hasattr(torch, name)
]


@pytest.mark.parametrize("deterministic", [False, True])
def test_dtypes_that_torch_cannot_copy_are_refused(deterministic: bool) -> None:
    def main(group: LocalGroup) -> None:
        odd = [
            torch.zeros(4, dtype=torch.int64).view(torch.uint8)[:4].view(d) for d in NO_COPY[:-1]
        ]
        for tensor in odd:
            for name, function in FUNCTIONS.items():
                if name in ("send", "receive"):
                    continue
                with pytest.raises(ArgumentError):
                    function(group, tensor)
        value = torch.full((3,), group.rank() + 1.0)
        ringcoll.all_reduce(value, group=group)
        assert value.tolist() == [3.0] * 3
        for tensor in odd:  # messages are bytes
            if tensor.is_quantized:
                continue
            works = [start(tensor, 1 - group.rank()) for start in (group.irecv, group.isend)]
            for work in works:
                work.wait()

    torch.use_deterministic_algorithms(deterministic)
    try:
        run_threads(main, K)
    finally:
        torch.use_deterministic_algorithms(False)


def test_negative_views_that_torch_cannot_copy_are_refused() -> None:
    def main(group: LocalGroup) -> None:
        for dtype in (torch.uint16, torch.uint32, torch.uint64, torch.bool):
            for function in (FUNCTIONS["broadcast"], FUNCTIONS["all_reduce"]):
                with pytest.raises(ArgumentError, match="cannot negate"):
                    function(group, torch._neg_view(torch.zeros(4, dtype=dtype)))
        value = torch._neg_view(torch.full((3,), -1 - group.rank()))
        ringcoll.all_reduce(value, group=group)
        assert value.tolist() == [3] * 3

    run_threads(main, K)
