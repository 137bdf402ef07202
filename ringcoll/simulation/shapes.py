"""Topologies in which nothing is above a rank: a crossbar, rings and tori."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Unpack

from ringcoll.schedule import LARGEST_WORLD
from ringcoll.simulation.links import Link, Number, RankCosts, checked
from ringcoll.simulation.topology import Topology


def crossbar(
    world_size: int,
    *,
    bandwidth: Number,
    latency_s: Number = 0,
    ports: int | None = 1,
    **costs: Unpack[RankCosts],
) -> Topology:
    """One switch that never is full: each rank has a cable to it.

    Parameters
    ----------
    world_size
        Number of ranks.
    bandwidth
        Bytes per second of a port.
    latency_s
        Seconds from a rank to another.
    ports
        Messages that a rank sends, and receives, at full bandwidth at the same time. ``None``
        for any number of them: then no message shares anything, and the simulation is faster.
    **costs
        The costs of a rank, as of `Topology`.

    Examples
    --------
    >>> from ringcoll.algorithms import schedule_of
    >>> from ringcoll.simulation import simulate
    >>> switch = crossbar(4, bandwidth=10**9, alpha_s=1e-6)
    >>> run = simulate(schedule_of("all_reduce", "ring", 4), 10**6, switch)
    >>> round(run.seconds, 9)  # 6 alpha + 3/2 n beta
    0.001506
    """
    checked("world_size", world_size, positive=True, whole=True, most=LARGEST_WORLD)
    links = [
        *(Link(rank, "switch", bandwidth, latency_s, ports) for rank in range(world_size)),
        *(Link("switch", rank, bandwidth, 0, ports) for rank in range(world_size)),
    ]

    def router(source: int, target: int) -> tuple[int, ...]:
        return source, world_size + target

    return Topology(
        world_size=world_size, links=tuple(links), name="crossbar", router=router, **costs
    )


def torus(
    shape: Sequence[int], *, bandwidth: Number, latency_s: Number = 0, **costs: Unpack[RankCosts]
) -> Topology:
    """A torus of any number of dimensions; ranks are numbered with the last dimension first.

    Each rank has a cable to the next one in each dimension, and the last one to the first. A
    message goes through the dimensions in order, in each the shorter way; of equal ones upward.

    Parameters
    ----------
    shape
        Ranks in each dimension.
    bandwidth, latency_s
        Bytes per second, and seconds, of a cable in each direction.
    **costs
        The costs of a rank, as of `Topology`.

    Examples
    --------
    >>> grid = torus((3, 4), bandwidth=10**9)
    >>> [grid.links[index].name for index in grid.route(0, 7)]  # 7 is (1, 3)
    ['0 -> 4', '4 -> 7']
    """
    for length in shape:
        checked("shape", length, positive=True, whole=True, most=LARGEST_WORLD)
    world_size = prod(shape)
    checked("world_size", world_size, positive=True, whole=True, most=LARGEST_WORLD)
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]

    def beside(rank: int, axis: int, way: int) -> int:
        place = rank // strides[axis] % shape[axis]
        return rank + ((place + way) % shape[axis] - place) * strides[axis]

    links: list[Link] = []
    number: dict[tuple[int, int], int] = {}
    for rank in range(world_size):
        for axis in range(len(shape)):
            for way in (1, -1):
                peer = beside(rank, axis, way)
                if peer != rank and (rank, peer) not in number:
                    number[rank, peer] = len(links)
                    links.append(Link(rank, peer, bandwidth, latency_s))

    def router(source: int, target: int) -> tuple[int, ...]:
        route, here = [], source
        for axis, (stride, length) in enumerate(zip(strides, shape, strict=True)):
            up = (target // stride - here // stride) % length
            way, hops = (1, up) if 2 * up <= length else (-1, length - up)
            for _ in range(hops):
                there = beside(here, axis, way)
                route.append(number[here, there])
                here = there
        return tuple(route)

    name = "torus " + "x".join(map(str, shape)) if len(shape) > 1 else "ring"
    return Topology(world_size=world_size, links=tuple(links), name=name, router=router, **costs)


def ring(
    world_size: int, *, bandwidth: Number, latency_s: Number = 0, **costs: Unpack[RankCosts]
) -> Topology:
    """A ring: each rank has a cable to the next one, as in a `torus` of one dimension."""
    return torus((world_size,), bandwidth=bandwidth, latency_s=latency_s, **costs)
