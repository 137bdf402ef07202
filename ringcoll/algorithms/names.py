"""Algorithms by their names, those with signs as well.

``ring+two_shot`` is a hierarchy, the innermost first, and ``ring~0.2.1`` is a ring through the ranks 0, 2, 1. What
`ringcoll.algorithms.registry` finds has an entry; these have none.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache

from ringcoll.algorithms import registry
from ringcoll.algorithms.entry import Algorithm
from ringcoll.algorithms.hierarchical import hierarchy
from ringcoll.algorithms.placed import SIGN, placed
from ringcoll.errors import UnknownAlgorithmError, UnsupportedWorldSizeError
from ringcoll.schedule import CONTRACTS, Schedule


def find(collective: str, name: str) -> Algorithm:
    """Look up an algorithm by its name or alias.

    Parameters
    ----------
    collective
        The collective.
    name
        The name of an entry; or ``name=value``, to choose the value of its `Parameter`; or
        names joined by ``+``, for a hierarchy; each with ``~`` and an order of the ranks after it, or without.

    Raises
    ------
    UnknownAlgorithmError
        The collective has no such algorithm, the message lists its algorithms; or the order is none.
    """
    name, sign, order = name.partition(SIGN)
    entry = (hierarchy if "+" in name else registry.entry_of)(collective, name)
    return placed(entry, order) if sign else entry


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


def schedule_of(
    collective: str,
    name: str,
    world_size: int,
    root: int = 0,
    hosts: tuple[int, ...] | None = None,
) -> Schedule:
    """Build, or take from a cache, the schedule of an algorithm; see `Algorithm.schedule`."""
    return _schedule(collective, name, world_size, root, hosts, registry.revision)


@lru_cache(maxsize=256)
def _schedule(
    collective: str,
    name: str,
    world_size: int,
    root: int,
    hosts: tuple[int, ...] | None,
    revision: int,
) -> Schedule:
    return find(collective, name).schedule(world_size, root, hosts)
