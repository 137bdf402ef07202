"""Ranks that share a GPU, with NVIDIA's Multi-Process Service and without it.

Without the service (MPS) the contexts of several processes take turns on a GPU, in slices of time; with
it their work runs at once. A process looks for the service in the folder that
``CUDA_MPS_PIPE_DIRECTORY`` names when it first uses the GPU, and does without if there is none.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["MpsError", "is_used", "state", "with_mps", "without_mps"]

_CONTROL = "nvidia-cuda-mps-control"
_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_ANSWER_S, _START_S = 10.0, 15.0
_LAST_WORDS = 300  # characters

Variables = dict[str, str]


class MpsError(RuntimeError):
    """The service does not run, and cannot be started."""


def _ask(command: str, variables: Mapping[str, str] | None = None) -> str:
    """Ask the daemon that listens in the folder of the variables.

    Raises
    ------
    MpsError
        None listens there, or the program is not installed.
    """
    try:
        done = subprocess.run(
            [_CONTROL],
            input=f"{command}\n",
            env={**os.environ, **(variables or {})},
            capture_output=True,
            text=True,
            timeout=_ANSWER_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        text = " ".join(f"{error.stdout} {error.stderr}".split())
        raise MpsError(text or f"{_CONTROL} ended with status {error.returncode}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MpsError(str(error)) from error
    answer = f"{done.stdout} {done.stderr}".strip()
    if "cannot find" in answer.lower():  # said with status 0, too
        raise MpsError(" ".join(answer.split()))
    return done.stdout.strip()


def state() -> str:
    """Whether the service runs on this machine, in words."""
    try:
        servers = _ask("get_server_list")
    except MpsError as error:
        return f"does not run ({error})"
    return f"runs, servers: {' '.join(servers.split()) or 'none yet'}"


def is_used(variables: Mapping[str, str]) -> bool:
    """Whether a process has used the GPU by way of the service: its server is started then."""
    try:
        return bool(_ask("get_server_list", variables))
    except MpsError:
        return False


@contextmanager
def without_mps() -> Iterator[Variables]:
    """The variables with which processes do not find the service, even if it runs."""
    with tempfile.TemporaryDirectory(prefix="no-mps-") as folder:
        yield {_PIPES: folder}


@contextmanager
def with_mps() -> Iterator[Variables]:
    """The variables with which processes use the service, which is started if it does not run.

    Raises
    ------
    MpsError
        The service cannot be started.
    """
    if state().startswith("runs"):
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="mps-", ignore_cleanup_errors=True) as folder:
        variables = {_PIPES: folder, _LOGS: folder}
        output = Path(folder, "output")
        with output.open("w") as file:
            # In the foreground: what ends the processes of this stage ends the daemon, too.
            try:
                daemon = subprocess.Popen(
                    [_CONTROL, "-f"],
                    env={**os.environ, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                )
            except OSError as error:
                raise MpsError(str(error)) from error
        try:
            _until_it_listens(daemon, variables, output)
            yield variables
        finally:
            with suppress(MpsError):
                _ask("quit", variables)
            _end(daemon)


def _until_it_listens(daemon: subprocess.Popen[bytes], variables: Variables, output: Path) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            _ask("get_server_list", variables)
        except MpsError as error:
            if daemon.poll() is not None or time.monotonic() > deadline:
                words = " ".join(output.read_text(errors="replace").split())[-_LAST_WORDS:]
                raise MpsError(f"it does not start: {words or error}") from error
            time.sleep(0.1)
        else:
            return


def _end(daemon: subprocess.Popen[bytes]) -> None:
    try:
        daemon.wait(_ANSWER_S)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()
