"""What a group costs until its first all-reduce is done, against native gloo: processes that have just begun.

Each program makes its default group and all-reduces 4 bytes, then does the same with further groups of all
ranks. The time is that of the slowest rank, from when all ranks are ready. Programs of both libraries
take turns, and all start from a process that has imported torch and the library. The costs of
messages are known from an earlier program, but in the rows that say otherwise.

Wanted: at most 60 ms for the first group where costs are known, later groups not slower than gloo's.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from compileall import compile_dir
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from common import LOOPBACK, Processes, Table, environment, introduce, parser, write

import ringcoll
from ringcoll.runtime import serve_store

BACKENDS = ("ringcoll", "gloo")
LIMIT = timedelta(seconds=60)


def program(
    rank: int, world_size: int, backend: str, port: int, groups: int, parent: Connection
) -> None:
    """Tell the parent the seconds of each group."""
    store = dist.TCPStore(LOOPBACK, port, None, False, timeout=LIMIT)
    times: list[float] = []
    for number in range(groups):
        parent.send("ready")
        parent.recv()  # all are ready
        start = time.perf_counter()
        group: Any = None
        if number == 0:
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world_size, timeout=LIMIT
            )
        else:
            group = dist.new_group(backend=backend)
        tensor = torch.tensor([float(rank + 1)])
        dist.all_reduce(tensor, group=group)
        times.append(time.perf_counter() - start)
        if tensor.item() != world_size * (world_size + 1) / 2:
            raise ValueError(f"rank {rank}: wrong sum {tensor.item()}")
    parent.send(times)
    parent.recv()
    dist.destroy_process_group()


def run(backend: str, world_size: int, groups: int = 1) -> list[float]:
    """Seconds until each group's first all-reduce is done on the slowest rank."""
    store = serve_store(LOOPBACK)
    with Processes("first_call") as processes:
        ends = [
            processes.start(program, rank, world_size, backend, store.port, groups)[1]
            for rank in range(world_size)
        ]
        answers: list[Any] = []
        for _ in range(groups + 1):
            answers = [end.recv() for end in ends]
            for end in ends:
                end.send("go")
        for process in processes.all:
            process.join()
    return [max(times) for times in zip(*answers, strict=True)]


COLUMNS = {
    "ranks": "count",
    "group": "text",
    "library": "text",
    "fastest quarter": "seconds",
    "median": "seconds",
    "slowest quarter": "seconds",
    "gloo's / its": "ratio",
}


def main() -> None:
    """Measure, and print the table."""
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    options.add_argument("--programs", type=int, default=9, help="programs of each library")
    options.add_argument("--groups", type=int, default=6, help="groups of a program")
    arguments = options.parse_args()
    facts = environment(max(arguments.ranks))
    introduce(facts)
    rows = []
    compile_dir(Path(ringcoll.__file__).parent, quiet=1)  # as an installation does
    with TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        for world_size in arguments.ranks:
            kinds = ("first, costs not known", "first", "later")
            times = {(kind, backend): list[float]() for kind in kinds for backend in BACKENDS}
            for _ in range(arguments.programs):
                shutil.rmtree(Path(folder, "ringcoll"), ignore_errors=True)
                times[kinds[0], "ringcoll"] += run("ringcoll", world_size)
                for backend in BACKENDS:
                    first, *later = run(backend, world_size, arguments.groups)
                    times["first", backend].append(first)
                    times["later", backend] += later
            times[kinds[0], "gloo"] = times["first", "gloo"]
            for (kind, backend), seconds in times.items():
                low, middle, high = statistics.quantiles(seconds, n=4)
                native = statistics.median(times[kind, "gloo"])
                rows.append((world_size, kind, backend, low, middle, high, native / middle))
    caption = f"{arguments.programs} programs of each library, {arguments.groups} groups each"
    table = Table(COLUMNS, rows, caption)
    table.show()
    write(arguments.json, __doc__, facts, [table])


if __name__ == "__main__":
    main()
