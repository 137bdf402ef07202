"""Longest ways in a graph whose circles have no length.

Source: R. Tarjan, "Depth-first search and linear graph algorithms", SIAM J. Comput. 1(2), 1972, for
the components that are strongly connected; written without recursion.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def levels_of(
    num_nodes: int, edges: Iterable[tuple[int, int, int]]
) -> tuple[list[int], frozenset[int]]:
    """The length of the longest way to each node; nodes of a circle share theirs.

    Examples
    --------
    >>> levels_of(4, [(0, 1, 1), (1, 2, 0), (2, 1, 0), (2, 3, 1)])
    ([0, 1, 1, 2], frozenset())
    >>> levels_of(3, [(0, 1, 1), (1, 2, 0), (2, 1, 1)])[1]
    frozenset({1, 2})
    """
    following: list[list[tuple[int, int]]] = [[] for _ in range(num_nodes)]
    for start, end, length in edges:
        following[start].append((end, length))
    components, component_of = _components(following)
    levels = [0] * num_nodes
    bad: set[int] = set()
    for nodes in reversed(components):  # those come first that nothing leads to
        level = max(levels[node] for node in nodes)
        for node in nodes:
            levels[node] = level
        for node in nodes:
            for end, length in following[node]:
                if component_of[end] != component_of[node]:
                    levels[end] = max(levels[end], level + length)
                elif length:
                    bad.update(nodes)
    return levels, frozenset(bad)


def _components(
    following: Sequence[Sequence[tuple[int, int]]],
) -> tuple[list[list[int]], list[int]]:
    """The components, last ones first, and the number of each node's component."""
    unseen = len(following)
    number = [unseen] * unseen  # when a node was first seen
    lowest = [unseen] * unseen  # the first node that can be reached, among those on the stack
    component_of = [-1] * unseen
    components: list[list[int]] = []
    stack: list[int] = []
    seen = 0
    for root in range(unseen):
        path = [(root, iter(following[root]))] if number[root] == unseen else []
        if path:
            number[root] = lowest[root] = seen
            seen += 1
            stack.append(root)
        while path:
            node, ends = path[-1]
            for end, _ in ends:
                if number[end] == unseen:
                    number[end] = lowest[end] = seen
                    seen += 1
                    stack.append(end)
                    path.append((end, iter(following[end])))
                    break
                if component_of[end] < 0:
                    lowest[node] = min(lowest[node], number[end])
            else:
                path.pop()
                if path:
                    lowest[path[-1][0]] = min(lowest[path[-1][0]], lowest[node])
                if lowest[node] == number[node]:
                    component: list[int] = []
                    while not component or component[-1] != node:
                        component.append(stack.pop())
                    components.append(component)
                    for member in component:
                        component_of[member] = len(components) - 1
    return components, component_of
