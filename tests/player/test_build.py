"""The page in the package is what `player/` is built to, and asks for nothing."""

from __future__ import annotations

import re
import subprocess
from base64 import b64decode

import pytest

from ringcoll.errors import ArgumentError
from ringcoll.lab.pictures import player_page
from ringcoll.lab.simulation import simulate, topology_named
from ringcoll.schedules import Send
from ringcoll.schedules.algorithms import schedule_of
from tests.cases.pages import data_of
from tests.player.conftest import MODULES, ROOT

BUILT = ROOT / "ringcoll" / "lab" / "pictures" / "player.html"


@pytest.mark.processes
def test_it_is_built_from_its_sources(tmp_path):
    if not (MODULES / "esbuild").is_dir():
        pytest.skip("the player is not built: that needs `npm ci` in player/")
    path = tmp_path / "player.html"
    subprocess.run(["npx", "tsc"], cwd=ROOT / "player", check=True, timeout=120)
    subprocess.run(["node", "build.js", path], cwd=ROOT / "player", check=True, timeout=60)
    assert path.read_text(encoding="utf-8") == BUILT.read_text(encoding="utf-8")


def test_it_asks_for_nothing():
    page = BUILT.read_text(encoding="utf-8")
    # The names of XML's vocabularies are no addresses that anybody opens.
    addresses = set(re.findall(r"https?://[^\"'` )<]+", page))
    assert addresses <= {
        f"http://www.w3.org/{name}"
        for name in ("2000/svg", "1999/xhtml", "1999/xlink", "2000/xmlns/", "XML/1998/namespace")
    }
    assert not re.search(r"<(link|img|iframe|script)[^>]*(src|href)=", page)


@pytest.mark.parametrize("name, world_size", [("ring", 5), ("direct", 4), ("rabenseifner", 6)])
def test_its_messages_are_those_of_the_schedule(name, world_size):
    schedule = schedule_of("all_reduce", name, world_size)
    (scene,) = data_of(player_page(schedule))["scenes"]
    for number, step in enumerate(scene["steps"]):
        sent = [
            (rank, op.peer, sorted(ref.chunk for ref in op.refs))
            for rank in range(world_size)
            for op in list(schedule.steps(rank))[number]
            if isinstance(op, Send)
        ]
        drawn = [(source, target, _numbers(runs)) for source, target, runs, _ in step["messages"]]
        assert drawn == sent
    complete = scene["sets"].index(f"0-{world_size - 1}")
    ends: dict[tuple[int, int], int] = {}
    for changes in [scene["start"], *(step["changes"] for step in scene["steps"])]:
        ends |= {(rank, chunk): number for rank, chunk, number in changes}
    assert set(ends.values()) == {complete}
    assert len(ends) == world_size * schedule.num_chunks


def _numbers(runs: str) -> list[int]:
    parts = [part.split("-") for part in runs.split(",")]
    return [number for part in parts for number in range(int(part[0]), int(part[-1]) + 1)]


def test_every_fault_fails_and_is_not_the_schedule():
    data = data_of(player_page(schedule_of("all_reduce", "ring", 4)))
    assert len(data["faults"]) == 9
    for fault in data["faults"]:
        assert fault["failure"]["words"]
        assert fault["steps"] != data["scenes"][0]["steps"]


@pytest.mark.parametrize(
    "trace, message",
    [
        ({}, "not a trace"),
        ({"traceEvents": 3, "otherData": {}}, "not a trace"),
        ({"traceEvents": [], "otherData": {"world_size": 4}}, "something else"),
    ],
)
def test_what_is_no_trace_is_refused(trace, message):
    with pytest.raises(ArgumentError, match=message):
        player_page(schedule_of("all_reduce", "ring", 4), trace=trace)


def test_a_trace_of_something_else_is_refused():
    other = simulate(
        schedule_of("all_reduce", "tree", 4), 64, topology_named("ring", 4), trace=True
    )
    with pytest.raises(
        ArgumentError, match=r"expected ring all_reduce, got binomial_tree all_reduce on 4 ranks"
    ):
        player_page(schedule_of("all_reduce", "ring", 4), trace=other.picture())


def test_a_run_without_a_trace_is_refused():
    run = simulate(schedule_of("all_reduce", "ring", 4), 64, topology_named("ring", 4))
    with pytest.raises(ArgumentError, match="no trace"):
        player_page(run)


def test_too_many_ranks_are_refused():
    with pytest.raises(ArgumentError, match="at most 64, got 65"):
        player_page(schedule_of("all_reduce", "ring", 65))


def test_a_notebook_shows_it_in_a_frame():
    page = player_page(schedule_of("all_reduce", "ring", 2))
    (address,) = re.findall(r'src="data:text/html;base64,([^"]*)"', page._repr_html_())
    assert b64decode(address).decode() == page
