"""The pool of processes: errors arrive, and nobody is left behind."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ringcoll.errors import ArgumentError, RingcollError
from ringcoll.runtime.launch import RankError, Ranks, processes, rendezvous, report
from ringcoll.runtime.transport.gloo import _listening
from tests.programs.started import of_session, started

pytestmark = pytest.mark.processes


def rank_of() -> int:
    return dist.get_rank()


def unpicklable() -> object:
    return lambda: None


def failing(rank: int) -> int:
    if dist.get_rank() == rank:
        raise LookupError("nothing here")
    return dist.get_rank()


def reporting() -> None:
    for number in range(3):
        report((dist.get_rank(), number))


def sleeping(seconds: float) -> None:
    time.sleep(seconds)


def writing_after(seconds: float, path: Path) -> None:
    time.sleep(seconds)
    path.touch()


def backend_and_sum() -> tuple[str, int]:
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    return dist.get_backend(), int(total)


def own_group(name: str) -> tuple[bool, str, int]:
    before = dist.is_initialized()
    store, rank, world_size = rendezvous()
    store = dist.PrefixStore(name, store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    found = backend_and_sum()
    dist.destroy_process_group()
    return before, *found


def listening() -> list[str]:
    return sorted({host for host, _ in _listening()})


def test_results_are_in_order_and_reports_arrive(pool):
    ranks = pool(3)
    assert ranks.run(rank_of) == [0, 1, 2]
    seen: list[tuple[int, int]] = []
    ranks.run(reporting, on_report=seen.append)
    assert sorted(seen) == [(rank, number) for rank in range(3) for number in range(3)]


def test_an_error_of_one_rank_is_raised_with_its_name_and_ends_the_others():
    with Ranks(2) as ranks:
        with pytest.raises(RankError, match="rank 1 raised LookupError: nothing here") as caught:
            ranks.run(failing, 1)
        assert caught.value.rank == 1
        assert caught.value.kind == "LookupError"
        assert "failing" in caught.value.details, "the traceback of the rank"
        assert not any(process.is_alive() for process in ranks.processes)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), vars(again)) == (str(caught.value), vars(caught.value))


def test_a_result_that_cannot_be_sent_is_an_error_of_the_rank():
    with Ranks(1) as ranks, pytest.raises(RankError, match="pickle"):
        ranks.run(unpicklable)


def test_a_run_has_a_time_limit_and_leaves_nobody_behind():
    begin = time.monotonic()
    with Ranks(1) as ranks:
        assert ranks.run(rank_of) == [0]
        with pytest.raises(TimeoutError, match=r"ranks \[0\] were not done"):
            ranks.run(sleeping, 60.0, timeout_s=0.5)
    assert not any(process.is_alive() for process in ranks.processes)
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize("number", [0, -1, True, 1.5, 2.0, "2", None, 1 << 30])
def test_what_is_no_number_of_ranks_is_refused_before_any_starts(monkeypatch, number):
    monkeypatch.setattr(Ranks, "_start", None)
    with pytest.raises(ArgumentError, match=r"'world_size'.*\(expected .*, got ") as caught:
        Ranks(number)
    assert caught.value.argument == "world_size"
    assert ("so many" in str(caught.value)) == (number == 1 << 30)


@pytest.mark.parametrize("number", [np.int64(1), torch.tensor(1)])
def test_a_number_of_ranks_may_be_of_another_class(number):
    with Ranks(number, backend=None) as ranks:
        assert (ranks.run(os.getpid), type(ranks.world_size)) == ([ranks.processes[0].pid], int)


@pytest.mark.parametrize(
    "free_nbytes, said", [(1 << 30, "there is no memory"), (1 << 50, "not started on one host")]
)
def test_why_there_are_not_so_many_ranks(monkeypatch, free_nbytes, said):
    monkeypatch.setattr(processes, "free_bytes", lambda: free_nbytes)
    with pytest.raises(ArgumentError, match=said):
        Ranks(2000)


@pytest.mark.parametrize(
    "error, scarce",
    [
        (OSError(errno.EMFILE, ""), "file descriptors"),
        (OSError(errno.ENOMEM, ""), "memory"),
        (BlockingIOError(errno.EAGAIN, ""), "processes"),
        (EOFError(), "processes"),  # of the server that could not fork
        (PermissionError(errno.EACCES, ""), None),
    ],
)
def test_what_the_system_lacks_for_a_rank_is_said(monkeypatch, error, scarce):
    def start(process: object) -> None:
        raise error

    monkeypatch.setattr(processes._context().Process, "start", start)
    with pytest.raises(type(error) if scarce is None else ArgumentError) as caught:
        Ranks(3)
    assert scarce is None or f"not enough {scarce} for 3 ranks" in str(caught.value)


def test_nothing_but_the_loopback_interface_is_listened_on(pool):
    pool(2).run(rank_of)
    assert pool(2).run(listening) == [["127.0.0.1"]] * 2
    before = _listening()
    with Ranks(1) as ranks:
        ranks.run(rank_of)
        own = _listening() - before
    assert {host for host, _ in own} == {"127.0.0.1"}


def test_the_default_group_has_the_backend_that_was_asked_for():
    with Ranks(2, backend="ringcoll") as ranks:
        assert ranks.run(backend_and_sum) == [("ringcoll", 3)] * 2


def test_without_a_group_functions_make_their_own():
    with Ranks(2, backend=None) as ranks:
        for name in ("first", "second"):
            assert ranks.run(own_group, name) == [(False, "gloo", 3)] * 2


def test_only_ranks_have_a_rendezvous():
    with pytest.raises(RingcollError, match="no rank of a pool"):
        rendezvous()


@contextlib.contextmanager
def started_until(moment: str, *words: str) -> Iterator[tuple[subprocess.Popen[str], set[int]]]:
    """`PROGRAM`, which says that it has come to a moment, and its ranks if they run."""
    with started(
        sys.executable, "-c", PROGRAM, *words,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        while (said := process.stdout.readline().split())[:1] != [moment]:
            assert process.poll() is None
        yield process, {*map(int, said[1:])}


PROGRAM = """
import multiprocessing, re, sys, time
from ringcoll.runtime.launch.processes import Ranks
print("starting", flush=True)
with Ranks(3) as ranks:
    ranks.run(time.sleep, 0.0)
    if "forks" in sys.argv:
        fork = multiprocessing.get_context("fork")
        fork.Process(target=time.sleep, args=(100.0,)).start()
    print("running", *(process.pid for process in ranks.processes), flush=True)
    if "hold the lock" in sys.argv:
        ranks.run(re.match, "(a+)+$", "a" * 60 + "b")
    ranks.run(time.sleep, 100.0)
"""


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_waits_for_a_report_to_be_taken():
    """What takes it may hold a lock, as a progress bar does."""
    taken = []

    def take(item: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        taken.append(item)

    ranks = Ranks(2)
    with pytest.raises(KeyboardInterrupt):
        ranks.run(reporting, on_report=take)
    assert len(taken) == 1
    assert not any(process.is_alive() for process in ranks.processes)


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_that_does_not_end_the_wait_is_not_lost(tmp_path):
    """As one that comes just before the wait, or reaches another thread: Python only notes it."""

    def interrupt() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    ranks = Ranks(1)
    ranks.run(rank_of)
    timer = threading.Timer(0.5, interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        ranks.run(writing_after, 15.0, tmp_path / "late")
    timer.join()
    assert not (tmp_path / "late").exists()
    assert not any(process.is_alive() for process in ranks.processes)


def test_who_ignores_interrupts_is_not_interrupted():
    """As jobs in the background of a shell: what notes interrupts must not make them count."""

    def interrupt(item: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Ranks(1) as ranks:
            ranks.run(reporting, on_report=interrupt)
    except KeyboardInterrupt:  # would end pytest
        pytest.fail("it was interrupted")
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes in /proc")
@pytest.mark.parametrize("moment", ["starting", "running"])
def test_an_interrupt_reaches_the_caller_only_and_leaves_nobody_behind(moment):
    with started_until(moment) as (process, _):
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of them
        _, errors = process.communicate(timeout=60)
        deadline = time.monotonic() + 60
        while of_session(process.pid):
            assert time.monotonic() < deadline, "ranks were left behind"
            time.sleep(0.05)
    assert process.returncode == -signal.SIGINT
    # An interrupt in an `except` block is printed beneath what was being handled.
    assert errors.count("Traceback") - errors.count("During handling of") == 1
    assert errors.endswith("KeyboardInterrupt\n")


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes in /proc")
@pytest.mark.parametrize(
    "state",
    [
        "run",
        pytest.param("hold the lock", marks=pytest.mark.slow),
        pytest.param("stop", marks=pytest.mark.slow),
        pytest.param("forks", marks=pytest.mark.slow),
    ],
)
def test_ranks_end_with_a_parent_that_is_killed(state):
    """Also in a function that no signal ends, and beside one that holds what the parent held."""
    with started_until("running", state) as (process, ranks):
        assert ranks < {*of_session(process.pid)}
        for pid in ranks if state == "stop" else ():
            os.kill(pid, signal.SIGSTOP)
        process.kill()
        process.wait()
        deadline = time.monotonic() + 30
        while ranks & {*of_session(process.pid)}:
            assert time.monotonic() < deadline, "ranks were left behind"
            time.sleep(0.05)


NOTEBOOK = """
import sys
from ringcoll.errors import ArgumentError
from ringcoll.runtime.launch.processes import Ranks

class Shift:
    def __init__(self, by):
        self.by = by

def shifted(shift):
    import torch.distributed as dist
    return dist.get_rank() + shift.by

with Ranks(2) as ranks:
    print(ranks.run(shifted, Shift(10)), ranks.run(abs, -1))
    sys.modules["cloudpickle"] = None
    print(ranks.run(abs, -2))
    try:
        ranks.run(shifted, Shift(10))
    except ArgumentError as error:
        print(error)
    print(ranks.run(abs, -3))
"""


def test_functions_of_a_notebook_cell_run_on_ranks():
    """A program without a file, as a notebook is: its functions travel, or a message says why."""
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    first, second, message, last = done.stdout.splitlines()
    assert (first, second, last) == ("[10, 11] [1, 1]", "[2, 2]", "[3, 3]")
    assert "put it into a module, or install cloudpickle" in message
    assert "got __main__.shifted" in message


def test_a_function_of_a_function_runs_on_ranks(pool):
    assert pool(2).run(lambda: dist.get_rank() + 1) == [1, 2]


class Unreadable:
    """A value that fails when a rank reads it."""

    def __reduce__(self) -> tuple[object, ...]:
        return int, ("no number",)


def test_what_a_rank_cannot_read_is_an_error_of_the_call():
    with Ranks(2, outlives_errors=True) as ranks:
        with pytest.raises(RankError, match=r"raised ValueError: invalid literal.*no number"):
            ranks.run(print, Unreadable())
        assert ranks.run(len, "four") == [4, 4]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16], ids=str)
def test_a_function_of_a_function_may_hold_tensors(pool, dtype: torch.dtype):
    tensor = torch.tensor([1, 2]).to(dtype)
    assert pool(2).run(lambda other: (tensor.int() + other.int()).tolist(), tensor) == [[2, 4]] * 2
