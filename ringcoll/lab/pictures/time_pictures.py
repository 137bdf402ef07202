"""Space and time: what each rank of a run does when, and the messages between the ranks.

Runs are simulated, or read from what ``ringcoll trace`` writes, of which the last operation, or the
last step of a trainer, is drawn.

Curves are times over sizes, on logarithmic axes; the sizes are marked from which another curve is
the lowest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ringcoll.errors import ArgumentError
from ringcoll.lab.pictures.step_pictures import too_many
from ringcoll.lab.pictures.svg import (
    COLOURS,
    FONT,
    MOST_RANKS,
    Picture,
    document,
    element,
    moved,
    rect,
    text,
    tooltip,
    width_of,
)
from ringcoll.lab.simulation import SimulatedRun

_BARS = {"send": "sends", "wait": "waits", "reduce": "adds"}  # what pictures call these events

TraceEvent = Mapping[str, Any]


class TracedMessage(NamedTuple):
    """A message, from when it is posted to when it has arrived; in microseconds."""

    step: int
    source: int
    target: int
    begin: float
    end: float
    nbytes: float


class TracedBar(NamedTuple):
    """A time of a rank, in microseconds; ``kind`` is "sends", "waits" or "adds"."""

    kind: str
    rank: int
    begin: float
    end: float
    about: str


class TracedRun(NamedTuple):
    """An operation of all ranks; times are from its beginning, in microseconds."""

    name: str
    world_size: int
    where: str
    duration: float
    messages: list[TracedMessage]
    bars: list[TracedBar]


def last_run(trace: TraceEvent, name: str | None = None) -> TracedRun:
    """Read the last operation of a trace, or the last one of a name such as "ring all_reduce".

    Raises
    ------
    ArgumentError
        It is no trace, or has no such operation.
    """
    try:
        events: Sequence[TraceEvent] = trace["traceEvents"]
        other = trace["otherData"]
        operations = [event for event in events if event.get("cat") == "operation"]
        wanted = [event for event in operations if name in (None, event["name"])]
        if wanted:
            number = max((event["args"]["group"], event["args"]["number"]) for event in wanted)
            return _run(events, number, int(other["world_size"]), str(other["transport"]))
        names = {f"{event['name']} on {other['world_size']} ranks" for event in operations}
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise _no_trace(error) from None
    message = "the trace is of something else"
    expected = name or "an operation"
    raise ArgumentError(message, "trace", expected, ", ".join(sorted(names)) or "no operation")


def last_step(trace: TraceEvent) -> TracedRun:
    """Read the last step of a trainer: bars that say "computes", "awaits" or "communicates"."""
    try:
        events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        other = trace["otherData"]
        steps = {}
        for event in sorted(events, key=lambda event: float(event["ts"])):
            if event["cat"] == "phase" and event["args"]["depth"] == 0:
                steps[event["pid"]] = event  # the last one of each rank
        zero = min((event["ts"] for event in steps.values()), default=0.0)
        bars = []
        for event in events:
            rank, begin, about = event["pid"], event["ts"] - zero, event.get("args", {})
            # Another rank may begin its last step before this rank has ended the step before.
            if rank not in steps or event["ts"] < steps[rank]["ts"]:
                continue
            if event["cat"] == "operation":
                word = "communicates"
            elif event["cat"] == "phase" and about["depth"] == 1:
                # A phase that mostly waits, or that others wait for, computes nothing.
                word = "computes" if 4 * about["computing_s"] > about["total_s"] else "awaits"
            else:
                continue
            bars.append(TracedBar(word, rank, begin, begin + event["dur"], event["name"]))
        ends = [event["ts"] + event["dur"] - zero for event in steps.values()]
        where, world_size = str(other["transport"]), int(other["world_size"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise _no_trace(error) from None
    if not steps:
        raise ArgumentError(
            "the trace is of something else", "trace", "steps of a trainer", "no phase"
        )
    name = f"one {next(iter(steps.values()))['name']} of training"
    return TracedRun(name, world_size, where, max(ends), [], bars)


def _no_trace(error: Exception) -> ArgumentError:
    return ArgumentError(
        "not a trace",
        "trace",
        "what ringcoll trace writes",
        f"nothing under {error}" if isinstance(error, KeyError) else "something else",
    )


def _run(
    events: Sequence[TraceEvent], number: tuple[int, int], world_size: int, where: str
) -> TracedRun:
    of = ("group", "number")
    with_args = [event for event in events if "args" in event]
    own = [event for event in with_args if tuple(map(event["args"].get, of)) == number]
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "e"}
    wholes = [event for event in own if event["cat"] == "operation"]
    zero = min(event["ts"] for event in wholes)
    # Posts of sends and arrivals come in the same order for a step and a pair of ranks.
    arrivals: dict[tuple[int, int, int], list[float]] = {}
    for event in own:
        if event["ph"] == "b" and event["args"]["way"] == "receive":
            about = event["args"]
            key = about["step"], about["peer"], event["pid"]
            arrivals.setdefault(key, []).append(ends[event["id"]] - zero)
    messages, bars = [], []
    for event in own:
        kind, begin, about = event["cat"], event["ts"] - zero, event["args"]
        is_send = event["ph"] == "b" and about["way"] == "send"
        if is_send:
            way = about["step"], event["pid"], about["peer"]
            arrived, end = arrivals.get(way), ends[event["id"]] - zero
            arrival = arrived.pop(0) if arrived else end
            times = map(_finite, (begin, arrival, about["bytes"]))
            messages.append(TracedMessage(*map(int, way), *times))
        else:
            end = begin + event.get("dur", 0.0)
        if kind in _BARS and (is_send or (event["ph"] == "X" and end > begin)):
            rank, about = int(event["pid"]), str(event["name"])
            bars.append(TracedBar(_BARS[kind], rank, _finite(begin), _finite(end), about))
    duration = _finite(max(event["ts"] + event["dur"] for event in wholes) - zero)
    return TracedRun(str(wholes[0]["name"]), world_size, where, duration, messages, bars)


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise ValueError(number)
    return float(number)


_MOST_SPANS = 20_000
_WIDTH = 900.0  # of the time
_LANE = 46.0  # of a rank
_BAR = 20.0
_GAP = 30.0
_MARKS = 5  # of the axis, about
_KINDS = ("sends", "computes", "waits", "awaits", "adds", "communicates")
_ABOVE = ("sends", "computes", "awaits")  # the middle of a lane
_STYLE = """
.sends { fill: #0072b2 }
.waits, .awaits { fill: #bdbdbd }
.adds, .communicates { fill: #d55e00 }
.computes { fill: #56b4e9; stroke: #ffffff }
.message { stroke: #0072b2; stroke-width: 1.5; fill: none; opacity: 0.7 }
@media (prefers-color-scheme: dark) { .waits, .awaits { fill: #57606a } \
.sends { fill: #56b4e9 } .message { stroke: #56b4e9 } }
"""


def time_picture(run: SimulatedRun | TraceEvent) -> Picture:
    """Draw a run: a lane a rank, time to the right.

    A bar above the middle of a lane is a message that the rank sends, from when it is posted until
    its last byte has left; below it are waits and additions. Lines lead from where a message is
    posted to where it has arrived.

    Parameters
    ----------
    run
        Of `ringcoll.lab.simulation.simulate` with ``trace=True``; or what ``ringcoll trace``
        writes, as an object, of which the last operation is drawn.

    Raises
    ------
    ArgumentError
        The run has no trace, or more ranks or messages than a picture can show.

    Examples
    --------
    >>> from ringcoll.schedules import schedule_of
    >>> from ringcoll.lab.simulation import simulate, topology_named
    >>> ring = schedule_of("all_reduce", "ring", 4)
    >>> picture = time_picture(simulate(ring, 1 << 20, topology_named("ring", 4), trace=True))
    >>> picture.count('class="message"')
    24
    """
    traced = last_run(run.picture() if isinstance(run, SimulatedRun) else run)
    lanes = _Lanes(traced)
    if (count := len(traced.bars) + len(traced.messages)) > _MOST_SPANS:
        raise too_many("messages and waits", _MOST_SPANS, count)
    x, y = lanes.x, lanes.y
    where = f"over {traced.where}"
    if isinstance(run, SimulatedRun):
        where = f"{run.nbytes} bytes on {run.topology.name}"
    drawn = [_bar(lanes, bar) for bar in traced.bars]
    for message in traced.messages:
        step, source, target, begin, end, nbytes = message
        way = f"M{x(begin):.1f} {y(source):.1f} L{x(end):.1f} {y(target):.1f}"
        said = f"step {step}: {nbytes:g} bytes from rank {source} to rank {target}"
        drawn.append(element("path", tooltip(said), d=way, class_="message"))
    return lanes.document(f"{traced.name}, {where}", drawn)


def overlap_picture(trace: TraceEvent) -> Picture:
    """Draw the last step of a trainer: phases above the middle of a rank's lane, collectives below.

    A collective below the phase "backward" is hidden behind it.

    Parameters
    ----------
    trace
        What ``ringcoll trace TRAINER`` writes, as an object.

    Raises
    ------
    ArgumentError
        It is not the trace of a trainer, or has more ranks than a picture can show.
    """
    step = last_step(trace)
    lanes = _Lanes(step)
    drawn = []
    for bar in step.bars:
        drawn.append(_bar(lanes, bar))
        place = (lanes.x(bar.begin) + lanes.x(bar.end)) / 2
        if bar.kind in _ABOVE and width_of(bar.about) < lanes.x(bar.end) - lanes.x(bar.begin):
            drawn.append(text(place, lanes.y(bar.rank) - _BAR / 2, bar.about, "small label"))
    return lanes.document(f"{step.name}, over {step.where}", drawn)


class _Lanes:
    """A lane a rank, an axis of time below, and the meaning of the colours."""

    def __init__(self, run: TracedRun) -> None:
        if run.world_size > MOST_RANKS:
            raise too_many("ranks", MOST_RANKS, run.world_size)
        self.total = run.duration or 1.0
        self.kinds = {bar.kind for bar in run.bars}
        self.names = [f"rank {rank}" for rank in range(run.world_size)]
        self.left = _GAP + max(map(width_of, self.names))

    def x(self, microseconds: float) -> float:
        return self.left + _WIDTH * microseconds / self.total

    def y(self, rank: int) -> float:
        return 3.4 * FONT + (rank + 0.5) * _LANE

    def document(self, about: str, inner: list[str]) -> Picture:
        left, bottom = self.left, self.y(len(self.names) - 1) + _LANE / 2
        drawn = [text(left + _WIDTH / 2, _GAP, f"{about}: {_in_words(self.total)}", "title")]
        for rank, name in enumerate(self.names):
            y = self.y(rank)
            drawn.append(text(left - 10, y, name, "small", "end"))
            drawn.append(element("path", d=f"M{left:.1f} {y:.1f} h{_WIDTH:.0f}", class_="cell"))
        foot, at = [], left
        for kind in (kind for kind in _KINDS if kind in self.kinds):
            foot += [
                rect(at, -_BAR / 2, 36, _BAR, class_=kind),
                text(at + 46, 0, kind, "small", "start"),
            ]
            at += 76 + width_of(kind, FONT - 2)
        height = bottom + 2 * FONT
        drawn += [*inner, *_axis(self.total, left, bottom), moved(0, height + FONT / 2, foot)]
        width = max(left + _WIDTH + 2 * _GAP, width_of(about) + 12 * FONT)
        return document(width, height + 2 * FONT, drawn, about, _STYLE)


def _bar(lanes: _Lanes, bar: TracedBar) -> str:
    """A time of a rank: sends and phases above the middle of its lane, the rest below."""
    begin, y = lanes.x(bar.begin), lanes.y(bar.rank) - _BAR * (bar.kind in _ABOVE)
    wide = max(0.5, lanes.x(bar.end) - begin)
    words = f"rank {bar.rank}, {bar.about}: {_in_words(bar.end - bar.begin)}"
    return rect(begin, y, wide, _BAR, tooltip(words), class_=bar.kind)


def _axis(total: float, left: float, y: float) -> list[str]:
    """Marks at round numbers."""
    step = 10.0 ** math.floor(math.log10(total / _MARKS))
    step *= next(factor for factor in (1, 2, 5, 10) if total / (factor * step) <= _MARKS + 1)
    drawn = []
    for number in range(int(total / step + 1e-9) + 1):
        at = left + _WIDTH * number * step / total
        drawn.append(element("path", d=f"M{at:.1f} {y:.1f} v8", class_="ink"))
        drawn.append(text(at, y + 8 + FONT / 2 + 4, _in_words(number * step, total), "small"))
    return drawn


def _in_words(microseconds: float, unit_of: float | None = None) -> str:
    """A time; in the unit that another one would have."""
    is_long = (microseconds if unit_of is None else unit_of) >= 1e4
    return f"{microseconds / 1e3:.4g} ms" if is_long else f"{microseconds:.4g} us"


Curve = Sequence[tuple[float, float]]
"""Sizes, increasing, and the time of each."""

_CURVES_WIDTH, _HEIGHT = 720.0, 420.0
_LEFT, _TOP, _BELOW = 130.0, 76.0, 80.0
_APART = 1.3 * FONT  # of names at the ends of curves
_MOST_MARKS = 8
_DASHES = ("none", "12 5", "4 5", "16 5 4 5")  # people who see no colours tell them apart
_CURVES_STYLE = """
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
        return _LEFT + _CURVES_WIDTH * math.log(size / sizes[0]) / math.log(sizes[-1] / sizes[0])

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
        drawn.append(
            element("path", d=f"M{_LEFT:.1f} {at:.1f} h{_CURVES_WIDTH:.1f}", class_="mark")
        )
        drawn.append(text(_LEFT - 12, at, time_in_words(10.0**power), "small", "end"))
    for number, (name, curve) in enumerate(curves.items()):
        points = " ".join(f"{x(size):.1f},{y(time):.1f}" for size, time in curve)
        stroke, dashes = COLOURS[number % len(COLOURS)], _DASHES[number % len(_DASHES)]
        drawn.append(
            element(
                "polyline", tooltip(name), points=points, class_="curve", stroke=stroke,
                stroke_dasharray=dashes,
            )
        )  # fmt: skip
    heights = _apart([(name, y(curve[-1][1])) for name, curve in curves.items()])
    right = _LEFT + _CURVES_WIDTH + 14
    drawn += [text(right, height, name, "title", "start") for name, height in heights.items()]
    for crossing in (crossing for family in families for crossing in crossings(family)):
        across, down = x(crossing.size), y(crossing.time)
        about = tooltip(crossing.in_words(size_in_words))
        drawn.append(element("circle", about, cx=across, cy=down, r=9, class_="crossing"))
        words = size_in_words(_rounded(crossing.size))
        drawn.append(text(across + 14, down + 24, words, "label", "start"))
    names = max(map(width_of, curves))
    width = max(right + names + FONT, width_of(title) + 2 * FONT)
    drawn.append(text(_LEFT + _CURVES_WIDTH / 2, FONT * 1.5, title, "title"))
    return document(width, bottom + _BELOW, drawn, title, _CURVES_STYLE)


def _rounded(size: float) -> int:
    """A size to four binary digits: where curves cross is no better known."""
    step = 2.0 ** (math.floor(math.log2(size)) - 3)
    return round(round(size / step) * step)


def _checked(curves: Mapping[str, Curve]) -> list[float]:
    """The sizes of all curves."""
    sizes = [[size for size, _ in curve] for curve in curves.values()]
    if not sizes or len(sizes[0]) < 2 or any(other != sizes[0] for other in sizes):
        message = "curves need the same sizes, two or more"
        expected = "one or more curves"
        raise ArgumentError(message, "curves", expected, [len(curve) for curve in curves.values()])
    for name, curve in curves.items():
        for size, time in curve:
            if not (size > 0 and 0 < time < math.inf):
                message = "cannot be drawn on logarithmic axes"
                expected = "sizes and times above 0"
                raise ArgumentError(message, "curves", expected, f"{time} at {size} for {name}")
    return sizes[0]


def _apart(names: list[tuple[str, float]]) -> dict[str, float]:
    """Heights of names, from the top down, so that none hides another."""
    placed: dict[str, float] = {}
    last = -math.inf
    for name, height in sorted(names, key=lambda item: item[1]):
        last = placed[name] = max(height, last + _APART)
    return placed
