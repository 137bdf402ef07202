"""The demand of a collective on a search: which rank has each chunk, and which ranks want it.

The demands are read from the contracts, so every collective that reduces nothing can be searched
for. A collective that reduces is one of these backwards: a reduce-scatter is an all-gather, and a
reduce a broadcast, in which every message goes the other way, in the opposite order of steps. An
all-reduce is a reduce-scatter, and then an all-gather. Source: Z. Cai et al., "Synthesizing Optimal
Collective Algorithms", arXiv 2008.08708, sections 3.3 and 3.4.
"""

from __future__ import annotations

from dataclasses import dataclass

from ringcoll.errors import ArgumentError
from ringcoll.schedule import CONTRACTS

SEARCHED = {name: rules.made_of for name, rules in CONTRACTS.items() if rules.made_of}
"""The phases of the package's collectives: what is searched for, and whether it is used backwards."""


def phases_of(collective: str) -> tuple[tuple[str, bool], ...]:
    """The phases of a collective; none if there is no such collective, or nothing to search for."""
    rules = CONTRACTS.get(collective)
    return () if rules is None else rules.made_of


@dataclass(frozen=True)
class Demand:
    """Where the chunks of a collective are, and where they have to be.

    Parameters
    ----------
    collective
        A collective that reduces nothing.
    world_size, root
        Number of ranks, and the root.
    chunks
        Chunks that each block is cut into.
    owners
        The rank that has each chunk at the beginning.
    wanted
        The ranks that have each chunk at the end, its owner too if the contract says so.
    """

    collective: str
    world_size: int
    root: int
    chunks: int
    owners: tuple[int, ...]
    wanted: tuple[frozenset[int], ...]

    @property
    def for_all(self) -> bool:
        """Whether every rank wants every chunk, so that none passes on what it does not want."""
        return all(len(ranks) == self.world_size for ranks in self.wanted)


def demand_of(collective: str, world_size: int, chunks: int = 1, root: int = 0) -> Demand:
    """Read the demand of a collective from its contract, with blocks cut into chunks.

    Raises
    ------
    ArgumentError
        The collective reduces, or there is nothing to search for.

    Examples
    --------
    >>> demand = demand_of("scatter", 3, root=1)
    >>> demand.owners, [sorted(ranks) for ranks in demand.wanted]
    ((1, 1, 1), [[0], [1], [2]])
    """
    rules = CONTRACTS.get(collective)
    if rules is None or rules.reduces:
        raise ArgumentError(
            "the collective is not searched for", argument="collective",
            expected=", ".join(SEARCHED), got=repr(collective),
        )  # fmt: skip
    outputs = [{*rules.outputs(rank, world_size, root)} for rank in range(world_size)]
    blocks = range(rules.num_blocks(world_size))
    return Demand(
        collective,
        world_size,
        root,
        chunks,
        tuple(rules.owner(block, world_size, root) for block in blocks for _ in range(chunks)),
        tuple(
            frozenset(rank for rank, blocks in enumerate(outputs) if block in blocks)
            for block in blocks
            for _ in range(chunks)
        ),
    )
