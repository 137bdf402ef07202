"""The list of algorithms."""

import json

import pytest

from ringcoll.schedules import CONTRACTS
from ringcoll.schedules.algorithms import Algorithm, algorithms


def test_every_algorithm_is_listed_with_its_summary(run):
    result = run("list", "--all")
    assert result.exit_code == 0
    rows = result.stdout.splitlines()[1:]
    assert len(rows) == len(list(algorithms()))
    for entry, row in zip(in_order(), rows, strict=True):
        assert f" {entry.name} " in row
        assert f" {entry.summary} " in row
        assert row.endswith(f"  {entry.source}")


ALL_TO_ALL = """\
all_to_all
  bruck     A block that has to go d ranks far goes by the bits of d.
  pairwise  Each block goes straight to its destination.

2 of 5 algorithms; all of them, with costs: ringcoll list --all
Steps and costs of one: ringcoll show ring all_reduce
"""


def test_the_usual_ones_of_one_collective(run):
    assert run("list", "all_to_all").stdout == ALL_TO_ALL


@pytest.mark.parametrize("columns", ["60", "200"])
def test_the_usual_ones_fit_a_terminal(run, monkeypatch, columns):
    """They run on any number of ranks, and are no second choices."""
    monkeypatch.setenv("COLUMNS", columns)
    page = run("list").stdout
    assert max(map(len, page.splitlines())) <= 80
    listed: dict[str, list[str]] = {}
    for line in page.split("\n\n", len(CONTRACTS))[:-1]:
        collective, *rows = line.splitlines()
        listed[collective] = [row.split()[0] for row in rows if row[2] != " "]
    usual = {
        (entry.collective, entry.name)
        for entry in in_order()
        if not entry.second_choice
        and all(entry.restriction(world_size) is None for world_size in range(1, 65))
    }
    assert {(name, one) for name, those in listed.items() for one in those} == usual
    assert [*listed] == [*CONTRACTS]
    assert all(1 <= len(those) <= 10 for those in listed.values())
    assert {"ring", "binomial_tree", "hierarchical"} <= {*listed["all_reduce"]}
    assert f"{len(usual)} of {len(in_order())} algorithms" in page


def test_an_algorithm_that_is_registered_joins_the_usual_ones(run, short_ring, only_powers):
    """One that is restricted does not."""
    assert "\n  short_ring\n" in run("list", "all_reduce").stdout
    assert "only_powers" not in run("list", "all_gather").stdout
    assert "only_powers" in run("list", "all_gather", "--all").stdout


def test_an_algorithm_of_a_file_is_in_the_wide_table(run, star):
    page = run("list", "star.py:star").stdout
    assert page.splitlines()[0].split()[:2] == ["collective", "algorithm"]
    assert page.splitlines()[1].split()[:2] == ["all_reduce", "star"]


def in_order() -> list[Algorithm]:
    return [entry for collective in CONTRACTS for entry in algorithms(collective)]


def test_every_algorithm_has_a_source():
    assert not [entry for entry in algorithms() if not entry.source]


def test_costs_bounds_and_restrictions_are_listed(run):
    data = json.loads(run("list", "--json").stdout)
    rows = run("list", "--all").stdout.splitlines()[1:]
    for entry, item, row in zip(in_order(), data, rows, strict=True):
        at, k = item["at"], item["at"]["world_size"]
        assert (at["rounds"], at["traffic"]) == pytest.approx(
            [float(number) for number in entry.counts(k)[:2]]
        )
        cells = row.partition(entry.name)[2].removeprefix(" (tree)").split(entry.summary)[0]
        wanted = [str(k), str(at["rounds"]), f"{at['rounds'] / at['rounds_at_least']:.2f}x"]
        wanted += [f"{at['traffic']:.3f}", f"{at['traffic'] / at['traffic_at_least']:.2f}x"]
        assert cells.split() == [*entry.needs.split(), *wanted]
        assert item["restriction"] == entry.needs
    needs = {item["algorithm"]: item["restriction"] for item in data if item["restriction"]}
    assert needs == {
        **dict.fromkeys(
            ("swing", "swing_latency", "bine", "bine_tree", "stragglar"), "it needs a power of 2"
        ),
        **dict.fromkeys(("trivance", "trivance_latency"), "it needs a power of 3"),
        "neighbor_exchange": "it needs an even number of ranks",
    }
    assert {item["at"]["world_size"] for item in data} == {8, 9}


def test_a_wrong_algorithm_is_listed_as_wrong(run, short_ring):
    (row,) = [
        row for row in run("list", "all_reduce", "--all").stdout.splitlines() if "short_ring" in row
    ]
    assert row.split()[1] == "wrong"


def test_short_names_are_shown(run):
    assert "binomial_tree (tree)" in run("list", "broadcast").stdout


def test_one_collective(run):
    rows = run("list", "all-to-all", "--all").stdout.splitlines()
    assert [row.split()[0] for row in rows] == [
        "collective",
        "all_to_all",
        "retri",
        "torus",
        "bine",
        "pairwise",
    ]


def test_json_agrees_with_the_registry(run):
    data = json.loads(run("list", "--json").stdout)
    found = {(item["collective"], item["algorithm"]): item["summary"] for item in data}
    assert found == {(entry.collective, entry.name): entry.summary for entry in algorithms()}


def test_unknown_collective(run):
    result = run("list", "all_reduction")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: unknown collective 'all_reduction'; known: all_reduce,")
    assert result.stderr.count("\n") == 1
