"""Curves of time and bandwidth over size, the Pareto front of a collective, pictures of training.

matplotlib is imported when something is drawn: it comes with ``ringcoll[plot]``. The curves differ
in marker and line style as well as in colour; colours are those of Okabe and Ito, which the
colour-blind can tell apart. The pictures of training systems (spans of time, schedules of a
pipeline, memory) are drawn into axes of the caller, who adds titles and shows the figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import cycle, product
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

from ringcoll.errors import MissingExtraError
from ringcoll.runtime.machine import replace_file
from ringcoll.schedules import Counts
from ringcoll.schedules.cost import Bound
from ringcoll.tools.bench.measure import Result
from ringcoll.tools.bench.reports import label
from ringcoll.tools.bench.units import as_size
from ringcoll.training import Kind, ModelStates, PipelineSchedule, timed_actions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Style = dict[str, Any]

_LOOKS: tuple[tuple[str, str, object], ...] = (
    ("#0072B2", "o", "-"),
    ("#D55E00", "s", "--"),
    ("#009E73", "^", "-."),
    ("#CC79A7", "D", ":"),
    ("#E69F00", "v", (0, (5, 1, 1, 1))),
    ("#56B4E9", "P", (0, (3, 1, 1, 1, 1, 1))),
)
_NATIVE_LOOK: tuple[str, str, object] = ("#000000", "x", (0, (1, 1)))
_KINDS = {
    Kind.FORWARD: ("#56B4E9", "forward"),
    Kind.BACKWARD: ("#E69F00", "backward"),
}  # colour, and name in the legend


def check_matplotlib() -> None:
    """Raise `MissingExtraError` if matplotlib is missing, before an hour is spent on measuring."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            "pictures need matplotlib, which comes with ringcoll[plot]: "
            "pip install 'ringcoll[plot]'"
        ) from error


def suffixes() -> tuple[str, ...]:
    """Endings of the files that a picture can be written to."""
    return tuple(f".{name}" for name in _figure(1, 1).canvas.get_supported_filetypes())


def _figure(width: float, height: float) -> Figure:
    check_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def styles(names: Sequence[str]) -> dict[str, Style]:
    """A look for each contender: colour, marker and line; native is always black."""
    others = [name for name in dict.fromkeys(names) if name != "native"]
    looks = dict(zip(others, cycle(_LOOKS), strict=False)) | {"native": _NATIVE_LOOK}
    return {
        name: {"color": colour, "marker": marker, "linestyle": dashes}
        for name, (colour, marker, dashes) in looks.items()
    }


def draw(curves: Mapping[str, Sequence[Result]], title: str, whose: str = "slowest rank") -> Figure:
    """Draw time and bus bandwidth over the size of the data, a curve for each name in the legend.

    Around each median the quartiles are shaded. ``whose`` says whose time is shown.
    """
    figure = _figure(11, 4.8)
    time_axes, bandwidth_axes = figure.subplots(1, 2)
    looks = styles(list(curves))
    sizes: set[int] = set()
    for name, results in curves.items():
        points = [
            (result, result.summary)
            for result in sorted(results, key=lambda result: result.nbytes)
            if result.timed is not None
        ]
        xs = [result.nbytes for result, _ in points]
        sizes.update(xs)
        times = [[1e6 * s.p25_s, 1e6 * s.p50_s, 1e6 * s.p75_s] for _, s in points]
        widths = [[r.busbw(s.p75_s), r.busbw(s.p50_s), r.busbw(s.p25_s)] for r, s in points]
        _curve(time_axes, xs, times, label(name), looks[name])
        _curve(bandwidth_axes, xs, widths, label(name), looks[name])
    time_axes.set(ylabel=f"time, {whose} (us)", title="time: lower is better")
    bandwidth_axes.set(ylabel="bus bandwidth (GB/s)", title="bandwidth: higher is better")
    for axes in (time_axes, bandwidth_axes):
        _size_axis(axes, sorted(sizes))
    # Beside the curves, as within the axes it would hide some.
    handles, names = time_axes.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 7))
    figure.suptitle(title)
    return figure


def _curve(axes: Axes, xs: list[int], ys: list[list[float]], name: str, look: Style) -> None:
    low, middle, high = zip(*ys, strict=True) if ys else ((), (), ())
    axes.plot(xs, middle, label=name, markersize=5, linewidth=1.5, **look)
    axes.fill_between(xs, low, high, color=look["color"], alpha=0.15, linewidth=0)


def _size_axis(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    every = -(-len(sizes) // 7) or 1  # as many labels as fit
    axes.set_xticks(sizes[::every], [as_size(nbytes) for nbytes in sizes[::every]])
    axes.minorticks_off()
    axes.set_xlabel("size of the data on each rank")
    axes.grid(visible=True, alpha=0.3)


def draw_front(
    costs: Mapping[str, Counts], dominated_by: Mapping[str, Sequence[str]], bound: Bound, title: str
) -> Figure:
    """Draw the costs of each algorithm as points: filled if it is on the front, otherwise hollow.

    ``dominated_by`` has the names that dominate each algorithm: see
    `ringcoll.schedules.cost.dominators`. The lower bounds are dashed lines.
    """
    amounts = ["traffic", *["reduced"] * any(cost.reduced for cost in costs.values())]
    figure = _figure(6.5 * len(amounts), 5.2)
    panels = figure.subplots(1, len(amounts), squeeze=False)[0]
    for axes, amount in zip(panels, amounts, strict=True):
        _points(axes, costs, dominated_by, amount)
        axes.axvline(bound.rounds, color="grey", linestyle="--", linewidth=1)
        axes.axhline(float(getattr(bound, amount)), color="grey", linestyle="--", linewidth=1)
        axes.set(xlabel="rounds", ylabel=f"{amount} / n")
        axes.grid(visible=True, alpha=0.3)
    figure.suptitle(f"{title}\nfilled: on the front; hollow: dominated; dashed: lower bounds")
    _spread_labels(figure)
    return figure


def _points(
    axes: Axes, costs: Mapping[str, Counts], dominated_by: Mapping[str, Sequence[str]], amount: str
) -> None:
    """Draw the points of one amount of data; algorithms at the same point share a label."""
    labels: dict[tuple[int, float], list[str]] = {}
    for name, cost in costs.items():
        point = cost.rounds, float(getattr(cost, amount))
        labels.setdefault(point, []).append(name)
        if dominated_by[name]:
            axes.plot(*point, "s", color=_LOOKS[1][0], markersize=8, fillstyle="none")
        else:
            axes.plot(*point, "o", color=_LOOKS[0][0], markersize=7)
    axes.set_xscale("symlog", base=2, linthresh=1)
    axes.set_yscale("symlog", base=2, linthresh=0.25)
    for point, names in labels.items():
        axes.annotate(
            fill(", ".join(names), 32), point, (8, 0), textcoords="offset points", fontsize=8,
            va="bottom", arrowprops={"arrowstyle": "-", "color": "grey", "linewidth": 0.6},
            bbox={"boxstyle": "square,pad=0.1", "color": "white", "alpha": 0.8},
        )  # fmt: skip
    axes.margins(0.3, 0.3)


def _spread_labels(figure: Figure) -> None:
    """Move each label to the nearest place where it covers no point and no other label."""
    from matplotlib.text import Annotation, Text
    from matplotlib.transforms import Bbox

    for axes in figure.axes:
        for text in axes.texts:
            text.set_in_layout(False)  # labels stay within the axes
    figure.draw_without_rendering()  # now the axes have their places
    pixels = figure.dpi / 72
    for axes in figure.axes:
        annotations = [text for text in axes.texts if isinstance(text, Annotation)]
        points = [axes.transData.transform(annotation.xy) for annotation in annotations]
        taken = [Bbox.from_extents(x - 6, y - 6, x + 6, y + 6) for x, y in points]
        for annotation, (x, y) in zip(annotations, points, strict=True):
            extent = Text.get_window_extent(annotation)  # without the line to the point
            wide, high = extent.width, extent.height
            dxs = (8, -8 - wide, *(k * 12 - wide / 2 for k in range(-12, 13)))
            dys = (-high / 2, *(k * 8 - high / 2 for k in range(-24, 25)))
            places = [  # the distance from the point; to the right is better
                (abs(dx + wide / 2) / 2 + 1.5 * abs(dy + high / 2) - (dx > 0) * 4, dx, dy)
                for dx, dy in product(dxs, dys)
            ]
            for _, dx, dy in sorted(places):
                box = Bbox.from_bounds(x + dx - 3, y + dy - 2, wide + 6, high + 4)
                inside = axes.bbox.contains(box.x0, box.y0) and axes.bbox.contains(box.x1, box.y1)
                if inside and not box.count_overlaps(taken):
                    break
            annotation.set_position((dx / pixels, dy / pixels))
            taken.append(box)


def save(figure: Figure, path: Path) -> None:
    """Write a picture; the file's ending says in which format."""
    picture = BytesIO()
    figure.savefig(picture, dpi=150, format=path.suffix[1:].lower())
    replace_file(path, picture.getvalue())


class TimeSpan(NamedTuple):
    """A piece of time, in seconds, and the kind of work, for colour and legend."""

    kind: str
    begin_s: float
    end_s: float


def timeline(axes: Axes, lanes: Mapping[str, Sequence[TimeSpan]]) -> None:
    """Draw spans of time in lanes, in milliseconds; each kind of work has a colour.

    ``lanes`` has the spans of each lane, from the top, by its name: for example "rank 0" and
    "rank 0, network". Spans of a lane that overlap cover each other.
    """
    kinds = dict.fromkeys(span.kind for spans in lanes.values() for span in spans)
    looks = styles(list(kinds))
    is_labelled: set[str] = set()
    for row, spans in enumerate(lanes.values()):
        for span in spans:
            axes.barh(row, 1e3 * (span.end_s - span.begin_s), left=1e3 * span.begin_s, height=0.7,
                      color=looks[span.kind]["color"], edgecolor="white", linewidth=0.5,
                      label="_" if span.kind in is_labelled else span.kind)  # fmt: skip
            is_labelled.add(span.kind)
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlabel("time (ms)")
    axes.grid(visible=True, axis="x", alpha=0.3)
    if kinds:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def pipeline_grid(axes: Axes, schedule: PipelineSchedule) -> None:
    """Draw when each rank does what, as `ringcoll.training.grid` does.

    A box is an action, with the number of its micro-batch; its colour is the kind of the action.
    White is idle.
    """
    drawn: set[Kind] = set()
    last = 0
    for rank, action, begin, end in timed_actions(schedule):
        colour, name = _KINDS[action.kind]
        axes.barh(rank, end - begin, left=begin, height=0.9, color=colour, edgecolor="black",
                  linewidth=0.5, label="_" if action.kind in drawn else name)  # fmt: skip
        axes.text((begin + end) / 2, rank, str(action.microbatch), ha="center", va="center",
                  fontsize=7)  # fmt: skip
        drawn.add(action.kind)
        last = max(last, end)
    ranks = range(schedule.world_size)
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.set_xlim(0, last)
    axes.set_ylim(schedule.world_size - 0.5, -0.5)


def memory_bars(
    axes: Axes, measured: Mapping[str, ModelStates], predicted: Mapping[str, ModelStates]
) -> None:
    """Draw bytes of a rank, in MiB, as stacked bars by name; a line is the formula's total."""
    kinds = ("parameters", "gradients", "optimizer")
    looks, names = styles(kinds), list(measured)
    bottoms = [0.0] * len(names)
    for kind in kinds:
        heights = [getattr(measured[name], kind) / (1 << 20) for name in names]
        axes.bar(names, heights, bottom=bottoms, width=0.6, label=kind, color=looks[kind]["color"])
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    marked = [(place, predicted[name]) for place, name in enumerate(names) if name in predicted]
    axes.hlines([states.total / (1 << 20) for _, states in marked],
                [place - 0.4 for place, _ in marked], [place + 0.4 for place, _ in marked],
                colors="black", linestyles="--", label="formula")  # fmt: skip
    axes.set_ylabel("model states per rank (MiB)")
    axes.grid(visible=True, axis="y", alpha=0.3)
    axes.legend()
