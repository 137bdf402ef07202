"""A transport that a program adds to the catalogue: gloo's, under a name of its own."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import ringcoll
from ringcoll.runtime.collectives import communicator
from ringcoll.runtime.transport import GlooTransport, catalogue
from ringcoll.schedules.cost import LinkCosts


class AddedTransport(GlooTransport):
    """Messages over gloo."""

    name = "added"


def check() -> None:
    """Nothing has to be installed."""


def make(
    store: dist.Store, rank: int, world_size: int, device: torch.device, timeout_s: float
) -> AddedTransport:
    """Make the transport."""
    return AddedTransport(store, rank, world_size)


def over_added_transport() -> tuple[tuple[str, str], list[float]]:
    """Run on every rank: add the transport, choose it for a new group, and use it."""
    catalogue.add(
        catalogue.Entry(
            name="added",
            module="tests.fakes.added_transport",
            sends=("cpu",),
            costs=LinkCosts(1e-4, 1e-9),
        )
    )
    group: Any = dist.new_group()
    ringcoll.use(group, transport="added")
    tensor = torch.tensor([1.0, 2.0]) + dist.get_rank()
    ringcoll.all_reduce(tensor, group=group)
    transport = communicator(group, torch.device("cpu")).transport
    return (type(transport).__name__, transport.name), tensor.tolist()
