"""With ``reproducible`` the bits of results depend on the inputs, and on nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ringcoll
from ringcoll import LocalGroup, UserOp, premul_sum, run_threads
from ringcoll.errors import ArgumentError
from ringcoll.runtime.reduction import reduce_in_order, reproduced, resolve
from ringcoll.schedules import OperandOrder, Order
from ringcoll.schedules.algorithms import algorithms, order_of, schedule_of
from ringcoll.tools.testing.inputs import FLOAT8

ANY: Any = "any_world_size"
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, *FLOAT8)


def inputs_of(world_size: int, numel: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Numbers of many sizes; at each element two ranks nearly cancel."""
    random = torch.Generator().manual_seed(seed + 100 * world_size + numel)
    rows = torch.randn(world_size, numel, generator=random, dtype=torch.float64)
    rows *= 2.0 ** torch.randint(-6, 6, (world_size, numel), generator=random)
    for element in range(numel):
        first, second = torch.randperm(world_size, generator=random)[:2].tolist()
        large = float(rows[:, element].abs().max()) * 2.0 ** (3 if dtype in FLOAT8 else 9)
        rows[first, element], rows[second, element] = large, -large
    return list(rows.to(torch.float32 if dtype in FLOAT8 else dtype).to(dtype))


def bits(tensor: Tensor) -> bytes:
    """The bits of a tensor; a NaN is a NaN."""
    if tensor.dtype.is_floating_point:
        nan = tensor.to(torch.float64).isnan()
        tensor = tensor.to(torch.float64).masked_fill(nan, torch.nan)
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def left_fold(world_size: int) -> Order:
    pluses = [item for rank in range(1, world_size) for item in (rank, "+")]
    return (0, *pluses)


def in_order(collective: str, world_size: int, least: OperandOrder) -> list[str]:
    """The algorithms whose proof has such an order."""
    return [
        entry.name
        for entry in algorithms(collective, world_size)
        if not entry.needs_hosts
        and order_of(schedule_of(collective, entry.name, world_size)) >= least
    ]


def results_of(
    inputs: Sequence[Tensor], calls: Sequence[dict[str, Any]], op: Any = "sum"
) -> list[Tensor]:
    """The result of each call, the same on all ranks."""

    def main(group: LocalGroup) -> list[Tensor]:
        results = []
        for options in calls:
            tensor = inputs[group.rank()].clone()
            ringcoll.all_reduce(tensor, op, group, **options)
            results.append(tensor)
        return results

    first, *others = run_threads(main, len(inputs))
    for results in others:
        for mine, own in zip(results, first, strict=True):
            assert bits(mine) == bits(own)
    answer: list[Tensor] = first
    return answer


# --- the first level ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_sums_are_from_left_to_right_for_every_algorithm_and_segment(world_size: int) -> None:
    names = in_order("all_reduce", world_size, OperandOrder.LEFT_TO_RIGHT)
    assert {"auto", *names} > {"auto"}
    calls = [
        {"algorithm": name, "segment_bytes": nbytes, "reproducible": True}
        for name in ("auto", *names)
        for nbytes in (None, 16)
    ]
    for dtype in DTYPES if world_size == 5 else DTYPES[1:2]:
        whole = inputs_of(world_size, 41, dtype)
        wanted = reduce_in_order(left_fold(world_size), whole)
        for numel in (1, world_size - 1, 41):
            for result in results_of([row[:numel] for row in whole], calls):
                assert bits(result) == bits(wanted[:numel])


@pytest.mark.slow
@pytest.mark.parametrize("op", ["avg", "product", premul_sum(0.3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_other_operators(op: Any, dtype: torch.dtype) -> None:
    inputs = inputs_of(3, 21, torch.float32)
    if dtype.is_complex:
        inputs = [torch.complex(row, 2 * row.flip(0)) for row in inputs]
    inputs = [row.to(dtype) for row in inputs]
    calls = [{"algorithm": name, "reproducible": True} for name in ("direct", "two_shot", "linear")]
    (wanted, *others) = results_of(inputs, calls, op)
    for result in others:
        assert bits(result) == bits(wanted)
    if not dtype.is_complex:
        assert bits(wanted) == bits(reduce_in_order(left_fold(3), inputs, op=op))
    for element in range(21):  # alone, an element has the bits that it has beside others
        alone = results_of([row[element : element + 1] for row in inputs], calls[:1], op)
        assert bits(alone[0]) == bits(wanted[element : element + 1])


def test_products_and_scaled_inputs_of_complex_numbers_have_their_definition() -> None:
    left, right = torch.randn(2, 39, 2, dtype=torch.float64).unbind()
    inputs = [torch.view_as_complex(left), torch.view_as_complex(right)]

    def product(one: Tensor, other: Tensor) -> Tensor:
        pairs = zip(one.tolist(), other.tolist(), strict=True)
        parts = [
            complex(a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real)
            for a, b in pairs
        ]
        return torch.tensor(parts, dtype=torch.complex128)

    (found,) = results_of(inputs, [{"reproducible": True}], "product")
    assert bits(found) == bits(product(*inputs))
    factor = torch.tensor(0.3 - 1.7j, dtype=torch.complex128)
    row = factor.repeat(39)
    for level in (True, ANY):
        (found,) = results_of(inputs, [{"reproducible": level}], premul_sum(factor))
        assert bits(found) == bits(product(inputs[0], row) + product(inputs[1], row))


def test_without_the_option_algorithms_and_places_give_other_bits() -> None:
    row = torch.tensor([1e8, 1.0, -1e8, 3.0])
    inputs = [row[rank].repeat(8) for rank in range(4)]
    names = ("ring", "direct", "recursive_doubling")
    ring, direct, doubling = results_of(inputs, [{"algorithm": name} for name in names])
    assert direct.tolist() == [3.0] * 8
    assert len(set(ring.tolist())) > 1  # equal inputs, and other sums at other places
    assert bits(doubling) != bits(direct)


def test_an_algorithm_that_brackets_otherwise_is_refused_and_those_that_do_not_are_named() -> None:
    enough = in_order("all_reduce", 4, OperandOrder.LEFT_TO_RIGHT)

    def main(group: LocalGroup) -> str:
        with pytest.raises(ArgumentError) as caught:
            ringcoll.all_reduce(torch.ones(4), group=group, algorithm="tree", reproducible=True)
        ringcoll.all_reduce(torch.ones(4).int(), group=group, algorithm="tree", reproducible=True)
        return str(caught.value)

    for message in run_threads(main, 4):
        assert "reproducible sum is not associative, and binomial_tree does not" in message
        assert f"expected {', '.join([*enough, 'auto'])}, got binomial_tree" in message


def test_no_partial_result_is_rounded_to_a_narrower_wire_dtype() -> None:
    at_once = in_order("all_reduce", 4, OperandOrder.AT_ONCE)
    partly = {*in_order("all_reduce", 4, OperandOrder.LEFT_TO_RIGHT)} - {*at_once}
    assert partly, "no algorithm goes from left to right and sends partial results"
    inputs = inputs_of(4, 33, torch.float32)
    wire = {"wire_dtype": torch.bfloat16}
    calls = [{"algorithm": name, "reproducible": True, **wire} for name in at_once]
    rounded = [row.bfloat16().float() for row in inputs]
    wanted = reduce_in_order(left_fold(4), rounded).bfloat16().float()
    for result in results_of(inputs, calls):
        assert bits(result) == bits(wanted)
    for name in partly:
        assert bits(*results_of(inputs, [{"algorithm": name, **wire}])) != bits(wanted)
        with pytest.raises(ArgumentError, match="reproducible sum takes the operands of all"):
            results_of(inputs, [{"algorithm": name, "reproducible": True, **wire}])


def test_operators_of_the_user_are_from_left_to_right() -> None:
    def skewed(left: Tensor, right: Tensor) -> Tensor:
        return left * 0.5 + right

    operator = UserOp(skewed, commutative=True)  # it is not: rounding is what counts here
    inputs = inputs_of(4, 21, torch.float32)
    calls = [{"algorithm": name, "reproducible": True} for name in ("direct", "two_shot", "auto")]
    wanted = reduce_in_order(left_fold(4), inputs, op=operator)
    for result in results_of(inputs, calls, operator):
        assert bits(result) == bits(wanted)
    assert bits(*results_of(inputs, [{"algorithm": "ring"}], operator)) != bits(wanted)
    with pytest.raises(ArgumentError, match="user operator skewed is not associative"):
        results_of(inputs, [{"algorithm": "ring", "reproducible": True}], operator)


# --- minima and maxima, at both levels ----------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e5m2fnuz], ids=str)
@pytest.mark.parametrize("level", [True, ANY], ids=str)
def test_extremes_know_zeros_from_each_other_at_every_place(dtype: torch.dtype, level: Any) -> None:
    nan, inf = math.nan, math.inf
    pairs = [(0.0, -0.0), (-0.0, 0.0), (-0.0, -0.0), (nan, inf), (-inf, nan), (-1.5, 2.0)]
    pairs += [(-inf, 3.0), (inf, 3.0), (-2.0, -1.5), (0.0, 2.0**-8), (-(2.0**-8), -0.0)]
    rows = torch.tensor([*zip(*pairs, strict=True)]).repeat(1, 5).to(dtype)
    first, second = rows.double()  # some dtypes have no infinity, or no -0

    def extreme(larger: bool) -> Tensor:
        is_first = (first > second) == larger
        negative = first.signbit() if larger else second.signbit()
        is_first = torch.where(first == second, ~negative, is_first)
        value = torch.where(is_first, first, second)
        return value.masked_fill(first.isnan() | second.isnan(), nan)

    calls = [
        {"algorithm": name, "reproducible": level, "segment_bytes": nbytes}
        for name, nbytes in (("ring", None), ("tree", 16), ("auto", None))
    ]
    for op in ("min", "max"):
        for result in results_of([*rows, rows[1]], calls, op):
            assert result.dtype is dtype
            assert bits(result.double()) == bits(extreme(op == "max"))


def test_extremes_in_a_narrower_wire_dtype() -> None:
    inputs = inputs_of(3, 17, torch.float32)
    for wire in (torch.bfloat16, torch.float8_e4m3fn):
        wanted = torch.stack([row.to(wire).float() for row in inputs])
        options = {"wire_dtype": wire, "algorithm": "ring"}
        found, plain = results_of(inputs, [{**options, "reproducible": True}, options], "max")
        assert torch.equal(found, plain)
        assert torch.equal(found, wanted.amax(0))


# --- the second level ----------------------------------------------------------------------


def exact(inputs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Exact sums, rounded to float32, or float64, and then to the dtype."""
    columns = zip(*(row.double().tolist() for row in inputs), strict=True)
    sums = [float(sum(map(Fraction, column))) for column in columns]  # rounded once
    if dtype is torch.float64:
        return torch.tensor(sums, dtype=dtype)
    # The second rounding, to float32, is none if the first was none.
    columns = zip(*(row.double().tolist() for row in inputs), strict=True)
    assert sums == [math.fsum(column) for column in columns]
    return torch.tensor(sums, dtype=torch.float64).float().to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_exact_sums_depend_on_no_order_and_on_no_rank_that_adds_zeros(dtype: torch.dtype) -> None:
    inputs = inputs_of(3, 29, dtype)
    inputs = [row * 1.0 if dtype not in FLOAT8 else row for row in inputs]
    zero = torch.zeros(29).to(dtype)
    wanted = exact(inputs, dtype)
    names = in_order("all_reduce", 3, OperandOrder.AT_ONCE)
    assert len(names) >= 3
    calls = [
        {"algorithm": name, "reproducible": ANY, "segment_bytes": nbytes}
        for name in ("auto", *names)
        for nbytes in (None, 16)
    ]
    for result in results_of(inputs, calls):
        assert bits(result) == bits(wanted)
    for ranks in (
        inputs[::-1],
        [zero, *inputs, zero, zero],
        [inputs[1], zero, inputs[0], inputs[2]],
    ):
        assert bits(*results_of(ranks, calls[:1])) == bits(wanted)
    for element in (0, 13, 28):
        alone = [row[element : element + 1] for row in inputs]
        assert bits(*results_of(alone, calls[:1])) == bits(wanted[element : element + 1])


def test_the_first_level_does_depend_on_the_order_of_ranks() -> None:
    inputs = inputs_of(3, 29, torch.float32)
    one, other = (
        results_of(ranks, [{"reproducible": True}])[0] for ranks in (inputs, inputs[::-1])
    )
    assert bits(one) != bits(other)
    assert bits(one) != bits(exact(inputs, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_zero_is_negative_on_any_number_of_ranks(dtype: torch.dtype) -> None:
    zeros = torch.full((5,), -0.0, dtype=dtype)
    for world_size in (1, 2, 3):
        (total,) = results_of([zeros] * world_size, [{"reproducible": ANY}])
        assert not total.signbit().any()
        (scaled,) = results_of([-zeros] * world_size, [{"reproducible": ANY}], premul_sum(-1.0))
        assert not scaled.signbit().any()


def test_averages_scaled_sums_and_narrower_wires_of_exact_sums() -> None:
    inputs = inputs_of(3, 23, torch.float32)
    total = exact(inputs, torch.float32)
    options = {"reproducible": ANY}
    assert bits(*results_of(inputs, [options], "avg")) == bits(total / 3)
    scaled = [row * 0.3 for row in inputs]
    assert bits(*results_of(inputs, [options], premul_sum(0.3))) == bits(
        exact(scaled, torch.float32)
    )
    narrow = [row.bfloat16().float() for row in inputs]
    wire = {"wire_dtype": torch.bfloat16}
    assert bits(*results_of(inputs, [options | wire])) == bits(
        exact(narrow, torch.float32).bfloat16().float()
    )


def test_exact_sums_of_complex_numbers() -> None:
    reals, imags = inputs_of(3, 23, torch.float32), inputs_of(3, 23, torch.float32, seed=7)
    numbers = [torch.complex(*parts) for parts in zip(reals, imags, strict=True)]
    total = torch.complex(exact(reals, torch.float32), exact(imags, torch.float32))
    found, turned = (
        results_of(ranks, [{"reproducible": ANY}])[0] for ranks in (numbers, numbers[::-1])
    )
    assert bits(found) == bits(turned) == bits(total)
    (mean,) = results_of(numbers, [{"reproducible": ANY}], "avg")
    assert bits(torch.view_as_real(mean)) == bits(torch.view_as_real(total) / 3)


# --- every function -----------------------------------------------------------------------


def _blocks(tensor: Tensor) -> list[Tensor]:
    return list(tensor.clone().split(7))


def _reduced(group: LocalGroup, own: Tensor, **options: Any) -> list[Tensor]:
    out = torch.empty_like(own)
    ringcoll.reduce(own, 2, group=group, out=out if group.rank() == 2 else None, **options)
    return [out] if group.rank() == 2 else []


def _scattered(group: LocalGroup, own: Tensor, **options: Any) -> list[Tensor]:
    outs = [torch.empty(7) for _ in range(3)]
    ringcoll.reduce_scatter(outs[0], _blocks(own), group=group, **options)
    ringcoll.reduce_scatter_tensor(outs[1], own.clone(), group=group, **options)
    ringcoll.reduce_scatter_single_coalesced(outs[2:], [own.clone()], group=group, **options)
    return outs


def _coalesced(group: LocalGroup, own: Tensor, **options: Any) -> list[Tensor]:
    tensors, planned = _blocks(own), own.clone()
    ringcoll.all_reduce_coalesced(tensors, group=group, **options)
    ringcoll.all_reduce.plan(planned, group=group, **options)()
    work = ringcoll.all_reduce(own, group=group, async_op=True, **options)
    assert work is not None
    work.wait()
    return [torch.cat(tensors), planned, own]


@pytest.mark.parametrize("level", [True, ANY], ids=str)
@pytest.mark.parametrize("call", [_reduced, _scattered, _coalesced])
def test_every_function_that_reduces(call: Callable[..., list[Tensor]], level: Any) -> None:
    inputs = inputs_of(3, 21, torch.float32)
    wanted = exact(inputs, torch.float32) if level == ANY else reduce_in_order(left_fold(3), inputs)

    def main(group: LocalGroup) -> list[Tensor]:
        return call(group, inputs[group.rank()].clone(), reproducible=level)

    for rank, results in enumerate(run_threads(main, 3)):
        own = wanted[7 * rank : 7 * rank + 7] if call is _scattered else wanted
        assert results or rank != 2
        for result in results:
            assert bits(result) == bits(own)


def test_the_reason_for_the_choice_is_explained() -> None:
    def main(group: LocalGroup) -> list[str]:
        kinds: list[dict[str, Any]] = [{}, {"reproducible": True}, {"reproducible": ANY}]
        kinds.append({"reproducible": True, "op": "max"})
        asked = [ringcoll.explain("all_reduce", 1 << 20, group, **kind) for kind in kinds]
        return [explanation.choice.reason.partition(" (")[0] for explanation in asked]

    fastest = "the least predicted time"
    in_turn = f"{fastest} of those that reduce in rank order"
    for reasons in run_threads(main, 4):
        assert reasons == [
            fastest,
            f"{in_turn}, from left to right",
            f"{in_turn}, all operands at once",
            fastest,
        ]


# --- refusals -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op, dtype, options, message",
    [
        ("sum", torch.float32, {"reproducible": "yes"}, "no such level"),
        ("sum", torch.float32, {"reproducible": 1}, "no such level"),
        ("sum", torch.int32, {"reproducible": ["any_world_size"]}, "no such level"),
        ("product", torch.float32, {"reproducible": ANY}, "product of torch.float32 has no exact"),
        (torch.add, torch.int64, {"reproducible": ANY}, "user operator add of torch.int64 has no"),
        ("sum", torch.float32, {"reproducible": ANY, "algorithm": "ring"}, "exact sum takes the"),
    ],
)
def test_what_cannot_be_reproducible_is_refused(
    op: Any, dtype: torch.dtype, options: dict[str, Any], message: str
) -> None:
    def main(group: LocalGroup) -> None:
        with pytest.raises(ArgumentError, match=message):
            ringcoll.all_reduce(torch.ones(3, dtype=dtype), op, group, **options)
        sparse = torch.ones(3).to_sparse()
        with pytest.raises(ArgumentError, match="not for sparse tensors"):
            ringcoll.all_reduce(sparse, group=group, reproducible=options["reproducible"])

    run_threads(main, 3)


def test_exact_sums_of_tensors_on_a_gpu_are_refused() -> None:
    for op, dtype, is_refused in (("sum", torch.float32, True), ("max", torch.float32, False)):
        reduction, device = resolve(op, dtype), torch.device("cuda")
        if is_refused:
            with pytest.raises(ArgumentError, match="on the CPU only"):
                reproduced(reduction, ANY, world_size=2, device=device)
        else:
            reproduced(reduction, ANY, world_size=2, device=device)


def test_ranks_that_ask_for_other_levels_call_other_operations() -> None:
    reduction, cpu = resolve("sum", torch.float32), torch.device("cpu")
    levels: list[Any] = [False, True, ANY]
    names = [reproduced(reduction, level, world_size=2, device=cpu).name for level in levels]
    assert names == ["sum", "reproducible sum", "exact sum"]


# --- transports ---------------------------------------------------------------------------


def on_process(numel: int) -> list[bytes]:
    """What a rank has after calls of both levels."""
    inputs = inputs_of(dist.get_world_size(), 41, torch.float32)
    own = inputs[dist.get_rank()].repeat(numel // 41 + 1)[:numel]
    found = []
    for level in (True, ANY):
        for name in ("auto", "direct", "two_shot"):
            for wire in (None, torch.bfloat16):
                tensor = own.clone()
                ringcoll.all_reduce(tensor, algorithm=name, reproducible=level, wire_dtype=wire)
                found.append(bits(tensor))
    return found


@pytest.mark.processes
@pytest.mark.parametrize("numel", [41, 70_001])  # short messages, and such as are read in place
def test_transports_give_the_same_bits(pool: Any, numel: int) -> None:
    inputs = [row.repeat(numel // 41 + 1)[:numel] for row in inputs_of(3, 41, torch.float32)]
    wanted = [
        bits(result)
        for level in (True, ANY)
        for result in results_of(
            inputs, [{"reproducible": level, "wire_dtype": wire} for wire in (None, torch.bfloat16)]
        )
        * 3
    ]
    for transport in ("gloo", "shared"):
        for answer in pool(3, transport=transport).run(on_process, numel):
            assert answer == wanted


def test_hosts_do_not_matter() -> None:
    """What has the left fold is not built for hosts; `hierarchical` is not among it."""
    for placement in ((0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 1)):
        schedules = [
            entry.schedule(4, hosts=placement)
            for entry in algorithms("all_reduce", 4)
            if entry.order >= OperandOrder.LEFT_TO_RIGHT
        ]
        assert len(schedules) >= 3
        for one, other in pairwise(schedules):
            assert order_of(one) is order_of(other) is OperandOrder.AT_ONCE
        hierarchical = schedule_of("all_reduce", "hierarchical", 4, 0, placement)
        assert order_of(hierarchical) < OperandOrder.LEFT_TO_RIGHT
        with pytest.raises(ArgumentError, match="hierarchical does not reduce from left"):
            results_of([torch.ones(4)] * 4, [{"algorithm": hierarchical, "reproducible": True}])
