"""A network: ranks, switches, and the links between them with bandwidth and latency; slow links stand out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import dist

from ringcoll.errors import ArgumentError
from ringcoll.pictures.layouts import network_layout
from ringcoll.pictures.scenes import MOST_RANKS
from ringcoll.pictures.svg import FONT, Picture, document, element, text, width_of
from ringcoll.simulation import Link, Topology

_UNIT = 280.0  # between neighbours, or more, so that two lines of text stand on a link
_ALIKE = 0.1  # of the larger number: directions that differ by no more are drawn as a cable
_GAP, _LINE, _HIGH = 40.0, 1.1 * FONT, 44.0  # around the network; of text; of a node
_STYLE = """
.link { stroke: #0072b2; fill: none }
.slow { stroke: #d55e00; fill: none; stroke-dasharray: 10 6 }
.switch { stroke: #1b1f24; fill: #fbe9c0; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
.link { stroke: #56b4e9 } .slow { stroke: #ff8c42 } .switch { stroke: #e6edf3; fill: #4a3b12 }
}
"""


def network_picture(topology: Topology) -> Picture:
    """Draw a network of at most `MOST_RANKS` ranks; more raise `ArgumentError`.

    The faster a link, the wider its line. The line is broken if the fastest link is at least twice as fast.
    Where the numbers of both directions differ by a tenth at most, one line has their means.
    """
    if topology.world_size > MOST_RANKS:
        raise ArgumentError("too many ranks to draw", argument="topology",
                            expected=f"at most {MOST_RANKS}", got=topology.world_size)  # fmt: skip
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
        lines.append(element("path", element("title", about), d=f"M{way} {end.real:.1f} {end.imag:.1f}",
                             class_=kind, stroke_width=broad, **looks))  # fmt: skip
    for node, place in at.items():
        kind, rx = ("rank", _HIGH / 2) if isinstance(node, int) else ("switch", 0.0)
        x, y = place.real - wide[node] / 2, place.imag - _HIGH / 2
        nodes.append(element("rect", x=x, y=y, width=wide[node], height=_HIGH, rx=rx, class_=kind))
        nodes.append(text(place.real, place.imag, str(node), "title"))
    about = f"{topology.name}: ranks {topology.world_size}, links {len(cables)}"
    legend = f"broken lines: at most half of {fastest / 1e9:.4g} GB/s, the fastest link"
    width = max(*(place.real + w / 2 for place, w, _ in taken), width_of(about), width_of(legend))
    low = max(place.imag for place, _, _ in taken) + 2 * _GAP
    foot = [text((width + _GAP) / 2, low, legend, "small")] * any('"slow' in line for line in lines)
    drawn = [*lines, *nodes, *numbers, text((width + _GAP) / 2, _GAP, about, "title"), *foot]
    return document(width + _GAP, low + _GAP, drawn, about, _STYLE)


def _joined(links: Iterable[Link]) -> Iterator[Link]:
    """The links; where both directions hardly differ, both have their means, so that they are a cable."""
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
