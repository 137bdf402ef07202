"""MPI programs that ``mpiexec`` starts on this host.

Problem: each MPI library brings an ``mpiexec`` of its own, with options of its own. Both Open MPI
and MPICH also read variables of the environment. So the same command line does for both libraries,
and the environment has the rest: any number of ranks on any number of cores, by any user, with
shared memory and the loopback interface for messages. No program is left behind.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ringcoll.errors import RingcollError
from ringcoll.runtime.launch import leashed

__all__ = ["MpiexecError", "beside", "run"]

_GRACE_S = 10.0  # between asking mpiexec to end its ranks and killing it

_ON_THIS_HOST = {
    # Open MPI: more ranks than cores, in version 5 and in 4; no network between ranks
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_btl": "self,sm",
    # MPICH
    "HYDRA_IFACE": "lo",
    "UCX_NET_DEVICES": "lo",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}
_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


class MpiexecError(RingcollError, RuntimeError):
    """An MPI program failed, with the exit status and the output of ``mpiexec``."""

    def __init__(self, message: str, status: int, output: str) -> None:
        self.status, self.output = status, output
        super().__init__(f"{message}\n{output}".rstrip())


def beside(python: Path | None = None) -> Path | None:
    """The ``mpiexec`` beside a Python interpreter, or ``None`` if there is no such file.

    Parameters
    ----------
    python
        Path of the interpreter; by default of this interpreter.
    """
    mpiexec = (Path(sys.executable) if python is None else python).parent / "mpiexec"
    return mpiexec if os.access(mpiexec, os.X_OK) else None


def run(
    mpiexec: Path,
    world_size: int,
    program: Sequence[str],
    *,
    timeout_s: float,
    variables: Mapping[str, str] | None = None,
) -> str:
    """Run a program on k ranks of this host; return its standard output.

    Parameters
    ----------
    mpiexec
        Path of the ``mpiexec`` of the program's MPI library.
    world_size
        Number of ranks.
    program
        The program and its arguments.
    timeout_s
        Time limit in seconds; then all ranks are ended.
    variables
        Variables of the environment, beside the variables of this process.

    Raises
    ------
    MpiexecError
        Some rank failed.
    TimeoutError
        The program took longer than the time limit.
    """
    environment = {**os.environ, **_ON_THIS_HOST, **(variables or {})}
    if os.geteuid() == 0:
        environment |= _AS_ROOT
    process = subprocess.Popen(  # what the caller names
        leashed(str(mpiexec), "-n", str(world_size), *program, by=signal.SIGTERM),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches this process only, which ends the program
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        output, errors = _end(process)
        printed = f"{output}{errors}".strip()
        raise TimeoutError(f"the ranks were not done after {timeout_s:g} s\n{printed}") from None
    except BaseException:
        _end(process)
        raise
    if process.returncode:
        status = process.returncode
        raise MpiexecError(f"mpiexec ended with status {status}", status, output + errors)
    return output


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End ``mpiexec``, which ends its ranks."""
    process.terminate()
    try:
        return process.communicate(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()
