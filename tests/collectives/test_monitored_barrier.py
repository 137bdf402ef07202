"""The barrier that names who is missing."""

from __future__ import annotations

import time
from typing import Any

import pytest

import ringcoll
from ringcoll import LocalGroup, run_threads
from ringcoll.errors import CollectiveTimeoutError


def test_a_monitored_barrier_waits_for_everybody():
    left = [0.0] * 3

    def main(group: LocalGroup) -> None:
        for slow in range(3):
            if group.rank() == slow:
                time.sleep(0.1)
                left[slow] = time.monotonic()
            ringcoll.monitored_barrier(group, timeout=20)
            assert time.monotonic() >= left[slow]

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
