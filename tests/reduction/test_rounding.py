"""How much is rounded: 16-bit floats are added up in float32, and rounded once.

Errors are in units of the last place of bfloat16: a result that is rounded once is off by
half of one at most, from the exact sum of the inputs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ringcoll
from ringcoll import LocalGroup, run_threads

RANKS, NUMEL = 8, 20_000
HALF = 0.5 * (1 + 2**-14)  # of a unit: the float32 sum is rounded itself, far below it


@pytest.fixture(scope="module")
def inputs() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(RANKS, NUMEL, generator=generator).bfloat16()


def all_reduced(inputs: Tensor, **options: Any) -> Tensor:
    """What every rank ends with; the same bits on all."""

    def main(group: LocalGroup) -> Tensor:
        tensor = inputs[group.rank()].clone()
        ringcoll.all_reduce(tensor, group=group, **options)
        return tensor

    first, *others = run_threads(main, RANKS)
    assert all(torch.equal(first, other) for other in others)
    result: Tensor = first
    return result


def errors(result: Tensor, inputs: Tensor) -> Tensor:
    """Distance from the exact sum, in units of the last place."""
    exact = inputs.double().sum(0)  # 8 numbers of 8 bits each: exact, but for wild exponents
    unit = torch.ldexp(torch.ones_like(exact), torch.frexp(exact).exponent - 8)
    return (result.double() - exact).abs() / unit


@pytest.mark.parametrize("algorithm", ["auto", "ring", "direct", "recursive_doubling"])
def test_sums_of_bfloat16_are_rounded_once(inputs: Tensor, algorithm: str) -> None:
    found = errors(all_reduced(inputs, algorithm=algorithm), inputs)
    native = errors(inputs.sum(0), inputs)  # torch adds in float32, too
    assert found.mean() <= native.mean() * 1.0001
    # A float32 sum is off by 7 roundings of 2^-24 of partial sums of at most 8 times the
    # largest input; where the total nearly cancels, that is more than its last place.
    usual = errors(inputs.double().sum(0).bfloat16(), inputs) + 1e-9
    assert (found <= torch.maximum(usual, torch.tensor(HALF)) + 2**-8).double().mean() > 0.9999


def test_a_narrow_wire_rounds_at_every_hop(inputs: Tensor) -> None:
    once = all_reduced(inputs, algorithm="ring")
    each_hop = all_reduced(inputs, algorithm="ring", wire_dtype=torch.bfloat16)
    assert errors(once, inputs).mean() <= errors(each_hop, inputs).mean() / 2
    # Every rank but the first rounds what it has added, to 8 bits; none is larger than this.
    largest = inputs.double().abs().sum(0) * (1 + 2**-8) ** RANKS
    off = (each_hop.double() - inputs.double().sum(0)).abs()
    assert bool((off <= RANKS * 2**-9 * largest).all())
