"""The registry: the algorithms by collective and name.

::

    @register("all_gather", "ring", chunks=lambda k: k)
    def ring_all_gather(rank, world_size):
        ...

A sign in a name makes an algorithm that has no entry of its own: ``circulant=64`` is an algorithm
with another value of its `Parameter`. `ringcoll.algorithms.names` knows names with ``+`` as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from ringcoll.algorithms.entry import Algorithm, Cost, Parameter, mark_built_in
from ringcoll.errors import ScheduleError, UnknownAlgorithmError
from ringcoll.schedule import CONTRACTS, LARGEST_WORLD, OperandOrder, Program, Schedule, contract

ALIASES = {"tree": "binomial_tree"}
"""Short names, understood wherever an algorithm is named."""


_REGISTRY: dict[tuple[str, str], Algorithm] = {}
_WITH_VALUE: dict[tuple[str, str], Callable[[int | None], Algorithm]] = {}
revision = 0
"""A number that changes with the registry, for caches that depend on it."""
_OWN: dict[tuple[str, str], Algorithm] = {}  # entries of the library, once it has them all


def _unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def seal() -> None:
    """Let no further entry count as one of the library: `ringcoll.algorithms` has all of them by now."""
    _OWN.update(_REGISTRY)


def own(collective: str, name: str) -> Algorithm:
    """The library's entry of a name, whatever a program has registered under that name."""
    return _OWN[collective, name]


def _changed() -> None:
    global revision  # noqa: PLW0603  # it counts what happened to the registry
    revision += 1


def register(
    collective: str,
    name: str,
    *,
    cost: Cost | None = None,
    chunks: Callable[..., int] = lambda *world: 1,
    slots: Callable[..., int] = lambda *world: 0,
    pipelined: bool = False,
    equal_blocks: bool = False,
    restriction: Callable[..., str | None] = lambda *world: None,
    needs_hosts: bool = False,
    order: OperandOrder = OperandOrder.ANY,
    across_hosts_from: int | None = None,
    second_choice: bool = False,
    parameter: Parameter | None = None,
) -> Callable[[Callable[..., Program]], Callable[..., Program]]:
    """Register the decorated program; the parameters are those of `Algorithm`.

    Raises
    ------
    ScheduleError
        The collective is unknown, or already has an algorithm of that name, or the name has one
        of the signs ``+``, ``=`` and ``~``.
    """
    contract(collective)
    if any(sign in name for sign in "+=~"):
        raise ScheduleError(f"an algorithm cannot be named {name!r}: +, = and ~ are signs in names")
    if (collective, name) in _REGISTRY or name in ALIASES or name == "auto":
        raise ScheduleError(f"{collective} already has an algorithm named {name!r}")

    is_built_in = not _OWN

    def decorate(program: Callable[..., Program]) -> Callable[..., Program]:
        @lru_cache(maxsize=64)
        def entry(value: int | None) -> Algorithm:
            bound = _unchanged if parameter is None else partial(parameter.bound, value)
            algorithm = Algorithm(
                collective,
                name if value is None else f"{name}={value}",
                bound(program),
                cost and Cost(bound(cost.rounds), bound(cost.traffic), bound(cost.reduced)),
                bound(chunks),
                bound(slots),
                pipelined,
                equal_blocks,
                bound(restriction),
                needs_hosts,
                order,
                across_hosts_from,
                second_choice,
                parameter,
            )
            return mark_built_in(algorithm) if is_built_in else algorithm

        _REGISTRY[collective, name] = entry(None)
        _WITH_VALUE[collective, name] = entry
        _changed()
        return program

    return decorate


def register_schedule(schedule: Schedule, name: str, origin: str = "a search") -> str:
    """Register a schedule, for its number of ranks and its root, and return the name.

    A name that is taken is kept: whoever registers a schedule puts a hash of its text into the name.
    """
    entry, key = entry_of_schedule(schedule, origin), (schedule.collective, name)
    if key not in _REGISTRY:
        entry = replace(entry, name=name)
        _WITH_VALUE[key] = lambda value: entry
        _REGISTRY[key] = entry  # ranks may be threads, which put the same there
        _changed()
    return name


def entry_of_schedule(schedule: Schedule, origin: str) -> Algorithm:
    """A schedule as an entry like those of the registry."""

    def program(rank: int, world_size: int, root: int = 0) -> Program:
        if root != schedule.root:
            raise ScheduleError(f"{origin} is for root {schedule.root}, not for root {root}")
        return iter(schedule.program(rank))

    program.__doc__ = f"Read from {origin}."

    def restriction(world_size: int) -> str | None:
        right = schedule.world_size
        return None if world_size == right else f"{origin} holds a schedule for {right} ranks"

    return Algorithm(
        schedule.collective,
        schedule.algorithm,
        program,
        cost=None,
        chunks=lambda world_size: schedule.num_chunks,
        slots=lambda world_size: schedule.num_slots,
        restriction=restriction,
    )


def unregister(collective: str, name: str) -> None:
    """Remove an algorithm from the registry.

    Raises
    ------
    UnknownAlgorithmError
        The collective has no algorithm of that name.
    """
    key = collective, entry_of(collective, name).name
    if key not in _REGISTRY:
        raise UnknownAlgorithmError(f"{name!r} has no entry for {collective}")
    del _REGISTRY[key], _WITH_VALUE[key]
    _changed()


def algorithms(
    collective: str | None = None, world_size: int | None = None, *, variants: bool = False
) -> Iterator[Algorithm]:
    """Registered algorithms, in order of registration.

    Parameters
    ----------
    collective
        The collective; by default the algorithms of all collectives.
    world_size
        Number of ranks, to leave out the algorithms that are not defined for it; by default
        none is left out.
    variants
        Whether an algorithm with a parameter comes with each value that ``"auto"`` considers, too.

    Raises
    ------
    ScheduleError
        There is no such collective.
    """
    wanted = CONTRACTS if collective is None else {contract(collective).collective}
    for registered in tuple(_REGISTRY.values()):
        if registered.collective in wanted:
            for entry in _variants(registered) if variants else (registered,):
                if world_size is None or not entry.restriction(world_size):
                    yield entry


def _variants(entry: Algorithm) -> Iterator[Algorithm]:
    yield entry
    for value in entry.parameter.tried if entry.parameter else ():
        yield entry_of(entry.collective, f"{entry.name}={value}")


def entry_of(collective: str, name: str) -> Algorithm:
    """Look up an entry: by its name or alias, or as ``name=value``. See `ringcoll.algorithms.find`."""
    plain, sign, value = name.partition("=")
    key = (collective, ALIASES.get(plain, plain))
    if key not in _REGISTRY:
        known = [algorithm.name for algorithm in algorithms(collective)]
        known += [short for short, full in ALIASES.items() if full in known]
        raise UnknownAlgorithmError(
            f"unknown algorithm {plain!r} for {collective}; known: {', '.join(known)}"
        )
    if not sign:
        return _REGISTRY[key]
    parameter = _REGISTRY[key].parameter
    if parameter is None:
        raise UnknownAlgorithmError(f"{plain} {collective} has no parameter, got {name!r}")
    is_number = re.fullmatch("[0-9]{1,9}", value)
    if not is_number or not parameter.least <= int(value) <= LARGEST_WORLD:
        raise UnknownAlgorithmError(
            f"{plain} {collective} takes a number of {parameter.name}, such as "
            f"{plain}={parameter.default(8)}, at least {parameter.least}, and at most {LARGEST_WORLD}, "
            f"got {name!r}"
        )
    return _WITH_VALUE[key](int(value))
