"""Algorithms by their names, those with signs as well.

``ring+two_shot`` is a hierarchy, the innermost first, and ``ring~0.2.1`` is a ring through the ranks 0, 2, 1. What
`ringcoll.algorithms.registry` finds has an entry; these have none.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache

from ringcoll.algorithms import registry
from ringcoll.algorithms.blocks_on_hosts import run_blocks_on, slots_of_blocks
from ringcoll.algorithms.entry import Algorithm, mark_built_in
from ringcoll.algorithms.hierarchical import chunks_of, run_on, slots_of
from ringcoll.algorithms.host_layout import Hosts
from ringcoll.algorithms.placed import SIGN, placed
from ringcoll.errors import UnknownAlgorithmError, UnsupportedWorldSizeError
from ringcoll.schedule import CONTRACTS, Program, Schedule

_HIERARCHIES = {
    "all_reduce": (run_on, slots_of),
    "reduce_scatter": (run_blocks_on, slots_of_blocks),
    "all_gather": (run_blocks_on, slots_of_blocks),
}


def find(collective: str, name: str) -> Algorithm:
    """Look up an algorithm by its name or alias.

    Parameters
    ----------
    collective
        The collective.
    name
        The name of an entry; or ``name=value``, to choose the value of its `Parameter`; or
        names joined by ``+``, for a hierarchy; any of these with ``~`` and an order of the ranks after it.

    Raises
    ------
    UnknownAlgorithmError
        The collective has no such algorithm, and the message lists its algorithms; or the order is no order of ranks.
    """
    name, sign, order = name.partition(SIGN)
    entry = (_hierarchy if "+" in name else registry.entry_of)(collective, name)
    return placed(entry, order) if sign else entry


def _hierarchy(collective: str, name: str) -> Algorithm:
    """The algorithm of a name such as ``ring+two_shot``: the first inside each host, the next across.

    Of three names the last two are a hierarchy of the hosts, in groups as of `rows_of`.

    Raises
    ------
    UnknownAlgorithmError
        The collective has no hierarchies, or no algorithm of one of the names.
    """
    entries = [registry.entry_of(collective, part) for part in name.split("+")]
    if collective not in _HIERARCHIES:
        raise UnknownAlgorithmError(f"{collective} has no hierarchies, got {name!r}")
    return _hierarchy_of(*entries)


@lru_cache(maxsize=256)
def _hierarchy_of(inside: Algorithm, *further: Algorithm) -> Algorithm:
    across = _hierarchy_of(*further) if len(further) > 1 else further[0]
    run, slots = _HIERARCHIES[inside.collective]

    def program(rank: int, hosts: Hosts) -> Program:
        return run(rank, hosts, inside, across)

    program.__doc__ = f"Hierarchy: {inside.name} inside each host, {across.name} across."
    hierarchy = Algorithm(
        inside.collective,
        f"{inside.name}+{across.name}",
        program,
        cost=None,
        chunks=lambda hosts: chunks_of(hosts, inside, across),
        slots=lambda hosts: slots(hosts, inside, across),
        pipelined=inside.pipelined or across.pipelined,
        needs_hosts=True,
    )
    # An algorithm of a user makes the hierarchy one of his.
    return mark_built_in(hierarchy) if inside.built_in and across.built_in else hierarchy


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
    collective: str, name: str, world_size: int, root: int = 0, hosts: tuple[int, ...] | None = None
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
