"""``ringcoll simulate``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ringcoll.lab.pictures import player_page, time_picture
from ringcoll.lab.simulation import crossbar, simulate, topology_named
from ringcoll.schedules.algorithms import schedule_of
from tests.cases.pictures import check
from tests.cli.conftest import Run


def test_the_sentences(run: Run) -> None:
    words = ("--bandwidth", "1", "--latency", "0", "--alpha", "1")
    result = run("simulate", "ring", "-k", "4", "--size", "1000000", *words)
    assert result.exit_code == 0
    assert result.stdout.startswith("ring all_reduce of 1000000 bytes on 4 ranks\n")
    assert "\ncrossbar: 1506 us\n" in result.stdout
    assert "\n0 -> switch" in result.stdout
    assert "and 3 further links" in result.stdout


def test_the_numbers(run: Run) -> None:
    costs = ("--bandwidth", "2", "--alpha", "3", "--gamma", "0.5", "--slow", "1=2", "--late", "2=7")
    words = ("broadcast", "-k", "5", "-b", "64K", "--segments", "3", "--root", "2", *costs)
    printed = json.loads(run("simulate", "chain", *words, "--json").stdout)
    expected = simulate(
        schedule_of("broadcast", "chain", 5, 2),
        64 << 10,
        crossbar(5, bandwidth=2e9, latency_s=1e-6, alpha_s=3e-6, gamma_s_per_byte=0.5e-9),
        segments=3,
        slowness={1: 2.0},
        late={2: 7e-6},
    )
    assert printed["seconds"] == pytest.approx(expected.seconds, rel=1e-12)
    assert printed["ends_s"] == pytest.approx(expected.ends, rel=1e-12)
    assert printed["path"][-1]["end_s"] == printed["seconds"]
    assert printed["messages"] == 12


def test_a_trace(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    result = run("simulate", "tree", "-k", "6", "--topology", "torus:2x3", "-o", str(path))
    assert f"Wrote {path}" in result.stdout
    check(json.loads(path.read_text(encoding="utf-8")))


def test_the_hierarchy_is_quicker_where_hosts_share_a_card(run: Run) -> None:
    times = [
        json.loads(
            run(
                "simulate", name, "-k", "8", "--topology", "hosts:4", "--hosts", "2", "--json"
            ).stdout
        )["seconds"]
        for name in ("hierarchical", "recursive_doubling")
    ]
    assert times[0] < times[1] / 2


@pytest.mark.parametrize(
    "words, said",
    [
        ("ring --topology star", "not a topology"),
        ("ring --topology torus", "not a topology"),
        ("ring --topology ring:4", "not a topology"),
        ("ring --topology fat_tree:2x2", "not a topology"),
        ("ring --topology hosts:0", "ranks_per_host"),
        ("ring -k 8 --topology torus:2x2", "torus:2x2 has 4 ranks"),
        ("ring --topology dgx_h100 --bandwidth 3", "a preset has"),
        ("ring --bandwidth 0", "'bandwidth'"),
        ("ring --bandwidth nan", "'bandwidth'"),
        ("ring --latency -1", "'latency_s'"),
        ("ring --alpha -1", "'alpha_s'"),
        ("ring --slow 1", "not a rank and a number"),
        ("ring --slow 4=2", "slowness"),
        ("ring --late 9=2", "late"),
        ("ring --fail 0", "not two ends"),
        ("ring --topology ring --fail 0-2", "there is no such link"),
        ("ring --fail 0-switch", "not connected"),
        ("ring --root 1", "all_reduce has no root"),
        ("ring --topology dgx_h100 --size 100G", "memory of a rank"),
        ("rong", "did you mean 'ring'?"),
    ],
)
def test_bad_calls_are_one_line(run: Run, words: str, said: str) -> None:
    result = run("simulate", *words.split())
    assert result.exit_code == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("ending", ["svg", "html", "png"])
def test_ranks_over_time_are_drawn(run: Run, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"run.{ending}"
    words = ("--topology", "torus:2x3", "--size", "4096", "-o", str(path))
    result = run("simulate", "tree", "-k", "6", *words)
    assert result.exit_code == 0
    assert result.stdout.endswith(f"Wrote {path}.\n")
    simulated = simulate(
        schedule_of("all_reduce", "tree", 6), 4096, topology_named("torus:2x3", 6), trace=True
    )
    content, drawn = path.read_bytes(), time_picture(simulated).encode()
    if ending == "png":
        assert content.startswith(b"\x89PNG")
    elif ending == "html":
        page = player_page(simulated, settings={"clock": "time", "times": "trace"})
        assert content.decode() == page
    else:
        assert content == drawn


def test_the_busiest_links_are_a_table(run):
    """A ring of four sends three quarters twice around, on each of its links alike."""
    lines = run("simulate", "ring", "-k", "4", "--size", "4000", "--topology", "ring").stdout
    (header,) = [line.split() for line in lines.splitlines() if "bytes" in line and "used" in line]
    assert header == ["link", "bytes", "used"]
