"""A group fits its algorithms to its network."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ringcoll.collectives.functions import barrier
from ringcoll.collectives.groups import communicator
from ringcoll.errors import ArgumentError
from ringcoll.machine import seconds_of
from ringcoll.schedule import contract


def refit(group: Any = None, uses: Iterable[tuple[str, int]] = (), budget_s: float = 3.0) -> str:
    """Measure the network of a group now, fit algorithms to it, and use them from the next operation on.

    All ranks of the group call this. Rank 0 fits and proves (`ringcoll.search.fit`), and publishes. With
    ``Options(refit=True)`` a group does this by itself when its operations have become slow.

    Parameters
    ----------
    group
        As for `ringcoll.all_reduce`.
    uses
        Collectives and bytes of their whole data to fit, at three sizes at most each; by default those of the group's
        operations so far. A fit of other collectives is dropped, as it was to another network.
    budget_s
        Seconds that the measurement is to take.

    Returns
    -------
    str
        What was fitted and why, a line a rule; empty if nothing is faster than the registered algorithms in rank order.

    Raises
    ------
    ScheduleError, ArgumentError
        There is no such collective, or bytes are no whole number above 0.
    CollectiveTimeoutError, PeerLostError
        A rank did not take part, or was lost.

    Examples
    --------
    >>> import ringcoll
    >>> words = ringcoll.run_threads(lambda group: ringcoll.refit(group, [("all_reduce", 1 << 20)], 0.5), 2)
    >>> words[0] == words[1]
    True
    """
    uses, budget_s = [*uses], seconds_of(budget_s, "budget_s")
    for collective, nbytes in uses:
        contract(collective)
        if type(nbytes) is not int or nbytes < 1:
            raise ArgumentError(
                "not a size", argument="uses", expected="bytes, at least 1", got=repr(nbytes)
            )
    barrier(group)  # ranks may come as late as to any operation
    member = communicator(group, torch.device("cpu"))
    member.in_turn(lambda: member.refit(member.timeout_s, uses, budget_s), "refit")
    assert member.table is not None
    fit = member.table.fit
    rows = zip(fit.rules, fit.reasons, strict=True) if fit else ()
    return "\n".join(f"{rule}: {reason}" for rule, reason in rows)
