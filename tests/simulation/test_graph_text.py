"""The text of a graph, and the DGX-1."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given

from ringcoll.errors import ArgumentError
from ringcoll.simulation import Topology, dgx1, ranks_named, topology_from_text
from tests.cases.effort import effort
from tests.cases.malformed import words

GRAPH = """
# three ranks, and a switch
0 -- s 50 0.5
s -- 1 12.5 0  # slower
1 -> 2 6 0
2->0 .5 1e-3
"""


def test_links_with_bandwidth_and_latency() -> None:
    graph = topology_from_text(GRAPH, name="three")
    assert (graph.world_size, graph.name) == (3, "three")
    assert [(link.source, link.target, link.bandwidth, link.latency_s) for link in graph.links] == [
        (0, "s", 50e9, 0.5e-6),
        ("s", 0, 50e9, 0.5e-6),
        ("s", 1, 12.5e9, 0),
        (1, "s", 12.5e9, 0),
        (1, 2, 6e9, 0),
        (2, 0, 0.5e9, pytest.approx(1e-9)),
    ]


@pytest.mark.parametrize(
    "text, said",
    [
        ("0 -- 1", "line 1: the line is no link"),
        ("0 -- 1 50 1\n0 - 2 50", "line 2: the line is no link"),
        ("\n0 -- 1 fast", "line 2: the line is no link"),
        ("0 -- 1 50 1 2", "line 1: the line is no link"),
        ("0 -- 1 0 0", "line 1: the bandwidth is out of range"),
        ("0 -- 1 50 1\n1 -- 2 -3 1", "line 2: the bandwidth is out of range"),
        ("0 -- 1 1e999 1", "line 1: the bandwidth is out of range"),
        ("0 -- 1 1e9999", "line 1: the line is no link"),
        ("0 -- 1 50 -1", "line 1: the latency is out of range"),
        ("0 -- 1 50 1\n1 -> 2 50", "line 2: the link has no latency"),
        ("0 -- 0 50", "line 1: the link leads from 0 to itself"),
        ("0 -- 1 50 1\n1 -> 0 50 1", "line 2: the link 1 -> 0 is there twice"),
        ("0x -- 1 50", "line 1: a rank is a number"),
        ("9999999 -- 1 50", "line 1: a rank is a number"),
        ("0 -- 1 50 0\n2 -- 3 50 0", "not connected: no route from rank 0 to rank 2"),
        ("0 -> 1 50 0", "no route from rank 1 to rank 0"),
        ("999999 -- 0 1 0", "line 1: a rank is a number below 65536"),
        ("65536 -- 0 1 0", "line 1: a rank is a number below 65536"),
        ("65535 -- 0 1 0", "no route from rank 0 to rank 1"),
    ],
)
def test_what_is_no_graph(text: str, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        topology_from_text(text)


@effort(40)
@given(words(GRAPH))
def test_any_text_is_a_graph_or_refused(text: str) -> None:
    try:
        assert isinstance(topology_from_text(text), Topology)
    except ArgumentError as error:
        assert str(error)  # noqa: PT017


def test_cables_are_links_of_both_ways_with_equal_numbers() -> None:
    network = topology_from_text("0 -- 1 5 1\n1 -> 2 5 1\n2 -> 1 6 1\n2 -> 0 5 1\n0 -> 2 5 1")
    named = [(link.name, is_cable) for link, is_cable in network.cables()]
    assert named == [("0 -> 1", True), ("1 -> 2", False), ("2 -> 1", False), ("2 -> 0", True)]


def test_the_dgx1() -> None:
    cube = dgx1()
    speeds = Counter(link.source for link in cube.links for _ in range(int(link.bandwidth // 25e9)))
    assert speeds == dict.fromkeys(range(8), 6)  # six cables a GPU
    assert {len([link for link in cube.links if link.source == rank]) for rank in range(8)} == {4}
    assert max(len(cube.route(0, rank)) for rank in range(1, 8)) == 2
    assert {(link.target, link.source) for link in cube.links} == {
        (link.source, link.target) for link in cube.links
    }


@pytest.mark.parametrize(
    "text, ranks", [("torus:2x3x4", 24), ("tpu-v4:4x4x4", 64), ("dgx1", 8), ("fat_tree:8:2", None),
                    ("torus", None), ("torus:axb", None), ("hosts:4", None)]
)  # fmt: skip
def test_texts_that_say_how_many_ranks(text: str, ranks: int | None) -> None:
    assert ranks_named(text) == ranks
