"""`ringcoll dump` of programs that hang or have failed; on real processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from ringcoll.runtime.rendezvous import serve_store
from ringcoll.runtime.watch import FOREIGN, answering
from tests.cli.conftest import Run
from tests.programs.started import started
from tests.programs.warm import WarmProgram

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux has such sockets")

ROOT = Path(__file__).parents[2]
# What two ranks come to when the third does not follow.
AT_LAST = (
    "is in all_reduce #2 step 0, waits for chunk 1 of rank 2",
    "is in all_reduce #2 step 1, waits for chunk 1 of rank 0",
    "in load_batch)",
)


@contextlib.contextmanager
def hanging(case: str) -> Iterator[list[subprocess.Popen[str]]]:
    """The three ranks of a program, which have met."""
    store = serve_store()
    program = [sys.executable, "-m", "tests.programs.hanging", case]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                started(
                    *program, str(rank), "3", str(store.port), by=WarmProgram, cwd=ROOT, **pipes
                )
            )
            for rank in range(3)
        ]
        for process in ranks:
            assert line(process) == "met"
        yield ranks


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def lines_of(run: Run, target: int, *, until: Callable[[str], object]) -> list[str]:
    """The lines of the command, once they are as they are going to stay."""
    deadline = time.monotonic() + 30
    while True:
        result = run("dump", str(target))
        assert result.exit_code == 0, result.output
        if until(result.stdout) or time.monotonic() > deadline:
            return result.stdout.splitlines()
        time.sleep(0.1)


def own(ranks: list[subprocess.Popen[str]], lines: list[str]) -> list[str]:
    """The lines on these ranks, and the one before them, on their group.

    The parent of the ranks may have further ones, which other tests have left waiting.
    """
    pids = [f"(pid {process.pid})" for process in ranks]
    places = [place for place, line in enumerate(lines) if any(pid in line for pid in pids)]
    return lines[places[0] - 1 : places[-1] + 1] if places else []


def has_settled(ranks: list[subprocess.Popen[str]], text: str) -> bool:
    said = "\n".join(own(ranks, text.splitlines()))
    return all(words in said for words in AT_LAST)


@pytest.mark.processes
@pytest.mark.parametrize("asked", [0, 2, None], ids=["a rank", "the rank at fault", "the parent"])
def test_a_rank_that_is_in_user_code(run: Run, asked: int | None) -> None:
    with hanging("user code") as ranks:
        target = os.getpid() if asked is None else ranks[asked].pid
        found = lines_of(run, target, until=partial(has_settled, ranks))
    first, *words = own(ranks, found)
    assert asked is None or found == [first, *words]
    number = r"\d+" if asked is None else "1"
    assert re.fullmatch(rf"group {number}, 3 ranks over shared: 2 in an operation", first)
    pids = [process.pid for process in ranks]
    program = rf"{re.escape(str(ROOT))}/tests/programs/hanging\.py:\d+ in"
    expected = [
        rf"  rank 2 \(pid {pids[2]}\) is not in any operation, after all_reduce #1 "
        rf"\(in user code, {program} load_batch\); rank 0 waits for it",
        rf"  rank 0 \(pid {pids[0]}\) is in all_reduce #2 step 0, waits for chunk 1 of rank 2; "
        rf"at {program} main; rank 1 waits for it",
        rf"  rank 1 \(pid {pids[1]}\) is in all_reduce #2 step 1, waits for chunk 1 of rank 0; "
        rf"at {program} main",
    ]
    for pattern, text in zip(expected, words, strict=True):
        assert re.fullmatch(pattern, text), text


@pytest.mark.processes
def test_ranks_that_wait_for_each_other_in_two_groups(run: Run) -> None:
    with hanging("two groups") as ranks:
        settled = r"but in group 2(?s:.*)but in group 1"
        text = "\n".join(lines_of(run, ranks[2].pid, until=lambda text: re.search(settled, text)))
    assert re.search(
        r"^  rank 1 .* is not in any operation, .* but in group 2 \(at ", text, re.MULTILINE
    )
    assert re.search(
        r"^  rank 0 .* is not in any operation, .* but in group 1 \(at ", text, re.MULTILINE
    )


@pytest.mark.processes
def test_operations_that_are_queued(run: Run) -> None:
    with hanging("queue") as ranks:
        settled = r"after all_reduce #2 (?s:.*) rank 0 .* step 0, .*3 more queued"
        text = "\n".join(lines_of(run, ranks[0].pid, until=lambda text: re.search(settled, text)))
    assert re.search(r"rank 0 .* is in all_reduce #3 step 0, .*, 3 more queued, up to #6", text)
    assert re.search(r"rank 2 .* is not in any operation, after all_reduce #2 ", text)


@pytest.mark.processes
def test_a_rank_that_is_stopped(run: Run) -> None:
    with hanging("stopped") as ranks:
        lines_of(run, ranks[0].pid, until=partial(has_settled, ranks))
        os.kill(ranks[2].pid, signal.SIGSTOP)
        for asked in (0, 2):
            begin = time.monotonic()
            found = lines_of(run, ranks[asked].pid, until=lambda text: "stopped" in text)
            assert time.monotonic() - begin < 10
            assert found[1].startswith(
                f"  rank 2 (pid {ranks[2].pid}) does not answer within 2 s: it is stopped by a "
                "signal; rank 0 waits for it"
            )
        document = json.loads(run("dump", str(ranks[0].pid), "--json").stdout)
        assert {record["pid"] for record in document["records"]} == {
            process.pid for process in ranks[:2]
        }
        assert list(document["silent"]) == [str(ranks[2].pid)]
        of_collectives = document["records"][0]["groups"][-1]  # behind that of messages
        assert len(of_collectives["operations"]) == 2
        listed = run("dump").stdout
        assert re.search(rf"{ranks[0].pid} +0 of 3 +is in all_reduce #2 step 0", listed)
        assert re.search(rf"{ranks[2].pid} +does not answer within 2 s", listed)


@pytest.mark.processes
def test_a_child_does_not_answer_for_its_parent(run: Run) -> None:
    with hanging("fork") as ranks:
        children = [int(line(process).removeprefix("child ")) for process in ranks]
        pids = [process.pid for process in ranks]
        assert set(pids) <= set(answering())
        assert not set(children) & set(answering())
        found = lines_of(run, pids[0], until=lambda text: "none in an" in text)
        assert [str(pid) in text for pid, text in zip(pids, found[1:], strict=True)] == [True] * 3
        os.kill(pids[0], signal.SIGKILL)
        ranks[0].wait()
        assert pids[0] not in answering(), "the child holds no socket of its parent"
        found = lines_of(run, pids[1], until=lambda text: "has ended" in text)
        assert f"rank 0 (pid {pids[0]}) has ended" in found[1]


@pytest.mark.processes
def test_records_of_ranks_that_have_failed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGCOLL_DUMP", str(tmp_path))
    with hanging("time limit") as ranks:
        assert [line(process) for process in ranks] == ["failed"] * 3
        pids = [process.pid for process in ranks]
    assert len(list(tmp_path.iterdir())) == 2
    first, *found = run("dump", str(tmp_path)).stdout.splitlines()
    assert first == "group 1, 3 ranks over shared: none in an operation, broken for 2"
    assert found[0] == f"  rank 2 (pid {pids[2]}) has left no record"
    for text in found[1:]:
        assert "is in a broken group: rank" in text
        assert "tests/programs/hanging.py" in text


@pytest.mark.processes
def test_nothing_is_left_after_the_last_group(run: Run) -> None:
    with hanging("end") as ranks:
        pids = {process.pid for process in ranks}
        assert pids <= set(answering())
        for process in ranks:
            output, errors = process.communicate("\n", timeout=60)
            assert process.returncode == 0, errors
            assert "ringcoll-" not in output
    assert not pids & set(answering())


def test_processes_of_others_are_not_listed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringcoll.tools.cli.dump.answering", lambda: [1, 2])
    monkeypatch.setattr("ringcoll.tools.cli.dump.ask", lambda *_: ({2: "text"}, {1: FOREIGN}))
    (_, only) = run("dump").stdout.splitlines()
    assert re.match(r"2 +answers what cannot be read", only)


@pytest.mark.parametrize("target", [1, 3])
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_processes_of_others_tell_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch, target: int, more: tuple[str, ...]
) -> None:
    """Neither for the process itself, nor for what has started it."""
    ancestors = {1: {3}}
    monkeypatch.setattr("ringcoll.tools.cli.dump.answering", lambda: [1, 2])
    monkeypatch.setattr(
        "ringcoll.tools.cli.dump.ask", lambda *_: ({}, {1: FOREIGN, 2: "is stopped"})
    )
    monkeypatch.setattr("ringcoll.tools.cli.dump._ancestors", lambda pid: ancestors.get(pid, set()))
    result = run("dump", str(target), *more)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "process 1 belongs to another user" in result.stderr
    assert "stopped" not in result.stderr


def test_without_processes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ringcoll.tools.cli.dump.answering", list)
    assert run("dump").stdout == "No process of this user has a group of more than one rank.\n"
    result = run("dump", str(os.getpid()))
    assert result.exit_code == 2
    assert "neither this process nor those that it has started are in a group" in result.stderr


def test_a_folder_without_records(run: Run, tmp_path: Path) -> None:
    for target, text in (("nowhere", "No such file"), (str(tmp_path), "no records are in")):
        result = run("dump", str(target))
        assert result.exit_code == 2
        assert text in result.stderr
    (tmp_path / "other.json").write_text("{}")
    assert "not the record of a process" in run("dump", str(tmp_path)).stderr


@pytest.mark.processes
def test_torch_is_not_imported() -> None:
    """The command is quick: it is wanted while something hangs."""
    code = "import sys; sys.modules['torch'] = None; import ringcoll.tools.cli.dump"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)
