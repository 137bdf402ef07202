"""Ranks that ``mpiexec`` or ``srun`` has started, told to torch.distributed in the variables of ``torchrun``.

Where rank 0 is and on which port it listens, ``MASTER_ADDR`` and ``MASTER_PORT`` say if they are set. Otherwise the ranks of
``mpiexec`` ask MPI, and those of Slurm take the step's first node, and a port that follows from the numbers of
the job and the step.
"""

from __future__ import annotations

import os
import re
import socket

from ringcoll.errors import ArgumentError
from ringcoll.transport import mpi_library

_STARTED = (  # number of ranks, rank, rank on this host; srun may set the first two of PMI, too, but not the third
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
)
_NODES = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
_PORTS = 15_000, 10_000  # the first one of jobs, and how many there are
_STEP = 101  # ports from one step of a job to the next


def adopt_ranks() -> bool:
    """Whether this process is one of several ranks that a launcher has started; then ``RANK`` and the like are set.

    Raises
    ------
    ArgumentError
        A variable of the launcher is missing, or is no number of a rank.
    MissingExtraError, TransportError
        ``MASTER_ADDR`` is not set, and MPI cannot be asked.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return True
    started = (
        row for row in _STARTED if os.environ.get(row[0], "1") != "1" and row[2] in os.environ
    )
    names = next(started, None)
    if names is None:
        return False
    size, rank, local_rank = map(_number, names)
    if rank >= size:
        raise ArgumentError("no rank", argument=names[1], expected=f"below {size}", got=rank)
    if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        address, port = _place_in_slurm() if names[0].startswith("SLURM") else _place_by_mpi()
        os.environ.setdefault("MASTER_ADDR", address)
        os.environ.setdefault("MASTER_PORT", str(port))
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(local_rank)}
    return True


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not (text.isascii() and text.isdigit()):
        raise ArgumentError(
            "a launcher has set no number", argument=name, expected="0 or more", got=repr(text)
        )
    return int(text)


def _place_by_mpi() -> tuple[str, int]:
    library = mpi_library()
    comm = library.COMM_WORLD
    here = comm.Split_type(library.COMM_TYPE_SHARED)
    is_one_host = here.Get_size() == comm.Get_size()
    here.Free()
    with socket.socket() as free:
        free.bind(("", 0))
        place = "127.0.0.1" if is_one_host else socket.getfqdn(), free.getsockname()[1]
    address, port = comm.bcast(place, root=0)
    return address, port


def _place_in_slurm() -> tuple[str, int]:
    """``node[03-04,7]`` begins with ``node03``; steps of a job have ports of their own."""
    nodes = next((os.environ[name] for name in _NODES if name in os.environ), "")
    first = re.sub(r"\[(\w+)[^]]*\]", r"\1", re.split(r",(?![^[]*\])", nodes)[0])
    if not (first or "MASTER_ADDR" in os.environ):
        raise ArgumentError("Slurm names no node: set MASTER_ADDR", argument=_NODES[0])
    begin, number = _PORTS
    step = _number("SLURM_STEP_ID") if "SLURM_STEP_ID" in os.environ else 0
    return first, begin + (_number("SLURM_JOB_ID") + _STEP * step) % number
