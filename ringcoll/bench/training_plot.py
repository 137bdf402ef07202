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

LossCurve = Sequence[tuple[float, int, float]]
"""Points of a run: seconds since its begin, number of the step, loss."""

_MOST_MARKERS = 12  # of a curve; more of them hide the line
_KINDS = {
    Kind.FORWARD: ("#56B4E9", "forward"),
    Kind.BACKWARD: ("#E69F00", "backward"),
    Kind.BACKWARD_INPUTS: ("#D55E00", "backward, inputs"),
    Kind.BACKWARD_WEIGHTS: ("#009E73", "backward, weights"),
}  # colour, and name in the legend


# --- losses ---------------------------------------------------------------------------


def loss_curves(panels: Sequence[Axes], curves: Mapping[str, LossCurve]) -> None:
    """Draw the loss of each run over steps and over time, into two axes with one scale."""
    if len(panels) != 2:
        raise ArgumentError("one for steps, one for time", argument="panels", expected="2 axes",
                            got=len(panels))  # fmt: skip
    over_steps, over_time = panels
    looks = styles(list(curves))
    for name, points in curves.items():
        losses = [loss for _, _, loss in points]
        every = max(1, len(points) // _MOST_MARKERS)
        look = looks[name] | {"markersize": 4, "linewidth": 1.5, "markevery": every}
        over_steps.plot([step for _, step, _ in points], losses, label=name, **look)
        over_time.plot([seconds for seconds, _, _ in points], losses, label=name, **look)
    over_time.sharey(over_steps)
    over_steps.set(xlabel="step", ylabel="loss", title="over steps")
    over_time.set(xlabel="time (s)", title="over time")
    for axes in panels:
        axes.grid(visible=True, alpha=0.3)
    over_steps.legend()


def draw_losses(curves: Mapping[str, LossCurve], path: Path, title: str = "") -> None:
    """Write a picture of the losses, in the format of the file's ending."""
    check_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    loss_curves(figure.subplots(1, 2), curves)
    figure.suptitle(title)
    save(figure, path)


# --- time -----------------------------------------------------------------------------


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


# --- pipelines ------------------------------------------------------------------------


def pipeline_grid(
    axes: Axes, schedule: PipelineSchedule, costs: Mapping[Kind, int] = UNIT_COSTS
) -> None:
    """Draw when each rank does what, as `ringcoll.training.grid` does.

    A box is an action, with the number of its micro-batch; its colour is the kind of the action.
    The later stages of a rank have paler boxes. White is idle.
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
            colour, name = _KINDS[action.kind]
            axes.barh(rank, cost, left=begin, height=0.9, color=colour, alpha=0.5**depth,
                      edgecolor="black", linewidth=0.5,
                      label="_" if action.kind in kinds else name)  # fmt: skip
            axes.text(begin + cost / 2, rank, str(action.microbatch), ha="center", va="center",
                      fontsize=7)  # fmt: skip
            kinds.add(action.kind)
    ranks = range(schedule.world_size)
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.set_xlim(0, length)
    axes.set_ylim(schedule.world_size - 0.5, -0.5)


# --- memory ---------------------------------------------------------------------------


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
