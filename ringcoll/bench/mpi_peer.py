"""Measure an MPI library's own collectives, in the rounds of `ringcoll.bench.rounds`; a script.

The script runs on every rank under the library's ``mpiexec``, in an environment that has mpi4py,
numpy and lazy_loader, and no torch; the package is found beside the script::

    mpiexec -n 4 python -P mpi_peer.py REQUEST

REQUEST is JSON: ``collective``, ``op``, ``dtype``, ``root``, ``modes``, ``warmup``, ``least``,
``most``, ``seconds``, ``over_ranks``, ``check``, ``blocking``, ``writes``, and ``shapes``, a list
of [send_numel, recv_numel]. Rank 0 prints JSON: ``library``, and ``found``, for each shape a list
of [in_place, samples_s, turn, wrong]; or ``refused``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial, reduce
from pathlib import Path
from typing import Any

import numpy as np

_NO_TURNS = 1  # of `blocking`
_SETTINGS = ("warmup", "least", "most", "seconds", "over_ranks")

_DTYPES = {  # of numpy, by the names of nccl-tests
    **{f"{kind}{bits}": f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    "float": "float32",
    "double": "float64",
    "complex64": "complex64",
    "complex128": "complex128",
}
_OPS: dict[str, tuple[str, Callable[..., Any]]] = {
    "none": ("SUM", np.add),
    "sum": ("SUM", np.add),
    "prod": ("PROD", np.multiply),
    "max": ("MAX", np.maximum),
    "min": ("MIN", np.minimum),
    "band": ("BAND", np.bitwise_and),
    "bor": ("BOR", np.bitwise_or),
    "bxor": ("BXOR", np.bitwise_xor),
}

Array = Any  # of numpy; types may be checked in another environment than the script runs in


def own_input(rank: int, numel: int, dtype: Any) -> Array:
    """Ones and twos that differ by rank and index: every reduction of them is exact."""
    index = np.arange(numel, dtype=np.int64)
    return (1 + (index // 3 + index * (rank + 1) + rank) % 2).astype(dtype)


class MpiPeer:
    """A collective on buffers of one shape."""

    def __init__(self, mpi: Any, request: dict[str, Any], send_numel: int, recv_numel: int) -> None:
        self.mpi, self.comm = mpi, mpi.COMM_WORLD
        self.rank, self.world_size = self.comm.Get_rank(), self.comm.Get_size()
        self.collective, self.op = request["collective"], request["op"]
        self.root, self.dtype = max(0, request["root"]), np.dtype(_DTYPES[request["dtype"]])
        self.send_numel, self.recv_numel = send_numel, recv_numel
        self.numel = min(send_numel, recv_numel)  # of a block, where there are blocks
        self.out = np.ones(recv_numel, self.dtype)
        self.inp = own_input(self.rank, send_numel, self.dtype)
        self.whole = np.ones(max(send_numel, recv_numel), self.dtype)

    def block(self, index: int) -> slice:
        """The elements of a block in the larger side."""
        return slice(index * self.numel, (index + 1) * self.numel)

    def fill(self, in_place: bool) -> None:
        """Put the inputs into their places, and garbage elsewhere."""
        self.out[:] = 77
        if in_place:
            is_gathered = self.send_numel < self.recv_numel
            self.whole[:] = 77
            self.whole[self.block(self.rank) if is_gathered else slice(self.send_numel)] = self.inp

    def write(self, index: int) -> None:
        """Write the inputs of every mode anew, before the turn of one of them."""
        self.inp[:] = 1
        self.whole[:] = 1

    def call(self, in_place: bool) -> None:
        """Run the collective once."""
        comm, root, here = self.comm, self.root, self.mpi.IN_PLACE
        op = getattr(self.mpi, _OPS[self.op][0])
        inp, out, whole = self.inp, self.out, self.whole
        source, target = (here, whole) if in_place else (inp, out)
        is_root = self.rank == root
        match self.collective:
            case "all_reduce":
                comm.Allreduce(source, target, op)
            case "reduce" if in_place:
                comm.Reduce(here if is_root else whole, whole if is_root else None, op, root)
            case "reduce":
                comm.Reduce(inp, out if is_root else None, op, root)
            case "broadcast":
                if is_root and not in_place:
                    out[:] = inp
                comm.Bcast(target, root)
            case "all_gather":
                comm.Allgather(source, target)
            case "reduce_scatter":
                comm.Reduce_scatter_block(source, target, op)
            case "gather" if in_place:
                mine = whole[self.block(self.rank)]
                comm.Gather(here if is_root else mine, whole if is_root else None, root)
            case "gather":
                comm.Gather(inp, out if is_root else None, root)
            case "scatter" if in_place:
                mine = whole[self.block(self.rank)]
                comm.Scatter(whole if is_root else None, here if is_root else mine, root)
            case "scatter":
                comm.Scatter(inp if is_root else None, out, root)
            case "all_to_all":
                comm.Alltoall(inp, out)
            case "scan" | "exscan":
                if self.collective == "scan" or self.world_size > 1:  # rank 0 alone has no result
                    getattr(comm, self.collective.capitalize())(source, target, op)
            case _:
                comm.Barrier()

    def wrong(self, in_place: bool) -> int:
        """Elements of the result that are wrong on this rank."""
        from ringcoll.schedule import contract

        k, rules = self.world_size, contract(self.collective)
        blocks = rules.outputs(self.rank, k, self.root)
        if rules.at_least_once or not blocks:
            return 0
        every = [own_input(rank, self.send_numel, self.dtype) for rank in range(k)]
        numel = max(self.send_numel, self.recv_numel) // rules.blocks_of_rank(k)
        if rules.reduces:
            start = blocks[0] * numel
            every = every[: rules.contributors(self.rank, k)]
            wanted = reduce(_OPS[self.op][1], every)[start : start + numel]
        else:
            pieces = []
            for block in blocks:
                source = rules.owner(block, k, self.root)
                first = rules.inputs(source, k, self.root)[0]
                pieces.append(every[source][(block - first) * numel :][:numel])
            wanted = np.concatenate(pieces)
        result = self.whole if in_place else self.out
        if in_place and rules.rooted and self.recv_numel < self.send_numel:
            result = result[self.block(self.rank)]
        return int((result[: wanted.size] != wanted).sum())


class MpiMeeting:
    """The meeting point of the ranks, for `alternate`."""

    def __init__(self, mpi: Any) -> None:
        self.mpi, self.comm = mpi, mpi.COMM_WORLD
        self.world_size = self.comm.Get_size()

    def start(self) -> None:
        """Wait until all ranks have come."""
        self.comm.Barrier()

    def agree(self, number: int) -> int:
        """Give all ranks the number of rank 0."""
        return int(self.comm.bcast(number, 0))

    def over_ranks(self, times_s: list[list[float]], how: str) -> list[tuple[float, ...]]:
        """Combine times that every rank has measured."""
        table = np.array(times_s)
        if how == "rank0":
            table = self.comm.bcast(table, 0)
        else:
            own, op = table.copy(), {"avg": "SUM", "min": "MIN", "max": "MAX"}[how]
            self.comm.Allreduce(own, table, getattr(self.mpi, op))
            table = table / self.world_size if how == "avg" else table
        return [tuple(row) for row in table.tolist()]


def several(call: Callable[[], object], times: int) -> None:
    """Call a function so many times."""
    for _ in range(times):
        call()


def measure(mpi: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Measure all shapes."""
    from ringcoll.bench import alternate
    from ringcoll.schedule import contract

    answer: dict[str, Any] = {"library": mpi.Get_library_version().split(",")[0].split("\n")[0]}
    if request["dtype"] not in _DTYPES:
        return answer | {"refused": f"numpy and MPI have no {request['dtype']}"}
    if request["op"] not in _OPS:
        return answer | {"refused": f"MPI has no operator {request['op']}"}
    answer["found"] = []
    for send_numel, recv_numel in request["shapes"]:
        peer = MpiPeer(mpi, request, send_numel, recv_numel)
        rules = contract(peer.collective)
        can_be_in_place = rules.in_place and not rules.at_least_once
        modes = [mode for mode in request["modes"] if can_be_in_place or not mode]
        wrong: list[int | None] = []
        for mode in modes:
            peer.fill(mode)
            peer.call(mode)
            wrong.append(peer.comm.allreduce(peer.wrong(mode)) if request["check"] else None)
        peer.whole[:] = 1  # what is reduced again and again should stay finite
        samples = alternate(
            MpiMeeting(mpi),
            [partial(several, partial(peer.call, mode)) for mode in modes],
            turn=1 if request["blocking"] == _NO_TURNS or request["writes"] else None,
            before=peer.write if request["writes"] else None,
            **{name: request[name] for name in _SETTINGS},
        )
        rows = zip(modes, samples.times_s, samples.turns, wrong, strict=True)
        answer["found"].append([list(row) for row in rows])
    return answer


def main() -> None:
    """Measure, and print on rank 0."""
    sys.path.append(str(Path(__file__).parents[2]))  # last: the environment has its own numpy
    from mpi4py import MPI

    answer = measure(MPI, json.loads(sys.argv[1]))
    if MPI.COMM_WORLD.Get_rank() == 0:
        sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
