"""``ringcoll run``: the ranks of a script are started, and ended."""

from __future__ import annotations

import io
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import click

from ringcoll.tools.cli.app import command
from ringcoll.tools.cli.options import world_size_option

_POLL_S = 0.05
_GRACE_S = 5.0  # between asking a rank to end and killing it
_PIPE_NBYTES = 1 << 20  # the most that a pipe holds
_END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)  # as for torchrun

Processes = list[subprocess.Popen[bytes]]


# Arguments behind the script are the script's own.
@command(
    examples="""
        ringcoll run --resilient -k 4 train.py
        ringcoll run -k 2 train.py --epochs 3
    """,
    context_settings={"allow_interspersed_args": False},
)
@world_size_option
@click.option("--resilient", is_flag=True, help="Let the other ranks go on when one fails.")
@click.argument("script", type=click.Path(dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(world_size: int, resilient: bool, script: str, arguments: tuple[str, ...]) -> None:
    """Run a script of Python on ranks that are processes of this host.

    The ranks get the variables that init_process_group reads: RANK, LOCAL_RANK, WORLD_SIZE,
    MASTER_ADDR and so on. What they print is printed with their rank. The command holds the store
    at which they meet. If a rank fails, the others are ended, and the exit status is that rank's;
    with --resilient they go on, as they can with ringcoll.training.resilient, and the exit status
    is 0 if any of them comes to its end. Options of the script stand behind it.
    """
    from ringcoll.runtime.launch import leashed
    from ringcoll.runtime.rendezvous import serve_store  # it imports torch

    if not Path(script).is_file():
        raise click.BadParameter(f"File {script!r} does not exist.", param_hint="'SCRIPT'")
    store = serve_store()
    shared = {
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        "WORLD_SIZE": f"{world_size}",
        "LOCAL_WORLD_SIZE": f"{world_size}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{store.port}",
        # torch's words for a store that the launcher holds, so that rank 0 serves none
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    write_errors: list[OSError] = []  # errors of writing the output of ranks
    signals: list[int] = []  # signals that end the command
    ranks: Processes = []
    readers: list[threading.Thread] = []

    def pause(*_: object) -> None:
        _send(ranks, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        _send(ranks, signal.SIGCONT)

    handlers: dict[int, Callable[..., object]] = {signal.SIGTSTP: pause}
    handlers |= dict.fromkeys(_END_SIGNALS, lambda number, _: signals.append(number))
    # A signal that is ignored, as below nohup, stays ignored, by the ranks, too.
    handlers = {n: f for n, f in handlers.items() if signal.getsignal(n) is not signal.SIG_IGN}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    ended, running = os.pipe()
    try:
        for rank in range(world_size):
            process = subprocess.Popen(  # noqa: S603  # the user's own script
                leashed(sys.executable, "-u", script, *arguments),
                env=shared | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # signals reach the rank from here, with its own processes
            )
            ranks.append(process)
            for source, to in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                assert source is not None
                passed = (rank, _Output(source, ended), to, write_errors)
                readers.append(threading.Thread(target=_pass_on, args=passed, daemon=True))
                readers[-1].start()
        status = _status(ranks, resilient, write_errors, signals)
    finally:
        _end(ranks, signals)
        os.close(running)
        for number, handler in before.items():
            signal.signal(number, handler)
    deadline = time.monotonic() + _GRACE_S
    for reader in readers:
        # A command that a signal ends does not wait for the readers of its output.
        reader.join(max(0.0, deadline - time.monotonic()) if signals else None)
    if signal.SIGINT in signals:
        raise KeyboardInterrupt
    sys.exit(status)


class _Output(io.RawIOBase):
    """The output of a rank until all ranks have ended; a pipe may stay open in other processes."""

    def __init__(self, pipe: Any, ended: int) -> None:
        self._pipe, self._ended, self._left = pipe, ended, _PIPE_NBYTES

    def readable(self) -> bool:
        """Whether it can be read, which `io.BufferedReader` asks."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read bytes, or wait for some."""
        if self._ended in _readable(self._pipe.fileno(), self._ended):
            if self._left <= 0 or not _readable(self._pipe.fileno(), limit_ms=0):
                return 0
            self._left -= len(buffer)
        return self._pipe.readinto(buffer)  # type: ignore[no-any-return]


def _readable(*descriptors: int, limit_ms: int | None = None) -> list[int]:
    """Wait until one of some descriptors can be read, or has ended."""
    waiting = select.poll()
    for descriptor in descriptors:
        waiting.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in waiting.poll(limit_ms)]


def _pass_on(rank: int, output: _Output, to: TextIO, write_errors: list[OSError]) -> None:
    """Pass on the lines of a rank, or drop them: a rank with a full pipe would wait for ever."""
    for line in io.TextIOWrapper(io.BufferedReader(output), errors="replace"):
        text = f"[rank {rank}] {line}".removesuffix("\n") + "\n"
        try:
            to.write(text.encode(to.encoding, "replace").decode(to.encoding))
            to.flush()
        except OSError as error:
            write_errors.append(OSError(error.errno, error.strerror, "the output"))


def _status(
    ranks: Processes, resilient: bool, write_errors: list[OSError], signals: list[int]
) -> int:
    """Wait for the ranks; the exit status of all. Raises the first error of writing."""
    failed: list[int] = []
    left = {*range(len(ranks))}
    while left:
        if signals:
            return 128 + signals[0]
        for rank in [rank for rank in sorted(left) if ranks[rank].poll() is not None]:
            left.remove(rank)
            code = ranks[rank].returncode
            if code:
                how = f"by signal {-code}" if code < 0 else f"with exit status {code}"
                click.echo(f"ringcoll: rank {rank} has ended {how}", err=True)
                failed.append(128 - code if code < 0 else code)
        if failed and not resilient:
            return failed[0]
        if write_errors:
            raise write_errors[0]
        time.sleep(_POLL_S)
    return 0 if len(failed) < len(ranks) else failed[0]


def _send(ranks: Processes, number: int) -> None:
    """Send a signal to the ranks that live, and to the processes that these have started."""
    for process in ranks:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)


def _end(ranks: Processes, signals: list[int]) -> None:
    """End the ranks that have not ended: by the first signal; a second signal kills them."""
    _send(ranks, signals[0] if signals else signal.SIGTERM)
    num_heard, deadline = len(signals), time.monotonic() + _GRACE_S
    while any(process.poll() is None for process in ranks):
        if len(signals) > num_heard or time.monotonic() > deadline:
            _send(ranks, signal.SIGKILL)
        time.sleep(_POLL_S)
