"""Elements of SVG as text, their colours on light and dark pages, and the picture of a network.

Colours are those of M. Okabe and K. Ito, "Color Universal Design", which people can tell apart
whatever colours they see. A chunk has the colour of its number; a reader who cannot see it reads
the number, which stands wherever there is room.

A layout of ranks and switches is the one that messages, or cables, ask for. Its coordinates are in
units of the distance between neighbours; y grows downwards. A network is drawn with the bandwidth
and latency of each link; slow links stand out.
"""

from __future__ import annotations

import html
import math
from base64 import b64encode
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from math import dist
from typing import NamedTuple

from ringcoll.errors import ArgumentError, printable
from ringcoll.lab.simulation import Link, Topology

COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999",
)  # fmt: skip
"""Colours of chunks, by their number."""
FONT = 20
"""Size of text; readable from the last row, where a picture fills a slide."""
_WIDE = 0.6  # width of a character over its height, in most fonts

# Classes, and not attributes, so that a page that is dark can have other colours.
_STYLE = """
text {{ font: {font}px "Helvetica Neue", Helvetica, Arial, "Liberation Sans", "DejaVu Sans", \
sans-serif; fill: #1b1f24 }}
.title {{ font-weight: bold }}
.small {{ font-size: {small}px }}
.paper {{ fill: #ffffff }}
.ink {{ stroke: #1b1f24; fill: none; stroke-width: 2 }}
.rank {{ stroke: #1b1f24; fill: #f3f4f6; stroke-width: 2 }}
.cell {{ stroke: #8b949e; fill: #ffffff; stroke-width: 1 }}
.done {{ stroke: #1b1f24; fill: none; stroke-width: 2.5 }}
.add {{ stroke: #d55e00; fill: none; stroke-width: 3 }}
.move {{ stroke: #0072b2; fill: none; stroke-width: 3; stroke-dasharray: 9 5 }}
.addhead {{ fill: #d55e00 }}
.movehead {{ fill: #0072b2 }}
.label {{ font-weight: bold; paint-order: stroke; stroke: #ffffff; stroke-width: 6; \
stroke-linejoin: round }}
.cellnumber {{ font-weight: bold; paint-order: stroke; stroke: #ffffff; stroke-width: 3 }}
.bad {{ stroke: #c8102e; fill: none; stroke-width: 5 }}
.badtext {{ fill: #c8102e; font-weight: bold }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #e6edf3 }}
.paper {{ fill: #0d1117 }}
.ink, .done {{ stroke: #e6edf3 }}
.rank {{ stroke: #e6edf3; fill: #21262d }}
.cell {{ fill: #161b22 }}
.label, .cellnumber {{ stroke: #0d1117 }}
.badtext {{ fill: #ff7b72 }}
.bad {{ stroke: #ff7b72 }}
.move {{ stroke: #56b4e9 }} .movehead {{ fill: #56b4e9 }}
}}
"""


def escape(words: str) -> str:
    """Escape a text for SVG and HTML; `printable` replaces signs that neither can hold."""
    return "\n".join(html.escape(printable(line)) for line in words.split("\n"))


def width_of(words: str, size: int = FONT) -> float:
    """About how wide a text is drawn."""
    return len(words) * size * _WIDE


def element(name: str, inner: str | Iterable[str] = "", /, **attributes: object) -> str:
    """Write an element; ``class_`` and ``text_anchor`` have SVG's names, ``inner`` is markup."""
    words = [name]
    for key, value in attributes.items():
        shown = f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
        words.append(f'{key.rstrip("_").replace("_", "-")}="{escape(shown)}"')
    content = inner if isinstance(inner, str) else "".join(inner)
    return f"<{' '.join(words)}>{content}</{name}>" if content else f"<{' '.join(words)}/>"


def rect(
    x: float, y: float, width: float, height: float, inner: str = "", **attributes: object
) -> str:
    """Write a rectangle by its upper left corner."""
    return element("rect", inner, x=x, y=y, width=width, height=height, **attributes)


def text(x: float, y: float, words: str, class_: str = "", anchor: str = "middle") -> str:
    """Write a text whose middle, or ``anchor``, is at a place."""
    return element(
        "text", escape(words), x=x, y=y, text_anchor=anchor, dominant_baseline="central",
        **{"class_": class_} if class_ else {},
    )  # fmt: skip


def tooltip(words: str) -> str:
    """Write the words that are read out, or shown below the mouse, for the element around them."""
    return element("title", escape(words))


def moved(x: float, y: float, inner: Iterable[str], **attributes: object) -> str:
    """A group of elements with its origin at a place."""
    return element("g", inner, transform=f"translate({x:.1f} {y:.1f})", **attributes)


class Picture(str):
    """An SVG document, which a notebook shows."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        # As an image: on a page with several pictures the rules of one would hold for all.
        data = b64encode(self.encode()).decode()
        return f'<img src="data:image/svg+xml;base64,{data}" style="max-width: 100%">'


def document(
    width: float, height: float, inner: Iterable[str], about: str, style: str = ""
) -> Picture:
    """Write a whole picture; ``about`` is read out to people who do not see it."""
    heads = [
        element(
            "marker",
            element("path", d="M0 0 L10 5 L0 10 z", class_=f"{kind}head"),
            id=kind, viewBox="0 0 10 10", refX=9, refY=5, markerWidth=5, markerHeight=5,
            orient="auto-start-reverse",
        )
        for kind in ("add", "move")
    ]  # fmt: skip
    rules = _STYLE.format(font=FONT, small=FONT - 2) + style
    picture = element(
        "svg",
        [
            tooltip(about),
            element("style", rules),
            element("defs", heads),
            element("rect", width="100%", height="100%", class_="paper"),
            *inner,
        ],
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width:.0f} {height:.0f}",
        width=f"{width:.0f}", height=f"{height:.0f}", role="img", aria_label=about,
    )  # fmt: skip
    return Picture(f"{picture}\n")


MOST_RANKS = 64
"""Ranks that a picture can show."""

Point = tuple[float, float]
Links = set[tuple[int, int]]


class RankLayout(NamedTuple):
    """A layout, by name, and the place of each rank."""

    name: str
    places: tuple[Point, ...]


def layout_of(
    world_size: int, links: Links, root: int = 0, hosts: Sequence[int] | None = None
) -> RankLayout:
    """Choose the layout of a schedule from the pairs of ranks that exchange messages.

    A pair has the lower rank first; ``root`` is the rank at the top of a tree, and ``hosts`` has
    the number of each rank's host, to draw the ranks of a host together.
    """
    if hosts is not None and len(set(hosts)) > 1:
        return RankLayout("hosts", _hosts(hosts))
    tree = partial(_tree, root=root)
    for name, place in ("line", _line), ("tree", tree), ("hypercube", _hypercube), ("grid", _grid):
        if (places := place(world_size, links)) is not None:
            return RankLayout(name, places)
    steps = {min(high - low, world_size - high + low) for low, high in links}
    return RankLayout("ring" if steps <= {1} else "circle", circle(world_size))


# Half of the distance of neighbours on a circle: cards stand beside each other aslant, too.
_ROOM = 0.6


def circle(world_size: int) -> tuple[Point, ...]:
    """Ranks on a circle, clockwise, rank 0 at the top."""
    if world_size == 1:
        return ((0.0, 0.0),)
    radius = max(_ROOM / math.sin(math.pi / world_size), 0.75)
    angles = [2 * math.pi * rank / world_size for rank in range(world_size)]
    return tuple((radius * math.sin(angle), -radius * math.cos(angle)) for angle in angles)


def _line(world_size: int, links: Links) -> tuple[Point, ...] | None:
    """Ranks in a row, if each exchanges messages with the ranks beside it only."""
    if world_size < 3 or links != {(rank, rank + 1) for rank in range(world_size - 1)}:
        return None
    return tuple((float(rank), 0.0) for rank in range(world_size))


def _tree(world_size: int, links: Links, root: int) -> tuple[Point, ...] | None:
    """Ranks below their parents, if the messages make a tree."""
    if world_size < 3 or len(links) != world_size - 1:
        return None
    beside: list[list[int]] = [[] for _ in range(world_size)]
    for low, high in sorted(links):
        beside[low].append(high)
        beside[high].append(low)
    depths, children = {root: 0}, dict[int, list[int]]()  # children: from left to right, down
    stack = [root]
    while stack:
        rank = stack.pop()
        children[rank] = [peer for peer in beside[rank] if peer not in depths]
        depths |= dict.fromkeys(children[rank], depths[rank] + 1)
        stack += reversed(children[rank])
    if len(depths) < world_size:
        return None  # some ranks are not connected with the root, and others in a circle
    leaves = [rank for rank in children if not children[rank]]
    across = {rank: float(number) for number, rank in enumerate(leaves)}
    for rank, below in reversed(children.items()):
        if below:
            across[rank] = sum(across[child] for child in below) / len(below)
    return tuple((across[rank], float(depths[rank])) for rank in range(world_size))


# One direction a bit of the rank; from three bits on with room between the corners.
_SQUARE = ((1.0, 0.0), (0.0, 1.0))
_CUBE = ((2.0, 0.0), (0.0, 2.0), (1.0, -1.0), (4.5, 0.0))


def _hypercube(world_size: int, links: Links) -> tuple[Point, ...] | None:
    """Ranks on the corners of a cube, if messages go along its edges only."""
    bits = world_size.bit_length() - 1
    is_cube = world_size == 1 << bits and 2 <= bits <= len(_CUBE)
    directions = _SQUARE if bits == len(_SQUARE) else _CUBE
    ranks = range(world_size)
    edges = {(low, low | 1 << bit) for low in ranks for bit in range(bits) if not low >> bit & 1}
    if not is_cube or links != edges:
        return None
    ways = [[way for bit, way in enumerate(directions) if rank >> bit & 1] for rank in ranks]
    return tuple((sum(x for x, _ in own), sum(y for _, y in own)) for own in ways)


def _grid(world_size: int, links: Links) -> tuple[Point, ...] | None:
    """Ranks in rows, if messages go to neighbours in rows and columns, around the edges too."""
    ranks = range(world_size)
    for width in range(2, world_size // 2 + 1):
        right = {(rank, rank // width * width + (rank + 1) % width) for rank in ranks}
        down = {(rank, (rank + width) % world_size) for rank in ranks}
        if world_size % width == 0 and links == {(min(way), max(way)) for way in right | down}:
            # Every second row is shifted a little: ways around the edge lie beside the others.
            places = (divmod(rank, width) for rank in ranks)
            return tuple((x + 0.15 * (y % 2), y + 0.15 * (x % 2)) for y, x in places)
    return None


def _hosts(hosts: Sequence[int]) -> tuple[Point, ...]:
    """Hosts on a circle, two of them side by side, and the ranks of each on a circle of its own."""
    members: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    largest = max(map(len, members.values()))
    apart = 2 * max(abs(x) for x, _ in circle(largest)) + 1.6
    beside = ((-0.5, 0.0), (0.5, 0.0))
    middles = beside if len(members) == len(beside) else circle(len(members))
    places: dict[int, Point] = {}
    for (x, y), ranks in zip(middles, members.values(), strict=True):
        for rank, (right, down) in zip(ranks, circle(len(ranks)), strict=True):
            places[rank] = apart * x + right, apart * y + down
    return tuple(places[rank] for rank in range(len(hosts)))


def network_layout(
    world_size: int, cables: Iterable[tuple[int | str, int | str]]
) -> dict[int | str, Point]:
    """Choose the places of the nodes of a network; a number is a rank, text is a switch.

    Ranks that are cabled to each other lie as `layout_of` says. Ranks of switches lie on a circle,
    those of a switch side by side, and the switches inside: the more cables to a rank, the nearer
    to the middle.
    """
    beside: dict[int | str, set[int | str]] = {rank: set() for rank in range(world_size)}
    for first, second in cables:
        beside.setdefault(first, set()).add(second)
        beside.setdefault(second, set()).add(first)
    switches = [node for node in beside if isinstance(node, str)]
    if not switches:
        pairs = {(a, b) for a, b in combinations(range(world_size), 2) if b in beside[a]}
        return dict(enumerate(layout_of(world_size, pairs).places))
    depths: dict[int | str, int] = dict.fromkeys(range(world_size), 0)
    waiting: deque[int | str] = deque(depths)
    while waiting:
        node = waiting.popleft()
        for other in beside[node] - depths.keys():
            depths[other] = depths[node] + 1
            waiting.append(other)
    unreached = max(depths.values()) + 1  # switches that no link joins to a rank
    depths |= {node: unreached for node in switches if node not in depths}

    def first_switch(rank: int) -> int:
        own = (switches.index(node) for node in beside[rank] if isinstance(node, str))
        return min(own, default=len(switches))

    ranks = sorted(range(world_size), key=first_switch)
    around = circle(world_size) if world_size > 1 else ((0.0, -1.0),)
    places: dict[int | str, Point] = dict(zip(ranks, around, strict=True))
    deepest = max(depths.values())
    is_star = sum(depth == deepest for depth in depths.values()) == 1
    outer = math.hypot(*places[0])
    for depth in range(1, deepest + 1):
        # Each switch towards the nodes below it; all of a depth at equal distances, so that none
        # covers another.
        angles = {}
        for switch in (node for node in switches if depths[node] == depth):
            nodes = sorted(beside[switch], key=str)
            below = [places[node] for node in nodes if depths[node] == depth - 1]
            x, y = sum(x for x, _ in below), sum(y for _, y in below)
            angle = math.atan2(x, -y) % (2 * math.pi) if math.hypot(x, y) > 1e-6 else 0.0
            angles[switch] = round(angle, 6)
        row = sorted(angles, key=angles.__getitem__)
        radius = outer * (1 - depth / (deepest + (not is_star)))
        for index, switch in enumerate(row):
            angle = angles[row[0]] + 2 * math.pi * index / len(row)
            places[switch] = radius * math.sin(angle), 0.0 - radius * math.cos(angle)
    return places


_UNIT = 280.0  # between neighbours, or more, so that two lines of text stand on a link
_ALIKE = 0.1  # of the larger number: directions that differ by no more are drawn as a cable
_GAP, _LINE, _HIGH = 40.0, 1.1 * FONT, 44.0  # around the network; of text; of a node
_NETWORK_STYLE = """
.link { stroke: #0072b2; fill: none }
.slow { stroke: #d55e00; fill: none; stroke-dasharray: 10 6 }
.switch { stroke: #1b1f24; fill: #fbe9c0; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
.link { stroke: #56b4e9 } .slow { stroke: #ff8c42 } .switch { stroke: #e6edf3; fill: #4a3b12 }
}
"""


def network_picture(topology: Topology) -> Picture:
    """Draw a network of at most `MOST_RANKS` ranks; more raise `ArgumentError`.

    The faster a link, the wider its line. The line is broken if the fastest link is at least twice
    as fast. Where the numbers of both directions differ by a tenth at most, one line has their
    means.
    """
    if topology.world_size > MOST_RANKS:
        raise ArgumentError(
            "too many ranks to draw", "topology", f"at most {MOST_RANKS}", topology.world_size
        )
    cables = replace(topology, links=tuple(_joined(topology.links)), router=None).cables()
    ends = [(link.source, link.target) for link, _ in cables]
    places = network_layout(topology.world_size, ends)
    left, top = (min(place[axis] for place in places.values()) for axis in (0, 1))
    wide = {node: max(_HIGH, width_of(str(node)) + 20) for node in places}
    labels = [(f"{float(link.bandwidth) / 1e9:.4g} GB/s", f"{float(link.latency_s) * 1e6:.4g} us")
              for link, _ in cables]  # fmt: skip
    rooms = [max(width_of(word, FONT - 2) for word in words) for words in labels]
    least = [((wide[a] + wide[b]) / 2 + room) / dist(places[a], places[b])
             for (a, b), room in zip(ends, rooms, strict=True)]  # fmt: skip
    unit = max([_UNIT, *least])
    begin = complex(max(max(wide.values()) + 2 * _GAP, *rooms, 0.0) / 2, 3 * _GAP)
    at = {node: begin + complex(x - left, y - top) * unit for node, (x, y) in places.items()}
    taken = [(place, wide[node], _HIGH) for node, place in at.items()]  # by nodes, then by words
    fastest = max([float(link.bandwidth) for link, _ in cables], default=0.0)
    lines, numbers, nodes = [], [], []
    for (link, is_cable), words, room in zip(cables, labels, rooms, strict=True):
        start, end, speed = at[link.source], at[link.target], float(link.bandwidth)
        # Single links are bent, so that those of both ways lie apart.
        over = (start + end) / 2 - (0 if is_cable else 0.15j) * (end - start)
        spots = [
            start * (1 - share) ** 2 + over * 2 * share * (1 - share) + end * share**2
            for share in (0.5, 0.42, 0.58, 0.34, 0.66, 0.26, 0.74)
        ]
        boxes = [(spot, room, 2 * _LINE) for spot in spots]
        taken.append(min(boxes, key=lambda box: sum(_shared(box, other) for other in taken)))
        spot = taken[-1][0]
        for word, down in zip(words, (-_LINE / 2, _LINE / 2), strict=True):
            numbers.append(text(spot.real, spot.imag + down, word, "small label"))
        back = over - end  # an arrow ends at the border of the node
        across, down = 2 * max(1, abs(back.real)), 2 * max(1, abs(back.imag))
        end += back * min(wide[link.target] / across, _HIGH / down)
        kind, arrow = ("slow", "add") if 2 * speed <= fastest else ("link", "move")
        way = " Q".join(f"{place.real:.1f} {place.imag:.1f}" for place in (start, over))
        looks = {} if is_cable else {"marker_end": f"url(#{arrow})"}
        about, broad = f"{link.name}: {', '.join(words)}", max(2.0, 9 * (speed / fastest) ** 0.5)
        d = f"M{way} {end.real:.1f} {end.imag:.1f}"
        title = tooltip(about)
        lines.append(element("path", title, d=d, class_=kind, stroke_width=broad, **looks))
    for node, place in at.items():
        kind, rx = ("rank", _HIGH / 2) if isinstance(node, int) else ("switch", 0.0)
        x, y = place.real - wide[node] / 2, place.imag - _HIGH / 2
        nodes.append(rect(x, y, wide[node], _HIGH, rx=rx, class_=kind))
        nodes.append(text(place.real, place.imag, str(node), "title"))
    about = f"{topology.name}: ranks {topology.world_size}, links {len(cables)}"
    legend = f"broken lines: at most half of {fastest / 1e9:.4g} GB/s, the fastest link"
    width = max(*(place.real + w / 2 for place, w, _ in taken), width_of(about), width_of(legend))
    low = max(place.imag for place, _, _ in taken) + 2 * _GAP
    foot = [text((width + _GAP) / 2, low, legend, "small")] * any('"slow' in line for line in lines)
    drawn = [*lines, *nodes, *numbers, text((width + _GAP) / 2, _GAP, about, "title"), *foot]
    return document(width + _GAP, low + _GAP, drawn, about, _NETWORK_STYLE)


def _joined(links: Iterable[Link]) -> Iterator[Link]:
    """The links; where both directions hardly differ, both have their means: they are a cable."""
    by_ends = {(link.source, link.target): link for link in links}
    for link in links:
        back = by_ends.get((link.target, link.source), link)
        numbers = (link.bandwidth, back.bandwidth), (link.latency_s, back.latency_s)
        pairs = [(float(a), float(b)) for a, b in numbers]
        is_cable = all(abs(a - b) <= _ALIKE * max(a, b) for a, b in pairs)
        bandwidth, latency_s = ((a + b) / 2 for a, b in pairs)
        yield replace(link, bandwidth=bandwidth, latency_s=latency_s) if is_cable else link


def _shared(box: tuple[complex, float, float], other: tuple[complex, float, float]) -> float:
    """The area that two boxes share, by their middles, widths and heights."""
    apart, across, down = box[0] - other[0], (box[1] + other[1]) / 2, (box[2] + other[2]) / 2
    return max(0.0, across - abs(apart.real)) * max(0.0, down - abs(apart.imag))
