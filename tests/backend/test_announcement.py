"""The failure that breaks a group is told in one line, at once; ``torchrun`` shows the line, too."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ringcoll.errors import RingcollError
from ringcoll.runtime.collectives import communicator
from ringcoll.runtime.rendezvous import serve_store
from ringcoll.runtime.watch import announce
from ringcoll.training.backend import process_group as backend
from tests.programs.started import run_program, started
from tests.programs.threads import together
from tests.programs.warm import WarmProgram

ROOT = Path(__file__).parents[2]
PROGRAM = ("-m", "tests.programs.dying")
LINE = re.compile(
    r"^ringcoll: rank (\d) .*rank 2.*, in call \d+ of the group \(all_reduce\(sum, float32, .*\)\).*"
)


def told(errors: str) -> dict[int, str]:
    """The lines in which ranks tell the failure, without the first word, by rank."""
    lines = [match for line in errors.splitlines() if (match := LINE.match(line))]
    ranks = [int(match[1]) for match in lines]
    assert len(set(ranks)) == len(ranks), errors  # each rank once
    return {rank: match[0].partition(" ")[2] for rank, match in zip(ranks, lines, strict=True)}


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("how", ["ddp", "blocking"])
def test_a_line_where_the_error_is_not_raised_in_the_caller(how: str) -> None:
    store = serve_store()
    variables = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    # The store is here, and in none of the ranks.
    variables |= {"GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                started(
                    *(sys.executable, *PROGRAM, how),
                    cwd=ROOT,
                    env={**os.environ, **variables, "RANK": str(rank)},
                    stderr=subprocess.PIPE,
                    by=WarmProgram,
                )
            )
            for rank in range(3)
        ]
        outputs = [process.communicate(timeout=90)[1] for process in ranks]
    for rank, errors in enumerate(outputs[:2]):
        assert set(told(errors)) == ({rank} if how == "ddp" else set()), errors
        line, traceback = errors.find("ringcoll: rank"), errors.index("Traceback")
        assert line < traceback
        assert "rank 2" in errors[traceback:]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("how", ["ddp", "blocking"])
def test_torchrun_shows_the_line(how: str, tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--nproc-per-node", "3")
    for attempt in range(3):
        # It looks after its processes every 3 s, by default every 0.1 s, and ends them all: if just
        # then a rank has died, too soon for the others.
        logs = tmp_path / str(attempt)
        options = ("--rdzv-endpoint", "127.0.0.1:0", "--monitor-interval", "3", "--log-dir", logs)
        command = map(str, (sys.executable, *torchrun, *options, *PROGRAM, how))
        errors = run_program(*command, cwd=ROOT).stderr
        lines = told(errors)
        if set(lines) == {0, 1}:
            break
    assert set(lines) == {0, 1}, errors
    summary = errors[errors.index("dying FAILED") :]
    for rank, line in lines.items():
        (file,) = logs.glob(f"*/attempt_0/{rank}/error.json")
        assert json.loads(file.read_text())["message"]["message"] == line
        assert line in summary
        assert [other.name for other in file.parent.iterdir()] == [file.name]


def test_a_handler_gets_the_line_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    announce("rank 0\nlost rank 1", is_raised=False)
    announce("it is raised", is_raised=True)
    assert [record.getMessage() for record in caplog.records] == ["rank 0 lost rank 1"]
    assert caplog.records[0].levelno == logging.ERROR


def test_what_is_in_the_error_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    for text in ("the first", "the second"):
        announce(text, is_raised=True)
    assert json.loads(file.read_text())["message"]["message"] == "the first"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "nowhere" / "error.json"))
    announce("the third", is_raised=True)
    assert [record.getMessage().split()[1] for record in caplog.records] == [
        "first",
        "second",
        "third",
    ]


@pytest.mark.parametrize("by", ["abort", "close"])
def test_who_ends_a_group_is_told_nothing(by: str, caplog: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()

    def main(rank: int) -> None:
        group = backend.ProcessGroup(store, rank, 2, timedelta(seconds=50))
        group.barrier().wait()
        if rank == 0:
            work = group.allreduce([torch.ones(3)])
            member = communicator(group, torch.device("cpu"))
            getattr(member, by)()
            with pytest.raises(RingcollError):
                work.wait()
            store.set("over", "")
            member.close()
        else:
            store.wait(["over"])

    assert together(2, main) == [None, None]
    assert not caplog.records
