"""Hierarchies: first inside each host, then between the hosts, and for all-reduces inside again.

Problem: ranks of one host reach each other sooner than those of another. A host's
link is shared by its ranks; it should carry every element once, reduced over the
host, rather than once for each rank. On 2 hosts of 4 ranks::

    reduce-scatter inside   0 1 2 3    4 5 6 7     rank i of a host has quarter i,
                            | | | |    | | | |     reduced over the host
    all-reduce across       0-4  1-5  2-6  3-7     a quarter each, all at once
    all-gather inside       0 1 2 3    4 5 6 7

Each phase is an algorithm of another family, on some of the ranks and of the data. Any two
all-reduces make a hierarchy, and have a name, such as ``recursive_doubling+ring``: the first runs
inside each host, and where it has completed a chunk, the second reduces that chunk across the hosts
before the first goes on. A third name is for groups of hosts, as square as can be:
``ring+ring+two_shot``.

The hosts may have different numbers of ranks, in any order. With m ranks on the smallest one, m of
each act. The others are divided among them, and each acting rank reduces with its own first (a
binomial tree), and tells them the result last. With m = 1 this is the scheme of leaders: reduce
inside, all-reduce among the leaders, broadcast inside.

A reduce-scatter runs inside and then across; an all-gather runs across and then inside. All ranks
act: those of the same number on each host exchange their blocks across. Where hosts have different
numbers of ranks, groups stand for hosts, of as many ranks as divide all of them: 4 and 2 ranks are
three pairs. If their numbers have no common divisor, all ranks are one level, host by host.

Sources: X. Jia et al., "Highly scalable deep learning training system with
mixed-precision", arXiv 1807.11205 (leaders); H. Mikami et al., "Massively distributed SGD:
ImageNet/ResNet-50 training in a flash", arXiv 1811.05233 (in two dimensions).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import islice
from math import gcd, isqrt

from ringcoll.errors import UnsupportedWorldSizeError
from ringcoll.schedules.algorithms import binomial
from ringcoll.schedules.algorithms.registry import (
    Algorithm,
    Cost,
    built_in_entry,
    register,
    rounds_to_reach_all,
    share_of_others,
)
from ringcoll.schedules.ir import (
    Program,
    Ref,
    Schedule,
    Step,
    in_place,
    inp,
    opening_of,
    out,
    renumber,
    split,
    step_count,
    tmp,
    unfinished,
)

Hosts = tuple[int, ...]
"""The host number of every rank."""


@dataclass(frozen=True)
class HostLayout:
    """The ranks that act: the first of ``teams[host][index]``, for all ranks of that team."""

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

    def find(self, rank: int) -> tuple[int, int, int]:
        """Host, number of the team on it, and number in the team, of a rank."""
        return next(
            (host, index, team.index(rank))
            for host, teams in enumerate(self.teams)
            for index, team in enumerate(teams)
            if rank in team
        )


@lru_cache(maxsize=64)
def layout_of(hosts: Hosts, *, even: bool = False) -> HostLayout:
    """Choose the ranks that act; in an even layout all ranks, in groups of equal size for hosts.

    >>> layout_of((0, 1, 0, 1)).teams
    (((0,), (2,)), ((1,), (3,)))
    >>> layout_of((0, 0, 0, 1, 1)).teams
    (((0, 2), (1,)), ((3,), (4,)))
    >>> layout_of((0, 0, 0, 0, 1, 1), even=True).teams
    (((0,), (1,)), ((2,), (3,)), ((4,), (5,)))
    """
    ranks: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    groups, acting = [*ranks.values()], min(map(len, ranks.values()))
    if even:
        acting = gcd(*map(len, groups))
        groups = [
            of_host[at : at + acting] for of_host in groups for at in range(0, len(of_host), acting)
        ]
    return HostLayout(
        tuple(tuple(tuple(group[index::acting]) for index in range(acting)) for group in groups)
    )


def rows_of(k: int) -> Hosts:
    """A torus of ``k`` ranks, as square as can be: the row of every rank.

    >>> rows_of(6), rows_of(9), rows_of(5)
    ((0, 0, 0, 1, 1, 1), (0, 0, 0, 1, 1, 1, 2, 2, 2), (0, 0, 0, 0, 0))
    """
    rows = max(rows for rows in range(1, isqrt(k) + 1) if k % rows == 0)
    return tuple(rank * rows // k for rank in range(k))


@lru_cache(maxsize=256)
def _schedule(entry: Algorithm, k: int) -> Schedule:
    """The schedule of one level; an algorithm that needs hosts takes the level for a torus."""
    return entry.schedule(k, hosts=rows_of(k))


def levels(hosts: Hosts, inside: Algorithm, across: Algorithm) -> tuple[Schedule, Schedule]:
    """The schedules inside each host and across."""
    layout = layout_of(hosts, even=inside.collective != "all_reduce")
    try:
        return _schedule(inside, layout.acting), _schedule(across, layout.num_hosts)
    except UnsupportedWorldSizeError as error:
        raise UnsupportedWorldSizeError(
            f"{inside.name}+{across.name} cannot run on {layout.num_hosts} hosts of which each has "
            f"at least {layout.acting} ranks: {error}"
        ) from None


def chunks_of(hosts: Hosts, inside: Algorithm, across: Algorithm) -> int:
    """Chunks of the data: each chunk of the level inside is cut for the level across."""
    inner, outer = levels(hosts, inside, across)
    return inner.num_chunks * outer.num_chunks


def slots_of(hosts: Hosts, inside: Algorithm, across: Algorithm) -> int:
    """Slots of scratch memory: those of both levels, for as many chunks as one message has."""
    inner, outer = levels(hosts, inside, across)
    most = max(map(len, opening_of(inner).completed))
    return inner.num_slots * outer.num_chunks + outer.num_slots * most


def run_on(rank: int, hosts: Hosts, inside: Algorithm, across: Algorithm) -> Program:
    """The steps of a rank: for its team, inside its host and across."""
    layout, (inner, outer) = layout_of(hosts), levels(hosts, inside, across)
    host, index, place = layout.find(rank)
    team = layout.teams[host][index]
    whole = range(inner.num_chunks * outer.num_chunks)
    rounds = rounds_to_reach_all(layout.largest_team)

    def in_team(program: Program) -> Program:
        of_all = renumber(split(program, lambda chunk: whole), peer=team.__getitem__)
        return _padded(of_all, rounds)

    yield from unfinished(in_team(binomial.reduce_phase(place, len(team), 0, out(0))))
    if place == 0:
        yield from _acting_steps(layout, host, index, inner, outer)
    else:
        acting = step_count(inner) * (layout.acting > 1)
        yield from _padded((), acting + step_count(outer) * (layout.num_hosts > 1))
    yield from in_team(binomial.broadcast_phase(place, len(team), 0, out(0)))


def _acting_steps(
    layout: HostLayout, host: int, index: int, inner: Schedule, outer: Schedule
) -> Program:
    """The steps of an acting rank: an all-reduce on equally many ranks of each host."""
    opening, pieces = opening_of(inner), outer.num_chunks
    own = opening.completed[index]
    leads = len(layout.teams[host][index]) > 1  # then the team's data are in the output

    def finer(chunk: int) -> range:
        return range(chunk * pieces, (chunk + 1) * pieces)

    def place_of(piece: int) -> list[int]:
        return [chunk * pieces + piece for chunk in own]

    steps = inner.steps(index) if layout.acting > 1 else iter(())
    steps = renumber(split(steps, finer), peer=lambda peer: layout.teams[host][peer][0])
    steps = in_place(steps) if leads else steps
    first = _padded(islice(steps, opening.first_steps), opening.first_steps)
    if layout.num_hosts == 1:
        yield from first
    else:
        yield from unfinished(first)
        between = renumber(
            split(outer.steps(host) if own else (), place_of),
            peer=lambda peer: layout.teams[peer][index][0],
            slot=lambda slot: inner.num_slots * pieces + slot,
        )
        is_there = layout.acting > 1 or leads
        yield from _padded(in_place(between) if is_there else between, step_count(outer))
    if layout.acting > 1:
        yield from _padded(steps, step_count(inner) - opening.first_steps)


def _padded(program: Iterable[Step], num_steps: int) -> Program:
    """Let a program last so many steps, as long as on ranks that have more to do."""
    steps: Iterator[Step] = iter(program)
    for _ in range(num_steps):
        yield next(steps, Step())
    assert next(steps, None) is None


# ---- All-reduces ---------------------------------------------------------------------------


def _usual(hosts: Hosts) -> tuple[Algorithm, Algorithm]:
    """Rings on both levels; two hosts need only an exchange."""
    far = "ring" if layout_of(hosts).num_hosts > 2 else "recursive_doubling"
    return built_in_entry("all_reduce", "ring"), built_in_entry("all_reduce", far)


def _chunks(hosts: Hosts) -> int:
    return chunks_of(hosts, *_usual(hosts))


def _rounds(hosts: Hosts) -> int:
    layout = layout_of(hosts)
    inside = rounds_to_reach_all(layout.largest_team) + layout.acting - 1
    across = layout.num_hosts - 1
    return 2 * inside + (2 * across if across > 1 else across)


def _inside(layout: HostLayout) -> Fraction:
    """The data that a rank sends inside its host before the level across, and again after it."""
    return rounds_to_reach_all(layout.largest_team) + share_of_others(layout.acting)


def _traffic(hosts: Hosts) -> Fraction:
    layout = layout_of(hosts)
    return 2 * (_inside(layout) + share_of_others(layout.num_hosts) / layout.acting)


def _reduced(hosts: Hosts) -> Fraction:
    layout = layout_of(hosts)
    # An exchange of two hosts reduces the whole share on both.
    across = Fraction(1) if layout.num_hosts == 2 else share_of_others(layout.num_hosts)
    return _inside(layout) + across / layout.acting


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

    >>> from ringcoll.schedules.algorithms import schedule_of
    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(schedule_of("all_reduce", "hierarchical", 4, hosts=(0, 0, 1, 1))))
    step  rank 0      rank 1      rank 2      rank 3
       0  >1:1 +1:0   >0:0 +0:1   >3:1 +3:0   >2:0 +2:1
       1  >2:0 +2:0!  >3:1 +3:1!  >0:0 +0:0!  >1:1 +1:1!
       2  >1:0 <1:1   >0:1 <0:0   >3:0 <3:1   >2:1 <2:0
    """
    return run_on(rank, hosts, *_usual(hosts))


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

    On a torus of a rows of b ranks, as square as can be, 2(a + b - 2) steps (one less for two
    rows), where the ring has 2(ab - 1), and 2(ab - 1)/ab of the vector sent by each rank, the lower
    bound. A prime number of ranks has one row, which is a ring.

    Source: C. Ying et al., "Image classification at supercomputer scale", arXiv 1811.06992; H.
    Mikami et al., "Massively distributed SGD: ImageNet/ResNet-50 training in a flash", arXiv
    1811.05233.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(torus_ring_all_reduce, 4))
    step  rank 0      rank 1      rank 2      rank 3
       0  >1:1 +1:0   >0:0 +0:1   >3:1 +3:0   >2:0 +2:1
       1  >2:0 +2:0!  >3:1 +3:1!  >0:0 +0:0!  >1:1 +1:1!
       2  >1:0 <1:1   >0:1 <0:0   >3:0 <3:1   >2:1 <2:0
    """
    return hierarchical_all_reduce(rank, rows_of(world_size))


# ---- Reduce-scatters and all-gathers -------------------------------------------------------


def _kept(inner: Schedule, outer: Schedule) -> int:
    """Slots for partial results between the levels of a reduce-scatter."""
    is_between = inner.collective == "reduce_scatter" and inner.world_size > 1 < outer.world_size
    return is_between * outer.num_chunks * (inner.num_chunks // inner.world_size)


def slots_of_blocks(hosts: Hosts, inside: Algorithm, across: Algorithm) -> int:
    """Slots of scratch memory: those of the level that needs more, and those between the levels."""
    inner, outer = levels(hosts, inside, across)
    widths = (inner, outer.num_chunks), (outer, inner.num_chunks // inner.world_size)
    each = (level.num_slots * width for level, width in widths if level.world_size > 1)
    return _kept(inner, outer) + max(each, default=0)


def run_blocks_on(rank: int, hosts: Hosts, inside: Algorithm, across: Algorithm) -> Program:
    """The steps of a rank in a hierarchy of all-gathers, or of reduce-scatters.

    On the level inside, the block of a rank stands for those of all ranks that have its number.
    Ranks that meet on the second level have done the same steps on the first one.
    """
    layout, (inner, outer) = layout_of(hosts, even=True), levels(hosts, inside, across)
    host, index, _ = layout.find(rank)
    numbered = [[team[0] for team in teams] for teams in zip(*layout.teams, strict=True)]
    pieces, num_kept = inner.num_chunks * outer.num_chunks // len(hosts), _kept(inner, outer)

    def level(schedule: Schedule, place: int, peers: list[int], blocks: list[list[int]]) -> Program:
        cut = pieces * schedule.world_size // schedule.num_chunks
        finer = [
            [owner * pieces + first + piece for owner in block for piece in range(cut)]
            for block in blocks
            for first in range(0, pieces, cut)
        ]
        steps = split(schedule.steps(place), finer.__getitem__)
        return renumber(steps, peer=peers.__getitem__, slot=lambda slot: num_kept + slot)

    def kept(chunk: int) -> Ref:
        """Where a partial result is between the levels."""
        return tmp(numbered[index].index(chunk // pieces) * pieces + chunk % pieces, chunk)

    near = level(inner, index, [team[0] for team in layout.teams[host]], numbered)
    far = level(outer, host, numbered[index], [[peer] for peer in numbered[index]])
    if layout.num_hosts == 1 or layout.acting == 1:
        yield from near if layout.num_hosts == 1 else far
    elif inside.collective == "all_gather":
        yield from far
        yield from in_place(near)
    else:
        yield from unfinished(in_place(near, source=inp, target=kept))
        yield from in_place(far, source=kept)


def _rings(collective: str) -> tuple[Algorithm, Algorithm]:
    return built_in_entry(collective, "ring"), built_in_entry(collective, "ring")


def _rounds_of_blocks(hosts: Hosts) -> int:
    layout = layout_of(hosts, even=True)
    return layout.acting + layout.num_hosts - 2


def _share_of_others(hosts: Hosts) -> Fraction:
    return share_of_others(len(hosts))


@register(
    "all_gather",
    "hierarchical",
    needs_hosts=True,
    chunks=len,
    cost=Cost(_rounds_of_blocks, _share_of_others),
)
def hierarchical_all_gather(rank: int, hosts: Hosts) -> Program:
    """Hierarchical all-gather: rings across the hosts, then a ring inside each host.

    On H hosts of m ranks m + H - 2 steps, where one ring has H m - 1, and (k - 1)/k of the output
    sent by each rank, the lower bound. A host sends m (H - 1) blocks to others, the least possible,
    in as many messages.

    Source: S. Singh et al., "The big send-off", arXiv 2504.18658.

    >>> from ringcoll.schedules.algorithms import schedule_of
    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(schedule_of("all_gather", "hierarchical", 4, hosts=(0, 0, 1, 1))))
    step  rank 0         rank 1         rank 2         rank 3
       0  =0 >2:0 <2:2   =1 >3:1 <3:3   =2 >0:2 <0:0   =3 >1:3 <1:1
       1  >1:0,2 <1:1,3  >0:1,3 <0:0,2  >3:0,2 <3:1,3  >2:1,3 <2:0,2
    """
    return run_blocks_on(rank, hosts, *_rings("all_gather"))


@register(
    "reduce_scatter",
    "hierarchical",
    needs_hosts=True,
    chunks=len,
    slots=lambda hosts: slots_of_blocks(hosts, *_rings("reduce_scatter")),
    cost=Cost(_rounds_of_blocks, _share_of_others, _share_of_others),
)
def hierarchical_reduce_scatter(rank: int, hosts: Hosts) -> Program:
    """Hierarchical reduce-scatter: a ring inside each host, then rings across the hosts.

    On H hosts of m ranks m + H - 2 steps, and (k - 1)/k of the input sent by each rank and as much
    reduced, both lower bounds. A host sends m (H - 1) blocks to others, reduced over the host: the
    least possible.

    Source: S. Singh et al., "The big send-off", arXiv 2504.18658.

    >>> from ringcoll.schedules.algorithms import schedule_of
    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(schedule_of("reduce_scatter", "hierarchical", 4, hosts=(0, 0, 1, 1))))
    step  rank 0         rank 1         rank 2         rank 3
       0  >1:1,3 +1:0,2  >0:0,2 +0:1,3  >3:1,3 +3:0,2  >2:0,2 +2:1,3
       1  >2:2 +2:0!     >3:3 +3:1!     >0:0 +0:2!     >1:1 +1:3!
    """
    return run_blocks_on(rank, hosts, *_rings("reduce_scatter"))
