"""The barrier that names who is missing."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringcoll
from ringcoll import LocalGroup, run_threads
from ringcoll.errors import CollectiveTimeoutError
from ringcoll.runtime.watch import monitored_barrier


def test_a_monitored_barrier_waits_for_everybody():
    left = [0.0] * 3

    def main(group: LocalGroup) -> None:
        for slow in range(3):
            if group.rank() == slow:
                time.sleep(0.1)
                left[slow] = time.monotonic()
            ringcoll.monitored_barrier(group, timeout=20)
            assert 0 < left[slow] <= time.monotonic()

    run_threads(main, 3)


@pytest.mark.parametrize("wait_all_ranks", [False, True])
def test_a_monitored_barrier_names_who_is_missing(wait_all_ranks: bool):
    def main(group: LocalGroup) -> str:
        text = ""
        if group.rank() in (0, 2):
            with pytest.raises(CollectiveTimeoutError) as caught:
                ringcoll.monitored_barrier(group, timeout=0.3, wait_all_ranks=wait_all_ranks)
            text = str(caught.value)
        else:
            time.sleep(0.8)
            # Who comes too late is told what came of it.
            with pytest.raises(CollectiveTimeoutError):
                ringcoll.monitored_barrier(group, timeout=0.3)
        ringcoll.barrier(group)  # the group works
        return text

    texts = run_threads(main, 4)
    named = "Ranks 1, 3" if wait_all_ranks else "Rank 1"
    assert texts[0].startswith(f"{named} failed to pass monitoredBarrier in 300 ms")
    assert named in texts[2]


@pytest.mark.slow
def test_a_rank_that_is_late_after_a_barrier_has_failed_makes_no_other_call():
    """It still computes, when others wait for it in the next call."""

    def main(group: LocalGroup) -> float:
        tensor = torch.ones(3)
        if group.rank() == 0:
            with pytest.raises(CollectiveTimeoutError):
                ringcoll.monitored_barrier(group, timeout=1)
            time.sleep(2)
        else:
            time.sleep(1.2)
        ringcoll.all_reduce(tensor, group=group)
        return tensor[0].item()

    assert run_threads(main, 2) == [2.0, 2.0]


def test_a_monitored_barrier_without_rank_0():
    def main(group: LocalGroup) -> None:
        if group.rank():
            with pytest.raises(CollectiveTimeoutError, match="rank 1: rank 0 failed") as caught:
                ringcoll.monitored_barrier(group, timeout=0.2)
            assert caught.value.peer == 0

    run_threads(main, 2)


def test_old_keys_of_monitored_barriers_are_deleted():
    """Keys in the store do not grow with the number of barriers."""
    counts: list[int] = []

    def main(group: LocalGroup) -> None:
        store: Any = group.communicator.store
        for number in range(20):
            ringcoll.monitored_barrier(group, timeout=20)
            ringcoll.barrier(group)
            if group.rank() == 0 and number in (4, 19):
                counts.append(store.num_keys())
            ringcoll.barrier(group)

    run_threads(main, 2)
    assert counts[1] <= counts[0] + 1


def test_rank_0_is_lost_after_it_has_come():
    """It may come at the time limit, wait as long for others, and then has to publish the result."""
    store = dist.HashStore()
    store.set("3/0", "")
    start = time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match="rank 1: rank 0 was lost") as caught:
        monitored_barrier(store, 1, 2, 3, 0.2, False)
    assert caught.value.peer == 0
    assert time.monotonic() - start >= 0.4


@pytest.mark.parametrize("wait_all_ranks", [False, True])
def test_the_first_missing_rank_is_the_peer(wait_all_ranks: bool):
    store = dist.HashStore()
    store.set("3/2", "")
    with pytest.raises(CollectiveTimeoutError) as caught:
        monitored_barrier(store, 0, 4, 3, 0.1, wait_all_ranks)
    assert caught.value.peer == 1


def test_the_keys_of_the_barrier_before_are_deleted():
    store = dist.HashStore()
    keys = [f"{number}/{name}" for number in (2, 3, 4) for name in ("over", "0", "1")]
    for key in keys:
        store.set(key, "")
    monitored_barrier(store, 0, 2, 4, 20.0, False)
    assert [key for key in keys if not store.check([key])] == ["3/over", "3/0", "3/1"]
