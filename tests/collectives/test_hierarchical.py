"""Hierarchies on threads, for hosts that are pretended."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import ringcoll
from ringcoll import LocalGroup, run_threads
from ringcoll.runtime.group import Communicator
from ringcoll.runtime.transport import Hub
from ringcoll.schedules.algorithms import on_hosts, schedule_of

LAYOUTS = [
    (0, 0, 0, 1, 1, 1),
    (0, 1, 0, 1, 0, 1),
    (0, 0, 0, 0, 1),
    (0, 1, 1, 2, 2, 2, 2),
    on_hosts(8, 4),
    (3, 3, 3),
    (0, 1, 2),
]


@pytest.mark.parametrize("hosts", LAYOUTS, ids=lambda hosts: "".join(map(str, hosts)))
def test_any_layout_at_any_length(hosts: tuple[int, ...]):
    world_size = len(hosts)
    known = Hub(world_size, hosts=hosts).transports()[0].hosts
    schedule = schedule_of("all_reduce", "hierarchical", world_size, 0, known)
    lengths = [0, 1, world_size - 1, world_size, world_size + 1, 1000]

    def main(group: LocalGroup) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = []
        for numel in lengths:
            own = torch.arange(numel) * world_size + 1000 * world_size * group.rank()
            total, mean = own.clone(), own.to(torch.float64)
            ringcoll.all_reduce(total, group=group, algorithm=schedule)
            ringcoll.all_reduce(
                mean, dist.ReduceOp.AVG, group, algorithm=schedule, segment_bytes=64
            )
            found.append((total, mean))
        return found

    for found in run_threads(main, world_size):
        for numel, (total, mean) in zip(lengths, found, strict=True):
            every = sum(1000 * world_size * rank for rank in range(world_size))
            wanted = torch.arange(numel) * world_size**2 + every
            assert torch.equal(total, wanted)
            assert torch.equal(mean, wanted.to(torch.float64) / world_size)


@pytest.mark.slow
@pytest.mark.parametrize("hosts", LAYOUTS, ids=lambda hosts: "".join(map(str, hosts)))
@pytest.mark.parametrize("name", ["hierarchical", "direct+ring"])
def test_blocks_on_any_layout(name: str, hosts: tuple[int, ...]):
    """Apart, and with the own block in its place in the whole."""
    k = len(hosts)
    gather, scatter = (
        schedule_of(collective, name, k, 0, hosts)
        for collective in ("all_gather", "reduce_scatter")
    )
    lengths = (0, 1, 7, 100)

    def main(group: LocalGroup) -> list[tuple[torch.Tensor, ...]]:
        rank = group.rank()
        found: list[tuple[torch.Tensor, ...]] = []
        for numel in lengths:
            block = torch.arange(numel) + 1000 * rank
            whole, placed = block.new_zeros(k * numel), block.repeat(k)
            ringcoll.all_gather_into_tensor(whole, block, group, algorithm=gather)
            own = placed[rank * numel : (rank + 1) * numel]
            ringcoll.all_gather_into_tensor(placed, own, group, algorithm=gather)
            shares = (torch.arange(k * numel) + 1) * (rank + 1)
            total, share = block.new_zeros(numel), shares[rank * numel : (rank + 1) * numel]
            ringcoll.reduce_scatter_tensor(total, shares, group=group, algorithm=scatter)
            ringcoll.reduce_scatter_tensor(share, shares, group=group, algorithm=scatter)
            found.append((whole, placed, total, share))
        return found

    for rank, found in enumerate(run_threads(main, k)):
        for numel, (whole, placed, total, share) in zip(lengths, found, strict=True):
            blocks = torch.cat([torch.arange(numel) + 1000 * other for other in range(k)])
            assert torch.equal(whole, blocks)
            assert torch.equal(placed, blocks)
            wanted = (torch.arange(numel) + rank * numel + 1) * (k * (k + 1) // 2)
            assert torch.equal(total, wanted)
            assert torch.equal(share, wanted)


@pytest.mark.parametrize("name", ["double_tree+circulant", "two_shot+recursive_doubling+ring"])
def test_hierarchies_by_their_names(name: str):
    """As given by a user, on hosts that only the transport knows; with scratch memory inside."""
    hosts = (0, 0, 1, 1, 2, 2, 3, 3)
    transports, store = Hub(8, hosts=hosts).transports(), dist.HashStore()

    def main(rank: int) -> list[float]:
        member = Communicator(transports[rank], store, 20.0)
        tensor = torch.arange(11.0) + 100 * rank
        ringcoll.all_reduce(tensor, group=LocalGroup(member), algorithm=name)
        member.close()
        return tensor.tolist()

    with ThreadPoolExecutor(8) as threads:
        totals = [future.result(60) for future in [threads.submit(main, rank) for rank in range(8)]]
    assert totals == [[8.0 * index + 2800 for index in range(11)]] * 8
