"""Hierarchy: first inside each host, then between the hosts, then inside again.

Problem: ranks of one host reach each other sooner than those of another. A host's
link is shared by its ranks; it should carry every element once, reduced over the
host, rather than once for each rank. On 2 hosts of 4 ranks::

    reduce-scatter inside   0 1 2 3    4 5 6 7     rank i of a host has quarter i,
                            | | | |    | | | |     reduced over the host
    all-reduce across       0-4  1-5  2-6  3-7     a quarter each, all at once
    all-gather inside       0 1 2 3    4 5 6 7

Each phase is an algorithm of another family, on some of the ranks and of the data.

The hosts may have different numbers of ranks, in any order. With m ranks on the
smallest one, m of each act. The others are divided among them, and each acting
rank reduces with its own first (a binomial tree), and tells them the result last.
With m = 1 this is the scheme of leaders: reduce inside, all-reduce among the
leaders, broadcast inside.

Sources: X. Jia et al., "Highly scalable deep learning training system with
mixed-precision", arXiv 1807.11205 (leaders); H. Mikami et al., "Massively distributed SGD:
ImageNet/ResNet-50 training in a flash", arXiv 1811.05233 (in two dimensions).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import isqrt

from ringcoll.algorithms import binomial, ring
from ringcoll.algorithms.bruck import rounds_to_reach_all
from ringcoll.algorithms.recursive import recursive_doubling_all_reduce
from ringcoll.algorithms.registry import Cost, register
from ringcoll.schedule.compose import in_place, renumber, split, unfinished
from ringcoll.schedule.ir import Program, Step, out

Hosts = tuple[int, ...]
"""The host number of every rank."""


@dataclass(frozen=True)
class HostLayout:
    """The ranks that act, and the ranks for which they act.

    Parameters
    ----------
    teams
        ``teams[host][index]`` are the ranks for which the first of them acts.
    """

    teams: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def num_hosts(self) -> int:
        """Number of hosts H."""
        return len(self.teams)

    @property
    def acting(self) -> int:
        """Ranks that act on each host: m, as many as the smallest host has."""
        return len(self.teams[0])

    @property
    def largest_team(self) -> int:
        """Ranks for which the busiest rank acts, itself included."""
        return max(len(team) for host in self.teams for team in host)

    @property
    def pieces(self) -> int:
        """Pieces into which a chunk is cut to go across: as the ring does, but not for two."""
        return self.num_hosts if self.num_hosts > 2 else 1

    @property
    def rounds_across(self) -> int:
        """Rounds between the hosts."""
        return 2 * (self.num_hosts - 1) if self.num_hosts > 2 else self.num_hosts - 1

    def find(self, rank: int) -> tuple[int, int, int]:
        """Host, number of the team on it, and number in the team, of a rank."""
        return next(
            (host, index, team.index(rank))
            for host, teams in enumerate(self.teams)
            for index, team in enumerate(teams)
            if rank in team
        )


@lru_cache(maxsize=64)
def layout_of(hosts: Hosts) -> HostLayout:
    """Choose the ranks that act.

    Examples
    --------
    >>> layout_of((0, 1, 0, 1)).teams
    (((0,), (2,)), ((1,), (3,)))
    >>> layout_of((0, 0, 0, 1, 1)).teams
    (((0, 2), (1,)), ((3,), (4,)))
    """
    ranks: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    acting = min(map(len, ranks.values()))
    return HostLayout(
        tuple(
            tuple(tuple(members[index::acting]) for index in range(acting))
            for members in ranks.values()
        )
    )


def _chunks(hosts: Hosts) -> int:
    layout = layout_of(hosts)
    return layout.acting * layout.pieces


def _rounds(hosts: Hosts) -> int:
    layout = layout_of(hosts)
    inside = rounds_to_reach_all(layout.largest_team) + layout.acting - 1
    return 2 * inside + layout.rounds_across


def _traffic(hosts: Hosts) -> Fraction:
    layout = layout_of(hosts)
    m, across = layout.acting, Fraction(2 * (layout.num_hosts - 1), layout.num_hosts)
    inside = rounds_to_reach_all(layout.largest_team) + Fraction(m - 1, m)
    return 2 * inside + across / m


def _reduced(hosts: Hosts) -> Fraction:
    layout = layout_of(hosts)
    m, num_hosts = layout.acting, layout.num_hosts
    across = Fraction(num_hosts - 1, num_hosts) if num_hosts > 2 else Fraction(num_hosts - 1)
    return rounds_to_reach_all(layout.largest_team) + Fraction(m - 1, m) + across / m


@register(
    "all_reduce",
    "hierarchical",
    needs_hosts=True,
    # With links of 200 Mbit/s between two hosts of two ranks, 1 MiB over gloo: 1.4 to 2.6 times
    # as fast as the ring, 1.7 to 3.2 times as the tree (`benchmarks/hosts.py`). Few bytes were
    # not measured.
    across_hosts_from=32 << 10,
    chunks=_chunks,
    cost=Cost(rounds=_rounds, traffic=_traffic, reduced=_reduced),
)
def hierarchical_all_reduce(rank: int, hosts: Hosts) -> Program:
    """Hierarchical all-reduce: reduce-scatter on each host, all-reduce across, all-gather.

    On H hosts of m ranks 2(m - 1) + 2(H - 1) steps (one less for two hosts), for any layout
    of ranks on hosts. A rank sends 2(m - 1)/m of the vector inside its host and 2(H - 1)/(H m)
    to others; the ranks of a host together send 2(H - 1)/H, the least that its link
    has to carry, where a ring of all ranks sends 2(k - 1)/k. Where hosts have different
    numbers of ranks, 2 ceil(lg t) steps with the whole vector come on top, t being the
    ranks for which the busiest one acts.

    >>> from ringcoll.algorithms import schedule_of
    >>> from ringcoll.schedule.drawing import grid
    >>> print(grid(schedule_of("all_reduce", "hierarchical", 4, hosts=(0, 0, 1, 1))))
    step  rank 0      rank 1      rank 2      rank 3
       0  >1:1 +1:0   >0:0 +0:1   >3:1 +3:0   >2:0 +2:1
       1  >2:0 +2:0!  >3:1 +3:1!  >0:0 +0:0!  >1:1 +1:1!
       2  >1:0 <1:1   >0:1 <0:0   >3:0 <3:1   >2:1 <2:0
    """
    layout = layout_of(hosts)
    host, index, place = layout.find(rank)
    team = layout.teams[host][index]

    def whole(chunk: int) -> range:
        return range(layout.acting * layout.pieces)

    def in_team(program: Program) -> Program:
        of_all = renumber(split(program, whole), peer=team.__getitem__)
        return _lasting(of_all, rounds_to_reach_all(layout.largest_team))

    yield from unfinished(in_team(binomial.reduce_phase(place, len(team), 0, out(0))))
    acts = _act(layout, host, index) if place == 0 else iter(())
    yield from _lasting(acts, 2 * (layout.acting - 1) + layout.rounds_across)
    yield from in_team(binomial.broadcast_phase(place, len(team), 0, out(0)))


def rows_of(k: int) -> Hosts:
    """A torus of ``k`` ranks, as square as can be: the row of every rank.

    Examples
    --------
    >>> rows_of(6), rows_of(9), rows_of(5)
    ((0, 0, 0, 1, 1, 1), (0, 0, 0, 1, 1, 1, 2, 2, 2), (0, 0, 0, 0, 0))
    """
    rows = max(rows for rows in range(1, isqrt(k) + 1) if k % rows == 0)
    return tuple(rank * rows // k for rank in range(k))


@register(
    "all_reduce",
    "torus_ring",
    chunks=lambda k: _chunks(rows_of(k)),
    cost=Cost(
        rounds=lambda k: _rounds(rows_of(k)),
        traffic=lambda k: _traffic(rows_of(k)),
        reduced=lambda k: _reduced(rows_of(k)),
    ),
    second_choice=True,
)
def torus_ring_all_reduce(rank: int, world_size: int) -> Program:
    """Two-dimensional ring all-reduce: rings along the rows of a torus, then along its columns.

    On a torus of a rows of b ranks, as square as can be, 2(a + b - 2) steps (one less for two rows),
    where the ring has 2(ab - 1), and 2(ab - 1)/ab of the vector sent by each rank, the lower bound. A prime
    number of ranks has one row, which is a ring.

    Source: C. Ying et al., "Image classification at supercomputer scale", arXiv 1811.06992.

    >>> from ringcoll.schedule.drawing import grid
    >>> print(grid(torus_ring_all_reduce, 4))
    step  rank 0      rank 1      rank 2      rank 3
       0  >1:1 +1:0   >0:0 +0:1   >3:1 +3:0   >2:0 +2:1
       1  >2:0 +2:0!  >3:1 +3:1!  >0:0 +0:0!  >1:1 +1:1!
       2  >1:0 <1:1   >0:1 <0:0   >3:0 <3:1   >2:1 <2:0
    """
    return hierarchical_all_reduce(rank, rows_of(world_size))


def _act(layout: HostLayout, host: int, index: int) -> Program:
    """The steps of an acting rank: an all-reduce on equally many ranks of each host."""
    width, pieces = layout.acting, layout.pieces

    def inside(peer: int) -> int:
        return layout.teams[host][peer][0]

    def across(peer: int) -> int:
        return layout.teams[peer][index][0]

    def finer(chunk: int) -> range:
        return range(chunk * pieces, (chunk + 1) * pieces)

    reduced = ring.reduce_scatter_phase(index, width, lambda chunk, step: out(chunk), out(index))
    reduced = renumber(split(reduced, finer), peer=inside)
    if len(layout.teams[host][index]) > 1:
        reduced = in_place(reduced)  # the team's data are there already
    yield from unfinished(reduced) if layout.num_hosts > 1 else reduced
    between = renumber(
        _between(host, layout.num_hosts), peer=across, chunk=lambda piece: index * pieces + piece
    )
    is_there = width > 1 or len(layout.teams[host][index]) > 1
    yield from in_place(between) if is_there else between
    yield from renumber(split(ring.all_gather_phase(index, width), finer), peer=inside)


def _between(host: int, num_hosts: int) -> Program:
    """The all-reduce of one rank of each host; two ranks need only an exchange."""
    if num_hosts == 1:
        return iter(())
    if num_hosts == 2:
        return recursive_doubling_all_reduce(host, num_hosts)
    return ring.ring_all_reduce(host, num_hosts)


def _lasting(program: Program, num_steps: int) -> Program:
    """Let a program last so many steps, as long as on ranks that have more to do."""
    steps: Iterator[Step] = iter(program)
    for _ in range(num_steps):
        yield next(steps, Step())
    assert next(steps, None) is None
