"""Asynchronous calls begin where they are made, and what takes longer than a moment goes on in the queue."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import ringcoll
from ringcoll import testing
from ringcoll.errors import GroupBrokenError
from ringcoll.runtime.launch import RankError, Ranks
from ringcoll.runtime.transport import Handle, LocalTransport, NotYetError
from tests.programs import at_once as program


class _Impatient:
    """Threads give up at some waits, whatever the time is, where they may."""

    def __init__(self, give_up: Any) -> None:
        self._give_up = give_up

    def install(self, patch: pytest.MonkeyPatch) -> None:
        give_up, wait = self._give_up, LocalTransport.wait

        def brief(self: LocalTransport, handle: Handle, timeout_s: float) -> None:
            if self.until_s is not None and give_up(self.rank):
                raise NotYetError
            wait(self, handle, timeout_s)

        patch.setattr(LocalTransport, "waits_briefly", True)
        patch.setattr(LocalTransport, "wait", brief)


def _mine(rank: int, numel: int) -> torch.Tensor:
    return (torch.arange(numel) + 1) * (rank + 1)


@pytest.mark.parametrize("algorithm", ["ring", "direct", "two_shot", "binary_tree"])
@pytest.mark.parametrize("after", range(8))
def test_a_call_goes_on_after_any_of_its_waits(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, after: int
):
    gave_up: list[bool] = []

    def give_up(rank: int) -> bool:
        if rank != 1:  # one rank that gives up is enough; the others wait for it
            return False
        gave_up.append(len(gave_up) == after)
        return gave_up[-1]

    _Impatient(give_up).install(monkeypatch)

    def main(group: ringcoll.LocalGroup) -> list[bool]:
        size, right = group.size(), []
        ringcoll.all_reduce(torch.ones(1), group=group)  # the ranks have met
        for work, tensor, numel in _calls(group, algorithm):
            work.wait()
            right.append(torch.equal(tensor, _mine(0, numel) * (size * (size + 1) // 2)))
        return right

    def _calls(group: ringcoll.LocalGroup, algorithm: str) -> list[Any]:
        calls: list[Any] = []
        for numel in (7, 1, 100):
            tensor = _mine(group.rank(), numel)
            work = ringcoll.all_reduce(tensor, group=group, async_op=True, algorithm=algorithm)
            calls.append((work, tensor, numel))
        return calls

    assert ringcoll.run_threads(main, 4) == [[True] * 3] * 4
    assert gave_up


@pytest.mark.parametrize("seed", range(20))
def test_random_calls_of_impatient_ranks(monkeypatch: pytest.MonkeyPatch, seed: int):
    """Blocking and asynchronous calls in a row, of which some are waited for late; each rank gives up at random."""
    share = random.Random(seed).choice([0.05, 0.3, 0.9, 1.0])
    dice = random.Random(seed + 1000)
    _Impatient(lambda _: dice.random() < share).install(monkeypatch)
    size = 2 + seed % 4

    def main(group: ringcoll.LocalGroup) -> list[str]:
        rank, plan, wrong = group.rank(), random.Random(seed), list[str]()
        waiting: list[tuple[Any, torch.Tensor, torch.Tensor]] = []

        def finish() -> None:
            work, got, wanted = waiting.pop(0)
            if work is not None:
                work.wait()
            if not torch.equal(got, wanted):
                wrong.append(f"{got} instead of {wanted}")

        for _ in range(30):
            numel, is_async = plan.choice([1, 3, 40, 1000]), plan.random() < 0.7
            mine = _mine(rank, numel)
            if plan.random() < 0.5:
                work = ringcoll.all_reduce(mine, group=group, async_op=is_async)
                waiting.append((work, mine, _mine(0, numel) * (size * (size + 1) // 2)))
            else:
                gathered = torch.zeros(numel * size, dtype=torch.int64)
                work = ringcoll.all_gather_single(gathered, mine, group, async_op=is_async)
                wanted = torch.cat([_mine(each, numel) for each in range(size)])
                waiting.append((work, gathered, wanted))
            while waiting and plan.random() < 0.5:
                finish()
        while waiting:
            finish()
        return wrong

    assert ringcoll.run_threads(main, size) == [[]] * size


@pytest.mark.parametrize("when", ["the moment is over", "it is put back"])
def test_an_interrupt_between_the_moment_and_the_rest_breaks_the_group(
    monkeypatch: pytest.MonkeyPatch, when: str
):
    """Otherwise the next call would take the rest for its own."""
    _Impatient(lambda _: True).install(monkeypatch)

    def main(group: ringcoll.LocalGroup) -> tuple[bool, object, str]:
        member, tensor = group.communicator, torch.ones(3)
        ringcoll.all_reduce(torch.ones(1), group=group)
        name = "_run" if when == "the moment is over" else "_call_thread"
        method = getattr(member, name)

        def interrupted(*arguments: Any) -> None:
            try:
                method(*arguments)
            except NotYetError:
                raise KeyboardInterrupt from None
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(member, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                ringcoll.all_reduce(tensor, group=group, async_op=True)
        with pytest.raises(GroupBrokenError) as later:
            ringcoll.all_reduce(torch.ones(3), group=group)
        return member._under_way is None, member.progress.current, str(later.value)

    for is_dropped, current, text in ringcoll.run_threads(main, 2):
        assert is_dropped
        assert current is None
        assert "broken by an earlier failure" in text


# --- real processes -------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("numel", [1, 1000, 1_000_000])
def test_what_takes_a_moment_ends_where_it_is_called(numel: int):
    found = testing.ranks(2).run(program.ends_there, numel)
    assert [[call[:2] for call in calls] for calls in found] == [[(True, True)] * 5] * 2


@pytest.mark.processes
def test_what_ends_where_it_is_called_needs_no_thread():
    with Ranks(2, backend="ringcoll", timeout_s=60.0) as ranks:
        assert ranks.run(program.ends_there, 10) == [[(True, True, 0)] * 5] * 2


@pytest.mark.processes
@pytest.mark.parametrize("with_callback", [False, True])
@pytest.mark.parametrize("numel", [1, 1000, 1_000_000])
def test_where_a_rank_is_late_the_queue_goes_on(numel: int, with_callback: bool):
    first, second = testing.ranks(2).run(program.handed_over, numel, with_callback)
    assert first == (False, [], True, True)
    assert second[2:] == (True, True)


@pytest.mark.processes
def test_groups_may_be_called_in_another_order():
    found = testing.ranks(2).run(program.in_another_order)
    assert found == [[[3.0] * 3, [21.0] * 3]] * 2


@pytest.mark.processes
@pytest.mark.parametrize("moment_s", [0.001, 30.0])
def test_a_loss_is_told_to_who_waits(moment_s: float):
    reports: list[tuple[str, str, str, bool, object]] = []
    with Ranks(2, backend="ringcoll", timeout_s=60.0) as ranks, pytest.raises(RankError):
        ranks.run(program.loses_a_rank, moment_s, on_report=reports.append)
    ((kind, text, later, is_over, current),) = reports
    assert kind == "PeerLostError"
    assert "rank 1" in text
    assert (later, is_over, current) == ("GroupBrokenError", True, None)


@pytest.mark.processes
def test_an_interrupt_is_raised_where_the_call_is_made():
    with Ranks(2, backend="ringcoll", timeout_s=60.0) as ranks:
        (first, second), (other, _) = ranks.run(program.interrupted)
    assert (first, second) == ("KeyboardInterrupt", "GroupBrokenError")
    assert other in ("PeerLostError", "GroupBrokenError")


@pytest.mark.processes
def test_a_process_that_is_forked_off_does_not_take_the_rest():
    first, second = testing.ranks(2).run(program.forked_off)
    assert first == ("GroupBrokenError", [0, 3, 6, 9])
    assert second == ("", [0, 3, 6, 9])
