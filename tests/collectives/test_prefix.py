"""scan and exscan on threads and on processes; every algorithm, length and kind of tensor is in test_functions too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import ringcoll
from ringcoll import LocalGroup, UserOp, premul_sum, run_threads
from ringcoll.errors import ArgumentError, MismatchError
from ringcoll.schedules import (
    Program,
    Schedule,
    Step,
    copy,
    inp,
    out,
    recv,
    recv_reduce,
    send,
    tmp,
)
from ringcoll.schedules.algorithms import algorithms
from ringcoll.tools.testing import inputs as data
from tests.cases.batches import check_batch
from tests.cases.calls import STYLES, USER_OPS, Case
from tests.cases.effort import effort
from tests.cases.strategies import cases, operators
from tests.programs.threads import Planned, run_case

BOTH = ("scan", "exscan")
WORLDS = (1, 2, 3, 4, 5, 7, 8, 13)
NAMED = [(entry.collective, entry.name) for entry in algorithms() if entry.collective in BOTH]
NAMED += [("exscan", f"recursive_doubling={i}") for i in (1, 2, 3)]


def own(rank: int, numel: int = 5) -> Tensor:
    """Integers that differ by rank and by index."""
    return torch.arange(numel) * 7 % 11 + 100 * rank + 1


def prefix(collective: str, rank: int, numel: int = 5) -> Tensor:
    """The result: all inputs, summed up over the ranks by torch; of an exscan, rank 0 keeps its own."""
    sums = torch.stack([own(r, numel) for r in range(rank + 1)]).cumsum(0)
    return sums[rank if collective == "scan" else max(0, rank - 1)]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("collective, algorithm", [*NAMED, ("scan", "auto"), ("exscan", "auto")])
def test_sums_are_those_of_cumsum(collective: str, algorithm: str, world_size: int) -> None:
    lengths = sorted({0, 1, world_size - 1, world_size, world_size + 1, 40})

    def main(group: LocalGroup) -> list[Tensor]:
        tensors = [own(group.rank(), numel) for numel in lengths]
        for tensor in tensors:
            getattr(ringcoll, collective)(
                tensor, group=group, algorithm=algorithm, segment_bytes=64
            )
        return tensors

    for rank, found in enumerate(run_threads(main, world_size)):
        for numel, tensor in zip(lengths, found, strict=True):
            assert torch.equal(tensor, prefix(collective, rank, numel)), (rank, numel)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("collective, algorithm", NAMED)
def test_operators_that_do_not_commute(collective: str, algorithm: str, world_size: int) -> None:
    run_case(Case(collective, algorithm, op="user_affine", lengths=(9,)), world_size)


@pytest.mark.parametrize("collective", BOTH)
def test_products_of_matrices(collective: str) -> None:
    """Each element is a matrix of 2 by 2 with small entries, kept as a number of base 16, modulo 16."""

    def parts(codes: Tensor) -> Tensor:
        digits = [(codes >> shift) & 15 for shift in (0, 4, 8, 12)]
        return torch.stack(digits, -1).view(*codes.shape, 2, 2)

    def product(left: Tensor, right: Tensor) -> Tensor:
        entries = (parts(left) @ parts(right) % 16).view(*left.shape, 4)
        return (entries << torch.tensor([0, 4, 8, 12])).sum(-1)

    def main(group: LocalGroup) -> Tensor:
        tensor = own(group.rank()) * 257
        getattr(ringcoll, collective)(tensor, UserOp(product), group)
        return tensor

    total = wanted = own(0) * 257
    for rank, found in enumerate(run_threads(main, 7)):
        if rank:
            before, total = total, product(total, own(rank) * 257)
            wanted = before if collective == "exscan" else total
        assert torch.equal(found, wanted), rank


@pytest.mark.slow
@effort(150)
@given(
    st.sampled_from([1, 2, 3, 5]).flatmap(
        lambda k: st.tuples(cases(k, collectives=BOTH), st.just(k), st.booleans())
    )
)
def test_every_dtype_operator_and_kind_of_tensor(drawn: tuple[Case, int, bool]) -> None:
    case, world_size, is_prepared = drawn
    run_case(case, world_size, *((Planned(),) if is_prepared else ()))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("collective", BOTH)
def test_styles(collective: str, style: str) -> None:
    numel = 1 if style == "scalar" else 6
    for in_place in (False, True):
        for dtype in (torch.int64, torch.complex64):
            case = Case(collective, style=style, dtype=dtype, lengths=(numel,), in_place=in_place)
            run_case(case, 3)


def test_bfloat16_is_added_in_float32_and_rounded_once() -> None:
    """Above 256 a bfloat16 has no odd integers: 256 + 1 + 1 + 1 would stay 256."""

    def main(group: LocalGroup) -> list[Any]:
        first = 256.0 if group.rank() == 0 else 1.0
        found = []
        for name in ("linear", "recursive_doubling"):
            tensor = torch.full((3,), first, dtype=torch.bfloat16)
            ringcoll.scan(tensor, group=group, algorithm=name)
            found.append(tensor.tolist())
        tensor = torch.full((3,), first, dtype=torch.bfloat16)
        ringcoll.exscan(tensor, group=group)
        return [*found, tensor.tolist()]

    for rank, found in enumerate(run_threads(main, 5)):
        sums = [torch.tensor(256.0 + r).bfloat16().item() for r in (rank, max(0, rank - 1))]
        assert found == [[sums[0]] * 3, [sums[0]] * 3, [sums[1]] * 3]


def test_scaled_inputs_leave_rank_0_as_it_is() -> None:
    def main(group: LocalGroup) -> list[list[float]]:
        scaled = premul_sum(2.0 + group.rank())
        found = []
        for function in (ringcoll.scan, ringcoll.exscan):
            tensor = torch.tensor([1.0, 10.0]) + group.rank()
            function(tensor, scaled, group)
            found.append(tensor.tolist())
        return found

    scans, exscans = zip(*run_threads(main, 3), strict=True)
    assert scans == ([2.0, 20.0], [8.0, 53.0], [20.0, 101.0])
    assert exscans == ([1.0, 10.0], [2.0, 20.0], [8.0, 53.0])


@pytest.mark.parametrize("collective", BOTH)
def test_asynchronous_prepared_and_with_an_output_of_its_own(collective: str) -> None:
    def main(group: LocalGroup) -> list[Tensor]:
        function, rank = getattr(ringcoll, collective), group.rank()
        source, target, later = own(rank), torch.zeros_like(own(rank)), own(rank)
        plan = function.plan(source, group=group, out=target)
        plan()
        work = function(later, group=group, async_op=True)
        first = target.clone()
        source += 1
        plan()
        work.wait()
        return [first, target, later, source - own(rank)]

    for rank, (first, second, later, source) in enumerate(run_threads(main, 4)):
        wanted, ranks = prefix(collective, rank), rank + (collective == "scan")
        assert torch.equal(later, wanted)
        assert torch.equal(source, torch.ones_like(source))
        assert torch.equal(first, wanted if ranks else torch.zeros_like(wanted))
        assert torch.equal(second, wanted + ranks if ranks else torch.zeros_like(wanted))


def test_reproducible_scans_are_left_folds() -> None:
    values = [1e8, 1.0, -1e8, 1.0]

    def main(group: LocalGroup) -> float:
        tensor = torch.tensor([values[group.rank()]])
        ringcoll.scan(tensor, group=group, reproducible=True)
        return tensor.item()

    assert run_threads(main, 4) == [1e8, 1e8, 0.0, 1.0]


# --- what is refused, and leaves the group as it was ------------------------------------------


def refused(collective: str, **options: Any) -> list[str]:
    """The messages on all ranks, which can use the group as before."""

    def main(group: LocalGroup) -> str:
        tensor = torch.ones(2)
        with pytest.raises(ArgumentError) as caught:
            getattr(ringcoll, collective)(tensor, group=group, **options)
        assert tensor.tolist() == [1.0, 1.0]
        ringcoll.scan(tensor, group=group)
        assert tensor.tolist() == [group.rank() + 1.0] * 2
        return str(caught.value)

    return run_threads(main, 3)


@pytest.mark.parametrize("algorithm", ["auto", "recursive_doubling"])
@pytest.mark.parametrize("collective", BOTH)
def test_there_is_no_average(collective: str, algorithm: str) -> None:
    for op in ("avg", torch.distributed.ReduceOp.AVG):
        for message in refused(collective, op=op, algorithm=algorithm):
            assert f"there is no {collective} for it" in message
            assert "got avg" in message


def test_a_function_of_the_user_may_be_named_avg() -> None:
    def main(group: LocalGroup) -> list[float]:
        tensor = torch.ones(1) + group.rank()
        ringcoll.scan(tensor, UserOp(torch.add, name="avg"), group)
        return tensor.tolist()

    assert run_threads(main, 3) == [[1.0], [3.0], [6.0]]


@pytest.mark.parametrize("collective", BOTH)
def test_there_is_no_exact_sum(collective: str) -> None:
    for options in (
        {"reproducible": "any_world_size"},
        {"reproducible": True, "wire_dtype": torch.bfloat16},
    ):
        for message in refused(collective, **options):
            assert "all operands at once" in message


def test_what_is_not_associative_needs_the_chain() -> None:
    skewed = USER_OPS["user_skewed"]
    for message in refused("exscan", op=skewed):
        assert "there is no exscan for it in rank order, from left to right" in message
    for message in refused("scan", op=skewed, algorithm="recursive_doubling"):
        assert "expected linear, auto" in message


def test_an_algorithm_of_the_caller_may_keep_an_order_that_no_other_keeps() -> None:
    """Here an exscan from left to right, which the caller hands over as a schedule."""

    def program(rank: int) -> Program:
        if rank == 0:
            yield Step(send(1, inp(0)), send(2, inp(0)))
        elif rank == 1:
            yield Step(recv(0, tmp(0, 0)))
            yield Step(send(2, inp(0)))
            yield Step(copy(out(0), tmp(0, 0)))
        else:
            yield Step(recv(0, tmp(0, 0)))
            yield Step(recv_reduce(1, out(0), tmp(0, 0), received_left=False))

    schedule = Schedule("exscan", "by_hand", 3, 1, 1, program)

    def main(group: LocalGroup) -> list[int]:
        tensor = own(group.rank(), 1)
        ringcoll.exscan(tensor, USER_OPS["user_skewed"], group, algorithm=schedule)
        return tensor.tolist()

    assert run_threads(main, 3) == [[1], [1], [3 * 1 - 101]]


def test_what_else_is_wrong() -> None:
    def main(group: LocalGroup) -> None:
        with pytest.raises(ArgumentError, match="another shape"):
            ringcoll.scan(torch.ones(2), group=group, out=torch.ones(3))
        with pytest.raises(ArgumentError, match="not a reduction operator"):
            ringcoll.exscan(torch.ones(2), "mean", group)
        with pytest.raises(ringcoll.errors.UnknownAlgorithmError, match="unknown algorithm 'ring'"):
            ringcoll.scan(torch.ones(2), group=group, algorithm="ring")

    run_threads(main, 2)


def test_ranks_that_disagree() -> None:
    def main(group: LocalGroup) -> None:
        function = ringcoll.scan if group.rank() else ringcoll.exscan
        with pytest.raises(MismatchError):
            function(torch.ones(2), group=group)

    run_threads(main, 2)


def test_explained() -> None:
    def main(group: LocalGroup) -> str:
        with pytest.raises(ArgumentError, match="no algorithm for scan reduces in rank order, all"):
            ringcoll.explain("scan", torch.ones(2), group, reproducible="any_world_size")
        return ringcoll.explain("scan", torch.ones(2), group, reproducible=True).algorithm

    assert run_threads(main, 2) == ["linear"] * 2


# --- processes --------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_on_processes_over_shared_memory(pool: Any, world_size: int) -> None:
    """Each algorithm at several lengths, and each dtype with each operator."""
    batch = [
        (
            "world",
            Case(collective, name, lengths=(numel,), op=op, segment_bytes=size, async_op=numel > 9),
        )
        for collective, name in NAMED
        for op in ("sum", "user_affine")
        for numel, size in ((1, None), (world_size + 1, 8), (40_000, 50_000))
    ]
    batch += [
        ("world", Case(collective, op=op, dtype=dtype, lengths=(7,), seed=seed))
        for seed, dtype in enumerate((*data.INTEGERS, *data.FLOATS, torch.bool))
        for op in operators(dtype)
        for collective in BOTH
        if op not in ("avg", "user_skewed")
    ]
    check_batch(pool(world_size, transport="shared"), batch, native=False)
