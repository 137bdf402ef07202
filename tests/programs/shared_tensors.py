"""Tensors in shared memory, as functions that the ranks of a pool run."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ringcoll
from ringcoll.errors import GroupBrokenError, PeerLostError, TransportError
from ringcoll.runtime.launch import report
from ringcoll.runtime.transport import SHORT, Message, SharedMemory
from ringcoll.runtime.transport.shared import tensors as shared_tensors
from ringcoll.runtime.transport.shared.tensors import region_of
from ringcoll.training import HookOptions, all_reduce_hook
from tests.programs.transports import LIMIT_S, transport_of_all

_MOST = SHORT // 4 * 3  # elements; two thirds of all messages are long


def _of_many(numel: int) -> torch.Tensor:
    """Memory in a file that many tensors share."""
    tensor = torch.empty(numel)
    shared_tensors.move([tensor.untyped_storage()], of_many=True)
    return tensor


def _memory(random: Random, held: list[torch.Tensor], numel: int) -> torch.Tensor:
    """So many elements, somewhere in memory that is held, or made now, in one way or another."""
    while len(held) > 3 or (held and random.random() < 0.3):
        held.pop(random.randrange(len(held)))
    fitting = [tensor for tensor in held if tensor.numel() >= numel]
    if not fitting or random.random() < 0.5:
        size = random.randrange(numel, _MOST + 1)
        make = random.choice(
            (torch.empty, ringcoll.empty_shared, _of_many, lambda n: ringcoll.share(torch.empty(n)))
        )
        held.append(make(size))
        fitting.append(held[-1])
    chosen = random.choice(fitting)
    start = random.randrange(chosen.numel() - numel + 1)
    return chosen[start : start + numel]


def random_regions(transport_name: str, seed: int, rounds: int) -> list[str]:
    """Messages from views of memory that is made, written, sent, freed and made again, at random.

    Every rank sends to the next rank, which receives the message or reads it where it lies, and may
    ask for it before or after it comes.
    """
    transport = transport_of_all(transport_name)
    rank, size = transport.rank, transport.world_size
    after, before = (rank + 1) % size, (rank - 1) % size
    own, held = Random(1000 * seed + rank), list[torch.Tensor]()
    wrong = []
    for turn in range(rounds):
        lengths = [Random(f"{seed} {turn} {sender}").randrange(1, _MOST) for sender in range(size)]
        leaving = _memory(own, held, lengths[rank])
        leaving.copy_(torch.arange(lengths[rank]) * 7 + 1009 * turn + rank)
        expected = (torch.arange(lengths[before]) * 7 + 1009 * turn + before).float()
        into = torch.full_like(expected, -1)
        is_lent = own.random() < 0.5 and into.nbytes >= transport.lends_from
        receive, send = Message(before, into, 0, is_lent), Message(after, leaving, 0)
        if own.random() < 0.3:
            (sending,) = transport.post([], [send])
            (receiving,) = transport.post([receive], [])
        else:
            receiving, sending = transport.post([receive], [send])
        transport.wait(receiving, LIMIT_S)
        if is_lent:
            near = transport.view(receiving, into.dtype)
            if near is not None:
                into.copy_(near)
            else:
                for piece, start in zip(
                    into.split(5000), range(0, into.numel(), 5000), strict=True
                ):
                    transport.read(receiving, start, piece)
            transport.release(receiving)
        transport.wait(sending, LIMIT_S)
        leaving.fill_(-2)  # as its owner may, now
        if not torch.equal(into, expected):
            wrong.append(f"turn {turn}: {into[:3]} of rank {before}, and not {expected[:3]}")
    transport.close()
    return wrong


def collectives(world_size: int) -> list[str]:
    """Collectives on tensors that all ranks share, that some share, and on views of these."""
    group = dist.distributed_c10d._get_default_group()
    ringcoll.use(group, transport="shared")
    rank, numel = dist.get_rank(), 30_000 * world_size
    wrong = []
    for who in (range(world_size), range(1), range(1, world_size)):
        make = ringcoll.empty_shared if rank in who else torch.zeros
        whole = make(numel + 5)
        ours = whole[5:]  # at an offset that is no page
        for algorithm in ("two_shot", "ring", "auto"):
            for turn in range(3):
                ours.copy_(torch.arange(numel) % 1000 + rank + turn)
                ringcoll.all_reduce(ours, algorithm=algorithm)
                total = world_size * (torch.arange(numel) % 1000 + turn)
                total += world_size * (world_size - 1) // 2
                if not torch.equal(ours, total.float()):
                    wrong.append(f"{who} {algorithm} {turn}: {ours[:3]}")
        parts = ringcoll.empty_shared(world_size, 30_000)
        parts.copy_(torch.arange(world_size)[:, None] * 10 + rank)
        mine = make(30_000)
        ringcoll.reduce_scatter_single(mine, parts.flatten())
        if mine.unique().tolist() != [world_size * rank * 10 + world_size * (world_size - 1) / 2]:
            wrong.append(f"{who} reduce_scatter: {mine.unique()}")
        mine.fill_(rank)
        ringcoll.all_gather_single(parts.view(-1), mine)
        if parts[:, 7].tolist() != list(range(world_size)) or parts.var(1).max() != 0:
            wrong.append(f"{who} all_gather: {parts[:, 7]}")
        ringcoll.broadcast(mine, 1)
        if mine.unique().tolist() != [1]:
            wrong.append(f"{who} broadcast: {mine.unique()}")
    ringcoll.close(group)
    return wrong


def _gradients(group: dist.ProcessGroup, options: HookOptions | None) -> tuple[list[float], bool]:
    """Gradients of torch's DDP after three steps, and whether its last buckets were shared."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(150, 150), torch.nn.Linear(150, 100, bias=False))
    model = torch.nn.parallel.DistributedDataParallel(
        net, process_group=group, gradient_as_bucket_view=True
    )
    if options is not None:
        model.register_comm_hook(options, all_reduce_hook)
    for step in range(3):
        model.zero_grad()
        model(torch.full((4, 150), 0.01 * (dist.get_rank() + 1) + step)).square().sum().backward()
    grads = [param.grad for param in net.parameters()]
    are_shared = all(region_of(g.data_ptr(), g.nbytes) is not None for g in grads if g is not None)
    return [float(grad.double().abs().sum()) for grad in grads if grad is not None], are_shared


def data_parallel() -> list[bool]:
    """Whether gradients are those of gloo with shared buckets, and whether they are shared."""
    gloo = dist.new_group(backend="gloo")
    ours = dist.new_group(backend="ringcoll", pg_options=ringcoll.Options(share=True))
    plain = dist.new_group(backend="ringcoll")
    expected, _ = _gradients(gloo, None)
    found = []
    for group, options in ((ours, None), (gloo, HookOptions(gloo, share=True)), (plain, None)):
        grads, are_shared = _gradients(group, options)
        found += [grads == expected, are_shared]
    array = np.ones(20_000)
    dist.all_reduce(torch.from_numpy(array), group=ours)  # it stays where it is
    found.append(set(array.tolist()) == {float(dist.get_world_size())})
    ringcoll.close(gloo)
    for group in (ours, plain, gloo):
        dist.destroy_process_group(group)
    return found


def differing_memory() -> list[bool]:
    """Sums in a group whose tensors are shared, where that is possible; in words, whether they are right."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(backend="ringcoll", pg_options=ringcoll.Options(share=True))
    short, array = torch.ones(3), np.full(20_000, 1.0 + rank)
    foreign = torch.from_numpy(array)
    first = foreign if rank == 0 else foreign.clone()
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in (short, first)]
    # An all-reduce may not move memory that a broadcast of the group still works on; nor, of a storage,
    # what other groups and the user's own messages work on.
    whole = torch.full((2_000_000,), float(rank))
    root = dist.get_global_rank(group, size - 1)
    works.append(dist.broadcast(whole, root, group=group, async_op=True))
    works.append(dist.all_reduce(whole, group=group, async_op=True))
    other = dist.new_group(backend="ringcoll")
    parts = torch.full((3, 2_000_000), float(rank))
    before, after = (rank - 1) % size, (rank + 1) % size
    works.append(dist.irecv(parts[0], dist.get_global_rank(group, before), group=group))
    if rank:  # rank 0 comes later
        works.append(dist.broadcast(parts[1], root, group=other, async_op=True))
    works.append(dist.all_reduce(parts[2], group=group, async_op=True))
    works[-1].wait()
    sent = torch.full((2_000_000,), 100.0 + rank)
    works.append(dist.isend(sent, dist.get_global_rank(group, after), group=group))
    if not rank:
        works.append(dist.broadcast(parts[1], root, group=other, async_op=True))
    for work in works:
        work.wait()
    total = size * (size - 1) / 2
    found = [
        short.tolist() == [size] * 3,
        first.unique().tolist() == [total + size],
        whole.unique().tolist() == [size * (size - 1)],
        parts[0].unique().tolist() == [100 + before],
        parts[1].unique().tolist() == [size - 1],
        parts[2].unique().tolist() == [total],
    ]
    dist.destroy_process_group(other)
    dist.destroy_process_group(group)
    return found


def too_little_room_on_one_rank() -> tuple[list[float], bool]:
    """A sum in a group whose tensors are shared, where rank 1 has no room for that; and whether it is shared."""
    group = dist.new_group(backend="ringcoll", pg_options=ringcoll.Options(share=True))
    tensor = torch.full((20_000,), 1.0 + dist.get_rank())
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(shared_tensors, "free_bytes", lambda: 1000)
        dist.all_reduce(tensor, group=group)
    dist.destroy_process_group(group)
    return tensor.unique().tolist(), region_of(tensor.data_ptr(), tensor.nbytes) is not None


def resources() -> tuple[int, int]:
    """Mappings of shared memory, and open descriptors, of this process."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    mapped = sum("memfd:ringcoll" in line or "/dev/shm/torch" in line for line in maps)
    return mapped, len([*Path("/proc/self/fd").iterdir()])


def come_and_go(rounds: int) -> list[tuple[int, int]]:
    """Resources after each of two rounds of tensors that are shared, sent, and freed."""
    group = dist.new_group()
    ringcoll.use(group, transport="shared")
    found = []
    for _ in range(2):
        for number in range(rounds):
            tensor = (
                ringcoll.empty_shared(20_000) if number % 2 else ringcoll.share(torch.zeros(20_000))
            )
            ringcoll.all_reduce(tensor, group=group, algorithm="two_shot")
            del tensor
        dist.barrier()
        found.append(resources())
    ringcoll.close(group)
    dist.destroy_process_group(group)
    return found


def refused(reads: bool) -> str:
    """What becomes of a shared tensor that its receiver cannot map; with or without remote reads."""
    transport = transport_of_all("shared" if reads else "shared, in pieces")
    numel, found = 100_000, "nothing"
    into, leaving = torch.zeros(numel), ringcoll.empty_shared(numel).fill_(3)
    dist.barrier()  # nothing is sent before both refuse

    def refuse(*arguments: object, **named: object) -> SharedMemory:
        raise PermissionError(1, "Operation not permitted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedMemory, "open", refuse)
        try:
            if transport.rank == 0:
                (handle,) = transport.post([], [Message(1, leaving, 0)])
            else:
                (handle,) = transport.post([Message(0, into, 0)], [])
            transport.wait(handle, LIMIT_S)
            found = "sent" if transport.rank == 0 else str(into.unique().tolist())
        except TransportError as error:
            found = str(error)
            transport.abort()
    dist.barrier()
    transport.close()
    return found


def dies_with_a_mapped_loan() -> None:
    """Rank 1 is killed while rank 0 reads a shared tensor of it."""
    transport = transport_of_all("shared")
    numel = 1 << 20
    if transport.rank == 1:
        sent = ringcoll.empty_shared(numel).fill_(1)
        transport.post([], [Message(0, sent, 0)])
        time.sleep(0.3)  # with a reference to what is sent
        os.kill(os.getpid(), signal.SIGKILL)
    (handle,) = transport.post([Message(1, torch.empty(numel), 0, lent=True)], [])
    transport.wait(handle, LIMIT_S)
    begin = time.monotonic()
    time.sleep(0.6)
    near = transport.view(handle, torch.float32)
    # The memory is there as long as somebody has mapped it.
    is_readable = near is not None and near.sum().item() == numel
    try:
        transport.release(handle)
    except PeerLostError as error:
        report((is_readable, error.peer, time.monotonic() - begin))


def forked() -> tuple[bool, bool]:
    """Whether a process that was forked off keeps shared memory, which its parent lets go of."""
    tensor = ringcoll.empty_shared(10_000).fill_(5)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reading, 1)
        os._exit(int(tensor.sum() != 50_000))
    is_known = region_of(tensor.data_ptr(), tensor.nbytes) is not None
    del tensor
    os.write(writing, b"1")
    _, status = os.waitpid(child, 0)
    os.close(reading)
    os.close(writing)
    return is_known, status == 0


def forked_rank() -> tuple[str, float]:
    """What a process is told that was forked off a rank and uses its group; and the group's own sum."""
    group = dist.new_group()
    ringcoll.use(group, transport="shared")
    ringcoll.all_reduce(torch.ones(20_000), group=group)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        text = "nothing"
        try:
            ringcoll.all_reduce(torch.ones(20_000), group=group)
        except GroupBrokenError as error:
            text = str(error)
        os.write(writing, text.encode())
        os._exit(0)
    total = torch.ones(20_000)
    ringcoll.all_reduce(total, group=group)
    told = os.read(reading, 1000).decode()
    os.waitpid(child, 0)
    ringcoll.all_reduce(total, group=group)
    for descriptor in (reading, writing):
        os.close(descriptor)
    ringcoll.close(group)
    dist.destroy_process_group(group)
    return told, float(total[-1])
