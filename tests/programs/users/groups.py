"""Users of groups, and of the collectives and messages of torch.distributed itself."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

import ringcoll
from ringcoll.runtime.launch import rendezvous
from tests.programs.ranks import AS_GIVEN
from tests.programs.users.models import batch


def _group() -> Any:
    return dist.group.WORLD


def _other_backend() -> str:
    return "gloo" if dist.get_backend() == "ringcoll" else "ringcoll"


def _of_members(group: Any, rank: int) -> Tensor:
    """A sum over a group, and who is in it; nothing for others."""
    if dist.get_rank(group) < 0:
        return torch.zeros(2)
    total = batch(rank, 0)
    dist.all_reduce(total, group=group)
    own = torch.tensor([dist.get_rank(group), dist.get_world_size(group)])
    return torch.cat([total.reshape(-1), own])


# --- groups ---------------------------------------------------------------------------


def sub_groups(rank: int, world_size: int) -> dict[str, Tensor]:
    """Groups of one, of two in either order, and of all."""
    found = {}
    for members in ([0], [0, 1], [world_size - 1, 0], list(range(world_size))):
        group = dist.new_group(members, **AS_GIVEN)
        found[str(members)] = _of_members(group, rank)
        if rank in members:
            dist.broadcast(total := batch(rank, 1), members[-1], group=group)
            found[f"{members}, sent"] = total
    return found


def sub_groups_of_another_backend(rank: int, world_size: int) -> dict[str, Tensor]:
    """Gloo's group in a world of this library's, or the other way round."""
    found = {}
    for members in ([0, 1], list(range(world_size))):
        group = dist.new_group(members, backend=_other_backend())
        if rank in members:
            assert dist.get_backend(group) == _other_backend()
        found[str(members)] = _of_members(group, rank)
    found["world"] = _of_members(None, rank)
    return found


def sub_groups_made_by_members(rank: int, world_size: int) -> dict[str, Tensor]:
    """Only the members call new_group."""
    members = [peer for peer in range(world_size) if peer % 2 == rank % 2]
    group = dist.new_group(members, use_local_synchronization=True)
    total = _of_members(group, rank)
    dist.barrier()
    return {"total": total}


def sub_groups_with_options(rank: int, world_size: int) -> dict[str, Tensor]:
    """An algorithm by name, a time limit, a description."""
    ours = dist.get_backend() == "ringcoll"
    options = ringcoll.Options(algorithm="ring", segment_bytes=64) if ours else None
    group: Any = dist.new_group(
        timeout=timedelta(seconds=7), pg_options=options, group_desc="by name"
    )
    assert group.group_desc == "by name"
    if ours:
        assert group.timeout == timedelta(seconds=7)
    return {"total": _of_members(group, rank)}


def new_subgroups(rank: int, world_size: int) -> dict[str, Tensor]:
    """The world cut into equal pieces."""
    found = {}
    for numel in (numel for numel in (1, 2, world_size) if world_size % numel == 0):
        own, everyone = dist.new_subgroups(numel)
        assert len(everyone) == world_size // numel
        found[str(numel)] = _of_members(own, rank)
    enumerated = [[0], list(range(1, world_size))]
    own, _ = dist.new_subgroups_by_enumeration(enumerated)
    return {**found, "enumerated": _of_members(own, rank)}


def meshes(rank: int, world_size: int) -> dict[str, Tensor]:
    """Meshes of one and two dimensions, their slices, flattened."""
    line = init_device_mesh("cpu", (world_size,), mesh_dim_names=("all",))
    plane = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("a", "b"))
    flat = plane["a", "b"]._flatten("flat")
    groups = {
        "line": line.get_group(),
        "a": plane.get_group("a"),
        "b": plane["b"].get_group(),
        "flat": flat.get_group(),
    }
    found = {name: _of_members(group, rank) for name, group in groups.items()}
    found["place"] = torch.tensor(plane.get_coordinate())
    return found


def split(rank: int, world_size: int) -> dict[str, Tensor]:
    """A group split from another; gloo's cannot be, and is made anew."""
    found = {}
    for members in ([world_size - 1, 0], [1]):
        if dist.get_backend() == "ringcoll":
            group = _group().split_group(members)
            if rank not in members:
                assert group is None
                continue
        else:
            group = dist.new_group(members, **AS_GIVEN)
            if rank not in members:
                continue
        total = batch(rank, 0)
        group.allreduce([total]).wait()
        group.broadcast([sent := batch(rank, 1)]).wait()
        found[str(members)], found[f"{members}, sent"] = total, sent
    dist.barrier()
    return {**found, "rank": torch.tensor(rank)}


def again_and_again(rank: int, world_size: int) -> dict[str, Tensor]:
    """The world is destroyed and made again."""
    backend = dist.get_backend()
    store, _, _ = rendezvous()
    turn = torch.randint(2**40, ())  # the seed is the same on all ranks
    dist.broadcast(turn, 0)
    found = {"first": _of_members(None, rank)}
    for number in range(3):
        dist.destroy_process_group()
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"again/{backend}/{turn}/{number}", store),
            rank=rank,
            world_size=world_size,
        )
        group = dist.new_group([0, 1])
        found[f"sub {number}"] = _of_members(group, rank)
        if number == 1 and rank < 2:
            dist.destroy_process_group(group)
        found[str(number)] = _of_members(None, rank)
    return found


def several_at_once(rank: int, world_size: int) -> dict[str, Tensor]:
    """Operations in flight on several groups, waited for in another order."""
    groups = [None, dist.new_group(), dist.new_group([0, 1])]
    mine = [group for group in groups if dist.get_rank(group) >= 0]
    tensors = [batch(rank, step) for step in range(6 * len(mine))]
    works: list[Any] = [
        dist.all_reduce(tensor, group=mine[index % len(mine)], async_op=True)
        for index, tensor in enumerate(tensors)
    ]
    for work in reversed(works):
        work.wait()
    return {str(index): tensor for index, tensor in enumerate(tensors)}


def from_threads(rank: int, world_size: int) -> dict[str, Tensor]:
    """A thread for each group; they start in another order on every rank."""
    groups: list[Any] = [dist.new_group() for _ in range(3)]
    tensors = [[batch(rank, 10 * index + step) for step in range(5)] for index in range(3)]

    def main(index: int) -> None:
        for tensor in tensors[index]:
            dist.all_reduce(tensor, group=groups[index])

    threads = [threading.Thread(target=main, args=((rank + turn) % 3,)) for turn in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {str(index): torch.cat(row) for index, row in enumerate(tensors)}


# --- objects and messages -------------------------------------------------------------


def _numbers(items: Any) -> Tensor:
    """The bytes of what objects look like in words."""
    return torch.tensor(list(repr(items).encode()))


def objects(rank: int, world_size: int) -> dict[str, Tensor]:
    """Collectives of anything that can be pickled, of other lengths on every rank."""
    own = {"rank": rank, "word": "x" * (3 * rank + 1)}
    last = world_size - 1
    everything: list[Any] = [None] * world_size
    dist.all_gather_object(everything, own)
    sent: list[Any] = [own, rank] if rank == last else [None, None]
    dist.broadcast_object_list(sent, src=last)
    gathered: list[Any] | None = [None] * world_size if rank == 0 else None
    dist.gather_object(own, gathered, dst=0)
    share: list[Any] = [None]
    shares = [f"for {peer}" for peer in range(world_size)] if rank == last else None
    dist.scatter_object_list(share, shares, src=last)
    received: list[Any] = [None, None]
    if rank == 0:
        dist.send_object_list([own, "a longer one"], dst=last)
    elif rank == last:
        dist.recv_object_list(received, src=0)
    results = (everything, sent, gathered, share, received)
    return {str(number): _numbers(result) for number, result in enumerate(results)}


def messages(rank: int, world_size: int) -> dict[str, Tensor]:
    """Sends and receives of every kind, around a ring and from any rank."""
    ahead, behind = (rank + 1) % world_size, (rank - 1) % world_size
    found = {}
    got = torch.zeros(4, 6)
    works = [dist.irecv(got, behind), dist.isend(batch(rank, 0), ahead)]
    for work in works:
        assert work is not None
        work.wait()
    found["ring"] = got
    tagged = [torch.zeros(4, 6) for _ in range(3)]
    works = [dist.irecv(tagged[tag], behind, tag=tag) for tag in (2, 0, 1)]
    works += [dist.isend(batch(rank, tag), ahead, tag=tag) for tag in range(3)]
    for work in works:
        assert work is not None
        work.wait()
    found["tagged"] = torch.cat(tagged)
    batched = torch.zeros(4, 6)
    pair = [
        dist.P2POp(dist.isend, batch(rank, 4), ahead),
        dist.P2POp(dist.irecv, batched, behind),
    ]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    found["batched"] = batched
    if rank == 0:
        seen = torch.zeros(world_size, 24)
        for _ in range(world_size - 1):
            source = dist.recv(any_rank := torch.zeros(24))
            seen[source] = any_rank
        found["from any"] = seen
        dist.send(torch.tensor([7]), world_size - 1)
    else:
        dist.send(batch(rank, 5).reshape(-1), 0)
    if rank == world_size - 1:
        dist.recv(last := torch.tensor([0]), 0)
        found["blocking"] = last
    return found


def messages_in_a_sub_group(rank: int, world_size: int) -> dict[str, Tensor]:
    """Peers by global rank and by rank in the group, whose order is another."""
    group: Any = dist.new_group([world_size - 1, 0], **AS_GIVEN)
    got = torch.zeros(4, 6)
    if rank == 0:
        dist.send(batch(rank, 0), world_size - 1, group=group)
        dist.recv(got, group=group, group_src=dist.get_group_rank(group, world_size - 1))
    elif rank == world_size - 1:
        dist.recv(got, 0, group=group)
        dist.send(batch(rank, 1), group=group, group_dst=dist.get_group_rank(group, 0))
    return {"got": got}


# --- collectives, by every name -------------------------------------------------------


def _started(call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Run a collective asynchronously, and wait for its future."""
    work = call(*arguments, **options, async_op=True)
    if dist.get_backend() == "ringcoll":  # some works of gloo's have no future
        work.get_future().wait()
        assert work.is_completed()
    work.wait()


def _all(run: Callable[..., None], rank: int, world_size: int) -> dict[str, Tensor]:
    last = world_size - 1
    found: dict[str, Tensor] = {}
    operators = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
    operators |= {"product": dist.ReduceOp.PRODUCT, "avg": dist.ReduceOp.AVG}
    for name, op in operators.items():
        found[f"all_reduce {name}"] = own = batch(rank, 0)
        run(dist.all_reduce, own, op=op)
    bits = torch.tensor([5, 3 * rank + 1, 12])
    for name, op in {"and": dist.ReduceOp.BAND, "or": dist.ReduceOp.BOR}.items():
        found[f"all_reduce {name}"] = own = bits.clone()
        run(dist.all_reduce, own, op=op)
    found["reduce"] = own = batch(rank, 1)
    run(dist.reduce, own, dst=last)
    if rank != last:
        del found["reduce"]  # gloo leaves partial sums there
    found["broadcast"] = own = batch(rank, 2)
    run(dist.broadcast, own, src=last)
    outputs = [torch.zeros(4, 6) for _ in range(world_size)]
    run(dist.all_gather, outputs, batch(rank, 3))
    found["all_gather"] = torch.cat(outputs)
    found["all_gather_into_tensor"] = torch.zeros(4 * world_size, 6)
    run(dist.all_gather_into_tensor, found["all_gather_into_tensor"], batch(rank, 4))
    gathered = [torch.zeros(4, 6) for _ in range(world_size)] if rank == 0 else None
    run(dist.gather, batch(rank, 5), gathered, dst=0)
    if gathered:
        found["gather"] = torch.cat(gathered)
    found["scatter"] = torch.zeros(4, 6)
    pieces = [batch(peer, 6) for peer in range(world_size)] if rank == last else None
    run(dist.scatter, found["scatter"], pieces, src=last)
    found["reduce_scatter"] = torch.zeros(4, 6)
    inputs = [batch(rank, 10 + peer) for peer in range(world_size)]
    run(dist.reduce_scatter, found["reduce_scatter"], inputs)
    found["reduce_scatter_tensor"] = torch.zeros(4, 6)
    run(dist.reduce_scatter_tensor, found["reduce_scatter_tensor"], torch.cat(inputs))
    outputs = [torch.zeros(4, 6) for _ in range(world_size)]
    run(dist.all_to_all, outputs, inputs)
    found["all_to_all"] = torch.cat(outputs)
    found["all_to_all_single"] = torch.zeros(4 * world_size, 6)
    run(dist.all_to_all_single, found["all_to_all_single"], torch.cat(inputs))
    sizes = [peer + 1 for peer in range(world_size)]
    uneven = batch(rank, 7, numel=sum(sizes))
    found["all_to_all_single uneven"] = torch.zeros((rank + 1) * world_size, 6)
    run(
        dist.all_to_all_single,
        found["all_to_all_single uneven"],
        uneven,
        [rank + 1] * world_size,
        sizes,
    )
    run(dist.barrier)
    return found


def collectives(rank: int, world_size: int) -> dict[str, Tensor]:
    """Every collective of torch.distributed."""
    return _all(operator.call, rank, world_size)


def collectives_in_flight(rank: int, world_size: int) -> dict[str, Tensor]:
    """Every collective, asynchronously, waited for by its future."""
    return _all(_started, rank, world_size)


def futures(rank: int, world_size: int) -> dict[str, Tensor]:
    """Callbacks of futures see the results, and may start further collectives."""
    own = batch(rank, 0)
    first: Any = dist.all_reduce(own, async_op=True)

    def then(future: Any) -> Any:
        (total,) = future.value()
        second = total / 2
        work: Any = dist.all_reduce(second, async_op=True)
        return work.get_future()

    inner = first.get_future().then(then).wait()
    (result,) = inner.wait()
    return {"first": own, "second": result}


def coalesced(rank: int, world_size: int) -> dict[str, Tensor]:
    """Several collectives as one, by the coalescing manager and by the old functions."""
    found: dict[str, Tensor] = {}
    for how in (False, True):
        totals = [batch(rank, step) for step in range(3)]
        with c10d._coalescing_manager(async_ops=how) as manager:
            for total in totals:
                dist.all_reduce(total)
        if how:
            manager.wait()
        found[f"all_reduce {how}"] = torch.cat(totals)
        gathered = [torch.zeros(4 * world_size, 6) for _ in range(3)]
        with c10d._coalescing_manager(async_ops=how) as manager:
            for step, output in enumerate(gathered):
                dist.all_gather_into_tensor(output, batch(rank, step))
        if how:
            manager.wait()
        found[f"all_gather {how}"] = torch.cat(gathered)
        scattered = [torch.zeros(2, 6) for _ in range(3)]
        with c10d._coalescing_manager(async_ops=how) as manager:
            for step, output in enumerate(scattered):
                dist.reduce_scatter_tensor(output, batch(rank, step, numel=2 * world_size))
        if how:
            manager.wait()
        found[f"reduce_scatter {how}"] = torch.cat(scattered)
    totals = [batch(rank, 5), batch(rank, 6)]
    dist.all_reduce_coalesced(totals)
    found["all_reduce_coalesced"] = torch.cat(totals)
    lists = [[torch.zeros(4, 6), torch.zeros(2, 6)] for _ in range(world_size)]
    dist.all_gather_coalesced(lists, [batch(rank, 7), batch(rank, 8, numel=2)])
    found["all_gather_coalesced"] = torch.cat([item for row in lists for item in row])
    return found


def collected(rank: int, world_size: int) -> dict[str, Tensor]:
    """The coalescing manager with a device, which collects works; gloo has no such thing."""
    own, other = batch(rank, 0), batch(rank, 1)
    if dist.get_backend() == "ringcoll":
        with c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            dist.broadcast(own, 0, async_op=True)
            _group().allreduce([other])
        manager.wait()
    else:
        dist.broadcast(own, 0)
        dist.all_reduce(other)
    return {"own": own, "other": other}


def methods(rank: int, world_size: int) -> dict[str, Tensor]:
    """The group's methods, in their short forms and by their old names."""
    group, last = _group(), world_size - 1
    found: dict[str, Tensor] = {}
    found["allreduce"] = batch(rank, 0)
    group.allreduce([found["allreduce"]]).wait()
    found["allreduce of one"] = batch(rank, 1)
    group.allreduce(found["allreduce of one"], dist.ReduceOp.MAX).wait()
    found["broadcast"] = batch(rank, 2)
    group.broadcast(found["broadcast"], last).wait()
    own = batch(rank, 3)
    group.reduce(own, last).wait()
    if rank == last:
        found["reduce"] = own
    outputs = [torch.zeros(4, 6) for _ in range(world_size)]
    group.allgather([outputs], [batch(rank, 4)]).wait()
    found["allgather"] = torch.cat(outputs)
    found["_allgather_base"] = torch.zeros(4 * world_size, 6)
    group._allgather_base(found["_allgather_base"], batch(rank, 5)).wait()
    found["_reduce_scatter_base"] = torch.zeros(2, 6)
    wide = batch(rank, 6, numel=2 * world_size)
    group._reduce_scatter_base(found["_reduce_scatter_base"], wide).wait()
    found["alltoall_base"] = torch.zeros(2 * world_size, 6)
    group.alltoall_base(found["alltoall_base"], wide, [], []).wait()
    gathered = [torch.zeros(4 * world_size, 6)]
    group.allgather_into_tensor_coalesced(gathered, [batch(rank, 7)]).wait()
    found["allgather_into_tensor_coalesced"] = gathered[0]
    scattered = [torch.zeros(2, 6)]
    group.reduce_scatter_tensor_coalesced(scattered, [wide]).wait()
    found["reduce_scatter_tensor_coalesced"] = scattered[0]
    pieces = [[batch(peer, 8) for peer in range(world_size)]] if rank == 0 else []
    found["scatter"] = torch.zeros(4, 6)
    options: Any = dist.ScatterOptions()
    options.rootRank = 0
    group.scatter([found["scatter"]], pieces, options).wait()
    group.barrier().wait()
    assert group.rank() == rank
    assert group.size() == world_size
    return found


def monitored_barrier(rank: int, world_size: int) -> dict[str, Tensor]:
    """This library's, on the world and on a part of it."""
    ringcoll.monitored_barrier(timeout=timedelta(seconds=20))
    group: Any = dist.new_group([0, 1])
    if rank < 2:
        ringcoll.monitored_barrier(group, wait_all_ranks=True)
    if dist.get_backend() == "ringcoll":
        _group().monitored_barrier()
    else:
        ringcoll.monitored_barrier()
    return {"rank": torch.tensor(rank)}
