"""How much memory ring all-reduce needs beyond the user's tensor.

Counted on the plan (its workspace, in bytes), and measured: the growth of the peak of
the resident memory of each process during the operation.

Wanted: at most two chunks, 2n/k bytes, at 256 MiB on 4 ranks.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from common import environment, introduce, parser, table, write

import ringcoll
from ringcoll.algorithms import schedule_of
from ringcoll.bench.units import as_size, parse_size
from ringcoll.launch import Ranks
from ringcoll.plan import compile_plan
from ringcoll.regions import Layout


def status(name: str) -> int:
    """A line of this process's status, in bytes."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")


def on_rank(nbytes: int, algorithm: str) -> int:
    """Growth of the peak of resident memory, in bytes."""
    tensor = torch.ones(nbytes // 4)
    # Connections, threads and code are there before; one element a chunk is no data.
    ringcoll.all_reduce(torch.ones(dist.get_world_size()), algorithm=algorithm)
    dist.barrier()
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # forgets the peak
    ringcoll.all_reduce(tensor, algorithm=algorithm)
    return status("VmHWM") - before


def workspace(world_size: int, nbytes: int, algorithm: str) -> list[int]:
    """Bytes of working memory in the plan of each rank."""
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
        grown = ranks.run(on_rank, nbytes, options.algorithm)
    planned = workspace(world_size, nbytes, options.algorithm)
    allowed = 2 * nbytes // world_size
    print(f"\n{options.algorithm} all-reduce of {as_size(nbytes)} on {world_size} ranks")
    table(
        ("rank", "plan", "measured", "allowed: 2n/k", "measured / chunk"),
        [
            (
                rank,
                as_size(plan),
                as_size(max(0, growth)),
                as_size(allowed),
                f"{growth * world_size / nbytes:.2f}",
            )
            for rank, (plan, growth) in enumerate(zip(planned, grown, strict=True))
        ],
    )
    found = {"nbytes": nbytes, "algorithm": options.algorithm, "allowed": allowed}
    write(options.json, facts, found | {"planned": planned, "measured": grown})


if __name__ == "__main__":
    main()
