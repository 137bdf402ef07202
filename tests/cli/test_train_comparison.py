"""The comparison of trained models between ranks, and with the native run."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringcoll import testing
from ringcoll.tools.bench import Meeting
from ringcoll.tools.cli.train import NATIVE_TRAINER, Contender, _compare, _ContenderOnRank


def runner(contender: Contender, parameters: list[float]) -> Any:
    """A contender that has trained on this rank, with these parameters at the end."""
    trainer = SimpleNamespace(whole=lambda: {"weight": torch.tensor(parameters)}, peak=None)
    run = object.__new__(_ContenderOnRank)
    vars(run).update(
        contender=contender, trainer=trainer, first=None, start=torch.zeros(2), start_loss=1.0,
        epochs=[], steps_s=[1.0 + dist.get_rank(), 1.0], bubbles=[], overlaps=[], nbytes_sent=10,
    )  # fmt: skip
    return run


def compared() -> list[tuple[float, float, float, float]]:
    """A contender whose parameters differ by rank, and the native run, which ends alike on all."""
    rank = dist.get_rank()
    meeting = Meeting()
    results = _compare(
        [
            runner(Contender("bucketed", "ring"), [3.0, 1.0 - 0.25 * rank]),
            runner(Contender("bucketed", "tree"), [3.0, math.nan if rank else 1.0]),
            runner(NATIVE_TRAINER, [2.0, 1.0]),
        ],
        meeting,
    )
    meeting.close()
    return [(one.between_ranks, *one.end) for one in results]


@pytest.mark.processes
def test_ranks_that_end_with_different_parameters():
    for found in testing.ranks(2, backend="gloo").run(compared):
        ring, tree, native = found
        assert ring == (0.25, 1.0, 3.0, 3.0)
        assert math.isnan(tree[0])
        assert native == (0.0, 0.0, 2.0, 2.0)
