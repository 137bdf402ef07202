"""Ranks that should not train together find out at once, and all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ringcoll import LocalGroup, run_threads
from ringcoll.errors import MismatchError, TrainingError
from ringcoll.training import check_finite, check_same
from tests.training.reference import perceptron


def test_equal_models_pass():
    run_threads(lambda group: check_same(perceptron(), group), 3)


@pytest.mark.parametrize("change", ["value", "dtype", "shape", "name"])
def test_a_rank_with_another_model_is_named_on_all_ranks(change: str):
    def main(group: LocalGroup) -> None:
        model: Any = perceptron()
        if group.rank() == 2:
            if change == "value":
                with torch.no_grad():
                    model[2].bias[-1] += 1e-12
            elif change == "dtype":
                model[0].float()
            elif change == "shape":
                model[0].bias = torch.nn.Parameter(model[0].bias[None])
            else:
                model.register_buffer("more", torch.zeros(1))
        with pytest.raises(MismatchError, match=f"rank {group.rank()}: .*rank 2 has") as caught:
            check_same(model, group)
        assert caught.value.peer == (0 if group.rank() == 2 else 2)
        assert caught.value.mine != caught.value.theirs

    run_threads(main, 4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_all_ranks_stop_where_a_loss_is_not_finite(bad: float):
    def main(group: LocalGroup) -> None:
        loss = torch.tensor(1.5, requires_grad=True)
        check_finite(loss, 6, group)
        if group.rank() == 1:
            loss = loss * bad
        with pytest.raises(TrainingError, match="the loss of rank 1 is not finite in step 7"):
            check_finite(loss, 7, group)

    run_threads(main, 3)


def test_of_several_steps_the_first_on_any_rank_is_named():
    def main(group: LocalGroup) -> None:
        losses = torch.ones(5)
        if group.rank() > 0:
            losses[[4, 2][group.rank() - 1] :] = float("nan")  # rank 2 is the first
        with pytest.raises(TrainingError, match="the loss of rank 2 is not finite in step 12"):
            check_finite(losses, 10, group)

    run_threads(main, 3)
