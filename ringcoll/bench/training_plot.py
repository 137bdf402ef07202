"""Pictures of training: losses, spans of time, schedules of a pipeline, memory.

matplotlib is imported when something is drawn: it comes with ``ringcoll[plot]``. Each function but
`draw_losses` draws into axes of the caller, who adds titles and shows the figure; looks and
colours are those of `ringcoll.bench.plot`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ringcoll.bench.plot import check_matplotlib, save, styles
from ringcoll.errors import ArgumentError
from ringcoll.training import UNIT_COSTS, Action, Kind, ModelStates, PipelineSchedule, grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "LossCurve",
    "TimeSpan",
    "draw_losses",
    "loss_curves",
    "memory_bars",
    "pipeline_grid",
    "timeline",
]

LossCurve = Sequence[tuple[float, int, float]]
"""Points of a run: seconds since its begin, number of the step, loss."""

_MOST_MARKERS = 12  # of a curve; more of them hide the line
_KIND_COLOURS = {
    Kind.FORWARD: "#56B4E9",
    Kind.BACKWARD: "#E69F00",
    Kind.BACKWARD_INPUTS: "#D55E00",
    Kind.BACKWARD_WEIGHTS: "#009E73",
}
_KIND_NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUTS: "backward, inputs",
    Kind.BACKWARD_WEIGHTS: "backward, weights",
}


# --- losses ---------------------------------------------------------------------------


def loss_curves(panels: Sequence[Axes], curves: Mapping[str, LossCurve]) -> None:
    """Draw the loss of each run over steps, and over time.

    Parameters
    ----------
    panels
        Two axes: for the steps, and for the time. They share the scale of the loss.
    curves
        Points of each run, by its name in the legend.

    Raises
    ------
    ArgumentError
        There are not two axes.
    """
    if len(panels) != 2:
        raise ArgumentError(
            "one for steps, one for time", argument="panels", expected="2 axes", got=len(panels)
        )
    over_steps, over_time = panels
    looks = styles(list(curves))
    for name, points in curves.items():
        losses = [loss for _, _, loss in points]
        look = looks[name] | {
            "markersize": 4,
            "linewidth": 1.5,
            "markevery": max(1, len(points) // _MOST_MARKERS),
        }
        over_steps.plot([step for _, step, _ in points], losses, label=name, **look)
        over_time.plot([seconds for seconds, _, _ in points], losses, label=name, **look)
    over_time.sharey(over_steps)
    over_steps.set(xlabel="step", ylabel="loss", title="over steps")
    over_time.set(xlabel="time (s)", title="over time")
    for axes in panels:
        axes.grid(visible=True, alpha=0.3)
    over_steps.legend()


def draw_losses(curves: Mapping[str, LossCurve], path: Path, title: str = "") -> None:
    """Write a picture of the losses over steps and over time.

    Parameters
    ----------
    curves
        As for `loss_curves`.
    path
        File; its ending says in which format.
    title
        Title of the picture.

    Raises
    ------
    MissingExtraError
        matplotlib is not installed.
    """
    check_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    loss_curves(figure.subplots(1, 2), curves)
    figure.suptitle(title)
    save(figure, path)


# --- time -----------------------------------------------------------------------------


class TimeSpan(NamedTuple):
    """A piece of time, and what it was spent on.

    Parameters
    ----------
    kind
        Name of the work, for colour and legend.
    begin_s, end_s
        Begin and end, in seconds.
    """

    kind: str
    begin_s: float
    end_s: float


def timeline(axes: Axes, lanes: Mapping[str, Sequence[TimeSpan]]) -> None:
    """Draw spans of time in lanes, in milliseconds; each kind of work has a colour.

    Parameters
    ----------
    axes
        Where to draw.
    lanes
        Spans of each lane, from the top, by the name of the lane: for example "rank 0" and
        "rank 0, network". Spans of a lane that overlap cover each other.
    """
    kinds = dict.fromkeys(span.kind for spans in lanes.values() for span in spans)
    looks = styles(list(kinds))
    is_labelled: set[str] = set()
    for row, spans in enumerate(lanes.values()):
        for span in spans:
            axes.barh(
                row,
                1e3 * (span.end_s - span.begin_s),
                left=1e3 * span.begin_s,
                height=0.7,
                color=looks[span.kind]["color"],
                edgecolor="white",
                linewidth=0.5,
                label="_" if span.kind in is_labelled else span.kind,
            )
            is_labelled.add(span.kind)
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlabel("time (ms)")
    axes.grid(visible=True, axis="x", alpha=0.3)
    if kinds:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


# --- pipelines ------------------------------------------------------------------------


def pipeline_grid(
    axes: Axes, schedule: PipelineSchedule, costs: Mapping[Kind, int] = UNIT_COSTS
) -> None:
    """Draw when each rank does what, as `ringcoll.training.pipeline_check.grid` does.

    A box is an action, with the number of its micro-batch; its colour is the kind of the action. The
    later stages of a rank have paler boxes. White is idle.

    Parameters
    ----------
    axes
        Where to draw.
    schedule, costs
        As for `ringcoll.training.pipeline_check.grid`.

    Raises
    ------
    VerificationError
        The schedule cannot be run.
    """
    kinds: set[Kind] = set()
    length = 0
    for rank, line in enumerate(grid(schedule, costs).splitlines()):
        cells = line.split()[2:]  # after "rank 0"
        length = len(cells)
        for begin, cell in enumerate(cells):
            if cell in (".", "-"):
                continue
            action = Action.parse(cell)
            cost = costs[action.kind]
            depth = action.stage // schedule.world_size
            axes.barh(
                rank,
                cost,
                left=begin,
                height=0.9,
                color=_KIND_COLOURS[action.kind],
                alpha=0.5**depth,
                edgecolor="black",
                linewidth=0.5,
                label="_" if action.kind in kinds else _KIND_NAMES[action.kind],
            )
            axes.text(
                begin + cost / 2, rank, str(action.microbatch), ha="center", va="center", fontsize=7
            )
            kinds.add(action.kind)
    axes.set_yticks(
        range(schedule.world_size), [f"rank {rank}" for rank in range(schedule.world_size)]
    )
    axes.set_xlim(0, length)
    axes.set_ylim(schedule.world_size - 0.5, -0.5)


# --- memory ---------------------------------------------------------------------------


def memory_bars(
    axes: Axes, measured: Mapping[str, ModelStates], predicted: Mapping[str, ModelStates]
) -> None:
    """Draw the bytes that a rank holds, in MiB, as stacked bars; a line is the formula's total.

    Parameters
    ----------
    axes
        Where to draw.
    measured
        Bytes of each bar, by its name.
    predicted
        Bytes by the formula, for bars that have a formula.
    """
    kinds = ("parameters", "gradients", "optimizer")
    looks, names = styles(kinds), list(measured)
    bottoms = [0.0] * len(names)
    for kind in kinds:
        heights = [getattr(measured[name], kind) / (1 << 20) for name in names]
        axes.bar(names, heights, bottom=bottoms, width=0.6, label=kind, color=looks[kind]["color"])
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    marked = [(place, predicted[name]) for place, name in enumerate(names) if name in predicted]
    axes.hlines(
        [states.total / (1 << 20) for _, states in marked],
        [place - 0.4 for place, _ in marked],
        [place + 0.4 for place, _ in marked],
        colors="black",
        linestyles="--",
        label="formula",
    )
    axes.set_ylabel("model states per rank (MiB)")
    axes.grid(visible=True, axis="y", alpha=0.3)
    axes.legend()
