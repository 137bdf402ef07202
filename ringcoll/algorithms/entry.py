"""An entry of the registry: all that the library has to know of an algorithm.

An algorithm is a function ``program(rank, world_size)``, or ``program(rank, world_size, root)`` for a
rooted collective, that yields steps. With ``needs_hosts`` it is ``program(rank, hosts)``, where ``hosts``
holds the host number of every rank, and the functions of the entry take ``hosts`` as well.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache, update_wrapper
from inspect import getdoc, getmodule
from typing import Any, cast

from ringcoll.errors import ScheduleError, UnsupportedWorldSizeError
from ringcoll.schedule import (
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


def _nothing(*world: int) -> Fraction:
    return Fraction(0)


@dataclass(frozen=True)
class Cost:
    """Formulas of the literature for what an algorithm costs, from the world size or the hosts.

    Parameters
    ----------
    rounds, traffic, reduced
        As in `ringcoll.schedule.counting.Counts`. `verify` compares each with what it
        counts on the schedule.
    """

    rounds: Callable[..., int]
    traffic: Callable[..., Fraction]
    reduced: Callable[..., Fraction] = _nothing


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
        Whether a rank moves blocks of others, whose length it knows only if all blocks are
        equal.
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
    restriction: Callable[[int], str | None] = field(default=lambda world_size: None)
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

        Parameters
        ----------
        world_size, hosts
            As for `schedule`.

        Raises
        ------
        UnsupportedWorldSizeError, ScheduleError
            As for `schedule`.

        Examples
        --------
        >>> from ringcoll.algorithms import find
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
    """The steps that a program yields.

    Raises
    ------
    ScheduleError
        The program returns steps, or anything else.
    """
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
    """Every collective on one rank: the output is the input; of an exclusive prefix there is none."""
    yield Step(*(copy(out(chunk), inp(chunk)) for chunk in range(num_chunks)))
