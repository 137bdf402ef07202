"""Groups on real processes: subgroups, several at a time, threads, the user's own messages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ringcoll.errors import ArgumentError
from ringcoll.runtime.collectives import StoreGroup
from tests.programs import ranks

pytestmark = pytest.mark.processes


def test_roots_of_a_group_whose_ranks_are_not_contiguous(pool):
    """The group of the global ranks 3, 0, 2, in this order where torch allows it."""
    found = pool(4).run(ranks.roots_of_a_group)
    members = [*ranks.GROUPS[4]["mixed"]]
    for rank in members:
        mine = found[rank]
        assert mine["global"] == 2, "src is a global rank"
        assert mine["group"] == 2, "group_src is a rank of the group"
        assert mine["first"] == 3
        assert "not in the group" in mine["outside"]
        assert str(members) in mine["outside"], "it says which ranks there are"
        assert "not in the group" in mine["beyond"]
        assert mine["gather"] == (members if rank == 2 else [])
    assert found[0]["reduce to 0"] == 5
    assert [found[rank]["reduce to 0"] for rank in (3, 2)] == [3, 2], "others stay as they were"
    assert "not a member" in found[1]["not a member"]


@pytest.mark.parametrize("world_size", [2, 3])
def test_threads_that_use_groups_of_their_own(pool, world_size: int):
    """Groups are made on first use, which takes all ranks: the orders differ, none waits."""
    found = pool(world_size).run(ranks.threads_with_groups_of_their_own, 30)
    assert found == [[]] * world_size


@pytest.mark.parametrize("world_size", [2, 4])
def test_several_groups_in_flight(pool, world_size: int):
    found = pool(world_size).run(ranks.several_groups_in_flight, 20)
    assert found == [[]] * world_size


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_users_own_messages_never_meet_the_librarys(pool, world_size: int):
    found = pool(world_size).run(ranks.own_messages_beside_collectives, 40)
    assert found == [[]] * world_size


def test_threads_end_with_their_group(pool):
    for before, during, after in pool(2).run(ranks.threads_of_a_group_that_is_destroyed):
        assert during == before + 2, "a worker and a monitor"
        assert after == before


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no list of threads")
def test_a_broken_group_leaves_nothing(pool):
    """The error that has broken it must not keep it alive."""
    for found in pool(2).run(ranks.threads_of_broken_groups, 6):
        assert max(found[3:]) <= max(found[:3])


def test_a_group_may_be_closed_and_used_again(pool):
    assert pool(3).run(ranks.close_and_use_again, 3) == [[3, 6, 9]] * 3


def test_a_group_that_meets_at_a_store_is_for_cpu_tensors():
    group = StoreGroup(dist.HashStore(), 0, 1, 5.0)
    try:
        assert group.on(torch.device("cpu")) is group.communicator
        with pytest.raises(
            ArgumentError, match=r"rank 0: .*CPU tensors \(expected cpu, got cuda\)"
        ):
            group.on(torch.device("cuda"))
    finally:
        group.close()
