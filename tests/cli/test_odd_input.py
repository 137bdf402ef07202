"""Odd networks, long texts and odd places for files: each gets an answer, or a line, in time."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from ringcoll.errors import RulesError, ScheduleError, TooLargeError
from ringcoll.lab.search import fit, synthesize
from ringcoll.lab.simulation import crossbar
from ringcoll.runtime.user_files import rules_in
from ringcoll.schedules import Schedule

Run = Callable[..., Result]

NETWORKS = {
    "no rank": "a -- b 1 1",
    "an island": "0 -- 1 1 1\na -- b 1 1",
    "the smallest number": "0 -- 1 5e-324 1",
    "a large latency": "0 -- 1 1 1e300",
    "a large cost": "0 -- 1 1 1\nranks 0 1e300 1e300",
    "speeds far apart": "0 -- 1 1e9 0\n1 -- 2 1e-9 0",
    "infinite": "0 -- 1 1e400 1",
}
COMMANDS = (
    *("show N.txt", "show N.txt -o x.svg", "simulate ring --graph N.txt -o x.html"),
    *("plot pareto --graph N.txt", "fit all_gather --graph N.txt --sizes 1K"),
    "search all_gather --graph N.txt --method trees",
)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("words", COMMANDS)
def test_odd_networks(run: Run, own_folder: Path, network: str, words: str) -> None:
    Path("N.txt").write_text(NETWORKS[network])
    result = run(*words.split())  # any other exception is raised
    assert result.exit_code in (0, 2)
    assert result.exit_code == 0 or "Error: " in result.stderr


@pytest.mark.parametrize("words", ["export ring", "simulate ring", "show ring"])
def test_a_pipe_that_nobody_reads(run: Run, own_folder: Path, words: str) -> None:
    os.mkfifo("pipe.svg")
    result = run(*words.split(), "-k", "2", "-o", "pipe.svg")
    assert result.exit_code == 2
    assert result.stderr == "Error: pipe.svg: nobody reads it\n"


def test_a_pipe_that_somebody_reads(run: Run, own_folder: Path) -> None:
    os.mkfifo("pipe")
    reader = os.open("pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert run("export", "ring", "-k", "2", "--format", "text", "-o", "pipe").exit_code == 0
    assert os.read(reader, 1 << 16).startswith(b"schedule all_reduce ring world_size=2")
    os.close(reader)


@pytest.mark.parametrize("text", ["[" * 300_000, "x.py" * 100_000, "a.txt" * 60_000 + ";"])
def test_rules_are_read_in_time_that_grows_with_their_length(text: str) -> None:
    with pytest.raises((RulesError, ScheduleError)):
        rules_in(text)


def test_work_is_estimated_before_it_begins() -> None:
    with pytest.raises(TooLargeError, match="36 chunks would do"):
        synthesize("all_gather", crossbar(4, bandwidth=1e9), most_chunks=1024)
    with pytest.raises(TooLargeError, match="4096 ranks would do"):
        fit("all_reduce", crossbar(65536, bandwidth=1e9))
    steps = "  -\n" * ((1 << 18) + 1)
    header = "schedule all_reduce long world_size=1 num_chunks=1 num_slots=0 root=0\nrank 0\n"
    with pytest.raises(ScheduleError, match="line 262147: a rank has more than 262,144 steps"):
        Schedule.from_text(header + steps)
