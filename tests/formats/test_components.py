"""Longest ways: against a search that tries all ways."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ringcoll.lab.formats.levelling import levels_of
from tests.cases.effort import effort

NODES = 7
EDGES = st.lists(
    st.tuples(st.integers(0, NODES - 1), st.integers(0, NODES - 1), st.integers(0, 1)), max_size=14
)


def longest(edges: list[tuple[int, int, int]]) -> list[int]:
    """Bellman and Ford's rounds; a node that still gets higher is behind a circle."""
    levels = [0] * NODES
    for _ in range(4 * NODES):
        for start, end, length in edges:
            levels[end] = max(levels[end], levels[start] + length)
    return levels


@effort(200)
@given(EDGES)
def test_levels(edges: list[tuple[int, int, int]]) -> None:
    levels, bad = levels_of(NODES, edges)
    expected = longest(edges)
    assert bool(bad) == (max(expected) > NODES)
    if not bad:
        assert levels == expected
    reach = {
        start: {end for end in range(NODES) if leads(edges, start, end)} for start in range(NODES)
    }
    in_circles = {
        node
        for start, end, length in edges
        if length and start in reach[end]
        for node in range(NODES)
        if node in reach[end] and start in reach[node]
    }
    assert bad == in_circles


def leads(edges: list[tuple[int, int, int]], start: int, end: int) -> bool:
    seen = {start}
    while more := {b for a, b, _ in edges if a in seen} - seen:
        seen |= more
    return end in seen


def test_a_long_way_needs_no_recursion() -> None:
    levels, bad = levels_of(20_000, [(node, node + 1, 1) for node in range(19_999)])
    assert (levels[-1], bad) == (19_999, frozenset())
