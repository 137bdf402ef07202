"""Values that are easily lost: NaN, inputs in the place of outputs, factors, many ranks of int8."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import ringcoll
from ringcoll import LocalGroup, UserOp, premul_sum, run_threads
from ringcoll.runtime.reduction.operators import _divide
from ringcoll.schedules.algorithms import Algorithm, algorithms
from tests.cases.algorithms import each_on

ANYWHERE = [entry for entry in algorithms("all_reduce") if not entry.needs_hosts]


@pytest.mark.slow
@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_one_nan_is_in_every_result(op: str, dtype: torch.dtype, world_size: int) -> None:
    """As torch.maximum has it, and not torch.fmax; whichever rank has the NaN."""
    fitting = [entry.name for entry in ANYWHERE if not entry.restriction(world_size)]

    def main(group: LocalGroup) -> list[Tensor]:
        results = []
        for name in fitting:
            tensor = torch.full((16,), float(group.rank())).to(dtype)
            tensor[group.rank() :: world_size + 1] = math.nan  # the last ones have none
            ringcoll.all_reduce(tensor, op, group, algorithm=name)
            results.append(tensor)
        return results

    extreme = world_size - 1 if op == "max" else 0
    wanted = torch.full((16,), math.nan)
    wanted[world_size :: world_size + 1] = extreme
    for found in run_threads(main, world_size):
        for name, tensor in zip(fitting, found, strict=True):
            torch.testing.assert_close(
                tensor.float(), wanted, equal_nan=True, rtol=0, atol=0, msg=name
            )


@pytest.mark.parametrize("numel", [2, 100])
@pytest.mark.parametrize("entry, world_size", each_on(4, entries=ANYWHERE))
def test_a_transpose_in_its_own_place(numel: int, entry: Algorithm, world_size: int) -> None:
    """The result lies in the input's memory, in another order."""

    def main(group: LocalGroup) -> Tensor:
        square = torch.arange(float(numel * numel)).view(numel, numel) + group.rank()
        ringcoll.all_reduce(square.t(), group=group, out=square, algorithm=entry.name)
        return square

    ranks = range(world_size)
    wanted = world_size * torch.arange(float(numel * numel)).view(numel, numel).t() + sum(ranks)
    assert all(torch.equal(found, wanted) for found in run_threads(main, world_size))


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("numel", [1, 5, 20_000])
def test_a_factor_in_place(world_size: int, numel: int) -> None:
    """The output is this rank's block of the input; the factor counts once, of this rank's input."""

    def main(group: LocalGroup) -> tuple[Tensor, Tensor]:
        rank = group.rank()
        whole = torch.arange(float(numel * world_size)) + 1000 * rank
        blocks = list(whole.split(numel))
        ringcoll.reduce_scatter(blocks[rank], blocks, premul_sum(0.5 + rank), group)
        other = torch.arange(float(numel * world_size)) + 1000 * rank
        part = other[rank * numel : (rank + 1) * numel]
        ringcoll.reduce_scatter_single(part, other, premul_sum(0.5 + rank), group)
        return blocks[rank], part

    ranks = range(world_size)
    inputs = [torch.arange(float(numel * world_size)) + 1000 * rank for rank in ranks]
    total = torch.stack([(0.5 + rank) * inputs[rank].double() for rank in ranks]).sum(0)
    for rank, found in enumerate(run_threads(main, world_size)):
        for block in found:
            wanted = total[rank * numel : (rank + 1) * numel]
            torch.testing.assert_close(block.double(), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
@pytest.mark.parametrize("world_size", [2, 127, 128, 130, 255, 256, 300, 40_000])
def test_a_number_of_ranks_that_the_dtype_cannot_hold(dtype: torch.dtype, world_size: int) -> None:
    """The divisor of an average must not wrap around: 130 as int8 would be -126."""
    info = torch.iinfo(dtype)
    totals = [info.min, info.min + 1, 0, 1, 5, info.max - 1, info.max]
    tensor = torch.tensor(totals, dtype=dtype)
    _divide(tensor, world_size)
    assert tensor.tolist() == [int(math.copysign(abs(n) // world_size, n)) for n in totals]


def test_inputs_that_need_gradients_are_sent_without_them() -> None:
    def main(group: LocalGroup) -> tuple[bool, bool, list[float]]:
        source = torch.ones(3, requires_grad=True)
        derived = source * (group.rank() + 1)
        out = torch.zeros(3)
        ringcoll.all_reduce(derived, group=group, out=out)
        gathered = [torch.zeros(3) for _ in range(2)]
        ringcoll.all_gather(gathered, derived, group)
        work = ringcoll.all_reduce(derived, group=group, out=out, async_op=True)
        assert work is not None
        work.wait()
        tracked = out.requires_grad or any(tensor.requires_grad for tensor in gathered)
        return tracked, derived.requires_grad, out.tolist()

    assert run_threads(main, 2) == [(False, True, [3.0] * 3)] * 2


@pytest.mark.parametrize("numel", [1, 7, 3 << 18])
def test_an_operator_of_the_users_gets_whole_chunks(numel: int) -> None:
    """Of a long tensor, too: nobody knows what the user's function does to a piece."""
    sizes: list[int] = []

    def add(left: Tensor, right: Tensor) -> Tensor:
        sizes.append(left.numel())
        return left + right

    own = UserOp(add, commutative=True, name="add")

    def main(group: LocalGroup) -> float:
        tensor = torch.ones(numel)
        ringcoll.all_reduce(tensor, own, group, algorithm="direct")
        return float(tensor.sum())

    assert run_threads(main, 3) == [3.0 * numel] * 3
    assert set(sizes) == {numel}


INFINITE = [[complex(1, 2), complex(-0.0, -0.0), complex(math.inf, 1), complex(-0.0, 3)],
            [complex(3, math.inf), complex(-0.0, -0.0), complex(1, 1), complex(-0.0, -math.inf)]]  # fmt: skip


def by_parts(function: str, op: str, level: object, algorithm: str, dtype: torch.dtype) -> None:
    """Compare a sum of complex numbers with the sums of its real and imaginary parts."""
    reproducible: dict[str, Any] = {"reproducible": level} if level else {}
    scaled = premul_sum(-0.5) if op == "premul_sum" else op

    def main(group: LocalGroup) -> tuple[Tensor, Tensor]:
        own = torch.tensor(INFINITE[group.rank() % 2], dtype=dtype).repeat(group.size())
        both = own, torch.view_as_real(own).contiguous().flatten()
        results = []
        for each in both:
            options: dict[str, Any] = {"group": group, "algorithm": algorithm, **reproducible}
            result = each.clone()
            if function == "reduce_scatter_single":
                result = each[: len(each) // group.size()].clone()
                ringcoll.reduce_scatter_single(result, each, scaled, **options)
            elif function == "reduce":
                ringcoll.reduce(result, op=scaled, group_dst=0, **options)
            elif function == "all_reduce_coalesced":
                ringcoll.all_reduce_coalesced([result, result.clone()], scaled, **options)
            else:
                ringcoll.all_reduce(result, scaled, **options)
            results.append(result)
        return results[0], results[1]

    for numbers, parts in run_threads(main, 3):
        found = torch.view_as_real(numbers).flatten()
        assert torch.equal(found.isnan(), parts.isnan())
        kept = ~parts.isnan()
        assert torch.equal(found[kept], parts[kept])
        assert torch.equal(found[kept].signbit(), parts[kept].signbit())


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("level", [False, True, "any_world_size"])
@pytest.mark.parametrize("op", ["sum", "avg", "premul_sum"])
def test_complex_numbers_are_added_by_parts(op: str, level: object, dtype: torch.dtype) -> None:
    """With infinities and with zeros of both signs, as docs/reproducibility.md has it."""
    algorithm = "auto" if level else "ring"
    by_parts("all_reduce", op, level, algorithm, dtype)


@pytest.mark.parametrize("algorithm", ["binomial_tree", "direct", "recursive_doubling"])
def test_complex_numbers_are_added_by_parts_by_every_algorithm(algorithm: str) -> None:
    by_parts("all_reduce", "sum", False, algorithm, torch.complex64)


@pytest.mark.parametrize("function", ["reduce", "reduce_scatter_single", "all_reduce_coalesced"])
@pytest.mark.parametrize("op", ["sum", "premul_sum"])
def test_complex_numbers_are_added_by_parts_in_every_function(function: str, op: str) -> None:
    by_parts(function, op, False, "auto", torch.complex64)


def test_a_complex_factor_multiplies_as_complex_numbers_do() -> None:
    def main(group: LocalGroup) -> complex:
        tensor = torch.tensor([3 + 4j])
        ringcoll.all_reduce(tensor, premul_sum(torch.tensor(1 - 2j)), group, reproducible=True)
        return complex(tensor[0].item())

    assert run_threads(main, 2) == [2 * (3 + 4j) * (1 - 2j)] * 2


def test_a_sum_that_is_sent_narrow_is_added_by_parts() -> None:
    def main(group: LocalGroup) -> complex:
        number = complex(3, math.inf) if group.rank() else 1 + 2j
        tensor = torch.tensor([number], dtype=torch.complex128)
        ringcoll.all_reduce(tensor, group=group, wire_dtype=torch.complex64)
        return complex(tensor[0].item())

    assert run_threads(main, 2) == [complex(4, math.inf)] * 2
