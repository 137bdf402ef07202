"""Hierarchies of reduce-scatters and of all-gathers: a phase inside each host, and one between the hosts.

Problem: the ranks of a host share its link, as in `hierarchical`. A reduce-scatter runs inside and then across; an
all-gather runs across and then inside.
All ranks act: those of the same number on each host exchange their blocks across. Where hosts have different
numbers of ranks, groups stand for hosts, of as many ranks as divide all of them: 4 and 2 ranks are three
pairs. If their numbers have no common divisor, all ranks are one level, host by host.

Source: S. Singh et al., "The big send-off", arXiv 2504.18658.
"""

from __future__ import annotations

from fractions import Fraction

from ringcoll.algorithms.entry import Algorithm, Cost
from ringcoll.algorithms.hierarchical import levels
from ringcoll.algorithms.host_layout import Hosts, layout_of
from ringcoll.algorithms.registry import own, register
from ringcoll.schedule import (
    Program,
    Ref,
    Schedule,
    in_place,
    inp,
    renumber,
    split,
    tmp,
    unfinished,
)


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

    On the level inside, the block of a rank stands for those of all ranks that have its number. Ranks that meet
    on the second level have done the same steps on the first one.
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
    return own(collective, "ring"), own(collective, "ring")


def _rounds_of_blocks(hosts: Hosts) -> int:
    layout = layout_of(hosts, even=True)
    return layout.acting + layout.num_hosts - 2


@register(
    "all_gather",
    "hierarchical",
    needs_hosts=True,
    chunks=len,
    cost=Cost(rounds=_rounds_of_blocks, traffic=lambda hosts: 1 - Fraction(1, len(hosts))),
)
def hierarchical_all_gather(rank: int, hosts: Hosts) -> Program:
    """Hierarchical all-gather: rings across the hosts, then a ring inside each host.

    On H hosts of m ranks m + H - 2 steps, where one ring has H m - 1, and (k - 1)/k of the output sent by each
    rank, the lower bound. A host sends m (H - 1) blocks to others, the least possible, in as many messages.

    >>> from ringcoll.algorithms import schedule_of
    >>> from ringcoll.schedule import grid
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
    cost=Cost(
        rounds=_rounds_of_blocks,
        traffic=lambda hosts: 1 - Fraction(1, len(hosts)),
        reduced=lambda hosts: 1 - Fraction(1, len(hosts)),
    ),
)
def hierarchical_reduce_scatter(rank: int, hosts: Hosts) -> Program:
    """Hierarchical reduce-scatter: a ring inside each host, then rings across the hosts.

    On H hosts of m ranks m + H - 2 steps, and (k - 1)/k of the input sent by each rank and as much reduced,
    both lower bounds. A host sends m (H - 1) blocks to others, reduced over the host: the least possible.

    >>> from ringcoll.algorithms import schedule_of
    >>> from ringcoll.schedule import grid
    >>> print(grid(schedule_of("reduce_scatter", "hierarchical", 4, hosts=(0, 0, 1, 1))))
    step  rank 0         rank 1         rank 2         rank 3
       0  >1:1,3 +1:0,2  >0:0,2 +0:1,3  >3:1,3 +3:0,2  >2:0,2 +2:1,3
       1  >2:2 +2:0!     >3:3 +3:1!     >0:0 +0:2!     >1:1 +1:3!
    """
    return run_blocks_on(rank, hosts, *_rings("reduce_scatter"))
