"""An algorithm that leaves `final`, the order of operands and its cost to the library runs right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import ringcoll
from ringcoll.schedules import Program, Step, inp, out, recv, recv_reduce, send
from ringcoll.schedules.algorithms import register, unregister


@pytest.fixture
def star() -> Iterator[str]:
    @register("all_reduce", "star")
    def star(rank: int, world_size: int) -> Program:
        """Rank 0 reduces the vectors of all ranks and sends the total back."""
        if rank == 0:
            for peer in range(1, world_size):
                yield Step(recv_reduce(peer, out(0), inp(0) if peer == 1 else out(0)))
            yield Step(*(send(peer, out(0)) for peer in range(1, world_size)))
        else:
            yield from (Step() for _ in range(1, rank))
            yield Step(send(0, inp(0)))
            yield from (Step() for _ in range(rank + 1, world_size))
            yield Step(recv(0, out(0)))

    yield "star"
    unregister("all_reduce", "star")


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_an_average_is_divided_once(star: str, world_size: int) -> None:
    def rank_main(group: ringcoll.LocalGroup) -> list[float]:
        tensor = torch.arange(3.0) + group.rank()
        ringcoll.all_reduce(tensor, dist.ReduceOp.AVG, group=group, algorithm=star)
        return tensor.tolist()

    mean = (world_size - 1) / 2
    expected = [[mean, mean + 1, mean + 2]] * world_size
    assert ringcoll.run_threads(rank_main, world_size) == expected


def test_operands_stay_in_rank_order(star: str) -> None:
    digits = ringcoll.UserOp(lambda left, right: 10 * left + right, associative=False)

    def rank_main(group: ringcoll.LocalGroup) -> int:
        tensor = torch.tensor([group.rank() + 1])
        ringcoll.all_reduce(tensor, digits, group=group, algorithm=star)
        return int(tensor)

    assert ringcoll.run_threads(rank_main, 4) == [1234] * 4


def test_a_program_that_is_registered_anew_runs_at_once(star: str) -> None:
    def rank_main(group: ringcoll.LocalGroup) -> int:
        tensor = torch.tensor([group.rank() + 1])
        ringcoll.all_reduce(tensor, group=group, algorithm=star)
        return int(tensor)

    assert ringcoll.run_threads(rank_main, 2) == [3, 3]
    unregister("all_reduce", star)

    @register("all_reduce", star)
    def changed(rank: int, world_size: int) -> Program:
        yield Step(send(1 - rank, inp(0)))

    with pytest.raises(ringcoll.errors.VerificationError, match="never received"):
        ringcoll.run_threads(rank_main, 2)
