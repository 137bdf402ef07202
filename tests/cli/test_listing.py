"""The list of algorithms."""

import json

from ringcoll.algorithms import algorithms


def test_every_algorithm_is_listed_with_its_summary(run):
    result = run("list")
    assert result.exit_code == 0
    rows = result.stdout.splitlines()[1:]
    assert len(rows) == len(list(algorithms()))
    for entry in algorithms():
        assert any(f" {entry.name} " in row and row.endswith(entry.summary) for row in rows)


def test_short_names_are_shown(run):
    assert "binomial_tree (tree)" in run("list", "broadcast").stdout


def test_one_collective(run):
    rows = run("list", "all-to-all").stdout.splitlines()
    assert [row.split()[0] for row in rows] == ["collective", "all_to_all", "pairwise"]


def test_json_agrees_with_the_registry(run):
    data = json.loads(run("list", "--json").stdout)
    found = {(item["collective"], item["algorithm"]): item["summary"] for item in data}
    assert found == {(entry.collective, entry.name): entry.summary for entry in algorithms()}


def test_unknown_collective(run):
    result = run("list", "all_reduction")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Error: unknown collective 'all_reduction'; known: all_reduce,")
    assert result.stderr.count("\n") == 1
