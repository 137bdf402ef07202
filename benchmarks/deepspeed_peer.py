"""All-reduce through shared memory against DeepSpeed's, on the same ranks and in the same run.

DeepSpeed's function is for sums of float32, float16 and bfloat16 on processors with AVX2 (16-bit: AVX-512), in
a single group for each process; ranks that wait never sleep. It is compiled here from the package's sources, by the
machine's compiler. Ours are prepared, on ordinary tensors and on tensors in shared memory.

``make bench-deepspeed`` installs the sources. Wanted: ours ahead at every size from 64 KiB.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from common import Table, environment, introduce, parser, write
from overhead import checked, repeated
from torch.utils import cpp_extension

import ringcoll
from ringcoll.runtime import TRANSPORT_VARIABLES, Ranks
from ringcoll.tools.bench import Meeting, alternate, as_size, parse_size, summarize

SIZES = "4,1K,64K,256K,1M,4M,16M,64M"
CONTENDERS = ("persistent", "shared_tensors", "deepspeed")
_SHM = Path("/dev/shm")  # where DeepSpeed's memory has names


def sources(folder: Path | None) -> Path:
    """The folder ``csrc`` of DeepSpeed: one that is named, or that of the package."""
    found = find_spec("deepspeed") if folder is None else None
    if found is not None and found.submodule_search_locations:
        folder = Path(found.submodule_search_locations[0]) / "ops" / "csrc"
    if folder is None or not (folder / "cpu" / "comm" / "shm.cpp").exists():
        sys.exit("DeepSpeed's sources are not here: make bench-deepspeed installs them")
    return folder


def compiled(folder: Path) -> Any:
    """DeepSpeed's operation; the first call compiles it."""
    comm = folder / "cpu" / "comm"
    with contextlib.redirect_stdout(sys.stderr):
        return cpp_extension.load(
            "deepspeed_shm_comm",
            [str(comm / "shm_interface.cpp"), str(comm / "shm.cpp")],
            extra_cflags=["-O2", "-fopenmp", "-march=native"],  # as its own builder has them
            extra_include_paths=[str(folder / "cpu" / "includes")],
        )


def on_rank(folder: Path, nbytes: int, seconds: float, port: int) -> list[tuple[float, ...]]:
    """Check and time the contenders at one size: samples of each, in seconds."""
    meeting = Meeting()
    os.environ |= {"LOCAL_SIZE": str(meeting.world_size), "MASTER_PORT": str(port)}
    os.environ["MASTER_ADDR"] = "ringcoll"  # both are parts of the memory's name only
    compiled(folder).initialize(meeting.world_size, meeting.rank)
    ordinary = torch.ones(nbytes // 4)
    shared = ringcoll.empty_shared(nbytes // 4).fill_(1)
    theirs = torch.ops.deepspeed.inference_all_reduce_
    functions: list[tuple[torch.Tensor, Callable[[], object]]] = [
        (ordinary, ringcoll.all_reduce.plan(ordinary)),
        (shared, ringcoll.all_reduce.plan(shared)),
        (ordinary, partial(theirs, ordinary)),
    ]
    for tensor, function in functions:
        checked(meeting, tensor, [function])
    ordinary.zero_()  # sums of thousands of operations stay what they are
    shared.zero_()
    samples = alternate(
        meeting,
        [partial(repeated, function) for _, function in functions],
        warmup=2, least=7, most=4000, seconds=seconds,
    )  # fmt: skip
    meeting.close()
    return samples.times_s


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("-k", "--ranks", default="2,4")
    arguments.add_argument("--sizes", default=SIZES)
    arguments.add_argument("--seconds", type=float, default=3.0, help="for each size")
    arguments.add_argument("--csrc", type=Path, help="DeepSpeed's sources, if not the package's")
    options = arguments.parse_args()
    os.environ[TRANSPORT_VARIABLES["cpu"]] = "shared"
    folder = sources(options.csrc).resolve()
    compiled(folder)
    worlds = [int(number) for number in options.ranks.split(",")]
    facts = environment(max(worlds), "shared")
    introduce(facts)
    before = {*_SHM.iterdir()}
    rows = []
    try:
        for number, (world_size, text) in enumerate(product(worlds, options.sizes.split(","))):
            nbytes = parse_size(text)
            with Ranks(world_size, timeout_s=600.0) as ranks:
                # A process can have one group of DeepSpeed's, and one name for its memory.
                name = 10 * os.getpid() + number
                times = ranks.run(on_rank, folder, nbytes, options.seconds, name)[0]
            summaries = [summarize(samples) for samples in times]
            medians = [summary.p50_s for summary in summaries]
            ahead = [medians[-1] / median for median in medians[:-1]]
            rows.append((world_size, as_size(nbytes), *medians, *ahead,
                         max(summary.spread for summary in summaries)))  # fmt: skip
    finally:
        for left in {*_SHM.iterdir()} - before:
            if "allreduce" in left.name:
                left.unlink(missing_ok=True)
    table = Table(
        {"ranks": "count", "size": "text"}
        | dict.fromkeys(CONTENDERS, "seconds")
        | {"persistent ahead": "ratio", "shared_tensors ahead": "ratio", "largest spread": "share"},
        rows,
        "All-reduce of float32, sum, in place: medians, and DeepSpeed's median over ours.",
    )
    table.show()
    write(options.json, __doc__, facts, [table])


if __name__ == "__main__":
    main()
