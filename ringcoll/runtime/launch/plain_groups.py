"""Groups of threads of this process, without torch's groups: for notebooks, examples and tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ringcoll.errors import PeerLostError
from ringcoll.runtime.collectives import OwnGroup
from ringcoll.runtime.group import Communicator
from ringcoll.runtime.machine import seconds_of
from ringcoll.runtime.process import check_not_ending, start_thread
from ringcoll.runtime.transport import Faults, Hub, as_asked


class LocalGroup(OwnGroup):
    """A rank of a group whose ranks are threads of this process; see `run_threads`.

    Examples
    --------
    >>> run_threads(lambda group: (group.rank(), group.size()), 2)
    [(0, 2), (1, 2)]
    """


def run_threads(
    function: Callable[[LocalGroup], Any],
    world_size: int,
    *,
    timeout_s: float = 60.0,
    verify_messages: bool = False,
    faults: Faults | None = None,
) -> list[Any]:
    """Run a function on k ranks that are threads of this process.

    For notebooks, examples and tests: no processes, no network.

    Parameters
    ----------
    function
        Function that each rank calls with its `LocalGroup`, the value for ``group=`` of the
        public functions.
    world_size
        Number of ranks.
    timeout_s
        Time limit of each operation, in seconds.
    verify_messages
        Whether messages have checksums: see `ringcoll.use`.
    faults
        What is to go wrong with messages, and how often; by default nothing.

    Returns
    -------
    list
        Return value of the function on each rank.

    Raises
    ------
    BaseException
        The exception of the first rank that failed; the other ranks are woken up.

    Examples
    --------
    >>> import torch, ringcoll
    >>> def rank_main(group):
    ...     tensor = torch.tensor([group.rank() + 1])
    ...     ringcoll.all_reduce(tensor, group=group, algorithm="ring")
    ...     return tensor.item()
    >>> ringcoll.run_threads(rank_main, 4)
    [10, 10, 10, 10]
    """
    timeout_s = seconds_of(timeout_s, "timeout_s")
    hub, store = Hub(world_size), dist.HashStore()
    members = [
        Communicator(
            as_asked(transport, verify_messages=verify_messages, faults=faults),
            dist.PrefixStore("monitor", store),
            timeout_s,
        )
        for transport in hub.transports()
    ]
    results: list[Any] = [None] * world_size
    failures: list[BaseException] = []

    def main(rank: int) -> None:
        try:
            results[rank] = function(LocalGroup(members[rank]))
        except BaseException as error:  # noqa: BLE001  # raised again below
            failures.append(error)
            hub.abort(f"rank {rank} raised {error!r}")
        finally:
            members[rank].close()

    check_not_ending()
    threads = [start_thread(main, f"rank-{rank}", rank) for rank in range(world_size)]
    for thread in threads:
        thread.join()
    # A rank that was woken up by another's failure did not fail first.
    first = [error for error in failures if not isinstance(error, PeerLostError)]
    if failures:
        raise (first or failures)[0]
    return results
