"""How a resilient group begins, how another process joins it, and how torch trains on it."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ringcoll.collectives import OwnGroup, as_group, time_limit_s
from ringcoll.errors import ArgumentError
from ringcoll.machine import own_address, place, private, seconds_of, store_host
from ringcoll.resilient.group import ResilientGroup
from ringcoll.resilient.membership import Membership
from ringcoll.resilient.succession import Member, View
from ringcoll.transport import told_by
from ringcoll.watch import Lives


def start(
    group: Any = None,
    *,
    transport: str = "auto",
    verify_messages: bool | None = None,
    refit: bool = False,
    host: str | None = None,
) -> ResilientGroup:
    """Make a resilient group of the ranks of a process group; all of them call this.

    Parameters
    ----------
    group
        A process group of torch; by default the default group. It may be of any backend, and is not
        used any more: its store may die with rank 0. Its time limit is that of the operations, and
        how long a rank that lives, but does not come, is waited for.
    transport
        As for `ringcoll.use`.
    verify_messages
        As for `ringcoll.use`. An operation in which a message was changed is tried again.
    refit
        As for `ringcoll.use`; the group refits after ranks have left or come, too.
    host
        Address of this machine on which new ranks can be asked to be let in, and ranks agree; by
        default the loopback interface, or that on which other hosts' ranks are reached.

    Returns
    -------
    ResilientGroup
        The value for ``group=`` of the public functions.

    Raises
    ------
    ArgumentError
        The group is no process group of torch.
    CollectiveTimeoutError
        Some rank did not come.
    PeerLostError
        A rank has died before the group was formed.

    Examples
    --------
    ::

        dist.init_process_group("ringcoll")
        group = resilient.start()                  # a new rank: resilient.join("127.0.0.1:4711")
        step = 0
        while step < 1000:
            if group.admit():                      # ranks have come: all get rank 0's state
                step = group.send_state(model, optimizer, step=step)
            loss = loss_of(model(batch(step, group.rank(), group.size())))
            loss.backward()
            for param in model.parameters():       # who is there, also if ranks die meanwhile
                ringcoll.all_reduce(param.grad, dist.ReduceOp.AVG, group)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    """
    group = as_group(group)
    if isinstance(group, OwnGroup):
        raise ArgumentError(
            "cannot be made resilient",
            rank=group.rank(),
            argument="group",
            expected="a process group of torch",
            got=group,
        )
    rank, world_size, timeout_s = group.rank(), group.size(), time_limit_s(group)
    store = dist.PrefixStore("ringcoll/resilient", private(group.get_group_store()))
    lives = Lives(store, rank, world_size)
    lives.tell()

    def of_all(name: str, value: object) -> list[Any]:
        store.set(f"{name}/{rank}", json.dumps(value))
        ranks = range(world_size)
        values = told_by(store, name, rank, ranks, timeout_s, lambda: bool(lives.ended()))
        return [values[peer] for peer in ranks]

    places = of_all("place", [place(), store_host(store)])
    if host is None:
        is_local = all(where == places[0][0] for where, _ in places)
        host = "127.0.0.1" if is_local else own_address(places[0][1])
    membership = Membership(host)
    view = View(1, 0, tuple(map(Member.of, of_all("member", membership.own))))
    return ResilientGroup(
        membership, view, timeout_s, transport, verify_messages, refit, has_state=True
    )


def join(
    address: str,
    *,
    timeout_s: float = 1800.0,
    transport: str = "auto",
    verify_messages: bool | None = None,
    refit: bool = False,
    host: str | None = None,
) -> ResilientGroup:
    """Join a resilient group, at the next step at which its ranks call `ResilientGroup.admit`.

    Parameters
    ----------
    address
        `ResilientGroup.address` of any of its ranks, such as ``"127.0.0.1:4711"``.
    timeout_s
        Time limit of the wait and of each operation, in seconds.
    transport, verify_messages, refit, host
        As for `start`; all ranks choose alike.

    Returns
    -------
    ResilientGroup
        The group, in which this process is the last rank, or one of the last ranks.

    Raises
    ------
    ArgumentError
        The address is none.
    PeerLostError, CollectiveTimeoutError
        No rank of the group can be reached; the ranks did not let this process join.
    """
    timeout_s = seconds_of(timeout_s, "timeout_s")
    peer, _, port = address.rpartition(":")
    if not peer or not port.isdecimal():
        raise ArgumentError("no address", argument="address", expected="HOST:PORT", got=address)
    membership = Membership(own_address(peer) if host is None else host)
    view = membership.join(peer, int(port), timeout_s)
    return ResilientGroup(
        membership, view, timeout_s, transport, verify_messages, refit, has_state=False
    )


def data_parallel(
    module: nn.Module, group: ResilientGroup, **options: Any
) -> DistributedDataParallel:
    """Let ``DistributedDataParallel`` average the gradients of a module over a resilient group.

    To torch, each rank trains alone: its own process group would break with the first rank that
    dies, and has a fixed number of ranks. Only the gradients travel, by `all_reduce_hook`; buffers
    such as those of batch norm stay each rank's own. Parameters are made alike by
    `ResilientGroup.send_state`.

    Parameters
    ----------
    module, **options
        As for ``DistributedDataParallel``; no ``process_group``, ``find_unused_parameters`` or
        ``static_graph``.
    group
        The ranks that train together.

    Returns
    -------
    DistributedDataParallel
        The module, to be called as any other.
    """
    # Imported here: most groups do not need them.
    from ringcoll.backend import ProcessGroup
    from ringcoll.training import HookOptions, all_reduce_hook

    alone = ProcessGroup(dist.HashStore(), 0, 1, timedelta(seconds=group.communicator.timeout_s))
    # torch lays its buckets out anew after a rank's first step, unless it looks for unused
    # parameters. A new rank's buckets would be others than those of the ranks before it.
    options |= {"find_unused_parameters": True, "static_graph": False}
    model = DistributedDataParallel(module, process_group=alone, **options)
    model.register_comm_hook(HookOptions(group=group), all_reduce_hook)
    return model
