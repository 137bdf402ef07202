"""Orders of ranks in which neighbours are near: the shortest way through all ranks and back.

The problem. Most algorithms send between ranks whose numbers are near each other, and numbers are given without
regard to the network. Of all cyclic orders the one is wanted in which a message from each rank to the next,
there and back, takes the least time in all: a travelling salesman's tour. All tours are tried on up to 8 ranks;
on more, the tour that goes to the nearest rank next is improved by turning pieces round (2-opt: G. A. Croes,
1958) until no turn helps.

Cost: ``(k - 1)!`` tours for few ranks, about ``k ** 2`` turns in a pass for many.
"""

from __future__ import annotations

from itertools import pairwise, permutations

from ringcoll.simulation import Topology

_ALL_TOURS = 8
_PASSES = 20
_Costs = list[list[float]]


def near_order(topology: Topology, nbytes: int) -> tuple[int, ...]:
    r"""Find the order of ranks whose tour takes the least time; its longest way is the last.

    Messages have so many bytes.

    Examples
    --------
    >>> from ringcoll.simulation import topology_from_text
    >>> cables = "0 -- 2 10 1" "\n" "2 -- 1 10 1" "\n" "1 -- 3 10 1" "\n" "3 -- 0 10 1"
    >>> near_order(topology_from_text(cables), 1 << 20)
    (0, 2, 1, 3)
    """
    world_size = topology.world_size
    costs = [
        [_seconds(topology, a, b, nbytes) for b in range(world_size)] for a in range(world_size)
    ]
    costs = [[costs[a][b] + costs[b][a] for b in range(world_size)] for a in range(world_size)]
    if world_size <= 3:
        return tuple(range(world_size))
    if world_size <= _ALL_TOURS:
        tours = ([0, *rest] for rest in permutations(range(1, world_size)) if rest[0] < rest[-1])
        best = min(tours, key=lambda tour: _length(tour, costs))
    else:
        best = _improved(_nearest(costs), costs)
    longest = max(range(world_size), key=lambda place: costs[best[place - 1]][best[place]])
    return tuple(best[longest:] + best[:longest]) if _is_uneven(best, costs) else tuple(best)


def _seconds(topology: Topology, source: int, target: int, nbytes: int) -> float:
    if source == target:
        return 0.0
    links = [topology.links[index] for index in topology.route(source, target)]
    slowest = min(float(link.fastest) for link in links)
    return sum(float(link.latency_s) for link in links) + nbytes / slowest


def _length(tour: list[int], costs: _Costs) -> float:
    return sum(costs[a][b] for a, b in pairwise([*tour, tour[0]]))


def _is_uneven(tour: list[int], costs: _Costs) -> bool:
    ways = [costs[a][b] for a, b in pairwise([*tour, tour[0]])]
    return max(ways) > 1.01 * min(ways)


def _nearest(costs: _Costs) -> list[int]:
    tour, left = [0], set(range(1, len(costs)))
    while left:
        here = costs[tour[-1]]
        tour.append(min(left, key=lambda rank: (here[rank], rank)))
        left.remove(tour[-1])
    return tour


def _improved(tour: list[int], costs: _Costs) -> list[int]:
    size = len(tour)
    for _ in range(_PASSES):
        is_better = False
        for i in range(size - 1):
            for j in range(i + 2, size if i else size - 1):
                a, b, c, d = tour[i], tour[i + 1], tour[j], tour[(j + 1) % size]
                if costs[a][c] + costs[b][d] < (costs[a][b] + costs[c][d]) * (1 - 1e-9):
                    tour[i + 1 : j + 1] = tour[i + 1 : j + 1][::-1]
                    is_better = True
        if not is_better:
            break
    return tour
