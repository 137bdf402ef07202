"""Messages between two ranks: threads, and processes on which everything trains as well."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from ringcoll import all_reduce, run_threads, testing
from ringcoll.errors import ArgumentError, CollectiveTimeoutError, PeerLostError
from ringcoll.runtime.launch import RankError
from ringcoll.training import Messages
from tests.programs import out_of_step
from tests.programs.out_of_step import (
    REFERENCES,
    around,
    close,
    initial,
    late,
    late_on_rank_0,
    leave_alone,
    loss_on_all,
)


def check_around(ranks: list[list[list[float]]]) -> None:
    for rank, numbers in enumerate(ranks):
        others = [r for r in range(len(ranks)) if r != rank]
        first, second = numbers[: len(others)], numbers[len(others) :]
        assert first == [[10.0 * r] * 3 for r in reversed(others)]
        assert second == [[10.0 * r + 1] * 5 for r in others]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_messages_of_threads(world_size: int):
    check_around(run_threads(around, world_size))


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["ringcoll", "gloo"])
def test_messages_of_processes(backend: str):
    check_around(testing.ranks(3, backend=backend).run(around, None))


def test_the_sender_may_go_on_with_its_tensor():
    def rank_main(group):
        messages = Messages(group, 30.0)
        if group.rank() == 0:
            tensor = torch.ones(2)
            messages.send(tensor, 1)()
            tensor.zero_()
            messages.send(tensor, 1)()
            return None
        received = torch.zeros(2, 2)
        for row in received:
            messages.recv(row, 0)
        return received.tolist()

    assert run_threads(rank_main, 2)[1] == [[1, 1], [0, 0]]


def test_a_message_that_does_not_come():
    over = threading.Barrier(2)  # who returns has left, which is another error

    def rank_main(group):
        caught = None if group.rank() else late(group)
        over.wait(30)
        return caught

    caught = run_threads(rank_main, 2)[0]
    assert caught.kind == CollectiveTimeoutError.__name__
    assert "rank 0 waited to receive from rank 1, at most 0.05 s: no message" in caught.text
    assert caught.peer == 1


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["ringcoll", "gloo"])
def test_a_message_of_a_process_that_does_not_come(backend: str):
    caught = testing.ranks(2, backend=backend).run(late_on_rank_0)[0]
    assert caught.kind == CollectiveTimeoutError.__name__
    assert "rank 0 waited to receive from rank 1, at most 0.05 s: " in caught.text
    assert caught.peer == 1


def test_a_rank_that_fails_wakes_up_those_that_wait():
    caught: list[PeerLostError] = []

    def rank_main(group):
        if group.rank() == 1:
            raise KeyError("gone")
        try:
            Messages(group, 30.0).recv(torch.zeros(1), 1)
        except PeerLostError as error:
            caught.append(error)

    with pytest.raises(KeyError, match="gone"):
        run_threads(rank_main, 3)
    assert len(caught) == 2


@pytest.mark.processes
def test_a_process_that_ends():
    with pytest.raises(RankError) as caught:
        testing.ranks(2).run(leave_alone)
    kinds = {rank: kind for rank, (kind, _) in caught.value.failures.items()}
    assert kinds == {0: PeerLostError.__name__, 1: "ProcessDied"}
    assert caught.value.rank == 1, "the cause is reported, not what follows from it"


def test_tags_match_in_any_order_and_within_a_tag_in_order():
    def rank_main(group):
        messages, peer = Messages(group), 1 - group.rank()
        sent = [torch.tensor([10.0 * group.rank() + n]) for n in range(3)]
        got = [torch.zeros(1) for _ in sent]
        waits = [messages.send(sent[n], peer, tag) for n, tag in enumerate((5, 6, 5))]
        waits += [messages.receive(got[n], peer, tag) for n, tag in enumerate((6, 5, 5))]
        for wait in waits:
            wait()
        return [tensor.item() for tensor in got]

    assert run_threads(rank_main, 2) == [[11.0, 10.0, 12.0], [1.0, 0.0, 2.0]]


def test_messages_do_not_meet_the_operations_of_the_group():
    """Rank 1 sends a message with the tag under which rank 0 waits for it in an all-reduce."""

    def rank_main(group):
        tensor, message = torch.tensor([1.0, 2.0]) + group.rank(), torch.tensor([100.0])
        all_reduce(torch.zeros(1), group=group)  # the ranks have met
        if group.rank() == 0:
            all_reduce(tensor, group=group, algorithm="ring")
            group.irecv(message.zero_(), 1, all_tags.pop()).wait()
        else:
            receives = group.communicator.transport.hub._receives
            while not (tags := [tag for (*_, tag), queue in tuple(receives.items()) if queue]):
                time.sleep(0.001)
            all_tags.append(tags[0])
            sent = group.isend(message, 0, tags[0])
            all_reduce(tensor, group=group, algorithm="ring")
            sent.wait()
        return [*tensor.tolist(), message.item()]

    all_tags: list[int] = []
    assert run_threads(rank_main, 2) == [[3.0, 5.0, 100.0]] * 2


@pytest.mark.parametrize(
    "call, text",
    [
        (
            lambda m: m.send(torch.zeros(1), 2),
            "'dst': cannot be used .*another rank below 2, got 2",
        ),
        (lambda m: m.recv(torch.zeros(1), m.rank), "'src': cannot be used .*another rank below 2"),
        (lambda m: m.send(torch.zeros(2, 3).t(), 1 - m.rank), "'tensor': .*contiguous"),
        (lambda m: m.recv(torch.zeros(1, requires_grad=True), 1 - m.rank), "'tensor': .*gradient"),
        (lambda m: Messages(m.group, float("nan")), "'timeout_s': must be positive .*, got nan"),
    ],
)
def test_messages_that_cannot_be_are_refused_before_they_start(call: Any, text: str):
    def rank_main(group):
        messages = Messages(group, 30.0)
        with pytest.raises(ArgumentError, match=f"rank {group.rank()}: argument {text}"):
            call(messages)

    run_threads(rank_main, 2)


def test_groups_without_messages():
    with pytest.raises(ArgumentError, match="there is no default group"):
        Messages(None, 1.0)

    class Other:
        pass

    with pytest.raises(ArgumentError, match="not a process group"):
        Messages(Other(), 1.0)


@pytest.mark.processes
@pytest.mark.parametrize("name", out_of_step.TRAINERS)
def test_training_on_processes_is_the_simulated_training(name: str):
    for ours, expected in zip(
        testing.ranks(3).run(out_of_step.by_name, name, 7), REFERENCES[name](3, 7), strict=True
    ):
        assert close(ours, expected)


@pytest.mark.processes
def test_asynchronous_training_on_processes_reaches_its_target():
    params = testing.ranks(3).run(out_of_step.with_server, None, 300, 2)[0]
    before = loss_on_all(out_of_step.flat(initial(0)), 3)
    assert before > 0.45
    assert loss_on_all(params, 3) < 0.1
