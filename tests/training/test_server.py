"""The synchronous server is data parallel, and with a bound no worker is too far ahead."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from ringcoll import run_threads
from ringcoll.errors import ArgumentError, CollectiveTimeoutError, PeerLostError
from ringcoll.runtime.launch import RankError
from ringcoll.training import ParameterServer, ServerWorker, systems
from tests.programs import out_of_step
from tests.programs.out_of_step import REFERENCES, close, initial, loss_on_all, with_server

STEPS = 9


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_synchronous_training_is_the_simulated_training(world_size: int):
    trained = run_threads(lambda group: with_server(group, STEPS), world_size)
    for ours, expected in zip(trained, REFERENCES["server"](world_size, STEPS), strict=True):
        assert close(ours, expected)
        assert torch.equal(ours, trained[0]), "all got the server's last parameters"


@pytest.mark.parametrize("staleness", [None, 0, 1])
def test_workers_may_leave_early(staleness: int | None):
    def rank_main(group):
        steps = 2 * group.rank()
        with_server(group, steps, staleness)

    run_threads(rank_main, 4)


def test_a_loop_over_a_generator_that_is_left_is_a_workers_end():

    def batches(module, group):
        with ServerWorker(module, group, timeout_s=5.0) as worker:
            while True:
                out_of_step.backward(module, 1, 0)
                worker.step()
                yield

    def rank_main(group):
        module = initial(group.rank())
        if group.rank() == 0:
            server = ParameterServer(module, out_of_step.sgd(module), group, timeout_s=5.0)
            server.serve()
            return server.num_updates
        loop = batches(module, group)
        next(loop)
        loop.close()
        return 1

    assert run_threads(rank_main, 2) == [1, 1]


class Progress:
    """What the workers note of each other: the gradients that each has sent."""

    def __init__(self, world_size: int) -> None:
        self.condition = threading.Condition()
        self.sent = [0.0] * world_size
        self.sent[0] = float("inf")  # the server sends none
        self.leads: list[float] = []

    def begin(self, rank: int) -> None:
        """A worker begins a step: how far is it ahead of the slowest?"""
        with self.condition:
            self.leads.append(self.sent[rank] - min(self.sent))
            self.condition.notify_all()

    def send(self, rank: int, clock: float) -> None:
        with self.condition:
            self.sent[rank] = clock
            self.condition.notify_all()

    def wait_for_lead(self, lead: float) -> None:
        """Wait until some worker has this lead, and a while longer: a larger lead is wrong."""
        with self.condition:
            assert self.condition.wait_for(lambda: max(self.leads) >= lead, 30)
            self.condition.wait_for(lambda: max(self.leads) > lead, 0.02)


def asynchronous(world_size: int, staleness: int) -> tuple[Progress, list[torch.Tensor], int]:
    """Train with a last worker that waits until another worker is as far ahead as it may be."""
    progress = Progress(world_size)

    def rank_main(group):
        rank, module = group.rank(), initial(group.rank())
        if rank == 0:
            server = ParameterServer(
                module, out_of_step.sgd(module), group, staleness=staleness, timeout_s=30.0
            )
            server.serve()
            assert server.nbytes_sent == server.num_updates * out_of_step.flat(module).nbytes
            return out_of_step.flat(module), server.num_updates
        with ServerWorker(module, group, timeout_s=30.0) as worker:
            for step in range(STEPS):
                progress.begin(rank)
                out_of_step.backward(module, rank, step)
                if rank == world_size - 1 > 1:
                    progress.wait_for_lead(min(staleness, STEPS - 1))
                progress.send(rank, step + 1)
                worker.step()
            progress.send(rank, float("inf"))  # it does not hold up the others any more
        return out_of_step.flat(module), 0

    params, updates = zip(*run_threads(rank_main, world_size), strict=True)
    return progress, list(params), updates[0]


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_no_worker_is_further_ahead_than_it_may_be(world_size: int, staleness: int):
    progress, _, num_updates = asynchronous(world_size, staleness)
    assert num_updates == STEPS * (world_size - 1)
    # A lead of the whole staleness occurs, because the slow worker waits for it.
    assert max(progress.leads) == (staleness if world_size > 2 else 0)


def test_without_a_bound_a_worker_runs_ahead():
    progress, _, _ = asynchronous(3, staleness=10**6)
    assert max(progress.leads) == STEPS - 1


@pytest.mark.slow
def test_asynchronous_training_reaches_its_target():
    def rank_main(group):
        return with_server(group, 300, staleness=2)

    params = run_threads(rank_main, 4)[0]
    before = loss_on_all(out_of_step.flat(initial(0)), 4)
    assert before > 0.45
    assert loss_on_all(params, 4) < 0.1


def test_bad_arguments():
    def rank_main(group):
        module, role = nn.Linear(2, 1), r"this rank cannot be .*rank 0 is the server.*got rank "
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        if group.rank() == 0:
            with pytest.raises(ArgumentError, match=r"'staleness'.*at least 0 steps, or None, got"):
                ParameterServer(module, optimizer, group, staleness=-1)
            with pytest.raises(ArgumentError, match=role + "0 of 2"):
                ServerWorker(module, group)
        else:
            with pytest.raises(ArgumentError, match=role + "1 of 2"):
                ParameterServer(module, optimizer, group)

    run_threads(rank_main, 2)
    with pytest.raises(ArgumentError, match=r"cannot be the server.*at least 2 ranks"):
        run_threads(lambda group: with_server(group, 1), 1)


@pytest.mark.parametrize("staleness", [None, 2])
def test_a_worker_that_goes_without_a_word(staleness: int | None):
    over = threading.Barrier(3)  # who returns has left, which is another error

    def rank_main(group):
        module = initial(0)
        if group.rank() == 0:
            optimizer = out_of_step.sgd(module)
            server = ParameterServer(module, optimizer, group, staleness=staleness, timeout_s=0.1)
            with pytest.raises(
                CollectiveTimeoutError, match=r"rank 0 waited to receive from rank [12]"
            ):
                server.serve()
        else:
            ServerWorker(module, group)
        over.wait(30)

    run_threads(rank_main, 3)


def test_a_worker_that_fails():
    caught: list[BaseException] = []

    def rank_main(group):
        module = initial(0)
        if group.rank() == 0:
            try:
                ParameterServer(module, out_of_step.sgd(module), group).serve()
            except PeerLostError as error:
                caught.append(error)
        else:
            with ServerWorker(module, group):
                raise KeyError("no more data")

    with pytest.raises(KeyError, match="no more data"):
        run_threads(rank_main, 2)
    assert "rank 1 raised KeyError('no more data')" in str(caught[0])


@pytest.mark.processes
@pytest.mark.parametrize("backend, staleness", [("ringcoll", None), ("gloo", 2)])
def test_the_server_goes_on_without_a_lost_worker(pool, backend: str, staleness: int | None):
    reports: list[tuple[str, list[int], int, torch.Tensor]] = []
    ranks = pool(3, backend)
    with pytest.raises(RankError, match="rank 2 raised ProcessDied"):
        ranks.run(out_of_step.lose_a_worker, staleness, 8, on_report=reports.append)
    ((kind, lost, num_updates, params),) = reports
    assert (kind, lost) == ("", [2])
    # Rank 2 took part in 4 of 8 steps; with a bound each gradient is a step of its own.
    assert num_updates == (8 if staleness is None else 8 + 4)
    if staleness is None:
        assert close(params, REFERENCES["server"](3, 8, 4)[0])


@pytest.mark.parametrize("gradient", [[5.0, 0.0, 3.0], [0.0, 0.0, 0.0], [1.0, 2.0, 0.0]])
def test_the_last_number_of_a_message_says_whether_its_worker_stays(gradient: list[float]) -> None:
    server = object.__new__(ParameterServer)
    messages = [(1, torch.tensor([*gradient, 1.0])), (2, torch.tensor([*gradient, 0.0]))]
    server._arrivals = cast("Any", SimpleNamespace(take=lambda: messages.pop(0)))
    server._ignored = ()
    worker, found = server._next()
    assert found is not None
    assert (worker, found.tolist()) == (1, gradient)
    assert server._next() == (2, None)


@pytest.mark.parametrize("option, learning_rate", [("", 0.6), ("async", 0.2)])
def test_a_step_of_each_worker_counts_for_its_share(option: str, learning_rate: float):
    rates: list[float] = []

    def make_optimizer(params: object, lr: float) -> str:
        rates.append(lr)
        return "made"

    task = SimpleNamespace(learning_rate=0.6, make_optimizer=make_optimizer)
    trainer: Any = SimpleNamespace(option=option, world_size=4, rank=2, params=[], task=task)
    systems.server(trainer)
    assert rates == [pytest.approx(learning_rate)]
    assert trainer.optimizer == "made"
    assert trainer.nbytes_sent() == 0
    assert [trainer.share(torch.arange(7)).tolist()] == [[3, 4]]
    with pytest.raises(ArgumentError, match="not a sample for each worker"):
        trainer.share(torch.arange(2))
    assert trainer.share(torch.arange(3)).tolist() == [1]
