"""Local SGD, also with an outer optimizer, is its formula, simulated in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ringcoll import run_threads
from ringcoll.errors import ArgumentError
from ringcoll.training import LocalSGD
from tests.programs.out_of_step import EVERY, REFERENCES, TRAINERS, close


@pytest.mark.slow
@pytest.mark.parametrize("steps", [2 * EVERY, 2 * EVERY + 2])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", ["local SGD", "outer optimizer"])
def test_training_is_the_simulated_training(name: str, world_size: int, steps: int):
    trained = run_threads(lambda group: TRAINERS[name](group, steps), world_size)
    for ours, expected in zip(trained, REFERENCES[name](world_size, steps), strict=True):
        assert close(ours, expected)
    has_met = steps % EVERY == 0
    same = all(torch.equal(ours, trained[0]) for ours in trained)
    assert same == (has_met or world_size == 1)
    other = "outer optimizer" if name == "local SGD" else "local SGD"
    assert not close(trained[0], REFERENCES[other](world_size, steps)[0])


def test_it_says_when_the_ranks_meet_and_what_they_send():
    def rank_main(group):
        module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1).double())  # dtypes may differ
        averaging = LocalSGD(module, group, every=3)
        return [averaging.step() for _ in range(7)], averaging.nbytes_sent

    for met, nbytes in run_threads(rank_main, 4):
        assert met == [False, False, True, False, False, True, False]
        assert nbytes == 2 * (2 * 3 * (15 * 4 + 4 * 8) // 4)


def test_bad_arguments():
    def rank_main(group):
        with pytest.raises(ArgumentError, match=r"'every'.*expected at least 1 step, got 0"):
            LocalSGD(nn.Linear(2, 1), group, every=0)
        with pytest.raises(ArgumentError, match="'module': no parameter needs a gradient"):
            LocalSGD(nn.ReLU(), group, every=1)

    run_threads(rank_main, 2)
