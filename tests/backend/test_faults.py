"""Faults in training on the backend: every survivor is told, in time, and nothing crashes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ringcoll import testing
from ringcoll.runtime.launch import RankError, Ranks
from tests.programs import backend_faults
from tests.programs.faults import Caught

pytestmark = pytest.mark.processes


def deaths(
    world_size: int, dying: int, function: Callable[..., None], *args: object
) -> list[tuple[int, Caught]]:
    """Run a function in which a rank dies; returns what the survivors reported.

    A survivor that crashes, by a segmentation fault say, would be among the failures.
    """
    reports: list[tuple[int, Caught]] = []
    with (
        Ranks(world_size, backend="ringcoll", timeout_s=60.0) as ranks,
        pytest.raises(RankError) as failure,
    ):
        ranks.run(function, *args, on_report=reports.append)
    assert failure.value.failures == {dying: ("ProcessDied", "the process ended with exit code -9")}
    assert {rank for rank, _ in reports} == set(range(world_size)) - {dying}
    return reports


@pytest.mark.slow
@pytest.mark.parametrize("trainer", backend_faults.TRAINERS)
def test_a_rank_dies_in_training(trainer: str):
    for rank, caught in deaths(3, 1, backend_faults.train_until_death, trainer, 1):
        # Raised by the wait in Python as it is; by C++, as a RuntimeError with its text.
        assert caught.kind in ("PeerLostError", "RuntimeError", "GroupBrokenError"), (rank, caught)
        assert "PeerLostError" in caught.text or caught.kind != "RuntimeError"
        assert "rank 1" in caught.text, (rank, caught)
        wanted = "all_gather|reduce_scatter" if trainer == "fsdp2" else "all_reduce"
        assert any(name in caught.text for name in wanted.split("|")), (rank, caught)
        assert caught.seconds < 10, (rank, caught)
        assert caught.next_kind == "GroupBrokenError", (rank, caught)


def test_a_rank_dies_and_nobody_waits():
    for rank, caught in deaths(3, 1, backend_faults.die_while_nobody_waits, 1):
        assert caught.kind == "GroupBrokenError", (rank, caught)
        for text in (caught.text, caught.theirs):  # the second is what was logged
            assert "rank 1's process has ended" in text or "lost rank 1" in text, (rank, caught)
            assert "all_reduce" in text, (rank, caught)
        assert caught.seconds < 5


def test_a_rank_dies_while_it_is_received_from():
    for _, caught in deaths(2, 1, backend_faults.die_while_receiving, 1):
        assert caught.kind == "PeerLostError"
        assert "rank 0 lost rank 1" in caught.text
        assert "tag 7" in caught.text
        assert caught.seconds < 5


def test_a_hook_that_raises_fails_the_step():
    for caught in testing.ranks(2).run(backend_faults.hooked_step, "raises"):
        assert isinstance(caught, Caught)
        assert "no gradients today" in caught.text


def test_a_hook_may_block_in_other_collectives():
    for world_size in (2, 3):
        # The sum of rank + 1 over the ranks, summed up once more.
        wanted = {float(world_size * sum(range(1, world_size + 1)))}
        assert (
            testing.ranks(world_size).run(backend_faults.hooked_step, "blocks")
            == [wanted] * world_size
        )


def test_power_sgd_keeps_ranks_equal():
    assert testing.ranks(3).run(backend_faults.power_sgd) == [[0.0] * 3] * 3


def test_time_limits_are_kept_however_they_are_given():
    for rank, found in enumerate(testing.ranks(3).run(backend_faults.time_limits)):
        for how, caught in found.items():
            if rank == 2:
                assert caught is None
                continue
            assert caught.kind in ("CollectiveTimeoutError", "PeerLostError"), (how, caught)
            assert 0.5 < caught.seconds < 2.9, (how, caught)
        if rank == 0:
            assert {caught.kind for caught in found.values()} >= {"CollectiveTimeoutError"}


def test_ten_thousand_operations_at_once_end_in_order():
    for in_order, wrong, threads in testing.ranks(2).run(backend_faults.many_at_once, 10_000):
        assert in_order
        assert wrong == 0
        assert threads < 15
