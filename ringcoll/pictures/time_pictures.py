"""Space and time: what each rank of a simulated run does when, and the messages between the ranks."""

from __future__ import annotations

import math

from ringcoll.errors import ArgumentError
from ringcoll.pictures.scenes import MOST_RANKS, too_many
from ringcoll.pictures.svg import FONT, Picture, document, element, moved, text, width_of
from ringcoll.simulation import SimulatedRun, SimulatedSpan

_MOST_SPANS = 20_000
_WIDTH = 900.0  # of the time
_LANE = 46.0  # of a rank
_BAR = 20.0
_GAP = 30.0
_MARKS = 5  # of the axis, about
_KINDS = {
    "send": ("sends", "sends"),
    "receive": ("waits", "waits"),
    "leave": ("waits", "waits"),
    "reduce": ("adds", "adds"),
}
_STYLE = """
.sends { fill: #0072b2 }
.waits { fill: #bdbdbd }
.adds { fill: #d55e00 }
.message { stroke: #0072b2; stroke-width: 1.5; fill: none; opacity: 0.7 }
@media (prefers-color-scheme: dark) { .waits { fill: #57606a } .sends { fill: #56b4e9 } .message { stroke: #56b4e9 } }
"""


def time_picture(run: SimulatedRun) -> Picture:
    """Draw a simulated run: a lane a rank, time to the right.

    A bar above the middle of a lane is a message that the rank sends, from when it is posted until its last
    byte has left; below it are waits and additions. Lines lead from where a message is posted to where it has
    arrived.

    Parameters
    ----------
    run
        Of `ringcoll.simulation.simulate` with ``trace=True``.

    Returns
    -------
    Picture
        An SVG document.

    Raises
    ------
    ArgumentError
        The run has no trace, or more ranks or messages than a picture can show.

    Examples
    --------
    >>> from ringcoll.algorithms import schedule_of
    >>> from ringcoll.simulation import simulate, topology_named
    >>> ring = schedule_of("all_reduce", "ring", 4)
    >>> picture = time_picture(simulate(ring, 1 << 20, topology_named("ring", 4), trace=True))
    >>> picture.count('class="message"')
    24
    """
    spans, world_size = run.spans, run.schedule.world_size
    if spans is None:
        raise ArgumentError("the run has no trace", argument="trace", expected=True, got=False)
    if world_size > MOST_RANKS:
        raise too_many("ranks", MOST_RANKS, world_size)
    if len(spans) > _MOST_SPANS:
        raise too_many("messages and waits", _MOST_SPANS, len(spans))
    total = float(run.seconds) or 1.0
    names = [f"rank {rank}" for rank in range(world_size)]
    left = _GAP + max(map(width_of, names))

    def x(seconds: object) -> float:
        return left + _WIDTH * float(seconds) / total  # type: ignore[arg-type]  # a number

    def y(rank: int) -> float:
        return 3.4 * FONT + (rank + 0.5) * _LANE

    bottom = y(world_size - 1) + _LANE / 2
    about = f"{run.schedule.algorithm} {run.schedule.collective}, {run.nbytes} bytes on {run.topology.name}"
    drawn = [text(left + _WIDTH / 2, _GAP, f"{about}: {_microseconds(total)}", "title")]
    for rank, name in enumerate(names):
        drawn.append(text(left - 10, y(rank), name, "small", "end"))
        drawn.append(element("path", d=f"M{left:.1f} {y(rank):.1f} h{_WIDTH:.0f}", class_="cell"))
    drawn_spans = [span for span in spans if span.kind == "send" or span.end_s > span.begin_s]
    for span in drawn_spans:
        begin = span.wave_s if span.kind == "send" else span.begin_s  # from when it is posted
        drawn.append(_bar(span, x(begin), x(span.end_s), y(span.rank)))
    for span in spans:
        if span.kind == "receive":
            way = f"M{x(span.posted_s):.1f} {y(span.peer):.1f} L{x(span.end_s):.1f} {y(span.rank):.1f}"
            said = f"step {span.step}: {float(span.nbytes):g} bytes from rank {span.peer} to rank {span.rank}"
            drawn.append(element("path", element("title", said), d=way, class_="message"))
    drawn += _axis(total, left, bottom)
    foot, at = [], left
    kinds = {span.kind for span in drawn_spans}
    for class_, words in dict(_KINDS[kind] for kind in _KINDS if kind in kinds).items():
        foot += [
            element("rect", x=at, y=-_BAR / 2, width=36, height=_BAR, class_=class_),
            text(at + 46, 0, words, "small", "start"),
        ]
        at += 76 + width_of(words, FONT - 2)
    height = bottom + 2 * FONT
    drawn.append(moved(0, height + FONT / 2, foot))
    width = max(left + _WIDTH + 2 * _GAP, width_of(about) + 12 * FONT)
    return document(width, height + 2 * FONT, drawn, about, _STYLE)


def _bar(span: SimulatedSpan, begin: float, end: float, y: float) -> str:
    """A time of a rank: what it sends above the middle of its lane, the rest below."""
    class_, _ = _KINDS[span.kind]
    about = f"step {span.step}: rank {span.rank} {span.kind}, {_microseconds(float(span.end_s - span.begin_s))}"
    top = y - _BAR if class_ == "sends" else y
    return element(
        "rect",
        element("title", about),
        x=begin,
        y=top,
        width=max(0.5, end - begin),
        height=_BAR,
        class_=class_,
    )


def _axis(total: float, left: float, y: float) -> list[str]:
    """Marks at round numbers."""
    step = 10.0 ** math.floor(math.log10(total / _MARKS))
    step *= next(factor for factor in (1, 2, 5, 10) if total / (factor * step) <= _MARKS + 1)
    drawn = []
    for number in range(int(total / step + 1e-9) + 1):
        at = left + _WIDTH * number * step / total
        drawn.append(element("path", d=f"M{at:.1f} {y:.1f} v8", class_="ink"))
        drawn.append(text(at, y + 8 + FONT / 2 + 4, _microseconds(number * step), "small"))
    return drawn


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.4g} us"
