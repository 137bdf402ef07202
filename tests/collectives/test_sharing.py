"""Memory moves when no operation works on it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringcoll
from ringcoll import LocalGroup, UserOp, run_threads
from ringcoll.errors import ArgumentError

NUMEL = 20_000
Start = Callable[[LocalGroup, Tensor, UserOp], ringcoll.Work | None]

STARTS: dict[str, Start] = {
    "running": lambda group, tensor, op: ringcoll.all_reduce(tensor, op, group, True),
    "the second": lambda group, tensor, op: (
        ringcoll.all_reduce(torch.ones(3), op, group, True),
        ringcoll.all_reduce(tensor, "sum", group, True),
    )[1],
    "a part": lambda group, tensor, op: ringcoll.all_reduce_coalesced(
        [torch.ones(NUMEL), tensor], op, group, True
    ),
    "prepared": lambda group, tensor, op: ringcoll.all_reduce.plan(tensor, op, group, True)(),
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("what", ["tensor", "view", "module"])
def test_memory_moves_when_the_operations_on_it_are_over(start: str, what: str) -> None:
    started, go_on = threading.Event(), threading.Event()

    def slow(left: Tensor, right: Tensor) -> Tensor:
        started.set()
        assert go_on.wait(30)
        return left + right

    def main(group: LocalGroup) -> Any:
        tensor, before = torch.full((NUMEL,), group.rank() + 1.0), 0
        work = STARTS[start](group, tensor, UserOp(slow))
        assert work is not None
        if group.rank() == 0:
            assert started.wait(30)
            before = tensor.data_ptr()
            ringcoll.share(torch.ones(NUMEL))  # of other memory, at once
            assert not work.is_completed()
            threading.Timer(0.1, go_on.set).start()
            module = nn.Module()
            module.weight = nn.Parameter(tensor)
            whats: dict[str, Any] = {"tensor": tensor, "view": tensor[5:], "module": module}
            ringcoll.share(whats[what])
            assert work.is_completed()
            assert tensor.data_ptr() != before
        work.wait()
        return tensor.unique().tolist()

    assert run_threads(main, 2) == [[3.0]] * 2


def test_memory_of_a_message_does_not_move_before_the_message_was_waited_for() -> None:
    def main(group: LocalGroup) -> None:
        ringcoll.barrier(group)
        peer = 1 - group.rank()
        sent, arrived = torch.full((NUMEL,), group.rank() + 1.0), torch.zeros(NUMEL)
        works = [group.irecv(arrived, peer), group.isend(sent, peer)]
        for tensor, work in zip((arrived, sent), works, strict=True):
            with pytest.raises(ArgumentError, match="a receive is under way"):
                ringcoll.share(tensor[3:])
            work.wait()
            ringcoll.share(tensor)
        assert arrived.unique().tolist() == [peer + 1.0]

    run_threads(main, 2)
