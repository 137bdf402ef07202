"""The inputs with known results: known, exact, and different everywhere."""

import functools
import operator

import pytest
import torch

from ringcoll.runtime.reduction import OPERATORS
from ringcoll.tools.bench import DTYPES, Oracle, count_wrong, spoil
from ringcoll.tools.bench.measure import _defined

FLOATS = [name for name, dtype in DTYPES.items() if dtype.is_floating_point]
PAIRS = [(dtype, op) for dtype in DTYPES for op in OPERATORS if _defined(dtype, op)]
NUMEL = 1000


def output(oracle: Oracle) -> torch.Tensor:
    result = oracle.output(0, NUMEL)
    assert result is not None
    return result


def added(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(tensors).sum(0)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 4, 7])
@pytest.mark.parametrize("dtype,op", PAIRS)
def test_every_contribution_counts(dtype, op, world_size):
    oracle = Oracle("all_reduce", OPERATORS[op], DTYPES[dtype], world_size)
    if not oracle.exact:
        pytest.skip("too few exact integers for so many ranks")
    inputs = [oracle.input(rank, NUMEL) for rank in range(world_size)]
    result = output(oracle)
    assert result.dtype is inputs[0].dtype is DTYPES[dtype]
    assert result.numel() == NUMEL
    for one in range(world_size):
        for other in range(one):
            assert count_wrong(inputs[one], inputs[other]) > 0
    if world_size == 1:
        return
    # It differs by index, too: a displaced result is a wrong one.
    assert count_wrong(result.roll(1), result) > 0


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_are_exact_in_any_order(dtype, world_size):
    oracle = Oracle("all_reduce", "sum", DTYPES[dtype], world_size)
    if not oracle.exact:
        pytest.skip("too few exact integers for so many ranks")
    inputs = [oracle.input(rank, NUMEL).to(torch.float64) for rank in range(world_size)]
    total = torch.zeros(NUMEL, dtype=torch.float64)
    for one in inputs:
        total = total + one
        # Each partial sum survives being kept in the dtype.
        assert torch.equal(total.to(DTYPES[dtype]).to(torch.float64), total)
    assert count_wrong(total.to(DTYPES[dtype]), output(oracle)) == 0


@pytest.mark.parametrize("op", ["band", "bor", "bxor", "min", "max", "prod", "sum", "avg"])
@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64"])
def test_integers_against_torch(dtype, op):
    world_size = 4
    oracle = Oracle("all_reduce", OPERATORS[op], DTYPES[dtype], world_size)
    inputs = [oracle.input(rank, NUMEL) for rank in range(world_size)]
    combine = {
        "band": operator.and_,
        "bor": operator.or_,
        "bxor": operator.xor,
        "min": torch.minimum,
        "max": torch.maximum,
        "prod": operator.mul,
    }.get(op, operator.add)
    result = functools.reduce(combine, inputs)
    if op == "avg":
        assert not (result % world_size).any()
        result = result // world_size
    assert torch.equal(result, output(oracle))


def test_blocks_go_where_the_collective_says():
    k, count, root = 3, 5, 1
    vectors = ("broadcast", "reduce", "scan", "exscan")
    sends = dict.fromkeys(("all_gather", "gather", *vectors), count)
    expected = {
        "all_gather": lambda ins, rank: torch.cat(ins),
        "gather": lambda ins, rank: torch.cat(ins) if rank == root else None,
        "broadcast": lambda ins, rank: ins[root],
        "scatter": lambda ins, rank: ins[root][rank * count : (rank + 1) * count],
        "all_to_all": lambda ins, rank: torch.cat(
            [one[rank * count : (rank + 1) * count] for one in ins]
        ),
        "reduce_scatter": lambda ins, rank: added(ins)[rank * count : (rank + 1) * count],
        "reduce": lambda ins, rank: added(ins) if rank == root else None,
        "scan": lambda ins, rank: added(ins[: rank + 1]),
        "exscan": lambda ins, rank: added(ins[:rank]) if rank else None,
    }
    for collective, result in expected.items():
        oracle = Oracle(collective, "sum", torch.float32, k, root)
        numel = sends.get(collective, k * count)
        inputs = [oracle.input(rank, numel) for rank in range(k)]
        for rank in range(k):
            known, wanted = oracle.output(rank, count), result(inputs, rank)
            assert (known is None) == (wanted is None), collective
            assert known is None or torch.equal(known, wanted), collective


def test_a_float_with_too_few_integers_is_not_checked():
    assert Oracle("all_reduce", "sum", torch.float8_e5m2, 8).exact
    assert not Oracle("all_reduce", "sum", torch.float8_e5m2, 9).exact
    assert Oracle("all_gather", "sum", torch.float8_e5m2, 1000).exact
    assert Oracle("all_reduce", "sum", torch.float32, 10_000).exact


@pytest.mark.parametrize("dtype", DTYPES)
def test_counting_and_spoiling(dtype):
    expected = Oracle("all_gather", "sum", DTYPES[dtype], 2).input(0, 100)
    result = expected.clone()
    assert count_wrong(result, expected) == 0
    spoil(result[10:20], expected[10:20])
    assert count_wrong(result, expected) == 10
    spoil(result, expected)
    assert count_wrong(result, expected) == 100


def test_the_sign_of_zero_and_nan_count():
    zero, minus = torch.zeros(3), torch.tensor([0.0, -0.0, float("nan")])
    assert count_wrong(minus, zero) == 2
    assert count_wrong(torch.empty(0), torch.empty(0)) == 0
