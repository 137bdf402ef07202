"""Three all-reduce algorithms of a user, each in at most 20 lines; nothing else knows of them."""

from ringcoll.schedules import (
    OperandOrder,
    Program,
    Step,
    inp,
    out,
    recv,
    recv_reduce,
    reduce,
    send,
    tmp,
)
from ringcoll.schedules.algorithms import register
from ringcoll.schedules.algorithms.direct import direct_reduce_scatter


@register("all_reduce", "line", pipelined=True, order=OperandOrder.LEFT_TO_RIGHT)
def line_all_reduce(rank: int, world_size: int) -> Program:
    """Line all-reduce: a partial result grows from the first rank to the last, and comes back."""
    last, held = world_size - 1, out(0) if rank else inp(0)
    for step in range(last):
        if rank == step + 1:
            yield Step(recv_reduce(step, out(0), inp(0), received_left=True, final=rank == last))
        else:
            yield Step(*[send(rank + 1, held)] * (rank == step))
    for step in range(last, 0, -1):
        if rank == step - 1:
            yield Step(recv(step, out(0)))
        else:
            yield Step(*[send(rank - 1, out(0))] * (rank == step))


@register("all_reduce", "carousel", slots=lambda k: k, order=OperandOrder.LEFT_TO_RIGHT)
def carousel_all_reduce(rank: int, world_size: int) -> Program:
    """Carousel all-reduce: whole vectors go round, and every rank adds them up in rank order."""
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    vectors = [inp(0) if owner == rank else tmp(owner, 0) for owner in range(world_size)]
    for step in range(world_size - 1):
        passed_on, arriving = (rank - step) % world_size, (before - step) % world_size
        yield Step(send(after, vectors[passed_on]), recv(before, vectors[arriving]))
    yield Step(reduce(out(0), *vectors, final=True))


@register("all_reduce", "owners", chunks=lambda k: k, slots=lambda k: k)
def owners_all_reduce(rank: int, world_size: int) -> Program:
    """Owners all-reduce: rank r reduces chunk r, then everyone collects, one peer in each step."""
    yield from direct_reduce_scatter(rank, world_size)
    for distance in range(1, world_size):
        asking, owner = (rank - distance) % world_size, (rank + distance) % world_size
        yield Step(send(asking, out(rank)), recv(owner, out(owner)))
