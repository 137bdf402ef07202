"""A barrier in the store, which names the ranks that do not come."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist

from ringcoll.errors import CollectiveTimeoutError, PeerLostError
from ringcoll.machine import appears, read_text

_LAST_S = 5.0  # for rank 0 to publish the result, when it has the last rank


def monitored_barrier(
    store: dist.Store,
    rank: int,
    world_size: int,
    number: int,
    timeout_s: float,
    wait_all_ranks: bool,
    given_up: Callable[[], bool] = lambda: False,
) -> None:
    """Wait until all ranks have come, or name the missing ranks.

    Rank 0 looks for the keys of all ranks, and publishes the result. ``number`` is the number of
    the barrier, the same on all ranks. If ``wait_all_ranks``, rank 0 names all missing ranks,
    otherwise the first. ``given_up`` says whether the wait is in vain.

    Raises
    ------
    CollectiveTimeoutError
        Some rank did not come.
    PeerLostError
        ``given_up`` has returned ``True``.
    """

    def appear(key: str, deadline: float) -> bool:
        if appears(store, [key], deadline, given_up):
            return True
        if given_up():
            raise PeerLostError(f"rank {rank} gave up monitored_barrier")
        return False

    keys = [f"{number}/{peer}" for peer in range(world_size)]
    limit = f"{1000 * timeout_s:g} ms"
    store.set(keys[rank], "")
    deadline = time.monotonic() + timeout_s
    if rank:
        # Rank 0 may come as late as the time limit allows, and then waits as long for others.
        if not appear(keys[0], deadline):
            raise CollectiveTimeoutError(
                f"rank {rank}: rank 0 failed to pass monitored_barrier in {limit}", peer=0
            )
        if not appear(f"{number}/over", deadline + timeout_s + _LAST_S):
            raise CollectiveTimeoutError(
                f"rank {rank}: rank 0 was lost in monitored_barrier", peer=0
            )
        failure = read_text(store, f"{number}/over")
        if failure:
            raise CollectiveTimeoutError(  # in gloo's words, which programs look for
                f"Rank {rank} successfully reached monitoredBarrier, but received errors while "
                f"waiting for send/recv from rank 0: {failure}"
            )
        return
    missing = []
    for peer in range(1, world_size):
        if not appear(keys[peer], deadline):
            missing.append(peer)
            if not wait_all_ranks:
                break
    failure = (
        f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} failed to pass "
        f"monitoredBarrier in {limit}, Rank 0 timed out in monitoredBarrier"
    )
    store.set(f"{number}/over", failure if missing else "")
    if missing:
        raise CollectiveTimeoutError(failure, peer=missing[0])
    for key in (f"{number - 1}/over", *(f"{number - 1}/{peer}" for peer in range(world_size))):
        store.delete_key(key)  # all ranks have left the barrier before
