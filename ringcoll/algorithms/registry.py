"""The registry: the algorithms by collective and name.

::

    @register("all_gather", "ring", chunks=lambda k: k)
    def ring_all_gather(rank, world_size):
        ...

Two signs in a name make algorithms that have no entry of their own: ``circulant=64`` is an
algorithm with another value of its `Parameter`, and ``ring+two_shot`` is a hierarchy of
algorithms, the innermost first (`ringcoll.algorithms.hierarchical`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

from ringcoll.algorithms.entry import Algorithm, Cost, Parameter, mark_built_in, on_hosts
from ringcoll.errors import ScheduleError, UnknownAlgorithmError, UnsupportedWorldSizeError
from ringcoll.schedule.contracts import CONTRACTS, LARGEST_WORLD, OperandOrder, contract
from ringcoll.schedule.ir import Program, Schedule

__all__ = [
    "ALIASES",
    "Algorithm",
    "Cost",
    "Parameter",
    "algorithms",
    "find",
    "named",
    "on_hosts",
    "own",
    "register",
    "required",
    "schedule_of",
    "seal",
    "unregister",
    "where_possible",
]

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
    schedule_of.cache_clear()


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
        of the signs ``+`` and ``=``.
    """
    contract(collective)
    if "+" in name or "=" in name:
        raise ScheduleError(f"an algorithm cannot be named {name!r}: + and = join names")
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


def unregister(collective: str, name: str) -> None:
    """Remove an algorithm from the registry.

    Raises
    ------
    UnknownAlgorithmError
        The collective has no algorithm of that name.
    """
    key = collective, find(collective, name).name
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
        yield find(entry.collective, f"{entry.name}={value}")


def find(collective: str, name: str) -> Algorithm:
    """Look up an algorithm by its name or alias.

    Parameters
    ----------
    collective
        The collective.
    name
        The name of an entry; or ``name=value``, to choose the value of its `Parameter`; or
        names joined by ``+``, for a hierarchy.

    Raises
    ------
    UnknownAlgorithmError
        The collective has no such algorithm; the message lists its algorithms.
    """
    if "+" in name:
        from ringcoll.algorithms.hierarchical import hierarchy  # that module imports this one

        return hierarchy(collective, name)
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
    if not re.fullmatch("[0-9]{1,9}", value) or int(value) > LARGEST_WORLD:
        raise UnknownAlgorithmError(
            f"{plain} {collective} takes a number of {parameter.name}, such as "
            f"{plain}={parameter.default(8)}, at most {LARGEST_WORLD}, got {name!r}"
        )
    return _WITH_VALUE[key](int(value))


def named(name: str, collective: str | None = None) -> list[Algorithm]:
    """Look up a name in one collective, or in all; as many algorithms as there are.

    Examples
    --------
    >>> [entry.collective for entry in named("pairwise")], named("pairwise", "broadcast")
    (['reduce_scatter', 'all_to_all'], [])
    """
    entries = []
    for each in CONTRACTS if collective is None else (collective,):
        with suppress(UnknownAlgorithmError):
            entries.append(find(each, name))
    return entries


def required(collective: str, name: str | Schedule, world_size: int) -> str | Schedule:
    """Check that a collective has an algorithm for a number of ranks; return its name.

    Raises
    ------
    UnknownAlgorithmError, UnsupportedWorldSizeError
        The collective does not have the algorithm, or the schedule is for something else.
    """
    if isinstance(name, Schedule):
        if name.collective != collective:
            raise UnknownAlgorithmError(
                f"{name.algorithm} is a schedule for {name.collective}, not for {collective}"
            )
        if name.world_size != world_size:
            raise UnsupportedWorldSizeError(
                f"{name.algorithm} {collective} cannot run on {world_size} ranks: it is a schedule "
                f"for {name.world_size}"
            )
        return name
    if name != "auto" and (reason := find(collective, name).restriction(world_size)):
        raise UnsupportedWorldSizeError(
            f"{name} {collective} cannot run on {world_size} ranks: {reason}"
        )
    return name


def where_possible(collective: str, name: str | Schedule, world_size: int) -> str | Schedule:
    """Name an algorithm, or return a schedule, if it is for the collective; otherwise ``"auto"``.

    Raises
    ------
    UnknownAlgorithmError, UnsupportedWorldSizeError
        No collective has the algorithm for so many ranks.
    """
    if isinstance(name, Schedule):
        required(name.collective, name, world_size)
        return name if name.collective == collective else "auto"
    if name == "auto":
        return name
    can_run = {entry.collective for entry in named(name) if not entry.restriction(world_size)}
    if not can_run:
        required("all_reduce", name, world_size)  # says why
    return name if collective in can_run else "auto"


@lru_cache(maxsize=256)
def schedule_of(
    collective: str,
    name: str,
    world_size: int,
    root: int = 0,
    hosts: tuple[int, ...] | None = None,
) -> Schedule:
    """Build, or take from a cache, the schedule of an algorithm; see `Algorithm.schedule`."""
    return find(collective, name).schedule(world_size, root, hosts)
