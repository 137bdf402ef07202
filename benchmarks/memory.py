"""Memory that ring all-reduce needs beyond the user's tensor.

*Plan* is the working memory that is counted on the plan. *Measured* is the growth of the peak
of each process's resident memory during the operation.

Wanted: at most two chunks, 2n/k bytes, at 256 MiB on 4 ranks.

With ``--operations`` it measures what rank 0 holds while it runs so many mixed collectives of torch's API on the backend:
its own resident memory after ``malloc_trim``, and what malloc has given out. Wanted: 100,000 operations within 2 MB,
from the first tenth on.
"""

from __future__ import annotations

import ctypes
import gc
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Table, environment, introduce, parser, write

import ringcoll
from ringcoll.runtime import Ranks
from ringcoll.runtime.operation import Layout, compile_plan
from ringcoll.schedules.algorithms import schedule_of
from ringcoll.tools.bench import as_size, parse_size


def status(name: str) -> int:
    """Read a line of this process's status, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def on_rank(nbytes: int, algorithm: str) -> int:
    """Measure the growth of the peak of resident memory, in bytes."""
    tensor = torch.ones(nbytes // 4)
    # Connections, threads and code exist afterwards; one element a chunk is no data.
    ringcoll.all_reduce(torch.ones(dist.get_world_size()), algorithm=algorithm)
    dist.barrier()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # forgets the peak
    ringcoll.all_reduce(tensor, algorithm=algorithm)
    return status("VmHWM") - before


class Heap(ctypes.Structure):
    """``struct mallinfo2`` of the GNU C library: the eighth number is of bytes in use."""

    _fields_ = [
        ("before", ctypes.c_size_t * 7),
        ("used", ctypes.c_size_t),
        ("after", ctypes.c_size_t * 2),
    ]  # ctypes wants a list


def held() -> tuple[int, int, int]:
    """Resident memory of its own, bytes that malloc has given out, and blocks of Python's."""
    gc.collect()
    library = ctypes.CDLL(None)
    library.malloc_trim(0)
    library.mallinfo2.restype = Heap
    return status("RssAnon"), library.mallinfo2().used, sys.getallocatedblocks()


def on_rank_for_long(number: int, num_groups: int) -> list[tuple[int, int, int]]:
    """Run random collectives, the same on all ranks; what is held after each tenth of them."""
    choose, rows, group, size = random.Random(0), [], None, dist.get_world_size()
    for index in range(number):
        if index % (number // num_groups) == 0:
            if group is not None:
                dist.destroy_process_group(group)
            group = dist.new_group(range(size))
        x = torch.full((choose.choice((1, 7, 300, 2000, 9000)),), float(dist.get_rank() + 1))
        match choose.randrange(6):
            case 0:
                dist.all_reduce(x, group=group)
                assert x[0] == size * (size + 1) / 2
            case 1:
                dist.all_reduce(x, group=group, async_op=True).wait()
            case 2:
                dist.broadcast(x, 0, group=group)
                assert x[0] == 1.0
            case 3:
                dist.all_gather([torch.empty_like(x) for _ in range(size)], x, group=group)
            case 4:
                dist.reduce_scatter(torch.empty_like(x), [x.clone()] * size, group=group)
            case _:
                dist.barrier(group=group)
        if (index + 1) % (number // 10) == 0:
            rows.append(held())
    return rows


def for_long(options: Any) -> None:
    """Measure many operations, print, write."""
    number, num_groups = options.operations, options.groups
    facts = environment(options.ranks)
    introduce(facts)
    with Ranks(options.ranks, backend="ringcoll", timeout_s=3600.0) as ranks:
        rows = ranks.run(on_rank_for_long, number, num_groups)[0]
    columns = {"operations": "count", "resident": "bytes", "malloc": "bytes", "Python": "count"}
    counted = [((index + 1) * (number // 10), *row) for index, row in enumerate(rows)]
    grown = max(row[0] for row in rows) - rows[0][0]
    caption = (
        f"{number} mixed operations on {options.ranks} ranks, {num_groups} groups one after the other: "
        f"{grown / 1e6:.1f} MB more than after the first tenth."
    )
    table = Table(columns, counted, caption)
    table.show()
    write(options.json, __doc__, facts, [table])


def workspace(world_size: int, nbytes: int, algorithm: str) -> list[int]:
    """Count the bytes of working memory in the plan of each rank."""
    schedule = schedule_of("all_reduce", algorithm, world_size)
    layout = Layout(((0, nbytes // 4),), in_place=True)
    return [4 * compile_plan(schedule, rank, layout).workspace_numel for rank in range(world_size)]


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("-k", "--ranks", type=int, default=4)
    arguments.add_argument("--nbytes", default="256M")
    arguments.add_argument("--algorithm", default="ring")
    arguments.add_argument("--operations", type=int, default=0)
    arguments.add_argument("--groups", type=int, default=1, help="with --operations")
    options = arguments.parse_args()
    if options.operations:
        for_long(options)
        return
    nbytes, world_size = parse_size(options.nbytes), options.ranks
    facts = environment(world_size)
    introduce(facts)
    with Ranks(world_size, timeout_s=600.0) as ranks:
        growths = ranks.run(on_rank, nbytes, options.algorithm)
    planned = workspace(world_size, nbytes, options.algorithm)
    columns = {
        "rank": "count",
        "plan": "bytes",
        "measured": "bytes",
        "allowed: 2n/k": "bytes",
        "measured / chunk": "ratio",
    }
    rows = [
        (rank, plan, max(0, growth), 2 * nbytes // world_size, growth * world_size / nbytes)
        for rank, (plan, growth) in enumerate(zip(planned, growths, strict=True))
    ]
    caption = f"{options.algorithm} all-reduce of {as_size(nbytes)} on {world_size} ranks."
    table = Table(columns, rows, caption)
    table.show()
    write(options.json, __doc__, facts, [table])


if __name__ == "__main__":
    main()
