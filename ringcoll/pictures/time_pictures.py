"""Space and time: what each rank of a run does when, and the messages between the ranks."""

from __future__ import annotations

import math

from ringcoll.pictures.scenes import MOST_RANKS, too_many
from ringcoll.pictures.svg import FONT, Picture, document, element, moved, text, width_of
from ringcoll.pictures.traces import Event, TracedBar, last_run
from ringcoll.simulation import SimulatedRun

_MOST_SPANS = 20_000
_WIDTH = 900.0  # of the time
_LANE = 46.0  # of a rank
_BAR = 20.0
_GAP = 30.0
_MARKS = 5  # of the axis, about
_KINDS = ("sends", "waits", "adds")
_STYLE = """
.sends { fill: #0072b2 }
.waits { fill: #bdbdbd }
.adds { fill: #d55e00 }
.message { stroke: #0072b2; stroke-width: 1.5; fill: none; opacity: 0.7 }
@media (prefers-color-scheme: dark) { .waits { fill: #57606a } .sends { fill: #56b4e9 } .message { stroke: #56b4e9 } }
"""


def time_picture(run: SimulatedRun | Event) -> Picture:
    """Draw a run: a lane a rank, time to the right.

    A bar above the middle of a lane is a message that the rank sends, from when it is posted until its last
    byte has left; below it are waits and additions. Lines lead from where a message is posted to where it has
    arrived.

    Parameters
    ----------
    run
        Of `ringcoll.simulation.simulate` with ``trace=True``; or what ``ringcoll trace`` writes, as an object, of which
        the last operation is drawn.

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
    traced = last_run(run.picture() if isinstance(run, SimulatedRun) else run)
    world_size = traced.world_size
    if world_size > MOST_RANKS:
        raise too_many("ranks", MOST_RANKS, world_size)
    if (count := len(traced.bars) + len(traced.messages)) > _MOST_SPANS:
        raise too_many("messages and waits", _MOST_SPANS, count)
    total = traced.duration or 1.0
    names = [f"rank {rank}" for rank in range(world_size)]
    left = _GAP + max(map(width_of, names))

    def x(microseconds: float) -> float:
        return left + _WIDTH * microseconds / total

    def y(rank: int) -> float:
        return 3.4 * FONT + (rank + 0.5) * _LANE

    bottom = y(world_size - 1) + _LANE / 2
    where = f"over {traced.where}"
    if isinstance(run, SimulatedRun):
        where = f"{run.nbytes} bytes on {run.topology.name}"
    about = f"{traced.name}, {where}"
    drawn = [text(left + _WIDTH / 2, _GAP, f"{about}: {_in_words(total)}", "title")]
    for rank, name in enumerate(names):
        drawn.append(text(left - 10, y(rank), name, "small", "end"))
        drawn.append(element("path", d=f"M{left:.1f} {y(rank):.1f} h{_WIDTH:.0f}", class_="cell"))
    drawn += [_bar(bar, x(bar.begin), x(bar.end), y(bar.rank)) for bar in traced.bars]
    for message in traced.messages:
        step, source, target, begin, end, nbytes = message
        way = f"M{x(begin):.1f} {y(source):.1f} L{x(end):.1f} {y(target):.1f}"
        said = f"step {step}: {nbytes:g} bytes from rank {source} to rank {target}"
        drawn.append(element("path", element("title", said), d=way, class_="message"))
    drawn += _axis(total, left, bottom)
    foot, at = [], left
    kinds = {bar.kind for bar in traced.bars}
    for kind in (kind for kind in _KINDS if kind in kinds):
        foot += [
            element("rect", x=at, y=-_BAR / 2, width=36, height=_BAR, class_=kind),
            text(at + 46, 0, kind, "small", "start"),
        ]
        at += 76 + width_of(kind, FONT - 2)
    height = bottom + 2 * FONT
    drawn.append(moved(0, height + FONT / 2, foot))
    width = max(left + _WIDTH + 2 * _GAP, width_of(about) + 12 * FONT)
    return document(width, height + 2 * FONT, drawn, about, _STYLE)


def _bar(bar: TracedBar, begin: float, end: float, y: float) -> str:
    """A time of a rank: what it sends above the middle of its lane, the rest below."""
    return element(
        "rect",
        element("title", f"rank {bar.rank}, {bar.about}: {_in_words(bar.end - bar.begin)}"),
        x=begin,
        y=y - _BAR if bar.kind == "sends" else y,
        width=max(0.5, end - begin),
        height=_BAR,
        class_=bar.kind,
    )


def _axis(total: float, left: float, y: float) -> list[str]:
    """Marks at round numbers."""
    step = 10.0 ** math.floor(math.log10(total / _MARKS))
    step *= next(factor for factor in (1, 2, 5, 10) if total / (factor * step) <= _MARKS + 1)
    drawn = []
    for number in range(int(total / step + 1e-9) + 1):
        at = left + _WIDTH * number * step / total
        drawn.append(element("path", d=f"M{at:.1f} {y:.1f} v8", class_="ink"))
        drawn.append(text(at, y + 8 + FONT / 2 + 4, _in_words(number * step), "small"))
    return drawn


def _in_words(microseconds: float) -> str:
    return f"{microseconds:.4g} us"
