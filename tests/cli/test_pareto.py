"""The Pareto front as a table, as data and as a picture."""

import json
import re
import sys
from fractions import Fraction

import numpy as np
import pytest

from ringcoll.schedules import CONTRACTS, Counts
from ringcoll.schedules.algorithms import algorithms, find
from ringcoll.schedules.cost import dominators, lower_bound
from ringcoll.tools.bench import draw_front
from ringcoll.tools.cli import pareto

ONE_PORT = """\
algorithm           Pareto front                                   rounds  traffic  reduced  at once
lower bound                                                             3    1.750    0.875        1
recursive_doubling  on the front                                        3    3.000    3.000        1
rabenseifner        on the front                                        6    1.750    0.875        1
binomial_tree       dominated by recursive_doubling, rabenseifner       6    6.000    3.000        1
hierarchical        dominated by rabenseifner                           7    1.750    1.000        1
ring                dominated by rabenseifner                          14    1.750    0.875        1

not shown: binary_tree sends 2 messages at once
not shown: double_tree sends 2 messages at once
not shown: bidirectional_ring sends 2 messages at once
not shown: direct sends 7 messages at once
not shown: two_shot sends 7 messages at once
"""


LISTED = (
    "binary_tree",
    "double_tree",
    "ring",
    "bidirectional_ring",
    "binomial_tree",
    "direct",
    "two_shot",
    "recursive_doubling",
    "rabenseifner",
    "hierarchical",
)


def test_the_table(run, monkeypatch):
    """The page of these algorithms; others may join them."""
    monkeypatch.setattr(
        pareto, "algorithms", lambda collective: [find(collective, name) for name in LISTED]
    )
    result = run("plot", "pareto", "all_reduce", "-k", "8", "--ports", "1")
    assert (result.exit_code, result.stdout) == (0, ONE_PORT)
    table = run("plot", "pareto", "all-reduce", "-k", "8").stdout
    assert "not shown" not in table
    assert [line.split()[0] for line in table.splitlines()[2:4]] == ["direct", "two_shot"]


@pytest.mark.parametrize("world_size", [1, 3, 8])
@pytest.mark.parametrize("collective", CONTRACTS)
def test_json_has_every_algorithm(run, collective, world_size):
    data = json.loads(run("plot", "pareto", collective, "-k", str(world_size), "--json").stdout)
    assert (data["collective"], data["world_size"]) == (collective, world_size)
    entries = [entry for entry in algorithms(collective) if not entry.restriction(world_size)]
    costs = {entry.name: entry.counts(world_size) for entry in entries}
    expected = dominators(costs)
    rows = {row["algorithm"]: row for row in data["algorithms"]}
    assert rows.keys() == costs.keys()
    assert (
        data["left_out"].keys() == {entry.name for entry in algorithms(collective)} - costs.keys()
    )
    assert any(row["on_front"] for row in rows.values())
    for name, row in rows.items():
        if world_size > 1:
            assert (row["rounds"], row["traffic"]) == (costs[name][0], float(costs[name][1]))
            assert row["dominated_by"] == list(expected[name])
        assert row["on_front"] == (not row["dominated_by"])
        assert row["rounds"] >= data["at_least"]["rounds"]
        assert row["traffic"] >= data["at_least"]["traffic"]
        assert row["reduced"] >= data["at_least"]["reduced"]
        assert row["ports"] <= data["at_least"]["ports"]


def test_hosts_change_what_the_hierarchy_costs(run):
    def hierarchy(hosts):
        words = ("plot", "pareto", "all_reduce", "-k", "12", "--hosts", str(hosts), "--json")
        rows = json.loads(run(*words).stdout)["algorithms"]
        return next(row for row in rows if row["algorithm"] == "hierarchical")["rounds"]

    assert hierarchy(2) != hierarchy(4)


def test_an_algorithm_that_cannot_run_is_named(run, only_powers):
    words = ("plot", "pareto", "all_gather", "-k", "6")
    reason = "only_powers all_gather cannot run on 6 ranks: it halves the world"
    assert f"\nnot shown: {reason}\n" in run(*words).stdout
    data = json.loads(run(*words, "--json").stdout)
    assert data["left_out"].keys() == {"only_powers", "bine"}
    assert data["left_out"]["only_powers"] == reason


def test_a_wrong_algorithm_is_an_error(run, short_ring):
    result = run("plot", "pareto", "all_reduce", "-k", "3")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: ")


def test_the_picture_is_written(run, tmp_path):
    pytest.importorskip("matplotlib")
    result = run("plot", "pareto", "all_reduce", "-k", "6", "-o", str(tmp_path / "front.svg"))
    assert result.exit_code == 0
    assert result.stdout.startswith("algorithm")
    text = (tmp_path / "front.svg").read_text()
    names = [entry.name for entry in algorithms("all_reduce") if not entry.restriction(6)]
    labels = {*re.findall(r"\w+", " ".join(re.findall("<!-- (.+?) -->", text, re.DOTALL)))}
    assert labels >= set(names)
    assert "<!-- all_reduce on 6 ranks" in text


def test_what_the_picture_shows():
    pytest.importorskip("matplotlib")
    names = ("ring", "recursive_doubling", "binomial_tree")
    costs = {name: find("all_reduce", name).counts(8) for name in names}
    costs["twin"] = costs["ring"]
    bound = lower_bound("all_reduce", 8)
    figure = draw_front(costs, dominators(costs), bound, "title")
    for axes, amount in zip(figure.axes, ("traffic", "reduced"), strict=True):
        points = [line for line in axes.lines if line.get_linestyle() != "--"]
        assert [tuple(*np.asarray(line.get_xydata()).tolist()) for line in points] == [
            (cost.rounds, float(getattr(cost, amount))) for cost in costs.values()
        ]
        assert [line.get_fillstyle() for line in points] == ["full", "full", "none", "full"]
        labels = [text.get_text() for text in axes.texts]
        assert labels == ["ring, twin", "recursive_doubling", "binomial_tree"]
    nothing = {"alone": Counts(1, Fraction(1), Fraction(0))}
    (axes,) = draw_front(nothing, dominators(nothing), bound, "nothing is reduced").axes
    assert axes.get_ylabel() == "traffic / n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "collective, world_size",
    [
        *(("all_reduce", world_size) for world_size in (1, 2, 3, 8, 9, 24, 64)),
        *(("broadcast", 16), ("reduce_scatter", 16), ("all_gather", 24)),
        *(("gather", 7), ("all_to_all", 8), ("barrier", 4)),
    ],
)
def test_no_label_covers_another_label_or_a_point(collective, world_size):
    """As matplotlib draws them."""
    pytest.importorskip("matplotlib")
    from matplotlib.text import Annotation, Text

    costs = {entry.name: entry.counts(world_size) for entry in algorithms(collective, world_size)}
    bound = lower_bound(collective, world_size)
    figure = draw_front(costs, dominators(costs), bound, "title")
    figure.draw_without_rendering()
    for axes in figure.axes:
        texts = [text for text in axes.texts if isinstance(text, Annotation)]
        boxes = [Text.get_window_extent(text) for text in texts]
        points = [axes.transData.transform(text.xy) for text in texts]
        assert len(boxes) == len(
            {(cost.rounds, getattr(cost, axes.get_ylabel().split()[0])) for cost in costs.values()}
        )
        for number, box in enumerate(boxes):
            assert box.count_overlaps(boxes) == 1, axes.texts[number].get_text()  # itself
            assert not any(box.contains(*point) for point in points)
            assert axes.bbox.x0 <= box.x0 < box.x1 <= axes.bbox.x1
            assert axes.bbox.y0 <= box.y0 < box.y1 <= axes.bbox.y1


def test_without_matplotlib_the_extra_is_named(run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("plot", "pareto", "all_reduce", "-o", str(tmp_path / "front.png"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "ringcoll[plot]" in result.stderr
    assert run("plot", "pareto", "all_reduce").exit_code == 0


@pytest.mark.parametrize(
    "words, message",
    [
        (["all_educe"], "unknown collective 'all_educe'; known: all_reduce, "),
        (["all_reduce", "-k", "2,4"], "pareto is drawn for one number of ranks"),
        (["--algorithms", "ring"], "--algorithms is for crossover, and says nothing about pareto"),
        (["ring"], "'ring' is an algorithm; expected a collective"),
        (["all_reduce", "-k", "0"], "Invalid value for '-k' / '--ranks'"),
        (["all_reduce", "--ports", "0"], "Invalid value for '--ports'"),
        (["broadcast", "--hosts", "2"], "broadcast is the same on any number of hosts"),
        (
            ["all_reduce", "-o", "/nowhere/front.png"],
            "Invalid value for '-o' / '--output': there is no",
        ),
        (
            ["all_reduce", "-o", "front.wav"],
            "Invalid value for '-o' / '--output': 'front.wav' has the",
        ),
    ],
)
def test_errors_are_one_clear_line(run, words, message):
    if "-o" in words:
        pytest.importorskip("matplotlib")
    result = run("plot", "pareto", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].startswith(f"Error: {message}")
