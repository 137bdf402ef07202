"""The registry: the algorithms by collective and name, and what an entry says of an algorithm.

::

    @register("all_gather", "ring", chunks=lambda k: k)
    def ring_all_gather(rank, world_size):
        ...

An algorithm is a function ``program(rank, world_size)``, or ``program(rank, world_size, root)`` for
a rooted collective, that yields steps. With ``needs_hosts`` it is ``program(rank, hosts)``, where
``hosts`` holds the host number of every rank, and the functions of the entry take ``hosts``, too.

A sign in a name makes an algorithm that has no entry of its own: ``circulant=64`` is an algorithm
with another value of its `Parameter`. `ringcoll.schedules.algorithms.names` knows names with ``+``
as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache, update_wrapper
from inspect import getdoc, getmodule
from typing import Any, cast

from ringcoll.errors import (
    ScheduleError,
    UnknownAlgorithmError,
    UnsupportedWorldSizeError,
    printable,
)
from ringcoll.schedules.ir import (
    CONTRACTS,
    LARGEST_WORLD,
    Counts,
    OperandOrder,
    Program,
    Schedule,
    Step,
    chunks_of_data,
    contract,
    copy,
    inp,
    out,
    tally_of,
)

ALIASES = {"tree": "binomial_tree"}
"""Short names, understood wherever an algorithm is named."""

# An algorithm from the value of its parameter; `None` is the default.
_Variants = Callable[[int | None], "Algorithm"]
_REGISTRY: dict[tuple[str, str], _Variants] = {}
_BUILT_IN: dict[tuple[str, str], _Variants] = {}  # entries of the library, once it has them all
revision = 0
"""A number that changes with the registry, for caches that depend on it."""


# ---- Numbers of many families --------------------------------------------------------------


def on_hosts(world_size: int, num_hosts: int = 2) -> tuple[int, ...]:
    """Divide ranks among hosts, each with ranks in a row, as evenly as can be.

    Examples
    --------
    >>> on_hosts(8), on_hosts(5), on_hosts(1), on_hosts(7, 3)
    ((0, 0, 0, 0, 1, 1, 1, 1), (0, 0, 0, 1, 1), (0,), (0, 0, 0, 1, 1, 2, 2))
    """
    num_hosts = min(num_hosts, world_size)
    least, more = divmod(world_size, num_hosts)
    return tuple(host for host in range(num_hosts) for _ in range(least + (host < more)))


def rounds_to_reach_all(k: int) -> int:
    """ceil(lg k): the fewest rounds in which one rank's data can reach k ranks."""
    return (k - 1).bit_length()


def share_of_others(k: int) -> Fraction:
    """The blocks of all ranks but one, as a part of the data: (k - 1)/k."""
    return Fraction(k - 1, k)


def vector_each_round(k: int) -> Fraction:
    """The vector in each of the fewest rounds, as a multiple of the data: ceil(lg k)."""
    return Fraction(rounds_to_reach_all(k))


def powers_below(base: int, k: int) -> Iterator[int]:
    """1, base, base^2, ... below ``k``."""
    power = 1
    while power < k:
        yield power
        power *= base


# ---- Entries -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """Formulas of the literature for the cost of an algorithm, from the world size or the hosts.

    Parameters
    ----------
    rounds, traffic, reduced
        As in `ringcoll.schedules.Counts`. `verify` compares each with what it counts on the
        schedule.
    """

    rounds: Callable[..., int]
    traffic: Callable[..., Fraction]
    reduced: Callable[..., Fraction] = lambda *world: Fraction(0)


@dataclass(frozen=True)
class Parameter:
    """A number that a caller may choose, by ``algorithm="name=value"``.

    The program and the functions of the entry take the value as their last argument.

    Parameters
    ----------
    name
        What the number counts, for messages and tables.
    default
        The value for the name alone, from the world size.
    tried
        Further values that ``"auto"`` considers, wherever the algorithm runs with them.
    least
        The least value that a caller may choose; the default may be below it for one rank.
    """

    name: str
    default: Callable[[int], int]
    tried: tuple[int, ...] = ()
    least: int = 0

    def bound(self, value: int | None, function: Callable[..., Any]) -> Callable[..., Any]:
        """A program, or a function of an entry, with a value; ``None`` for the default."""

        def with_value(*arguments: Any) -> Any:
            world_size = arguments[1 if len(arguments) > 1 else 0]  # a program has the rank first
            return function(*arguments, self.default(world_size) if value is None else value)

        return update_wrapper(with_value, function)


@dataclass(frozen=True)
class Algorithm:
    """A registered algorithm: all that the rest of the library knows of it.

    Parameters
    ----------
    collective, name
        Names of the collective and of the algorithm.
    program
        The function that yields the steps of a rank.
    cost
        Formulas of the literature; ``None`` to have the cost counted on the schedule.
    chunks, slots
        Number of chunks of data and of scratch slots, from the world size or the hosts.
    pipelined
        Whether the algorithm is meant to be run in segments.
    equal_blocks
        Whether a rank moves blocks of others, whose length it knows only if all blocks are equal.
    restriction
        The reason why the algorithm is not defined for a world size; otherwise ``None``.
    needs_hosts
        Whether the program and the functions of this entry (but for ``restriction``)
        take the host number of every rank in place of the world size.
    order
        The order of operands that the algorithm keeps, for every world size and root.
    across_hosts_from
        Bytes of the whole data from which ``"auto"`` takes the algorithm where some hosts
        have several ranks; ``None`` for an algorithm that is not chosen for that reason.
    second_choice
        Whether ``"auto"`` takes the algorithm only if its predicted time is below that of all
        others: another one of the same time comes first.
    parameter
        The number that a caller may choose; ``None`` for an algorithm without one.
    """

    collective: str
    name: str
    program: Callable[..., Program]
    cost: Cost | None
    chunks: Callable[[Any], int]
    slots: Callable[[Any], int]
    pipelined: bool = False
    equal_blocks: bool = False
    restriction: Callable[[int], str | None] = lambda world_size: None
    needs_hosts: bool = False
    order: OperandOrder = OperandOrder.ANY
    across_hosts_from: int | None = None
    second_choice: bool = False
    parameter: Parameter | None = None
    built_in: bool = field(default=False, init=False)
    """Whether this very entry comes with the library: every rank has it, and tests prove it."""

    @property
    def summary(self) -> str:
        """First line of the program's docstring."""
        return (self.program.__doc__ or "").strip().split("\n")[0]

    @property
    def needs(self) -> str:
        """The restriction in words; empty if the algorithm runs on every number of ranks."""
        return next(filter(None, map(self.restriction, range(2, 65))), "")

    @property
    def source(self) -> str:
        """Where the algorithm is from: as its docstring says, or else that of its module."""
        for described in (self.program, getmodule(self.program)):
            for paragraph in (getdoc(described) or "").split("\n\n"):
                if paragraph.startswith(("Source: ", "Sources: ")):
                    return " ".join(paragraph.partition(": ")[2].split())
        return ""

    def world(self, world_size: int, hosts: Sequence[int] | None = None) -> Any:
        """The argument of the entry's functions: the world size, or the hosts if they are needed.

        Parameters
        ----------
        world_size
            Number of ranks.
        hosts
            The host number of every rank; by default the two hosts of `on_hosts`.

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
            ``root`` is not one of the ranks, or ``hosts`` is not one number for each rank.
        """
        if not 1 <= world_size <= LARGEST_WORLD:
            raise UnsupportedWorldSizeError(
                f"world_size must be at least 1, and at most {LARGEST_WORLD}, got {world_size}"
            )
        if reason := self.restriction(world_size):
            raise UnsupportedWorldSizeError(
                f"{self.name} {self.collective} cannot run on {world_size} ranks: {reason}"
            )
        world = self.world(world_size, hosts)
        num_chunks, stated = self.chunks(world), None
        if self.cost is not None and world_size > 1:
            stated = self.cost.rounds(world), self.cost.traffic(world), self.cost.reduced(world)

        def program(rank: int) -> Program:
            if world_size == 1:
                return alone(num_chunks if contract(self.collective).outputs(0, 1, 0) else 0)
            if contract(self.collective).rooted:
                return _yielded(self.program(rank, world, root))
            return _yielded(self.program(rank, world))

        return Schedule(
            collective=self.collective,
            algorithm=self.name,
            world_size=world_size,
            num_chunks=num_chunks,
            num_slots=self.slots(world),
            program=program,
            root=root,
            stated_cost=stated,
        )

    def counts(self, world_size: int, hosts: Sequence[int] | None = None) -> Counts:
        """The cost of the algorithm: by its formulas, or counted if it has none.

        The parameters and errors are those of `schedule`.

        Examples
        --------
        >>> from ringcoll.schedules.algorithms import find
        >>> counts = find("all_reduce", "ring").counts(8)
        >>> counts.rounds, str(counts.traffic), str(counts.reduced)
        (14, '7/4', '7/8')
        """
        if stated := self.schedule(world_size, hosts=hosts).stated_cost:
            return Counts(*stated)
        return _counted(self, world_size, None if hosts is None else tuple(hosts))


def mark_built_in(entry: Algorithm) -> Algorithm:
    """Let an entry count as one of the library."""
    object.__setattr__(entry, "built_in", True)
    return entry


@lru_cache(maxsize=1024)
def _counted(entry: Algorithm, world_size: int, hosts: tuple[int, ...] | None) -> Counts:
    schedule = entry.schedule(world_size, hosts=hosts)
    return tally_of(schedule).counts(chunks_of_data(schedule))


def _yielded(program: object) -> Program:
    """The steps that a program yields; a ScheduleError if it returns steps, or anything else."""
    returned = program
    if isinstance(program, Iterator):
        returned = yield from cast("Generator[Step, None, object]", program)
    if returned is not None or program is None:
        what = "None" if returned is None else f"an object of type {type(returned).__name__}"
        raise ScheduleError(
            f"the program returned {what}; a program yields its steps one by one, as in "
            "`yield Step(...)`, and returns nothing"
        )


def alone(num_chunks: int) -> Program:
    """Every collective on one rank: the output is the input; an exclusive prefix has none."""
    yield Step(*(copy(out(chunk), inp(chunk)) for chunk in range(num_chunks)))


# ---- The registry --------------------------------------------------------------------------


def seal() -> None:
    """Let no further entry count as one of the library."""
    _BUILT_IN.update(_REGISTRY)


def built_in_entry(collective: str, name: str) -> Algorithm:
    """The library's entry of a name, whatever a program has registered under that name."""
    return _BUILT_IN[collective, name](None)


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
    key = collective, name
    if key in _REGISTRY or name in ALIASES or name == "auto":
        raise ScheduleError(f"{collective} already has an algorithm named {name!r}")
    is_built_in = not _BUILT_IN

    def decorate(program: Callable[..., Program]) -> Callable[..., Program]:
        @lru_cache(maxsize=64)
        def entry(value: int | None) -> Algorithm:
            def bound(function: Callable[..., Any]) -> Callable[..., Any]:
                return function if parameter is None else parameter.bound(value, function)

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

        entry(None)  # made here, as ranks may be threads, which would make several
        _REGISTRY[key] = entry
        _changed()
        return program

    return decorate


def register_schedule(schedule: Schedule, name: str, origin: str = "a search") -> str:
    """Register a schedule, for its number of ranks and its root, and return the name.

    A name that is taken keeps its entry: the caller puts a hash of the schedule's text into the
    name.
    """
    entry, key = entry_of_schedule(schedule, origin), (schedule.collective, name)
    if key not in _REGISTRY:
        entry = replace(entry, name=name)
        _REGISTRY[key] = lambda value: entry  # ranks may be threads, which put the same there
        _changed()
    return name


def entry_of_schedule(schedule: Schedule, origin: str) -> Algorithm:
    """A schedule as an entry like those of the registry."""
    origin = printable(origin)

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
    del _REGISTRY[key]
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
    for (of_collective, _), entry_with in tuple(_REGISTRY.items()):
        if of_collective in wanted:
            parameter = entry_with(None).parameter
            tried = parameter.tried if variants and parameter else ()
            for entry in map(entry_with, (None, *tried)):
                if world_size is None or not entry.restriction(world_size):
                    yield entry


def entry_of(collective: str, name: str) -> Algorithm:
    """Look up an entry: by its name or alias, or as ``name=value``."""
    plain, sign, value = name.partition("=")
    key = (collective, ALIASES.get(plain, plain))
    if key not in _REGISTRY:
        known = [algorithm.name for algorithm in algorithms(collective)]
        known += [short for short, full in ALIASES.items() if full in known]
        raise UnknownAlgorithmError(
            f"unknown algorithm {plain!r} for {collective}; known: {', '.join(known)}"
        )
    entry = _REGISTRY[key](None)
    if not sign:
        return entry
    parameter = entry.parameter
    if parameter is None:
        raise UnknownAlgorithmError(f"{plain} {collective} has no parameter, got {name!r}")
    is_number = re.fullmatch("[0-9]{1,9}", value)
    if not is_number or not parameter.least <= int(value) <= LARGEST_WORLD:
        raise UnknownAlgorithmError(
            f"{plain} {collective} takes a number of {parameter.name}, such as "
            f"{plain}={parameter.default(8)}, at least {parameter.least}, and at most "
            f"{LARGEST_WORLD}, got {name!r}"
        )
    return _REGISTRY[key](int(value))
