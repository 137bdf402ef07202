"""What the pictures of training show: the data of their artists."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ringcoll.tools.bench import (
    TimeSpan,
    memory_bars,
    pipeline_grid,
    timeline,
)
from ringcoll.training import SCHEDULES, Kind, ModelStates, bubble, grid


@pytest.fixture
def panels() -> Iterator[Any]:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    return figure.subplots(1, 2)  # type: ignore[no-any-return]


def boxes(axes) -> list[tuple[int, float, float]]:
    """Row, begin and length of each horizontal bar."""
    return [
        (round(bar.get_y() + bar.get_height() / 2), bar.get_x(), bar.get_width())
        for bar in axes.patches
    ]


def test_a_timeline_has_a_row_for_each_lane(panels):
    lanes = {
        "rank 0": [TimeSpan("forward", 0.0, 0.25), TimeSpan("backward", 0.25, 0.75)],
        "rank 0, network": [TimeSpan("all-reduce", 0.5, 1.0)],
        "rank 1": [TimeSpan("backward", 0.5, 0.625)],
    }
    timeline(panels[0], lanes)
    assert boxes(panels[0]) == [(0, 0, 250), (0, 250, 500), (1, 500, 500), (2, 500, 125)]
    colours = [bar.get_facecolor() for bar in panels[0].patches]
    assert colours[1] == colours[3]
    assert len(set(colours)) == 3
    assert [label.get_text() for label in panels[0].get_yticklabels()] == list(lanes)
    assert panels[0].get_legend_handles_labels()[1] == ["forward", "backward", "all-reduce"]


def test_an_empty_timeline(panels):
    timeline(panels[0], {"rank 0": []})
    assert not panels[0].patches


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_grid_has_a_box_for_each_action_and_leaves_the_bubble_white(panels, name: str):
    schedule = SCHEDULES[name](3, 6)
    pipeline_grid(panels[0], schedule)
    drawn, length = boxes(panels[0]), panels[0].get_xlim()[1]
    programs = [schedule.program(rank) for rank in range(3)]
    for rank, program in enumerate(programs):
        widths = [width for row, _, width in drawn if row == rank]
        assert widths == [1 if action.kind is Kind.FORWARD else 2 for action in program]
    assert 1 - sum(width for _, _, width in drawn) / (3 * length) == pytest.approx(bubble(schedule))
    microbatches = [str(action.microbatch) for program in programs for action in program]
    assert [text.get_text() for text in panels[0].texts] == microbatches


def test_a_box_stands_where_the_text_form_has_it(panels):
    schedule = SCHEDULES["1f1b"](2, 2)
    pipeline_grid(panels[0], schedule)
    assert grid(schedule).splitlines()[1] == "rank 1  .   1F0 1B0 -   1F1 1B1 -   .   ."
    assert [box for box in boxes(panels[0]) if box[0] == 1] == [
        (1, 1, 1), (1, 2, 2), (1, 4, 1), (1, 5, 2)
    ]  # fmt: skip


def test_bars_of_memory_are_stacked_and_the_formula_is_a_line(panels):
    mib = 1 << 20
    measured = {
        "plain": ModelStates(4 * mib, 2 * mib, 8 * mib),
        "stage 2": ModelStates(4 * mib, mib, 2.5 * mib),
    }
    memory_bars(panels[0], measured, {"stage 2": ModelStates(4 * mib, mib, 2 * mib)})
    bars = [(bar.get_y(), bar.get_height()) for bar in panels[0].patches]
    assert bars == [(0, 4), (0, 4), (4, 2), (4, 1), (6, 8), (5, 2.5)]
    (lines,) = panels[0].collections
    assert [segment[:, 1].tolist() for segment in lines.get_segments()] == [[7, 7]]
    assert [label.get_text() for label in panels[0].get_xticklabels()] == list(measured)


def test_a_legend_says_what_the_bars_are(panels):
    memory_bars(panels[0], {"plain": ModelStates(1 << 20, 1 << 20, 0)}, {})
    legend = panels[0].get_legend()
    assert legend is not None
    words = {text.get_text() for text in legend.get_texts()}
    assert words == {"parameters", "gradients", "optimizer", "formula"}
