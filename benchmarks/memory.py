"""Memory that ring all-reduce needs beyond the user's tensor.

*Plan* is the working memory that is counted on the plan. *Measured* is the growth of the peak
of each process's resident memory during the operation.

Wanted: at most two chunks, 2n/k bytes, at 256 MiB on 4 ranks.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from common import Table, environment, introduce, parser, write

import ringcoll
from ringcoll.algorithms import schedule_of
from ringcoll.bench.units import as_size, parse_size
from ringcoll.launch.processes import Ranks
from ringcoll.runtime.plan import compile_plan
from ringcoll.runtime.regions import Layout


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
    options = arguments.parse_args()
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
