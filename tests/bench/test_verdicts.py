"""Sentences about made-up numbers, and the picture of them."""

import sys

import pytest

from ringcoll.errors import MissingExtraError
from ringcoll.tools.bench import (
    EVEN,
    Result,
    Timing,
    Workload,
    by_size,
    duel,
    faster,
    plot,
    sentences,
    speed_against,
)


def result(name, nbytes, *microseconds, wrong=0, refused=None, scouted=False):
    timing = Timing(tuple(1e-6 * time for time in microseconds), 1, wrong)
    return Result(
        Workload("all_reduce", nbytes), name, 4, nbytes // 4, nbytes,
        None, None if refused else timing, refused, scouted,
    )  # fmt: skip


def crossover():
    """Tree wins up to 64 bytes, ring from 4096 on; at 1024 they overlap."""
    times = {4: (30, 10, 20), 64: (40, 20, 30), 1024: (50, 51, 60), 4096: (60, 90, 50)}
    return [
        result(name, nbytes, time - 1, time, time + 1, time + 2)
        for nbytes, row in times.items()
        for name, time in zip(("ring", "tree", "native"), row, strict=True)
    ]


def test_crossovers_are_told():
    table = by_size(crossover())
    assert duel(table, "ring", "tree") == (
        "Ring against tree: tree is faster up to 64 B, about even at 1 KiB, "
        "ring is faster from 4 KiB on."
    )
    assert duel(table, "ring", "nobody") == ("Ring and nobody were not measured at a common size.")


def test_overlap_is_no_difference():
    one, other = result("a", 4, 10, 20, 30, 40), result("b", 4, 25, 26, 27, 28)
    assert faster(one, other) == EVEN
    assert faster(one, result("c", 4, 50, 51)) == "a"
    assert faster(result("c", 4, 50, 51), one) == "a"
    assert speed_against(result("a", 4, 10), result("b", 4, 25)) == pytest.approx(2.5)


def test_sentences_on_all_of_it():
    text = list(sentences(crossover()))
    assert text[0] == "Lowest median: tree up to 64 B, ring at 1 KiB, native from 4 KiB on."
    assert text[1].startswith("Ring against tree: ")
    assert text[2] == (
        "The fastest of ringcoll runs at 0.83 times (at 4 KiB) to 1.95 times (at 4 B) "
        "the speed of native."
    )
    assert text[-1] == (
        "All results were right to the last bit, on all 4 ranks, in place and out of place."
    )


def test_wrong_results_are_named():
    results = [result("ring", 4, 10, wrong=7), result("native", 4, 10)]
    assert list(sentences(results))[-1] == "WRONG results: ring at 4 B (7 elements)."
    unchecked = [result("ring", 4, 10, wrong=None)]
    assert list(sentences(unchecked))[-1] == "No result was checked."


def test_what_could_not_run_is_said():
    results = [result("ring", 4, 10), result("native", 4, refused="no such dtype")]
    text = list(sentences(results))
    assert "Native is not available: no such dtype" in text
    assert text[-1].startswith("All that ran was right")
    assert list(by_size(results)[4]) == ["ring"]


def test_one_size_and_wins_everywhere():
    few = [result("ring", 4, 10, 11), result("tree", 4, 20, 21)]
    assert duel(by_size(few), "ring", "tree") == "Ring against tree: ring is faster at 4 B."
    more = [*few, result("ring", 8, 10, 11), result("tree", 8, 20, 21)]
    text = duel(by_size(more), "ring", "tree", names=("a ring", "a tree"))
    assert text == "A ring against a tree: a ring is faster at every size."


def test_the_picture_has_units_legend_and_different_lines(tmp_path):
    curves: dict[str, list[Result]] = {}
    for one in crossover():
        curves.setdefault(one.contender, []).append(one)
    figure = plot.draw(curves, "a title")
    time_axes, bandwidth_axes = figure.axes
    assert time_axes.get_ylabel() == "time, slowest rank (us)"
    assert bandwidth_axes.get_ylabel() == "bus bandwidth (GB/s)"
    assert {time_axes.get_xscale(), time_axes.get_yscale()} == {"log"}
    (box,) = figure.legends  # beside the axes: within them it would hide a curve
    assert time_axes.get_legend() is None
    legend = [text.get_text() for text in box.get_texts()]
    assert legend == ["ring", "tree", "native"]
    markers, dashes = zip(
        *((look["marker"], look["linestyle"]) for look in plot.styles(legend).values()), strict=True
    )
    assert len(set(markers)) == len(set(dashes)) == 3  # readable without colour
    assert [line.get_marker() for line in time_axes.lines] == list(markers)
    assert time_axes.lines[0].get_ydata() == pytest.approx([30.5, 40.5, 50.5, 60.5])
    path = tmp_path / "picture.png"
    plot.save(figure, path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"ringcoll\[plot\]"):
        plot.check_matplotlib()
