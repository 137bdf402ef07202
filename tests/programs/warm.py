"""Programs that start warm, forked from a process that has imported torch: 0.2 s of a processor instead of 1.6 s.

A program is a `WarmProgram`, a `subprocess.Popen`, and a child of the process that starts it. The process
that forks, one for each process that tests, does nothing else. The program runs as Python runs it, in the
main module, and ends with all that Python does at its end; objects that the imports made are not looked at
then (`gc.freeze`).

What only a real start has: a hash seed of its own, so that sets have another order on each rank; variables
that Python or torch read when they begin (``PYTHON...``, ``OMP_NUM_THREADS``); warnings of imports. So of each
kind of program one is started as users start it.
"""

from __future__ import annotations

import atexit
import ctypes
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import warnings
from functools import cache
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from ringcoll.runtime.launch import PRELOADED, Ranks

ROOT = Path(__file__).parents[2]
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: orphans become children of this process (prctl(2))
_MOST_BYTES = 1 << 20
_SERVER = """
import gc, ringcoll.training.backend.process_group, ringcoll.runtime.launch, torch._dynamo
from tests.programs import warm
gc.collect(), gc.freeze()
program = warm.serve({number}, {with_ranks})
if program is not None:
    warm.run(program)
"""


@cache
def _server(with_ranks: bool) -> socket.socket:
    """The process that forks, which ends with its last connection."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER.format(number=theirs.fileno(), with_ranks=with_ranks)],
        pass_fds=[theirs.fileno()], cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


class WarmProgram(subprocess.Popen[str]):
    """`python [-W FILTER]... (-m MODULE | -c CODE | FILE) [ARGUMENT]...`; other options are errors."""

    with_ranks = False
    """Whether the ranks of its `Ranks` are forked from a process of the tests, outside of its session."""

    def _execute_child(self, *args: Any) -> None:
        usual: Any = super()
        given = inspect.signature(usual._execute_child).bind(*args).arguments
        command = list(map(os.fspath, given["args"]))
        assert command[0] == sys.executable, command
        usual_values = {
            "preexec_fn": None,
            "pass_fds": (),
            "shell": False,
            "umask": -1,
            "uid": None,
            "gid": None,
        }
        for name, value in usual_values.items():
            assert given[name] == value, f"{name} is not for programs that start warm"
        request = {
            "command": command[1:],
            "cwd": os.fspath(given["cwd"] or Path.cwd()),
            "environment": dict(os.environ if given["env"] is None else given["env"]),
            "session": bool(given["start_new_session"]),
            "ignores_interrupts": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        }
        ends = [(given["p2cread"], 0), (given["c2pwrite"], 1), (given["errwrite"], 2)]
        server, libc = _server(self.with_ranks), ctypes.CDLL(None)
        libc.prctl(_SUBREAPER, 1)
        try:
            files = [own if end == -1 else end for end, own in ends]
            socket.send_fds(server, [json.dumps(request).encode()], files)
            answer = server.recv(100)
            assert answer, "the process that forks has ended, or cannot fork"
            self.pid = int(answer)
        finally:
            libc.prctl(_SUBREAPER, 0)
        self._child_created = True
        # The program's ends of pipes; a file of the caller stays open.
        piped = {"p2cread": "p2cwrite", "c2pwrite": "c2pread", "errwrite": "errread"}
        for end in {given[own] for own, other in piped.items() if given[other] != -1}:
            os.close(end)
        if (devnull := getattr(self, "_devnull", None)) is not None:
            os.close(devnull)
        self._closed_child_pipe_fds = True


class ProgramWithWarmRanks(WarmProgram):
    """A program whose ranks start warm, too."""

    with_ranks = True


def serve(number: int, with_ranks: bool) -> dict[str, Any] | None:
    """Fork for each request; returns the request in the program, and `None` at the end of the server."""
    connection = socket.socket(fileno=number)
    if with_ranks:
        PRELOADED.append("torch._dynamo")
        with Ranks(1, backend=None):
            pass
        # Its programs ask the same server, of which they are not the parent.
        server: Any = forkserver._forkserver
        server.ensure_running = resource_tracker.ensure_running
    while True:
        data, files, _, _ = socket.recv_fds(connection, _MOST_BYTES, 3)
        if not data:
            return None
        read, write = os.pipe()
        between = os.fork()  # it ends at once, so that the program becomes a child of the tests
        if between == 0:
            if os.fork():
                os._exit(0)
            program = dict(json.loads(data))
            if program["session"]:
                os.setsid()  # before anybody knows the program
            os.write(write, str(os.getpid()).encode())
            connection.close()
            os.close(read)
            os.close(write)
            for standard, file in enumerate(files):
                os.dup2(file, standard)
                os.close(file)
            return program
        os.waitpid(between, 0)
        os.close(write)
        connection.send(os.read(read, 100))
        for file in (read, *files):
            os.close(file)


def run(program: dict[str, Any]) -> None:
    """Be a program, as `python` with its arguments would be."""
    os.environ.clear()
    os.environ.update(program["environment"])
    os.chdir(program["cwd"])
    ignores = program["ignores_interrupts"]
    signal.signal(signal.SIGINT, signal.SIG_IGN if ignores else signal.default_int_handler)
    words = list(program["command"])
    while words[0] == "-W":
        warnings._setoption(words[1])  # type: ignore[attr-defined]
        sys.warnoptions.append(words[1])
        del words[:2]
    names = sys.modules["__main__"].__dict__
    for name in ("gc", "program", "ringcoll", "torch", "warm"):
        names.pop(name)
    if words[0] == "-m":
        sys.path[0], sys.argv[:] = program["cwd"], ["-m", *words[2:]]
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]  # what `python -m` calls
    elif words[0] == "-c":
        sys.path[0], sys.argv[:] = "", ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), names)
    else:
        assert not words[0].startswith("-"), words
        sys.path[0], sys.argv[:] = str(Path(words[0]).resolve().parent), words
        names["__file__"] = words[0]
        exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), names)
