"""A whole model, put together from what ranks hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ringcoll
from ringcoll.errors import TrainingError
from ringcoll.training import whole_parameters

SHAPES = {"rows": torch.empty(6, 2), "shared": torch.empty(3), "far": torch.empty(1)}


def held(rank: int) -> dict[str, torch.Tensor]:
    """Two rows of six on each rank, a parameter of all ranks, and a parameter of rank 2 alone."""
    own = {"rows": torch.arange(4.0).view(2, 2) + 10 * rank, "shared": torch.arange(3.0)}
    return own | ({"far": torch.tensor([-7.0])} if rank == 2 else {})


def test_pieces_and_parameters_of_some_ranks_are_put_together():
    def rank_main(group: Any) -> dict[str, list[Any]]:
        whole = whole_parameters(held(group.rank()), SHAPES, group, group.rank())
        return {name: tensor.tolist() for name, tensor in whole.items()}

    rows = [
        [10.0 * rank + 2 * row, 10.0 * rank + 2 * row + 1] for rank in range(3) for row in (0, 1)
    ]
    expected = {"rows": rows, "shared": [0.0, 1.0, 2.0], "far": [-7.0]}
    assert ringcoll.run_threads(rank_main, 3) == [expected] * 3


@pytest.mark.parametrize("wrong", [1.5, float("nan")])
def test_ranks_that_hold_different_values_of_a_parameter_are_told(wrong: float):
    def rank_main(group: Any) -> str:
        own = held(group.rank())
        if group.rank() == 1:
            own["shared"][1] = wrong
        with pytest.raises(TrainingError) as caught:
            whole_parameters(own, SHAPES, group, group.rank())
        return str(caught.value)

    texts = ringcoll.run_threads(rank_main, 3)
    assert texts == [
        f"rank {rank}: the ranks that hold shared have different values of it" for rank in range(3)
    ]
