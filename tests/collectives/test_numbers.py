"""Numbers of any class: ranks, sizes and time limits of numpy, tensors of no dimension, for ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ringcoll
from ringcoll import LocalGroup, run_threads
from ringcoll.errors import ArgumentError
from ringcoll.runtime.group import Work
from ringcoll.runtime.machine import FOREVER_S, seconds_of, whole
from ringcoll.training import Messages

ONE: tuple[Any, ...] = (
    np.int64(1),
    np.uint8(1),
    torch.tensor(1),
    torch.tensor(1, dtype=torch.uint8),
)
ZERO: Any = np.int64(0)
FOREVER: tuple[Any, ...] = (
    float("inf"),
    1e12,
    10**400,
    timedelta.max,
    np.float64("inf"),
    torch.tensor(float("inf")),
)
LIMITS: tuple[Any, ...] = (
    *(np.int64(5), np.float32(5), torch.tensor(5), torch.tensor(5.0), Fraction(5), Decimal(5), 5),
    timedelta(seconds=5),
)


@pytest.mark.parametrize("one", ONE, ids=repr)
def test_roots_are_whole_numbers_of_any_class(one: Any):
    def main(group: LocalGroup) -> list[Any]:
        rank, sent = group.rank(), torch.tensor([10.0 + group.rank()])
        found: list[Any] = []
        for name in ("group_src", "src"):
            ringcoll.broadcast(got := sent.clone(), group=group, **{name: one})
            found.append(got.item())
            parts = [torch.tensor([1.0]), torch.tensor([2.0])] if rank == 1 else None
            ringcoll.scatter(got, parts, group=group, **{name: one})
            found.append(got.item())
        for name in ("group_dst", "dst"):
            ringcoll.reduce(total := sent.clone(), group=group, **{name: one})
            found.append(total.item() if rank == 1 else None)
            parts = [torch.zeros(1), torch.zeros(1)] if rank == 1 else None
            ringcoll.gather(sent, parts, group=group, **{name: one})
            found.append(None if parts is None else [part.item() for part in parts])
        return found

    first, second = run_threads(main, 2)
    assert first == [11.0, 1.0, 11.0, 1.0, None, None, None, None]
    assert second == [11.0, 2.0, 11.0, 2.0, 21.0, [10.0, 11.0], 21.0, [10.0, 11.0]]


def test_a_root_in_a_tensor_counts_as_it_is_at_the_call():
    def main(group: LocalGroup) -> list[float]:
        found: list[float] = []
        root: Any = torch.tensor(0)
        for number in (0, 1, 0):
            root.fill_(number)
            ringcoll.broadcast(
                got := torch.tensor([float(group.rank())]), group_src=root, group=group
            )
            found.append(got.item())
        return found

    assert run_threads(main, 2) == [[0.0, 1.0, 0.0]] * 2


@pytest.mark.parametrize("wrong", [1.5, "1", torch.tensor([0, 1]), np.int64(2), -1, None.__class__])
def test_other_roots_are_refused(wrong: Any):
    def main(group: LocalGroup) -> float:
        with pytest.raises(ArgumentError, match="not in the group"):
            ringcoll.broadcast(torch.zeros(1), group_src=wrong, group=group)
        ringcoll.all_reduce(total := torch.ones(1), group=group)
        return total.item()

    assert run_threads(main, 2) == [2.0, 2.0]


SIZES: tuple[Callable[[list[int]], Any], ...] = (
    np.array,
    torch.tensor,
    tuple,
    lambda s: [np.int32(n) for n in s],
)


@pytest.mark.parametrize("wrong", [2, -1, 2**40, 0.5, None, "1"])
def test_messages_to_no_rank_are_refused(wrong: Any):
    def main(group: LocalGroup) -> None:
        for call, argument in ((group.isend, "dst"), (group.irecv, "src")):
            for peer in (wrong, group.rank()):
                with pytest.raises(ArgumentError, match=f"{argument}.*another rank.* 0 to 1, got"):
                    call(torch.ones(2), peer)

    run_threads(main, 2)


@pytest.mark.parametrize("kind", SIZES)
def test_split_sizes_of_any_class(kind: Callable[[list[int]], Any], world: Any):
    def main(group: LocalGroup) -> list[float]:
        sizes = [[1, 2], [3, 0]][group.rank()]
        incoming = [[1, 3], [2, 0]][group.rank()]
        got, sent = torch.zeros(sum(incoming)), torch.arange(3.0) + 10 * group.rank()
        ringcoll.all_to_all_single(got, sent, kind(incoming), kind(sizes), group)
        return got.tolist()

    assert run_threads(main, 2) == [[0.0, 10.0, 11.0, 12.0], [1.0, 2.0]]
    dist.all_to_all_single(got := torch.zeros(3), torch.arange(3.0), kind([3]), kind([3]))
    assert got.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("limit", [*LIMITS, *FOREVER], ids=repr)
def test_time_limits_of_any_class(limit: Any):
    expected = 5.0 if limit in LIMITS[-2:] or any(limit is each for each in LIMITS) else FOREVER_S
    assert seconds_of(limit) == expected

    def main(group: LocalGroup) -> list[float]:
        assert group.communicator.timeout_s == expected
        ringcoll.all_reduce(total := torch.ones(1), group=group, timeout=limit)
        work = ringcoll.broadcast(total, 0, group, async_op=True, timeout=limit)
        assert isinstance(work, Work)
        assert work.wait(timedelta.max)
        ringcoll.barrier(group, timeout=limit)
        ringcoll.monitored_barrier(group, limit)
        message = group.isend(total, ONE[0]) if group.rank() == 0 else group.irecv(total, ZERO)
        assert message.wait(timedelta.max)
        assert Messages(group, limit)._timeout_s == expected
        return [total.item()]

    assert run_threads(main, 2, timeout_s=limit) == [[2.0], [2.0]]


@pytest.mark.parametrize(
    "wrong",
    [
        0,
        -1,
        float("nan"),
        "5",
        b"5",
        1j,
        np.int64(0),
        timedelta(0),
        torch.ones(2),
        torch.ones((), device="meta"),
        -(10**400),
        [5],
    ],
)
def test_what_is_no_time_limit_is_refused(wrong: Any):
    with pytest.raises(ArgumentError, match="must be positive"):
        run_threads(lambda group: None, 2, timeout_s=wrong)

    def main(group: LocalGroup) -> float:
        with pytest.raises(ArgumentError, match="must be positive"):
            ringcoll.all_reduce(torch.ones(1), group=group, timeout=wrong)
        ringcoll.all_reduce(total := torch.ones(1), group=group)
        return total.item()

    assert run_threads(main, 2) == [2.0, 2.0]


@pytest.fixture
def world() -> Iterator[Any]:
    store, limit = dist.HashStore(), timedelta.max
    dist.init_process_group("ringcoll", store=store, rank=0, world_size=1, timeout=limit)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_group_of_torch_waits_for_ever(world: Any):
    assert world.timeout == timedelta(seconds=FOREVER_S)
    dist.all_reduce(total := torch.ones(2))
    work = dist.all_reduce(total, async_op=True)
    assert work is not None
    assert work.wait(timedelta.max)
    options = dist.AllreduceOptions()
    options.timeout = timedelta.max
    world.allreduce([total], options).wait()
    dist.monitored_barrier(timeout=timedelta.max)
    world.set_timeout(timedelta.max)
    dist.barrier()
    assert total.tolist() == [1.0, 1.0]
    group: Any = dist.new_group(timeout=timedelta.max)
    dist.broadcast(total, group_src=ZERO, group=group)
    assert group.timeout == world.timeout


def test_segments_of_numpy_s_bytes():
    def main(group: LocalGroup) -> float:
        options: Any = {"algorithm": "ring", "segment_bytes": np.int64(64)}
        ringcoll.all_reduce(total := torch.ones(100), group=group, **options)
        return total.sum().item()

    assert run_threads(main, 2) == [200.0, 200.0]


def test_whole_numbers():
    assert [whole(number) for number in (np.int8(3), torch.tensor(3), True, None)] == [
        3,
        3,
        1,
        None,
    ]
    assert whole("3") == "3"
