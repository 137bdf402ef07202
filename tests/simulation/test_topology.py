"""Links and routes, and the text of a topology."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringcoll.errors import ArgumentError
from ringcoll.lab.simulation import (
    FORMS,
    PRESETS,
    Link,
    Topology,
    crossbar,
    dragonfly,
    fat_tree,
    hosts,
    ring,
    topology_named,
    torus,
)


def check_route(topology: Topology, source: int, target: int) -> int:
    here: Any = source
    for index in topology.route(source, target):
        assert topology.links[index].source == here
        here = topology.links[index].target
    assert here == target
    return len(topology.route(source, target))


@pytest.mark.parametrize(
    "topology",
    [
        crossbar(5, bandwidth=1),
        ring(7, bandwidth=1),
        torus((3, 4), bandwidth=1),
        torus((2, 3, 4), bandwidth=1),
        fat_tree(7, ranks_per_leaf=3, bandwidth=1),
        hosts(7, ranks_per_host=2, bandwidth=10, across_bandwidth=1),
    ],
    ids=lambda topology: topology.name,
)
def test_every_route_is_a_shortest_one(topology: Topology) -> None:
    by_search = Topology(world_size=topology.world_size, links=topology.links)
    for source in range(topology.world_size):
        for target in range(topology.world_size):
            if source != target:
                assert check_route(topology, source, target) == (
                    check_route(by_search, source, target)
                )


@settings(deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_a_torus_has_two_links_a_dimension(shape: list[int]) -> None:
    grid = torus(shape, bandwidth=1)
    per_rank = sum(min(2, length - 1) for length in shape)
    assert len(grid.links) == per_rank * grid.world_size
    assert max((len(grid.route(0, rank)) for rank in range(1, grid.world_size)), default=0) == sum(
        length // 2 for length in shape
    )


def test_oversubscribed_cables_have_fewer_lanes() -> None:
    tree = fat_tree(8, ranks_per_leaf=4, bandwidth=10, oversubscription=2)
    above = [link for link in tree.links if "core" in (link.source, link.target)]
    assert {link.capacity for link in above} == {20}
    narrow = fat_tree(2, ranks_per_leaf=1, bandwidth=10, oversubscription=3)
    assert narrow.links[-1].fastest == Fraction(10, 3)


@pytest.mark.parametrize("text", [*FORMS, *PRESETS, "crossbar:2", "torus:4x4x2", "hosts:4:2"])
def test_every_text_of_the_help_is_a_topology(text: str) -> None:
    world_size = {"torus:4x8": 32, "torus:4x4x2": 32}.get(text, 64 if "x4x4" in text else 8)
    topology = topology_named(text, world_size)
    check_route(topology, 0, world_size - 1)
    assert bool(topology.source) == (text in PRESETS)


@pytest.mark.parametrize(
    "values", [{"bandwidth": 0}, {"bandwidth": -1}, {"bandwidth": float("inf")},
               {"bandwidth": "1"}, {"bandwidth": True}, {"latency_s": -1},
               {"latency_s": float("nan")}, {"lanes": 0}]
)  # fmt: skip
def test_a_link_has_numbers(values: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(values))):
        Link(**{"source": 0, "target": 1, "bandwidth": 1} | values)


@pytest.mark.parametrize(
    "ends, said",
    [
        ([(0, 1), (1, 0)], "no route from rank 0 to rank 2"),
        ([(0, 1), (1, 0), (1, 2)], "no route from rank 2 to rank 0"),
        ([(0, 1), (1, 2), (2, 3)], "rank that is not there"),
        ([], "not connected"),
    ],
)
def test_a_topology_is_connected(ends: list[tuple[int, int]], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        Topology(world_size=3, links=tuple(Link(*pair, 1) for pair in ends))


@pytest.mark.parametrize("world_size", [0, -1, 1 << 20, 2.0])
def test_numbers_of_ranks(world_size: Any) -> None:
    for build in (crossbar, ring):
        with pytest.raises(ArgumentError):
            build(world_size, bandwidth=1)


def test_the_last_route_may_not_fail() -> None:
    line = ring(3, bandwidth=1).without(0, 1)
    assert len(line.route(0, 1)) == 2
    with pytest.raises(ArgumentError, match="not connected"):
        line.without(1, 2)
    with pytest.raises(ArgumentError, match="no such link"):
        line.without(0, 1)


def routers(topology: Topology, source: int, target: int) -> list[str]:
    links = [topology.links[index] for index in topology.route(source, target)]
    return [str(link.target) for link in links[:-1]]


def test_a_dragonfly_joins_every_two_groups_by_one_cable() -> None:
    # p = 2, a = 4, h = 2: the full size has a h + 1 = 9 groups of 8 ranks.
    network = dragonfly(72, ranks_per_router=2, routers_per_group=4, global_links=2, bandwidth=1)
    groups = [
        {str(end).removeprefix("router ").split(".")[0] for end in (link.source, link.target)}
        for link in network.links
        if isinstance(link.source, str) and isinstance(link.target, str)
    ]
    assert sum(len(ends) == 2 for ends in groups) == 9 * 8
    assert sum(len(ends) == 1 for ends in groups) == 9 * 4 * 3
    ends = [link.source for link in network.links if isinstance(link.source, str)]
    assert {ends.count(name) for name in ends} == {2 + 3 + 2}, "all routers are alike"
    for source in range(72):
        for target in range(72):
            if source != target:
                assert check_route(network, source, target) <= 5


def test_routes_of_a_dragonfly_by_hand() -> None:
    network = dragonfly(72, ranks_per_router=2, routers_per_group=4, global_links=2, bandwidth=1)
    assert routers(network, 0, 1) == ["router 0.0"]
    assert routers(network, 0, 7) == ["router 0.0", "router 0.3"]
    # Group 0 has its cables to groups 1 and 2 at router 0, to 3 and 4 at router 1, ...
    assert routers(network, 0, 8 * 3) == ["router 0.0", "router 0.1", "router 3.2", "router 3.0"]
    # ... and group 1, to which group 0 is the eighth to follow, has that at router 3.
    assert routers(network, 8 + 7, 0) == ["router 1.3", "router 0.0"]


@pytest.mark.parametrize(
    "numbers, said",
    [
        ({"global_links": 1}, "at least 2 for 9 groups"),
        ({"global_links": 0}, "at least 2 for 9 groups"),
        ({"ranks_per_router": 0}, "ranks_per_router"),
        ({"routers_per_group": -1}, "routers_per_group"),
        ({"bandwidth": 0}, "bandwidth"),
        ({"global_bandwidth": 0}, "bandwidth"),
    ],
)
def test_a_dragonfly_has_to_be_possible(numbers: dict[str, Any], said: str) -> None:
    sizes = {"ranks_per_router": 2, "routers_per_group": 4, "global_links": 2, "bandwidth": 1}
    with pytest.raises(ArgumentError, match=said):
        dragonfly(72, **sizes | numbers)


def test_a_host_has_few_slots() -> None:
    with pytest.raises(ArgumentError, match="8 cards"):
        topology_named("pcie5_host", 9)


def test_a_link_ends_at_a_rank_that_is_there() -> None:
    links = [Link(0, 1, 10**9), Link(1, 2, 10**9)]
    with pytest.raises(ArgumentError, match=r"link .* \(expected 0 to 1, got 2\)"):
        Topology(world_size=2, links=tuple(links))
