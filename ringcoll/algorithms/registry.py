"""The registry: one entry an algorithm.

An algorithm is a function ``program(rank, world_size)``, or ``program(rank,
world_size, root)`` for a rooted collective, that yields steps. Its entry says
how many chunks and scratch slots it uses and what the literature says that it
costs; tests hold the cost counted on the schedule against these formulas::

    @register("all_gather", "ring", chunks=lambda k: k,
              cost=Cost(rounds=lambda k: k - 1, traffic=lambda k: Fraction(k - 1, k)))
    def ring_all_gather(rank, world_size):
        ...

With ``needs_hosts`` a program is ``program(rank, hosts)``, where ``hosts`` holds the host
number of every rank, and what the entry says is from ``hosts`` as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Any

from ringcoll.contracts import CONTRACTS, contract
from ringcoll.errors import ScheduleError, UnknownAlgorithmError, UnsupportedWorldSizeError
from ringcoll.schedule import Program, Schedule, Step, copy, inp, out

__all__ = ["ALIASES", "Algorithm", "Cost", "algorithms", "find", "on_hosts", "register"]

ALIASES = {"tree": "binomial_tree"}
"""Short names, understood wherever an algorithm is named."""


def on_hosts(world_size: int, num_hosts: int = 2) -> tuple[int, ...]:
    """Divide ranks among hosts, each with ranks in a row, as evenly as can be.

    Examples
    --------
    >>> on_hosts(8), on_hosts(5), on_hosts(1), on_hosts(7, 3)
    ((0, 0, 0, 0, 1, 1, 1, 1), (0, 0, 0, 1, 1), (0,), (0, 0, 0, 1, 1, 2, 2))
    """
    num_hosts = min(num_hosts, world_size)
    least, more = divmod(world_size, num_hosts)
    return tuple(
        host for host in range(num_hosts) for _ in range(least + (1 if host < more else 0))
    )


def _nothing(world_size: int) -> Fraction:
    return Fraction(0)


@dataclass(frozen=True)
class Cost:
    """What an algorithm costs, from the world size k (or the hosts), by the literature.

    Times are ``rounds * alpha + (traffic * beta + reduced * gamma) * n`` where n
    is the size of the whole data: the vector, or all blocks of one rank.

    Parameters
    ----------
    rounds
        Steps in which anything is sent.
    traffic
        Sum over the steps of the most that any rank sends or receives in it, in n.
    reduced
        Sum over the steps of the most that any rank reduces in it, in n.
    """

    rounds: Callable[[Any], int]
    traffic: Callable[[Any], Fraction]
    reduced: Callable[[Any], Fraction] = _nothing


@dataclass(frozen=True)
class Algorithm:
    """A registered algorithm.

    Parameters
    ----------
    collective, name
        What it is called by.
    program
        The function that yields the steps of a rank.
    chunks, slots
        Number of chunks of data and of scratch slots, from the world size, or the hosts.
    cost
        The formulas of the literature.
    pipelined
        Whether it is meant to be run in segments.
    equal_blocks
        Whether it moves blocks whose length a rank knows only if all are equal.
    restriction
        For a world size it is not defined for, the reason; otherwise ``None``.
    needs_hosts
        Whether the program and the functions of this entry (but for ``restriction``)
        take the host number of every rank in place of the world size.
    """

    collective: str
    name: str
    program: Callable[..., Program]
    cost: Cost
    chunks: Callable[[Any], int]
    slots: Callable[[Any], int]
    pipelined: bool = False
    equal_blocks: bool = False
    restriction: Callable[[int], str | None] = field(default=lambda world_size: None)
    needs_hosts: bool = False

    @property
    def summary(self) -> str:
        """First line of the program's docstring."""
        return (self.program.__doc__ or "").strip().split("\n")[0]

    def world(self, world_size: int, hosts: Sequence[int] | None = None) -> Any:
        """What the functions of the entry take: the world size, or the hosts if it needs them.

        Parameters
        ----------
        world_size
            Number of ranks.
        hosts
            The host number of every rank; by default those of `on_hosts`, which are two.

        Raises
        ------
        ScheduleError
            ``hosts`` is not one number for each rank.
        """
        if hosts is not None and len(hosts) != world_size:
            raise ScheduleError(f"hosts are given for {len(hosts)} ranks of {world_size}")
        if not self.needs_hosts:
            return world_size
        return on_hosts(world_size) if hosts is None else tuple(hosts)

    def schedule(
        self, world_size: int, root: int = 0, hosts: Sequence[int] | None = None
    ) -> Schedule:
        """Build the schedule for a world size.

        Parameters
        ----------
        world_size
            Number of ranks, at least 1.
        root
            The root, for a rooted collective.
        hosts
            The host number of every rank, for an algorithm that needs them; see `world`.

        Raises
        ------
        UnsupportedWorldSizeError
            The algorithm is not defined for this world size.
        ScheduleError
            ``root`` is not one of the ranks, or ``hosts`` are not one for each rank.
        """
        if world_size < 1:
            raise UnsupportedWorldSizeError(f"world_size must be at least 1, got {world_size}")
        if reason := self.restriction(world_size):
            raise UnsupportedWorldSizeError(
                f"{self.name} {self.collective} cannot run on {world_size} ranks: {reason}"
            )
        world = self.world(world_size, hosts)
        num_chunks = self.chunks(world)

        def program(rank: int) -> Program:
            if world_size == 1:
                return alone(num_chunks)
            if contract(self.collective).rooted:
                return self.program(rank, world, root)
            return self.program(rank, world)

        return Schedule(
            collective=self.collective,
            algorithm=self.name,
            world_size=world_size,
            num_chunks=num_chunks,
            num_slots=self.slots(world),
            program=program,
            root=root,
        )


def alone(num_chunks: int) -> Program:
    """Every collective on one rank: the output is the input."""
    yield Step(*(copy(out(chunk), inp(chunk)) for chunk in range(num_chunks)))


_REGISTRY: dict[tuple[str, str], Algorithm] = {}
_changes: list[str] = []


def generation() -> int:
    """A number that changes with the registry, for caches that depend on it."""
    return len(_changes)


def _changed(name: str) -> None:
    _changes.append(name)
    schedule_of.cache_clear()


def register(
    collective: str,
    name: str,
    *,
    cost: Cost,
    chunks: Callable[[Any], int] = lambda world_size: 1,
    slots: Callable[[Any], int] = lambda world_size: 0,
    pipelined: bool = False,
    equal_blocks: bool = False,
    restriction: Callable[[int], str | None] = lambda world_size: None,
    needs_hosts: bool = False,
) -> Callable[[Callable[..., Program]], Callable[..., Program]]:
    """Register the decorated program; parameters as for `Algorithm`.

    Raises
    ------
    ScheduleError
        The collective is unknown, or it already has an algorithm of that name.
    """
    contract(collective)
    if (collective, name) in _REGISTRY or name in ALIASES or name == "auto":
        raise ScheduleError(f"{collective} already has an algorithm named {name!r}")

    def decorate(program: Callable[..., Program]) -> Callable[..., Program]:
        _REGISTRY[collective, name] = Algorithm(
            collective,
            name,
            program,
            cost,
            chunks,
            slots,
            pipelined,
            equal_blocks,
            restriction,
            needs_hosts,
        )
        _changed(name)
        return program

    return decorate


def unregister(collective: str, name: str) -> None:
    """Take an algorithm out of the registry.

    Raises
    ------
    UnknownAlgorithmError
        There is none of that name.
    """
    del _REGISTRY[collective, find(collective, name).name]
    schedule_of.cache_clear()


def algorithms(collective: str | None = None) -> Iterator[Algorithm]:
    """All registered algorithms, or those of one collective, in order of registration.

    Raises
    ------
    ScheduleError
        There is no such collective.
    """
    wanted = CONTRACTS if collective is None else {contract(collective).collective}
    yield from (entry for entry in _REGISTRY.values() if entry.collective in wanted)


def find(collective: str, name: str) -> Algorithm:
    """Look up an algorithm by its name or alias.

    Raises
    ------
    UnknownAlgorithmError
        There is none; the message lists those that there are.
    """
    entry = _REGISTRY.get((collective, ALIASES.get(name, name)))
    if entry is None:
        known = [algorithm.name for algorithm in algorithms(collective)]
        known += [short for short, full in ALIASES.items() if full in known]
        raise UnknownAlgorithmError(
            f"unknown algorithm {name!r} for {collective}; known: {', '.join(known)}"
        )
    return entry


@lru_cache(maxsize=256)
def schedule_of(
    collective: str,
    name: str,
    world_size: int,
    root: int = 0,
    hosts: tuple[int, ...] | None = None,
) -> Schedule:
    """Build, or fetch, the schedule of an algorithm; see `Algorithm.schedule`."""
    return find(collective, name).schedule(world_size, root, hosts)
