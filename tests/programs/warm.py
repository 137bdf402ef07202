"""Programs that start warm, forked from a process that has imported torch: 0.2 s of a processor instead of 1.6 s.

A program is a `WarmProgram`, a `subprocess.Popen`, and a child of the process that starts it. The process
that forks, one for each process that tests, does nothing else. The program runs as Python runs it, in the
main module, and ends with all that Python does at its end; objects that the imports made are not looked at
then (`gc.freeze`).
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

from ringcoll.launch import PRELOADED, Ranks

ROOT = Path(__file__).parents[2]
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: orphans become children of this process (prctl(2))
_MOST_BYTES = 1 << 20
_SERVER = """
import gc, ringcoll.backend.process_group, ringcoll.launch, torch._dynamo
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
            self.pid = int(server.recv(100))
        finally:
            libc.prctl(_SUBREAPER, 0)
        self._child_created = True
        for end in {end for end, _ in ends} - {-1, given["p2cwrite"], given["c2pread"]}:
            if end > 2:
                os.close(end)


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
            pid = os.fork()
            if pid:
                os.write(write, str(pid).encode())
                os._exit(0)
            connection.close()
            os.close(read)
            os.close(write)
            for standard, file in enumerate(files):
                os.dup2(file, standard)
                os.close(file)
            return dict(json.loads(data))
        os.waitpid(between, 0)
        connection.send(os.read(read, 100))
        for file in (read, write, *files):
            os.close(file)


def run(program: dict[str, Any]) -> None:
    """Be a program, as `python` with its arguments would be."""
    if program["session"]:
        os.setsid()
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
