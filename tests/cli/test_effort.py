"""Absurd numbers are refused before any work begins, with a number that would do; no option takes all memory."""

from __future__ import annotations

import re

import pytest

from ringcoll.errors import (
    ArgumentError,
    TooLargeError,
    UnknownAlgorithmError,
    UnsupportedWorldSizeError,
)
from ringcoll.lab.search import synthesize
from ringcoll.lab.simulation import crossbar, ring, simulate, topology_from_text
from ringcoll.runtime.launch import Ranks
from ringcoll.schedules import Schedule, Step, check_work, tally_of, verify
from ringcoll.schedules.algorithms import find, schedule_of
from tests.cli.conftest import Run


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "export ring -k 2000",
        "export ring -k 65536 --format text",
        "show ring all_reduce -k 65536",
        "show ring all_reduce -k 65536 --text",
        "show bruck all_to_all -k 3000",
        "verify swing --order -k 65536",
        "verify hierarchical --order -k 60000",
        "verify ring --collective all_reduce --world-sizes 2,3000",
        "simulate direct -k 65536",
        "simulate direct all_gather -k 4500",
        "simulate pairwise all_to_all -k 65536",
        "search all_gather --topology ring -k 9000",
        "search all_gather --topology ring -k 3000 --method greedy",
        "search broadcast --topology crossbar -k 4000 --method trees",
    ],
)
def test_too_many_ranks(run: Run, words: str) -> None:
    result = run(*words.split())
    assert (result.exit_code, result.stdout) == (2, "")
    found = re.search(r"(\d+) ranks would do\n", result.stderr)
    assert found is not None, result.stderr
    assert 16 <= int(found[1]) < 3000


@pytest.mark.parametrize("name, collective", [("ring", "all_reduce"), ("bruck", "all_to_all")])
def test_the_number_of_ranks_that_would_do_does(run: Run, name: str, collective: str) -> None:
    refused = run("export", name, "-c", collective, "-k", "60000")
    found = re.search(r"(\d+) ranks would do\n", refused.stderr)
    assert found is not None
    check_work(schedule_of(collective, name, int(found[1])))
    with pytest.raises(TooLargeError):
        check_work(schedule_of(collective, name, 2 * int(found[1])))


@pytest.mark.usefixtures("only_large")
@pytest.mark.parametrize(
    "words", ["verify only_large --world-sizes 3000", "verify only_large --order -k 3000"]
)
def test_where_no_fewer_ranks_would_do(run: Run, words: str) -> None:
    result = run(*words.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.fullmatch(
        r"Error: only_large .* is too large: .*, expected at most [\d,]+\n", result.stderr
    )


def test_fewer_segments_would_do(run: Run) -> None:
    words = ("simulate", "ring", "-k", "64", "--topology", "hosts:8", "--segments")
    result = run(*words, "65536")
    assert result.exit_code == 2
    found = re.search(r"expected at most ([\d,]+); (\d+) segments would do\n", result.stderr)
    assert found is not None
    assert int(found[2]) == int(found[1].replace(",", "")) // (8 * 126)  # 8 ranks stand for all


@pytest.mark.parametrize(
    "words",
    [
        *(f"{command} -k 100000" for command in (
            "export ring", "show ring all_reduce", "verify ring --order", "plot pareto all_reduce", "simulate direct",
            "search all_gather --topology ring", "explain all_reduce", "doctor", "bench all_reduce",
            "bench --vs native", "trace all_reduce", "train", "tune",
        )),
        "show hierarchical all_reduce --hosts 100000000",
        "simulate ring --hosts 100000000",
        "simulate ring --segments 100000000",
        "simulate ring --size 99999999999T",
        "simulate ring --topology torus:999999x999999",
        "simulate ring --topology dragonfly:9:999999:9",
        "search all_gather --topology ring --more-steps 100000000",
        "show circulant=99999999 broadcast",
        "show circulant=65536 broadcast -k 1000",
        "bench all_reduce -k 2 -b 1 -e 1T -i 1",
        "bench all_reduce -k 2 -b 100T -e 100T",
        "bench all_reduce -k 2 -n 1000000000000",
        "bench all_reduce -k 5000",
        "trace all_reduce -k 2 -b 100T",
        "tune -k 2 -e 100T",
        "bench --vs native -k 2 -e 100T",
        "train -k 2 --layers 1000000",
        "train -k 2 --width 10000000",
    ],
)  # fmt: skip
def test_absurd_numbers(run: Run, words: str) -> None:
    result = run(*words.split())
    last = result.stderr.splitlines()[-1]
    assert (result.exit_code, last[:7]) == (2, "Error: "), result.stderr


def test_the_largest_schedules_that_are_proved_without_a_doubt() -> None:
    for name, world_size in (("ring", 1024), ("binomial_tree", 1 << 16)):
        check_work(schedule_of("all_reduce", name, world_size))


def test_the_functions_behind_the_commands() -> None:
    large = schedule_of("all_reduce", "ring", 1 << 16)
    for refuses in (verify, tally_of, check_work):
        with pytest.raises(TooLargeError, match="too large"):
            refuses(large)
    endless = Schedule("all_reduce", "endless", 200, 1, 0, lambda rank: iter(Step, None))
    with pytest.raises(TooLargeError):
        verify(endless)
    with pytest.raises(TooLargeError):
        simulate(endless, 1, crossbar(200, bandwidth=1))
    with pytest.raises(TooLargeError):
        verify(Schedule("all_reduce", "wide", 10**12, 1, 0, lambda rank: iter(())))
    with pytest.raises(UnsupportedWorldSizeError, match="at most 65536, got 65537"):
        find("all_reduce", "ring").schedule((1 << 16) + 1)
    with pytest.raises(UnknownAlgorithmError, match="at most 65536"):
        find("broadcast", "circulant=65537")
    with pytest.raises(TooLargeError, match="messages"):
        simulate(
            schedule_of("all_reduce", "ring", 2000), 1, crossbar(2000, bandwidth=1), engine="events"
        )
    chain = topology_from_text("\n".join(f"{rank} -- {rank + 1} 10 1" for rank in range(2999)))
    for method in ("exact", "greedy", "trees"):
        with pytest.raises(TooLargeError, match="ranks would do"):
            synthesize("all_gather", chain, method=method)
    assert synthesize("all_gather", ring(8, bandwidth=1e9), method="greedy", most_chunks=1).points
    with pytest.raises(ArgumentError, match="so many processes"):
        Ranks(10**6)
