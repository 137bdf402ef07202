"""Measure the network of a group."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ringcoll.collectives.functions import barrier
from ringcoll.collectives.groups import communicator
from ringcoll.machine import seconds_of

if TYPE_CHECKING:
    from ringcoll.simulation import Measurements, Topology

_LIMIT_S = 10.0  # of a message


def measurements(group: Any = None, budget_s: float = 20.0) -> Measurements:
    """What `probe` measures, as numbers of pairs of ranks."""
    from ringcoll.group import probe as measure  # not above: every program imports this module

    budget_s, member = seconds_of(budget_s, "budget_s"), communicator(group, torch.device("cpu"))
    barrier(group)  # ranks may come as late as to any operation
    in_turn = partial(member.in_turn, name="probe")
    limit_s = min(_LIMIT_S, member.timeout_s)
    between_ranks = measure(member.transport, budget_s, limit_s, in_turn)
    assert member.table is not None
    return replace(between_ranks, rank_costs=member.table.parameters.of_rank)


def probe(group: Any = None, budget_s: float = 20.0) -> Topology:
    """Measure the network between the ranks of a group: hosts, their cards, and the switches between them.

    All ranks of the group call this; each gets the same topology. The messages are those of the group's transport for
    CPU tensors. Nothing else should run on these hosts meanwhile.

    Parameters
    ----------
    group
        As for `ringcoll.all_reduce`.
    budget_s
        Seconds to spend; hundreds of hosts take longer.

    Returns
    -------
    Topology
        The network as `ringcoll.simulate` takes it; `ringcoll.simulation.topology_text` writes it.

    Raises
    ------
    CollectiveTimeoutError
        Nothing came from a rank to another; the message names both.
    PeerLostError
        A rank was lost.

    Examples
    --------
    >>> import ringcoll
    >>> network = ringcoll.run_threads(lambda group: ringcoll.probe(group, 0.5), 2)[0]
    >>> [link.name for link in network.links]
    ['0 -> host0', 'host0 -> 0', '1 -> host0', 'host0 -> 1']
    """
    from ringcoll.simulation import topology_of

    return topology_of(measurements(group, budget_s))
