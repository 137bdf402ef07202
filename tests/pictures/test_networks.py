"""Pictures of networks: every node and link is there, slow links stand out, and no label hides another."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import combinations

import pytest

from ringcoll.errors import ArgumentError
from ringcoll.lab.pictures import MOST_RANKS, network_picture
from ringcoll.lab.pictures.svg import FONT, width_of
from ringcoll.lab.simulation import Topology, dgx1, topology_from_text, topology_named

SVG = "{http://www.w3.org/2000/svg}"
NETWORKS = {
    "one": Topology(world_size=1, links=()),
    "two": topology_from_text("0 -> 1 10 1\n1 -> 0 3 2"),
    "line": topology_from_text("0 -- 1 10 1\n1 -- 2 3 1"),
    "star": topology_from_text("\n".join(f"{k} -- hub {10 + k} {k + 0.25}" for k in range(13))),
    "hosts": topology_from_text(
        "\n".join(f"{k} -- host{k // 4} {50 + k} {k}" for k in range(8)) + "\nhost0 -- host1 12.5 5"
    ),
    "fat tree": topology_named("fat_tree:4:2", 16),
    "ring": topology_named("ring", 7),
    "dgx1": dgx1(),
}

PROBED = topology_from_text(
    """
    0 -> host0 1.619 10.74
    host0 -> 0 1.832 10.74
    1 -> host1 1.624 9
    host1 -> 1 1.79 10
    host0 -> card0 0.1195 0
    card0 -> host0 0.1201 0
    card0 -> net 0.1195 72.44
    net -> card0 0.1201 72.44
    host1 -- card1 0.02418 0
    card1 -> net 0.02418 72.44
    net -> card1 0.02423 80.6
    """
)


def elements(picture: str, name: str, class_: str) -> list[ET.Element]:
    nodes = ET.fromstring(picture).iter(f"{SVG}{name}")  # ours
    return [node for node in nodes if class_ in node.get("class", "").split()]


@pytest.mark.parametrize("topology", NETWORKS.values(), ids=NETWORKS)
def test_every_node_and_link_is_drawn_with_its_numbers(topology: Topology) -> None:
    picture = network_picture(topology)
    cables = topology.cables()
    switches = {node for link, _ in cables for node in (link.source, link.target)} - {
        *range(topology.world_size)
    }
    assert len(elements(picture, "rect", "rank")) == topology.world_size
    assert len(elements(picture, "rect", "switch")) == len(switches)
    drawn = elements(picture, "path", "link") + elements(picture, "path", "slow")
    assert len(drawn) == len(cables)
    said = [node.text for node in elements(picture, "text", "label")]
    words = [
        word
        for link, _ in cables
        for word in (f"{link.bandwidth / 1e9:.4g} GB/s", f"{float(link.latency_s) * 1e6:.4g} us")
    ]
    assert sorted(map(str, said)) == sorted(words)
    assert len(elements(picture, "path", "movehead")) == 1, "of the arrows' definition"
    assert picture.count("marker-end") == sum(not is_cable for _, is_cable in cables)


@pytest.mark.parametrize("topology", [*NETWORKS.values(), PROBED], ids=[*NETWORKS, "probed"])
def test_words_are_large_inside_and_apart(topology: Topology) -> None:
    picture = network_picture(topology)
    wide, high = map(int, re.findall(r'viewBox="0 0 (\d+) (\d+)"', picture)[0])
    boxes = []
    for node in ET.fromstring(picture).iter(f"{SVG}text"):  # ours
        x, y, words = float(node.get("x", "")), float(node.get("y", "")), node.text or ""
        half = width_of(words, FONT - 2) / 2
        assert half - 1 <= x <= wide - half + 1, words
        assert FONT / 2 <= y <= high - FONT / 2, words
        boxes.append((x, y, half))
    if topology is not NETWORKS["dgx1"]:  # 16 cables between 8 ranks cross in the middle
        for (x, y, half), (other_x, other_y, other_half) in combinations(boxes, 2):
            assert abs(x - other_x) > half + other_half - 8 or abs(y - other_y) >= FONT - 2
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: ([\d.]+)px", picture)]
    assert min(sizes) >= 18


def test_directions_that_hardly_differ_are_one_line_with_the_means() -> None:
    picture = network_picture(PROBED)
    drawn = elements(picture, "path", "link") + elements(picture, "path", "slow")
    assert sorted(str(path.findtext(f"{SVG}title")) for path in drawn) == [
        "0 -> host0: 1.619 GB/s, 10.74 us",
        "1 -> host1: 1.707 GB/s, 9.5 us",
        "card0 -> net: 0.1198 GB/s, 72.44 us",
        "card1 -> net: 0.02418 GB/s, 72.44 us",
        "host0 -> 0: 1.832 GB/s, 10.74 us",
        "host0 -> card0: 0.1198 GB/s, 0 us",
        "host1 -> card1: 0.02418 GB/s, 0 us",
        "net -> card1: 0.02423 GB/s, 80.6 us",
    ]
    assert picture.count("marker-end") == 4


def test_slow_links_are_broken_thinner_and_explained() -> None:
    picture = network_picture(
        topology_from_text("0 -- 1 50 1\n1 -- 2 26 1\n2 -- 3 25 1\n3 -> 0 2 9")
    )
    slow, fast = elements(picture, "path", "slow"), elements(picture, "path", "link")
    titles = [path.findtext(f"{SVG}title") for path in slow]
    assert titles == ["2 -> 3: 25 GB/s, 1 us", "3 -> 0: 2 GB/s, 9 us"]
    widths = [float(path.get("stroke-width", "")) for path in (*fast, *slow)]
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] >= 2
    assert "broken lines: at most half of 50 GB/s, the fastest link" in picture
    assert "prefers-color-scheme: dark" in picture
    same = network_picture(topology_named("ring", 5))
    assert "broken lines" not in same


def test_an_arrow_ends_at_the_border_of_its_node() -> None:
    picture = network_picture(topology_from_text("0 -> leaf 5 1\nleaf -> 0 6 1\n1 -- leaf 5 1"))
    (rect,) = elements(picture, "rect", "switch")
    left, top = float(rect.get("x", "")), float(rect.get("y", ""))
    right, bottom = left + float(rect.get("width", "")), top + float(rect.get("height", ""))
    (path,) = (
        path
        for path in elements(picture, "path", "link")
        if (path.findtext(f"{SVG}title") or "").startswith("0 -> leaf")
    )
    x, y = map(float, path.get("d", "").split()[-2:])
    gaps = [abs(x - left), abs(x - right), abs(y - top), abs(y - bottom)]
    assert min(gaps) <= 0.2
    assert left - 0.2 <= x <= right + 0.2
    assert top - 0.2 <= y <= bottom + 0.2


def test_too_many_ranks() -> None:
    network_picture(topology_named("ring", MOST_RANKS))
    with pytest.raises(ArgumentError, match=r"too many ranks to draw .expected at most 64, got 65"):
        network_picture(topology_named("ring", MOST_RANKS + 1))
