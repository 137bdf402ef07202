"""Hierarchical all-reduce on threads, for hosts that are pretended."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

import ringcoll
from ringcoll import LocalGroup, run_threads
from ringcoll.algorithms import on_hosts, schedule_of
from ringcoll.group import Communicator
from ringcoll.transport import Hub

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
