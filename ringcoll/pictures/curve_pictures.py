"""Times over sizes, on logarithmic axes; the sizes are marked from which another one is fastest."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from ringcoll.errors import ArgumentError
from ringcoll.pictures.svg import COLOURS, FONT, Picture, document, element, text, width_of

Curve = Sequence[tuple[float, float]]
"""Sizes, increasing, and the time of each."""

_WIDTH, _HEIGHT = 720.0, 420.0
_LEFT, _TOP, _BELOW = 130.0, 76.0, 80.0
_APART = 1.3 * FONT  # of names at the ends of curves
_MOST_MARKS = 8
_DASHES = ("none", "12 5", "4 5", "16 5 4 5")  # who sees no colours tells them apart
_STYLE = """
.curve { fill: none; stroke-width: 4 }
.mark { fill: none; stroke: #8b949e; stroke-width: 1 }
.crossing { fill: #ffffff; stroke: #1b1f24; stroke-width: 3 }
@media (prefers-color-scheme: dark) { .crossing { fill: #0d1117; stroke: #e6edf3 } }
"""


class Crossing(NamedTuple):
    """From ``size`` on, ``after`` is faster than ``before``."""

    size: float
    time: float
    before: str
    after: str

    def in_words(self, size_in_words: Callable[[int], str]) -> str:
        """The crossing as a sentence."""
        size = size_in_words(_rounded(self.size))
        return f"from {size} on {self.after} is faster than {self.before}"


def crossings(curves: Mapping[str, Curve]) -> list[Crossing]:
    """Find where another curve becomes the lowest.

    Between two sizes, curves are straight on logarithmic axes.

    >>> (crossing,) = crossings({"tree": [(1, 1), (100, 100)], "ring": [(1, 10), (100, 10)]})
    >>> round(crossing.size, 6), crossing.before, crossing.after
    (10.0, 'tree', 'ring')
    """
    sizes = [size for size, _ in next(iter(curves.values()))]
    lowest = [min(curves, key=lambda name: curves[name][index][1]) for index in range(len(sizes))]
    changes = []
    for index, (before, after) in enumerate(pairwise(lowest), start=1):
        if before == after:
            continue
        gaps = [math.log(curves[before][at][1] / curves[after][at][1]) for at in (index - 1, index)]
        share = gaps[0] / (gaps[0] - gaps[1]) if gaps[0] != gaps[1] else 0.0
        size, time = (
            math.exp(math.log(low) + share * math.log(high / low))
            for low, high in zip(curves[before][index - 1], curves[before][index], strict=True)
        )
        changes.append(Crossing(size, time, before, after))
    return changes


def curves_picture(
    title: str,
    *families: Mapping[str, Curve],
    size_in_words: Callable[[int], str],
    time_in_words: Callable[[float], str],
) -> Picture:
    """Draw times over sizes; the names stand at the ends of their curves.

    Parameters
    ----------
    title
        Stands above.
    families
        Times in seconds by the name of the algorithm, at least two sizes each, all positive; the
        same sizes for all. Where curves of one family cross is marked.
    size_in_words, time_in_words
        How numbers are written at the axes.

    Raises
    ------
    ArgumentError
        There is no curve, or one of fewer than two points, or of other sizes, or with a time that
        is not positive.

    Examples
    --------
    >>> curves = {"tree": [(1024, 1e-5), (1048576, 1e-3)], "ring": [(1024, 1e-4), (1048576, 2e-4)]}
    >>> picture = curves_picture("two", curves, size_in_words=str, time_in_words=str)
    >>> picture.count('class="crossing"')
    1
    """
    curves = {name: curve for family in families for name, curve in family.items()}
    sizes = _checked(curves)
    times = [time for curve in curves.values() for _, time in curve]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
    high = max(high, low + 1)

    def x(size: float) -> float:
        return _LEFT + _WIDTH * math.log(size / sizes[0]) / math.log(sizes[-1] / sizes[0])

    def y(time: float) -> float:
        return _TOP + _HEIGHT * (high - math.log10(time)) / (high - low)

    bottom = _TOP + _HEIGHT
    drawn = []
    step = -(-(len(sizes) - 1) // (_MOST_MARKS - 1))
    for size in sizes[::step]:
        drawn.append(element("path", d=f"M{x(size):.1f} {_TOP:.1f} V{bottom:.1f}", class_="mark"))
        drawn.append(text(x(size), bottom + FONT, size_in_words(round(size)), "small"))
    for power in range(low, high + 1):
        at = y(10.0**power)
        drawn.append(element("path", d=f"M{_LEFT:.1f} {at:.1f} h{_WIDTH:.1f}", class_="mark"))
        drawn.append(text(_LEFT - 12, at, time_in_words(10.0**power), "small", "end"))
    for number, (name, curve) in enumerate(curves.items()):
        points = " ".join(f"{x(size):.1f},{y(time):.1f}" for size, time in curve)
        stroke, dashes = COLOURS[number % len(COLOURS)], _DASHES[number % len(_DASHES)]
        drawn.append(
            element(
                "polyline", element("title", name), points=points, class_="curve", stroke=stroke,
                stroke_dasharray=dashes,
            )
        )  # fmt: skip
    heights = _apart([(name, y(curve[-1][1])) for name, curve in curves.items()])
    right = _LEFT + _WIDTH + 14
    drawn += [text(right, height, name, "title", "start") for name, height in heights.items()]
    for crossing in (crossing for family in families for crossing in crossings(family)):
        across, down = x(crossing.size), y(crossing.time)
        about = element("title", crossing.in_words(size_in_words))
        drawn.append(element("circle", about, cx=across, cy=down, r=9, class_="crossing"))
        words = size_in_words(_rounded(crossing.size))
        drawn.append(text(across + 14, down + 24, words, "label", "start"))
    names = max(map(width_of, curves))
    width = max(right + names + FONT, width_of(title) + 2 * FONT)
    drawn.append(text(_LEFT + _WIDTH / 2, FONT * 1.5, title, "title"))
    return document(width, bottom + _BELOW, drawn, title, _STYLE)


def _rounded(size: float) -> int:
    """A size to four binary digits: where curves cross is no better known."""
    step = 2.0 ** (math.floor(math.log2(size)) - 3)
    return round(round(size / step) * step)


def _checked(curves: Mapping[str, Curve]) -> list[float]:
    """The sizes of all curves."""
    sizes = [[size for size, _ in curve] for curve in curves.values()]
    if not sizes or len(sizes[0]) < 2 or any(other != sizes[0] for other in sizes):
        raise ArgumentError(
            "curves need the same sizes, two or more", argument="curves",
            expected="one or more curves", got=[len(curve) for curve in curves.values()],
        )  # fmt: skip
    for name, curve in curves.items():
        for size, time in curve:
            if not (size > 0 and 0 < time < math.inf):
                raise ArgumentError(
                    "cannot be drawn on logarithmic axes", argument="curves",
                    expected="sizes and times above 0", got=f"{time} at {size} for {name}",
                )  # fmt: skip
    return sizes[0]


def _apart(names: list[tuple[str, float]]) -> dict[str, float]:
    """Heights of names, from the top down, so that none hides another."""
    placed: dict[str, float] = {}
    last = -math.inf
    for name, height in sorted(names, key=lambda item: item[1]):
        last = placed[name] = max(height, last + _APART)
    return placed
