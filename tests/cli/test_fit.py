"""``ringcoll fit`` prints what won, and writes what groups use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ringcoll.errors import TooLargeError
from ringcoll.lab.search import Fit, fit
from ringcoll.runtime.user_files import read_fit
from ringcoll.tools.cli.app import cli

SLOW = "\n".join(f"{rank} -- {(rank + 1) % 6}  {0.1 if rank == 5 else 1}  1" for rank in range(6))


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["fit", *arguments])
    return result.exit_code, result.output


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.txt"
    path.write_text(SLOW)
    return path


def test_the_table_and_the_file(graph: Path, tmp_path: Path) -> None:
    file = tmp_path / "cluster.fit"
    code, text = run("all_reduce", "--graph", str(graph), "--sizes", "1M,64M", "-o", str(file))
    assert code == 0, text
    assert "all_reduce on cluster, 6 ranks" in text
    assert text.splitlines()[3].split()[:2] == ["bytes", "algorithm"]
    assert f"Wrote {file}." in text.replace("\n", "")
    fitted = read_fit(file)
    assert fitted.world_size == 6
    assert {rule.collective for rule in fitted.rules} == {"all_reduce"}
    code, text = run(
        "all_gather", "--graph", str(graph), "--sizes", "1M", "-o", str(file), "--json"
    )
    assert code == 0, text
    document = json.loads(text)["fits"][0]
    (one,) = document["ranges"]
    assert one["least_s"] <= one["seconds"] < one["registered"]["seconds"]
    assert {rule.collective for rule in read_fit(file).rules} == {"all_reduce", "all_gather"}


def test_where_nothing_is_faster_nothing_is_written(tmp_path: Path) -> None:
    file = tmp_path / "even.fit"
    code, text = run("all_reduce", "--topology", "crossbar", "-k", "3", "--sizes", "64M", "-o", str(file))  # fmt: skip
    assert code == 0, text
    assert "no schedule is clearly faster" in text
    assert f"{file} is not written." in text.replace("\n", "")
    assert not file.exists()


@pytest.mark.parametrize(
    "content, arguments, message",
    [
        ("0 -- 1 1 1\n2 -- 3 1 1", [], "not connected"),
        ("0 -- 1 0 1", [], "line 1"),
        ("0 -- 1 1", [], "line 1"),
        (SLOW, ["-k", "8"], "6"),
        (SLOW, ["--sizes", "much"], "much"),
        (SLOW, ["--sizes", "0"], "at least 1"),
    ],
)
def test_what_cannot_be_fitted(
    tmp_path: Path, content: str, arguments: list[str], message: str
) -> None:
    path = tmp_path / "cluster.txt"
    path.write_text(content)
    result = CliRunner().invoke(cli, ["fit", "all_reduce", "--graph", str(path), *arguments])
    assert result.exit_code != 0
    assert message in (result.output or str(result.exception))


def test_a_file_of_something_else_is_kept(graph: Path, tmp_path: Path) -> None:
    file = tmp_path / "other.txt"
    file.write_text("mine")
    result = CliRunner().invoke(
        cli, ["fit", "all_reduce", "--graph", str(graph), "--sizes", "1M", "-o", str(file)]
    )
    assert result.exit_code != 0
    assert file.read_text() == "mine"


def test_without_a_network() -> None:
    code, text = run("all_reduce")
    assert code == 2
    assert "--topology or --graph" in text


def test_tuning_on_a_network_fits_all_that_it_is_asked_for(graph: Path, tmp_path: Path) -> None:
    file = tmp_path / "cluster.fit"
    words = ["tune", "--graph", str(graph), "-b", "16M", "-e", "64M", "-f", "4"]
    collectives = "all_gather,barrier,reduce-scatter"
    result = CliRunner().invoke(cli, [*words, "--collectives", collectives, "-o", str(file)])
    assert result.exit_code == 0, result.output
    rules = read_fit(file).rules
    assert {rule.collective for rule in rules} == {"all_gather", "reduce_scatter"}
    for size in (16 << 20, 64 << 20):
        assert sum(size in rule.nbytes for rule in rules) == 2  # one of each collective
    for lacking in (
        [],
        ["--algorithms", "ring", "-o", str(file)],
        ["--seconds", "3", "-o", str(file)],
    ):
        refused = CliRunner().invoke(cli, [*words, *lacking])
        assert refused.exit_code == 2
        assert "give --output, and no option for ranks that run" in refused.output


def test_tuning_on_a_network_without_sizes_leaves_no_gap(graph: Path, tmp_path: Path) -> None:
    file = tmp_path / "cluster.fit"
    words = ["tune", "--graph", str(graph), "--collectives", "reduce_scatter", "-o", str(file)]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    assert any(rule.nbytes.end is None for rule in read_fit(file).rules)


@pytest.mark.parametrize("small", [[], ["all_gather"]])
def test_what_is_too_large_is_named_and_the_others_are_fitted(
    small: list[str], graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cluster.fit"

    def fit_small(collective: str, *arguments: Any, **options: Any) -> Fit:
        if collective not in small:
            raise TooLargeError(f"{collective} has too many messages", most=0)
        return fit(collective, *arguments, **options)

    monkeypatch.setattr("ringcoll.tools.cli.fit.fit", fit_small)
    words = ("--graph", str(graph), "--sizes", "64M", "-o", str(file))
    code, text = run("all_to_all", "reduce_scatter", *small, *words)
    assert "all_to_all has too many messages" in text
    assert "reduce_scatter has too many messages" in text
    assert (code == 0) == bool(small) == file.exists()
    if small:
        assert {rule.collective for rule in read_fit(file).rules} == set(small)
