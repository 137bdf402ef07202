"""``ringcoll run``: the ranks of a script as processes of this host, and the end of one of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, TextIO

import click

from ringcoll.cli.command import command
from ringcoll.cli.parameters import world_size_option
from ringcoll.machine import served

_EXAMPLES = """
ringcoll run --resilient -k 4 train.py
ringcoll run -k 2 train.py --epochs 3
"""

_LOOK_S = 0.05
_GRACE_S = 5.0  # between asking a rank to end and killing it


# Arguments behind the script are the script's own.
@command(examples=_EXAMPLES, context_settings={"allow_interspersed_args": False})
@world_size_option
@click.option("--resilient", is_flag=True, help="Let the other ranks go on when one fails.")
@click.argument("script", type=click.Path(dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(world_size: int, resilient: bool, script: str, arguments: tuple[str, ...]) -> None:
    """Run a script of Python on ranks that are processes of this host.

    The ranks get the variables that init_process_group reads: RANK, LOCAL_RANK, WORLD_SIZE,
    MASTER_ADDR and so on. What they print is printed with their rank. The command holds the store
    at which they meet. If a rank fails, the others are ended, and the exit status is that rank's;
    with --resilient they go on, as they can with ringcoll.resilient, and the exit status is 0 if
    any of them comes to its end. Options of the script stand behind it.
    """
    if not Path(script).is_file():
        raise click.BadParameter(f"File {script!r} does not exist.", param_hint="'SCRIPT'")
    store = served()
    shared = os.environ | {
        "WORLD_SIZE": f"{world_size}",
        "LOCAL_WORLD_SIZE": f"{world_size}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{store.port}",
        # torch's words for a store that the launcher holds, so that rank 0 serves none
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    lost: list[OSError] = []  # why what the ranks print cannot be written
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    ranks: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    try:
        for rank in range(world_size):
            process = subprocess.Popen(  # noqa: S603  # the user's own script
                [sys.executable, "-u", script, *arguments],
                env=shared | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
            ranks.append(process)
            for source, to in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                assert source is not None
                reader = threading.Thread(
                    target=_pass_on, args=(rank, source, to, lost), daemon=True
                )
                reader.start()
                readers.append(reader)
        status = _status(ranks, resilient, lost)
    finally:
        _end(ranks)
        signal.signal(signal.SIGTERM, before)
    for reader in readers:
        reader.join(_GRACE_S)  # a process that a rank has left behind may hold its output open
    sys.exit(status)


def _pass_on(rank: int, source: IO[str], to: TextIO, lost: list[OSError]) -> None:
    """Pass on the lines of a rank, or drop them: a rank with a full pipe would wait for ever."""
    for line in source:
        text = f"[rank {rank}] {line}".removesuffix("\n") + "\n"
        try:
            to.write(text.encode(to.encoding, "replace").decode(to.encoding))
            to.flush()
        except OSError as error:
            lost.append(OSError(error.errno, error.strerror, "the output"))


def _status(ranks: list[subprocess.Popen[str]], resilient: bool, lost: list[OSError]) -> int:
    """Wait for the ranks; the exit status of all of them. Raises what their output is lost for."""
    failed: list[int] = []
    left = {*range(len(ranks))}
    while left:
        for rank in [rank for rank in sorted(left) if ranks[rank].poll() is not None]:
            left.remove(rank)
            code = ranks[rank].returncode
            if code:
                how = f"by signal {-code}" if code < 0 else f"with exit status {code}"
                click.echo(f"ringcoll: rank {rank} has ended {how}", err=True)
                failed.append(128 - code if code < 0 else code)
        if failed and not resilient:
            return failed[0]
        if lost:
            raise lost[0]
        time.sleep(_LOOK_S)
    return 0 if len(failed) < len(ranks) else failed[0]


def _end(ranks: list[subprocess.Popen[str]]) -> None:
    """End the ranks that have not ended."""
    for process in ranks:
        process.terminate()
    deadline = time.monotonic() + _GRACE_S
    for process in ranks:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
