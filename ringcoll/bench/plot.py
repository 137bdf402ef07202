"""Curves of time and bandwidth over size, and the Pareto front of a collective.

matplotlib is imported when something is drawn: it comes with ``ringcoll[plot]``. The
curves differ in marker and line style as well as in colour; colours are those of Okabe
and Ito, which the colour-blind can tell apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import cycle
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from ringcoll.bench.measure import Result
from ringcoll.bench.units import as_size
from ringcoll.bench.verdicts import label
from ringcoll.cost import Bound
from ringcoll.errors import MissingExtraError
from ringcoll.machine import replace_file
from ringcoll.schedule import Counts

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
    check_matplotlib()
    from matplotlib.figure import Figure

    return tuple(f".{name}" for name in Figure().canvas.get_supported_filetypes())


def styles(names: Sequence[str]) -> dict[str, Style]:
    """A look for each contender: colour, marker and line; native is always black."""
    others = [name for name in dict.fromkeys(names) if name != "native"]
    looks = dict(zip(others, cycle(_LOOKS), strict=False)) | {"native": _NATIVE_LOOK}
    return {
        name: {"color": colour, "marker": marker, "linestyle": dashes}
        for name, (colour, marker, dashes) in looks.items()
    }


def draw(curves: Mapping[str, Sequence[Result]], title: str) -> Figure:
    """Draw time and bus bandwidth over the size of the data, a curve for each name in the legend.

    Around each median the quartiles are shaded.
    """
    check_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    time_axes, bandwidth_axes = figure.subplots(1, 2)
    looks = styles(list(curves))
    sizes: set[int] = set()
    for name, results in curves.items():
        points = [
            (result, result.timed.summary)
            for result in sorted(results, key=lambda result: result.nbytes)
            if result.timed is not None
        ]
        xs = [result.nbytes for result, _ in points]
        sizes.update(xs)
        times = [[1e6 * s.p25_s, 1e6 * s.p50_s, 1e6 * s.p75_s] for _, s in points]
        widths = [[r.busbw(s.p75_s), r.busbw(s.p50_s), r.busbw(s.p25_s)] for r, s in points]
        _curve(time_axes, xs, times, label(name), looks[name])
        _curve(bandwidth_axes, xs, widths, label(name), looks[name])
    time_axes.set(ylabel="time, slowest rank (us)", title="time: lower is better")
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
    `ringcoll.cost.dominators`. The lower bounds are dashed lines.
    """
    check_matplotlib()
    from matplotlib.figure import Figure

    amounts = ["traffic", *["reduced"] * any(cost.reduced for cost in costs.values())]
    figure = Figure(figsize=(6.5 * len(amounts), 5.2), layout="constrained")
    for axes, amount in zip(
        figure.subplots(1, len(amounts), squeeze=False)[0], amounts, strict=True
    ):
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
            fill(", ".join(names), 32), point, (8, 0), textcoords="offset points", fontsize=8, va="bottom",
            arrowprops={"arrowstyle": "-", "color": "grey", "linewidth": 0.6},
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
        points = [axes.transData.transform(one.xy) for one in annotations]
        taken = [Bbox.from_extents(x - 6, y - 6, x + 6, y + 6) for x, y in points]
        for annotation, (x, y) in zip(annotations, points, strict=True):
            extent = Text.get_window_extent(annotation)  # without the line to the point
            wide, high = extent.width, extent.height
            places = sorted(
                (
                    (dx, dy)
                    for dx in (8, -8 - wide, *(k * 12 - wide / 2 for k in range(-12, 13)))
                    for dy in (-high / 2, *(k * 8 - high / 2 for k in range(-24, 25)))
                ),
                key=lambda place: (
                    abs(place[0] + wide / 2) / 2
                    + 1.5 * abs(place[1] + high / 2)
                    - (place[0] > 0) * 4
                ),
            )
            for dx, dy in places:
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
