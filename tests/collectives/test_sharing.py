"""Memory moves when no operation works on it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringcoll
from ringcoll import LocalGroup, UserOp, run_threads
from ringcoll.errors import ArgumentError, RingcollError
from ringcoll.runtime.collectives import messages_in_flight

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


def test_memory_moves_after_a_call_of_several_parts_has_failed() -> None:
    def main(group: Any) -> None:
        tensors = [torch.ones(20_000), torch.ones(20_000)]
        if group.rank() == 0:
            with pytest.raises(RingcollError):
                ringcoll.all_reduce_coalesced(tensors, group=group, timeout=0.5)
            for tensor in tensors:
                ringcoll.share(tensor)
                assert tensor.is_shared()

    ringcoll.run_threads(main, 2)


def test_memory_moves_while_others_send() -> None:
    """Who looks through the messages under way does not see them change."""

    class Sent:
        tensor: torch.Tensor | None = None

    is_over = threading.Event()

    def sends() -> None:
        while not is_over.is_set():
            works = [Sent() for _ in range(30)]
            for work in works:
                messages_in_flight[work] = None

    many = [Sent() for _ in range(50_000)]  # so that the other thread comes in between
    messages_in_flight.update(dict.fromkeys(many))
    thread = threading.Thread(target=sends)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    thread.start()
    try:
        for _ in range(5):
            ringcoll.share(torch.ones(1))
    finally:
        is_over.set()
        thread.join()
        sys.setswitchinterval(interval)
