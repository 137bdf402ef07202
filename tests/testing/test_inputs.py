"""Inputs of tests: they differ by rank, block and index, and special ones hold every special value."""

from __future__ import annotations

import itertools

import pytest
import torch

from ringcoll.tools.testing import values


def test_neighbours_ranks_and_blocks_differ() -> None:
    found = {
        (rank, block): values(torch.float64, 9, rank=rank, block=block)
        for rank, block in itertools.product(range(4), range(3))
    }
    for one, two in itertools.combinations(found.values(), 2):
        assert not (one == two).any()
    for tensor in found.values():
        assert (tensor[1:] != tensor[:-1]).all()
        assert tensor.abs().max() <= 20


@pytest.mark.parametrize("rank", range(5))
def test_random_factors_are_near_one(rank: int) -> None:
    found = values(torch.float64, 200, rank=rank, kind="random", op="product").abs()
    assert ((found >= 0.75) & (found < 1.75)).all()


def test_special_values_are_all_there() -> None:
    found = values(torch.float64, 2000, rank=1, kind="special")
    zeros = found[found == 0]
    assert zeros.signbit().any()
    assert not zeros.signbit().all()
    assert found.isnan().any()
    small = torch.tensor(5e-8).item()  # in float32
    assert {torch.inf, -torch.inf, small, 1.0, -1.0} <= {*found[~found.isnan()].tolist()}


@pytest.mark.parametrize("op", ["sum", "max", "bor", "bxor", "product", "min", "band"])
def test_truth_values_leave_both_results_possible(op: str) -> None:
    """Of several ranks, one false value decides an "and", and one true value an "or"."""
    share = values(torch.bool, 4000, rank=2, op=op).double().mean().item()
    expected = 0.9 if op in ("product", "min", "band") else 0.1
    assert abs(share - expected) < 0.03
