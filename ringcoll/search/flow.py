"""Maximum flows in small networks, and the cuts that limit them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from ringcoll.simulation import Node

ORIGIN: Node = -1
"""A node before several ranks; ranks begin at 0, and switches are words."""

Capacities = Mapping[Node, Mapping[Node, int]]
"""The capacity of each arc, by the nodes at its beginning and its end."""


def maximum_flow(
    capacities: Capacities, source: Node, sink: Node, enough: int
) -> tuple[int, set[Node]]:
    """Send as much as possible from one node to another, up to ``enough``.

    By shortest augmenting paths: J. Edmonds and R. M. Karp, "Theoretical improvements in algorithmic
    efficiency for network flow problems", 1972.

    Examples
    --------
    >>> maximum_flow({0: {1: 3, 2: 1}, 1: {2: 1, 3: 1}, 2: {3: 5}}, 0, 3, enough=9)
    (3, {0, 1})
    """
    left: dict[Node, dict[Node, int]] = {}
    for node, arcs in capacities.items():
        for target, capacity in arcs.items():
            left.setdefault(node, {})[target] = left.get(node, {}).get(target, 0) + capacity
            left.setdefault(target, {}).setdefault(node, 0)
    flow = 0
    while flow < enough:
        before: dict[Node, Node] = {source: source}
        waiting = deque([source])
        while waiting and sink not in before:
            node = waiting.popleft()
            for target, room in left.get(node, {}).items():
                if room and target not in before:
                    before[target] = node
                    waiting.append(target)
        if sink not in before:
            return flow, set(before)
        path = [sink]
        while path[-1] != source:
            path.append(before[path[-1]])
        arcs_of_path = list(zip(path[1:], path[:-1], strict=True))
        more = min(enough - flow, *(left[a][b] for a, b in arcs_of_path))
        for a, b in arcs_of_path:
            left[a][b] -= more
            left[b][a] += more
        flow += more
    return flow, set()
