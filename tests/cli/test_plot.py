"""``ringcoll plot``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringcoll.lab.simulation import crossbar, simulate
from ringcoll.schedules.algorithms import schedule_of
from tests.cli.conftest import Run


@pytest.mark.slow
def test_where_the_ring_overtakes_the_tree(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "crossover.svg"
    result = run("plot", "crossover", "-k", "16", "-o", str(path))
    assert result.exit_code == 0
    said, written = result.stdout.splitlines()
    assert said == "from 36 KiB on ring is faster than binomial_tree"
    assert written == str(path)
    assert "<title>from 36 KiB on ring is faster than binomial_tree</title>" in path.read_text()
    result = run("plot", "crossover", "-k", "16,1024", "-o", str(path))
    assert result.stdout.splitlines()[:-1] == [
        "from 36 KiB on ring (16) is faster than binomial_tree (16)",
        "from 1.125 MiB on ring (1024) is faster than binomial_tree (1024)",
    ]
    # The ring on 16 ranks overtakes the tree on 1,024 ranks, too: that is no crossing.
    assert path.read_text().count('class="crossing"') == 2


def test_the_numbers_are_those_of_the_simulator(run: Run, tmp_path: Path) -> None:
    words = ("--bandwidth", "2", "--latency", "3", "-b", "4K", "-e", "64K", "-f", "4")
    path = tmp_path / "c.svg"
    printed = json.loads(
        run("plot", "crossover", "-k", "5", *words, "-o", str(path), "--json").stdout
    )
    assert list(printed["curves"]) == ["ring", "binomial_tree"]
    topology = crossbar(5, bandwidth=2e9, latency_s=3e-6)
    for name, curve in printed["curves"].items():
        schedule = schedule_of("all_reduce", name, 5)
        assert curve == [
            [nbytes, pytest.approx(simulate(schedule, nbytes, topology).seconds, rel=1e-12)]
            for nbytes in (4096, 16384, 65536)
        ]
    assert printed["picture"] == str(path)
    for one in printed["crossings"]:
        assert 4096 <= one["size"] <= 65536


def test_an_algorithm_of_the_user_that_always_wins(run: Run, star: str, tmp_path: Path) -> None:
    words = ("--algorithms", f"{star}:star, ,linear,", "-k", "3", "-o", str(tmp_path / "c.svg"))
    result = run("plot", "crossover", *words)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == str(tmp_path / "c.svg")
    assert ">star</text>" in (tmp_path / "c.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "words, message",
    [
        (("pie",), "'pie' is not one of 'crossover', 'pareto'"),
        (("crossover", "--algorithms", " ,"), "--algorithms: name at least one"),
        (("crossover", "--algorithms", "rong"), "unknown algorithm 'rong'"),
        (("crossover", "--topology", "mars"), "not a topology"),
        (("crossover", "-b", "1M", "-e", "1K"), "the largest size (-e) is below the smallest"),
        (("crossover", "-b", "1M", "-e", "1M"), "curves need the same sizes, two or more"),
        (("crossover", "-o", "x.gif"), "expected .svg, .html, .png, .pdf"),
        (("crossover", "-k", "0"), "not within 1 to"),
        (("crossover", "-k", "some"), "neither a number nor a range"),
        (("crossover", "barrier", "--algorithms", "tree"), "for barrier"),
    ],
)
def test_what_cannot_be_drawn_is_one_clear_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("plot", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())
