"""Which device the tensors of a call are on."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringcoll
from ringcoll import LocalGroup
from ringcoll.errors import ArgumentError
from ringcoll.runtime.collectives import functions as api
from ringcoll.runtime.transport import streams
from ringcoll.training.backend import process_group as backend
from tests.fakes.second_device import Elsewhere


def alone() -> backend.ProcessGroup:
    return backend.ProcessGroup(dist.HashStore(), 0, 1, timedelta(seconds=20))


def test_tensors_of_one_call_are_on_one_device():
    def main(group: LocalGroup) -> None:
        far = torch.zeros(3).as_subclass(Elsewhere)
        with pytest.raises(ArgumentError, match=r"on one device.*expected cpu, got cuda:1"):
            ringcoll.all_reduce(torch.zeros(3), group=group, out=far)
        with pytest.raises(ArgumentError, match=r"on one device.*expected cuda:1, got cpu"):
            ringcoll.all_gather([torch.zeros(3)], far, group=group)

    ringcoll.run_threads(main, 1)


def test_tensors_of_a_coalesced_call_are_on_one_device(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RINGCOLL_REDUCTION", "torch")

    def main(group: LocalGroup) -> None:
        near, far = torch.zeros(3), torch.zeros(3).as_subclass(Elsewhere)
        for tensors, said in (([near, far], "cpu, got cuda:1"), ([far, near], "cuda:1, got cpu")):
            with pytest.raises(ArgumentError, match=f"on one device.*expected {said}"):
                ringcoll.all_reduce_coalesced(tensors, group=group)
        factor = torch.ones(1).as_subclass(Elsewhere)
        monkeypatch.setattr(Elsewhere, "is_cpu", False, raising=False)
        with pytest.raises(ArgumentError, match=r"factor.*expected cpu, got cuda:1"):
            ringcoll.all_reduce(near, ringcoll.premul_sum(factor), group=group)
        ringcoll.all_reduce(near, group=group)  # and the group is as it was

    ringcoll.run_threads(main, 1)


@pytest.mark.parametrize("given, wanted", [("cpu", None), ("cuda", [3]), ("cuda:1", [1])])
def test_a_barrier_uses_the_device_that_torch_names(
    monkeypatch: pytest.MonkeyPatch, given: str, wanted: list[int] | None
):
    asked = []

    def barrier(**keywords: Any) -> None:
        asked.append(keywords["device_ids"])

    monkeypatch.setattr(api, "barrier", barrier)
    monkeypatch.setattr(streams, "current_device", lambda: 3)
    group, options = alone(), dist.BarrierOptions()
    options.device = torch.device(given)
    group.barrier(options).wait()
    assert asked == [wanted]
