"""A picture of the Pareto front of a collective: rounds against traffic and against reduced data.

matplotlib is imported when something is drawn: it comes with ``ringcoll[plot]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ringcoll.bench.plot import check_matplotlib
from ringcoll.cost.counts import Bound
from ringcoll.schedule.counting import Counts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_front"]

_FRONT, _DOMINATED = "#0072B2", "#D55E00"


def draw_front(
    costs: Mapping[str, Counts], dominated_by: Mapping[str, Sequence[str]], bound: Bound, title: str
) -> Figure:
    """Draw each algorithm as a point: filled if it is on the front, otherwise hollow.

    Parameters
    ----------
    costs
        Cost of each algorithm, by its name.
    dominated_by
        The names that dominate each algorithm; see `ringcoll.cost.pareto.dominators`.
    bound
        Lower bounds, drawn as dashed lines.
    title
        Title of the picture.

    Raises
    ------
    MissingExtraError
        matplotlib is not installed.
    """
    check_matplotlib()
    from matplotlib.figure import Figure

    amounts = (
        ["traffic", "reduced"] if any(cost.reduced for cost in costs.values()) else ["traffic"]
    )
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
            axes.plot(*point, "s", color=_DOMINATED, markersize=8, fillstyle="none")
        else:
            axes.plot(*point, "o", color=_FRONT, markersize=7)
    axes.set_xscale("symlog", base=2, linthresh=1)
    axes.set_yscale("symlog", base=2, linthresh=0.25)
    for point, names in labels.items():
        axes.annotate(  # slanted, so that neighbours hardly cover each other
            ", ".join(names),
            point,
            (6, -3),
            textcoords="offset points",
            fontsize=8,
            rotation=-20,
            rotation_mode="anchor",
        )
    axes.margins(0.4, 0.2)
