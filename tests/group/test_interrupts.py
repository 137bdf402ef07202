"""A signal comes at any step of a call: its function raises, or makes a call of the same group."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import ringcoll
from ringcoll.errors import GroupBrokenError, NestedCallError
from ringcoll.runtime.launch import Ranks
from tests.programs import alarms, interrupts


def test_a_call_within_another_one_of_its_group_is_refused():
    """An operator stands for a function for a signal: both are called in the middle of an operation."""

    def main(group: ringcoll.LocalGroup) -> tuple[list[float], str]:
        texts: list[str] = []

        def nested(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            with pytest.raises(NestedCallError) as caught:
                ringcoll.barrier(group)
            texts.append(str(caught.value))
            return left + right

        tensor = torch.full((2,), 1.0 + group.rank())
        ringcoll.all_reduce(tensor, ringcoll.UserOp(nested), group)
        ringcoll.barrier(group)  # the group can be used
        return tensor.tolist(), texts[0] if texts else ""

    found = ringcoll.run_threads(main, 3)
    assert [total for total, _ in found] == [[6.0, 6.0]] * 3
    told = {text for _, text in found if text}
    assert told
    for text in told:
        assert "the call of barrier was made within another operation of the same group" in text


def test_a_wait_within_the_operation_that_it_waits_for_is_refused():
    def main(group: ringcoll.LocalGroup) -> tuple[float, int]:
        refused = 0
        later: list[Any] = []
        is_made = threading.Event()

        def nested(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            nonlocal refused
            assert is_made.wait(20)
            with pytest.raises(NestedCallError, match="a wait was made within another operation"):
                later[0].wait()
            refused += 1
            return left + right

        first = ringcoll.all_reduce(
            torch.ones(1), ringcoll.UserOp(nested), group, True, algorithm="direct"
        )
        assert first is not None
        total = torch.full((1,), 1.0 + group.rank())
        later.append(ringcoll.all_reduce(total, group=group, async_op=True))
        is_made.set()
        first.wait()
        later[0].wait()
        return total.item(), refused

    assert [total for total, refused in ringcoll.run_threads(main, 2) if refused] == [3.0] * 2


def test_what_an_interrupt_has_left_taken_breaks_the_group_and_is_freed():
    def main(group: ringcoll.LocalGroup) -> list[str]:
        member, texts = group.communicator, list[str]()
        ringcoll.barrier(group)
        member._queue.serving.acquire()  # as if an interrupt had come just behind it
        for _ in range(2):
            with pytest.raises(GroupBrokenError) as caught:
                ringcoll.barrier(group)
            texts.append(str(caught.value))
        with ThreadPoolExecutor(1) as another:
            assert another.submit(member._queue.serving.acquire, blocking=False).result()
            another.submit(member._queue.serving.release).result()
        return texts

    for text in ringcoll.run_threads(main, 1)[0]:
        assert text.endswith("an earlier failure: rank 0 was interrupted in an operation")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ZeroDivisionError])
def test_an_interrupt_is_the_reason_why_the_group_is_broken(kind: type[BaseException]):
    def main(group: ringcoll.LocalGroup) -> str:
        def interrupted(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            raise kind

        with pytest.raises((kind, ringcoll.errors.RingcollError)):
            ringcoll.all_reduce(torch.ones(1), ringcoll.UserOp(interrupted), group)
        with pytest.raises(GroupBrokenError) as caught:
            ringcoll.barrier(group)
        return str(caught.value)

    for text in ringcoll.run_threads(main, 2):
        assert kind.__name__ in text


def test_an_interrupt_in_the_operation_of_another_call_is_raised_where_it_comes():
    """It came while this thread waited for its own call, and did the one before it."""

    def main(group: ringcoll.LocalGroup) -> tuple[str, str, str]:
        member = group.communicator
        ringcoll.barrier(group)

        def interrupted(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            # No thread of the queue: who waits does all the work.
            patch.setattr(member._queue, "call_thread", lambda *_: None)
            patch.setattr(member._queue, "serve_alone", lambda: None)
            first: Any = ringcoll.all_reduce(
                torch.ones(1), ringcoll.UserOp(interrupted), group, True, algorithm="direct"
            )
            second: Any = ringcoll.all_reduce(torch.ones(1), group=group, async_op=True)
            kinds = []
            for work in (second, first, second):
                try:
                    work.wait()
                    kinds.append("nothing")
                except BaseException as error:  # noqa: BLE001  # it is an interrupt
                    kinds.append(type(error).__name__)
        return kinds[0], kinds[1], kinds[2]

    assert (
        ringcoll.run_threads(main, 2)
        == [("KeyboardInterrupt", "GroupBrokenError", "GroupBrokenError")] * 2
    )


# --- real processes -------------------------------------------------------------------------

EVERY = 41  # steps of Python between two interrupts: all of them, one after the other, take an hour


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "kind, transport, numel, every, late_s",
    [
        ("blocking", "shared", 1, EVERY, 0.0),
        ("asynchronous", "shared", 1, EVERY, 0.03),
        ("prepared", "shared", 1, EVERY, 0.0),
        ("blocking", "gloo", 1, 2 * EVERY, 0.0),
        ("asynchronous", "gloo", 1, 2 * EVERY, 0.0),
    ],
)
def test_after_an_interrupt_the_call_is_done_or_the_group_is_broken(
    kind: str, transport: str, numel: int, every: int, late_s: float
):
    with Ranks(2, backend="ringcoll", timeout_s=120.0) as ranks:
        steps = 1, 10**6, every
        found = ranks.run(interrupts.everywhere, kind, transport, numel, steps, late_s)
    for each in found:
        assert each["wrong"] == []
        assert each["steps"] > 600, "the call has been interrupted in its middle, too"
        assert sum(each["ends"].values()) > 600 // every


@pytest.mark.processes
@pytest.mark.parametrize("sends", [True, False])
def test_after_an_interrupt_messages_of_the_users_own_come_in_their_order(sends: bool):
    with Ranks(2, backend="ringcoll", timeout_s=120.0) as ranks:
        found = ranks.run(interrupts.messages, sends, (1, 10**6, 7))
    for each in found:
        assert each["wrong"] == []
        assert each["steps"] > 300


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("backend, transport", [("ringcoll", "shared"), ("gloo", "gloo")])
def test_a_function_for_a_signal_may_make_a_call_while_the_program_waits_in_one(
    backend: str, transport: str
):
    with Ranks(2, backend=backend, timeout_s=30.0) as ranks:
        found = ranks.run(alarms.agrees, transport)
    for each in found:
        assert len(each) == (8 if backend == "ringcoll" else 7)
        assert {name: values[0] for name, values in each.items()} == dict.fromkeys(each, 3.0)
        short = ["short", "meeting", "prepared", "async", "several"]
        assert [each[name][1] for name in short] == [3.0] * 5
        assert [each[name][2] for name in ("long", "several")] == [3.0] * 2
