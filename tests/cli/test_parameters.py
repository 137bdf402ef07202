"""Numbers and ranges."""

import os
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringcoll.runtime import launch
from ringcoll.runtime.transport import catalogue
from ringcoll.schedules import as_runs
from ringcoll.tools.cli import measuring
from ringcoll.tools.cli.options import collective_name, rank_numbers, world_sizes


@pytest.mark.parametrize(
    "text, expected",
    [
        ("4", (4,)),
        ("1-4", (1, 2, 3, 4)),
        ("8, 1-3 ,2", (1, 2, 3, 8)),
        ("1,2,8-16", (1, 2, 8, 9, 10, 11, 12, 13, 14, 15, 16)),
        ("65536", (65536,)),
    ],
)
def test_numbers_and_ranges_are_read_sorted_and_once(text, expected):
    assert world_sizes(text) == expected


@pytest.mark.parametrize("text", ["", "x", "1-", "-1", "1..4", "1,,2", "0", "0-4", "4-1", "65537"])
def test_anything_else_is_refused(text):
    with pytest.raises(click.BadParameter, match=r"range like 1-8|not within 1 to 65536"):
        world_sizes(text)


@given(st.sets(st.integers(1, 100), min_size=1))
def test_what_is_written_reads_back(sizes):
    assert world_sizes(as_runs(sorted(sizes))) == tuple(sorted(sizes))


def test_collectives_may_be_spelled_as_in_prose():
    assert collective_name.convert("all-to-all", None, None) == "all_to_all"


def test_ranks_begin_at_0():
    assert rank_numbers("7,0-2") == (0, 1, 2, 7)
    with pytest.raises(click.BadParameter, match="not within 0 to"):
        rank_numbers("3-1")


@pytest.mark.parametrize(
    "words, hint",
    [
        ("show rong all_reduce", "did you mean 'ring'?"),
        ("verify trea", "did you mean 'tree'?"),
        ("verify all_reduce", "'all_reduce' is a collective"),
        ("bench all_reduce --algorithms dubble_tree", "did you mean 'double_tree'?"),
        ("explain all_educe", "did you mean 'all_reduce'?"),
        ("list ring", "'ring' is an algorithm; expected a collective: all_reduce, "),
        ("show all_reduce ring", "did you mean `ringcoll show ring all_reduce`?"),
        ("show all-reduce ring", "did you mean `ringcoll show ring all-reduce`?"),
    ],
)
def test_the_nearest_name_is_suggested(run, words, hint):
    result = run(*words.split())
    assert result.exit_code == 2
    assert hint in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("command", ["bench", "explain", "trace", "train", "tune"])
def test_transports_are_those_of_the_catalogue(run, command):
    collective = ["all_reduce"] if command in ("bench", "explain", "trace") else []
    result = run(command, *collective, "--transport", "pigeons")
    assert result.exit_code == 2
    for name in ("auto", *catalogue.names("cpu")):
        assert f"'{name}'" in result.stderr


@pytest.mark.parametrize(
    "command", ["bench all_reduce", "bench --vs native", "trace all_reduce", "train", "tune"]
)
def test_mpi_is_refused_before_anything_starts(run, monkeypatch, command):
    monkeypatch.setattr(launch, "Ranks", None)
    monkeypatch.setenv("RINGCOLL_TRANSPORT", "mpi")
    result = run(*command.split())
    assert result.exit_code == 2
    assert "MPI as a transport is gone" in " ".join(result.stderr.split())


def test_a_transport_is_chosen_for_one_command_only(run, monkeypatch):
    seen = []
    monkeypatch.setattr(measuring, "on_ranks", lambda *args, **options: seen.append(variable()))

    def variable():
        return os.environ.get("RINGCOLL_TRANSPORT")

    monkeypatch.setenv("RINGCOLL_TRANSPORT", "auto")
    run("trace", "all_reduce", "--transport", "gloo")
    monkeypatch.delenv("RINGCOLL_TRANSPORT")
    run("trace", "all_reduce", "--transport", "gloo")
    assert seen == ["gloo", "gloo"]
    assert variable() is None


@pytest.mark.parametrize(
    "words, message",
    [
        ("bench all_reduce -J no/folder/a.json", "there is no folder"),
        ("bench --picture no/folder/a.png", "there is no folder"),
        ("bench --picture a.doc", "has the ending '.doc', expected"),
        ("trace all_reduce -o no/folder/a.json", "there is no folder"),
        ("tune -o no/folder/a.json", "there is no folder"),
        ("tune -o locked.json", "cannot be written"),
    ],
)
def test_files_are_checked_before_anything_starts(run, monkeypatch, own_folder, words, message):
    monkeypatch.setattr(launch, "Ranks", None)
    monkeypatch.setattr(
        os, "access", lambda path, mode: mode != os.W_OK or "locked" not in str(path)
    )
    Path("locked.json").touch()
    result = run(*words.split())
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert [path.name for path in own_folder.iterdir()] == ["locked.json"]
