"""Times over sizes: curves go through their points, and crossings are where two curves meet."""

from __future__ import annotations

import math
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringcoll.errors import ArgumentError
from ringcoll.lab.pictures import crossings, curves_picture

SVG = "{http://www.w3.org/2000/svg}"
SIZES = [float(4**power) for power in range(1, 9)]


def line(start: float, slope: float) -> list[tuple[float, float]]:
    """A power law, which is straight on logarithmic axes."""
    return [(size, start * size**slope) for size in SIZES]


def picture(**curves: list[tuple[float, float]]) -> str:
    return curves_picture("title", curves, size_in_words=str, time_in_words="{:g} s".format)


@given(st.floats(0.2, 3), st.floats(5, 15))
def test_two_lines_cross_where_arithmetic_says(slope: float, bits: float) -> None:
    where = 2.0**bits
    curves = {"short": line(1.0, slope), "long": line(where**slope, 0.0)}
    (crossing,) = crossings(curves)
    assert (crossing.before, crossing.after) == ("short", "long")
    assert crossing.size == pytest.approx(where, rel=1e-6)
    assert crossing.time == pytest.approx(where**slope, rel=1e-6)


def test_curves_that_do_not_cross_and_three_that_take_turns() -> None:
    assert crossings({"a": line(1, 1), "b": line(2, 1)}) == []
    curves = {"a": line(1.0, 1.0), "b": line(16.0**0.5, 0.5), "c": line(16.0**0.5 * 256**0.5, 0.0)}
    assert [(one.before, one.after, round(one.size)) for one in crossings(curves)] == [
        ("a", "b", 16),
        ("b", "c", 256),
    ]
    first, second = crossings(curves)
    assert picture(**curves).count('class="crossing"') == 2
    assert first.size < second.size


def test_points_are_where_their_numbers_are() -> None:
    root = ET.fromstring(picture(a=line(1e-6, 1.0), b=line(1e-4, 0.0)))
    marks = {
        node.text: float(node.get("y", 0))
        for node in root.iter(f"{SVG}text")
        if (node.text or "").endswith(" s")
    }
    for polyline, curve in zip(
        root.iter(f"{SVG}polyline"), (line(1e-6, 1.0), line(1e-4, 0.0)), strict=True
    ):
        points = [
            tuple(map(float, point.split(","))) for point in (polyline.get("points") or "").split()
        ]
        assert len(points) == len(SIZES)
        widths = {round(right[0] - left[0], 0) for left, right in pairwise(points)}
        assert len(widths) == 1, "sizes grow by a factor, so they are evenly apart"
        high, low = marks["0.0001 s"], marks["1e-05 s"]
        for (_, y), (_, time) in zip(points, curve, strict=True):
            assert y == pytest.approx(high + (low - high) * (-4 - math.log10(time)), abs=0.1)


def test_names_do_not_hide_each_other() -> None:
    names = {f"algorithm{number}": line(1 + number / 1000, 1) for number in range(8)}
    root = ET.fromstring(picture(**names))
    heights = sorted(
        float(node.get("y", 0)) for node in root.iter(f"{SVG}text") if (node.text or "") in names
    )
    assert len(heights) == 8
    assert all(low - high >= 20 for high, low in pairwise(heights))
    looks = {
        (node.get("stroke"), node.get("stroke-dasharray")) for node in root.iter(f"{SVG}polyline")
    }
    assert len(looks) == 8


@pytest.mark.parametrize(
    "curves",
    [
        {},
        {"a": [(1.0, 1.0)]},
        {"a": line(1, 1), "b": line(1, 1)[1:]},
        {"a": [(1.0, 1.0), (2.0, 0.0)]},
        {"a": [(0.0, 1.0), (2.0, 1.0)]},
        {"a": [(1.0, 1.0), (2.0, math.inf)]},
        {"a": [(1.0, 1.0), (2.0, math.nan)]},
    ],
)
def test_what_cannot_be_drawn(curves: dict[str, list[tuple[float, float]]]) -> None:
    with pytest.raises(ArgumentError, match="argument 'curves'"):
        curves_picture("title", curves, size_in_words=str, time_in_words=str)
