"""Cost of a call: public functions against prepared operations, code by hand, and gloo.

*Functions*: every collective with blocks of 4 bytes and 64 KiB on 2 ranks, over threads and over
UCX; the public function against the operation that its ``plan`` prepares. Wanted at 4 bytes: at
most 1.3 times the time of the prepared operation.

*By hand*: all-reduce of 4 bytes on 2 ranks over UCX against an exchange of 4 bytes over the same
transport and the addition. Wanted: at most 1.5 times the time of the code by hand.

*Backend*: 20 all-reduces of 4 bytes, and a step of torch's DistributedDataParallel on an MLP of
4 layers of 256, on the backend ``ringcoll`` and on gloo, on an idle machine and with busy loops
beside the ranks. Wanted: 1.2 times gloo's speed on an idle machine, gloo's speed beside 2 loops.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common import Table, busy_loops, environment, introduce, parser, write
from torch import nn

import ringcoll
from ringcoll.runtime import Message, Ranks, communicator
from ringcoll.tools.bench import Meeting, Summary, alternate, summarize

PARTS = ("functions", "by hand", "backend")
SIZES = (4, 64 << 10)
MANY, LAYERS, WIDTH, BATCH = 20, 4, 256, 32
_TAG, _LIMIT_S = 1, 300.0

Row = tuple[object, ...]


@dataclass(frozen=True)
class ThreadMeeting:
    """`ringcoll.tools.bench.Meeting` for ranks that are threads of one process."""

    rank: int
    barrier: threading.Barrier
    items: list[Any]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.items)

    def start(self) -> None:
        """Wait until all ranks have come."""
        self.barrier.wait()

    def gather(self, item: Any) -> list[Any]:
        """Return the items of all ranks."""
        self.items[self.rank] = item
        self.barrier.wait()
        items = list(self.items)
        self.barrier.wait()
        return items

    def agree(self, number: int) -> int:
        """Return rank 0's number."""
        return int(self.gather(number)[0])

    def over_ranks(self, times_s: list[list[float]], how: str) -> list[tuple[float, ...]]:
        """Return the time of the slowest rank for each sample."""
        samples = zip(*self.gather(times_s), strict=True)
        return [tuple(map(max, zip(*ranks, strict=True))) for ranks in samples]


def repeated(function: Callable[[], object], times: int) -> None:
    """Do so many operations, as `alternate` asks for them."""
    for _ in range(times):
        function()


def timed(
    meeting: Any, functions: Sequence[Callable[[], object]], seconds: float, turn: int | None = None
) -> list[Summary]:
    """Time functions that take turns; called by all ranks alike."""
    samples = alternate(
        meeting,
        [partial(repeated, function) for function in functions],
        warmup=3,
        least=7,
        most=5000,
        seconds=seconds,
        turn=turn,
    )
    return [summarize(times) for times in samples.times_s]


# --- functions ------------------------------------------------------------------------


def calls(rank: int, world_size: int, nbytes: int) -> dict[str, tuple[Any, ...]]:
    """The arguments of each public function, for blocks of so many bytes."""
    block, whole = torch.zeros(nbytes // 4), torch.zeros(world_size * nbytes // 4)
    blocks = list(torch.zeros(world_size, nbytes // 4)) if rank == 0 else None
    return {
        "all_reduce": (block,),
        "reduce": (block, 0),
        "broadcast": (block, 0),
        "all_gather_single": (whole, block),
        "reduce_scatter_single": (block, whole),
        "gather": (block, blocks, 0),
        "scatter": (block, blocks, 0),
        "all_to_all_single": (torch.zeros_like(whole), whole),
        "barrier": (),
    }


def compare_functions(group: Any, meeting: Any, rank: int, seconds: float) -> list[Row]:
    """Time every public function against its prepared operation: rows of a table."""
    rows: list[Row] = []
    for nbytes in SIZES:
        for name, arguments in calls(rank, 2, nbytes).items():
            if name == "barrier" and nbytes != SIZES[0]:  # it moves no block
                continue
            public = getattr(ringcoll, name)
            functions = (
                partial(public, *arguments, group=group),
                public.plan(*arguments, group=group),
            )
            rows.append((name, nbytes, *against(timed(meeting, functions, seconds))))
    return rows


def against(summaries: Sequence[Summary]) -> Row:
    """Two medians, each with its spread, and their ratio."""
    own, peer = summaries
    return own.p50_s, own.spread, peer.p50_s, peer.spread, own.p50_s / peer.p50_s


def functions_over_threads(seconds: float) -> list[Row]:
    """Compare the functions on 2 ranks that are threads."""
    barrier, items = threading.Barrier(2, timeout=_LIMIT_S), [None, None]

    def on_rank(group: ringcoll.LocalGroup) -> list[Row]:
        meeting = ThreadMeeting(group.rank(), barrier, items)
        return compare_functions(group, meeting, group.rank(), seconds)

    rows: list[Row] = ringcoll.run_threads(on_rank, 2)[0]
    return rows


def functions_over_ucx(seconds: float) -> list[Row]:
    """Compare the functions on 2 ranks that are processes; called on each."""
    ringcoll.use(transport="ucx")
    meeting = Meeting()
    rows = compare_functions(None, meeting, meeting.rank, seconds)
    meeting.close()
    return rows


# --- by hand --------------------------------------------------------------------------


def by_hand(seconds: float) -> list[Row]:
    """Time all-reduce of 4 bytes on 2 ranks against an exchange and an addition."""
    ringcoll.use(transport="ucx")
    tensor, incoming = torch.zeros(1), torch.zeros(1)
    ringcoll.all_reduce(tensor)  # the ranks have met, and connected
    transport = communicator(None, tensor.device).transport
    peer = 1 - dist.get_rank()
    receives, sends = [Message(peer, incoming, _TAG)], [Message(peer, tensor, _TAG)]

    def exchange() -> None:
        for handle in transport.post(receives, sends):
            transport.wait(handle, _LIMIT_S)
        tensor.add_(incoming)

    meeting = Meeting()
    functions = {
        "public function": partial(ringcoll.all_reduce, tensor),
        "prepared operation": ringcoll.all_reduce.plan(tensor),
        "by hand": exchange,
    }
    summaries = timed(meeting, list(functions.values()), seconds)
    meeting.close()
    hand_s = summaries[-1].p50_s
    return [
        (name, summary.p50_s, summary.spread, summary.p50_s / hand_s)
        for name, summary in zip(functions, summaries, strict=True)
    ]


# --- backend --------------------------------------------------------------------------


def all_reduces(group: Any, tensors: Sequence[torch.Tensor], async_op: bool) -> None:
    """All-reduce tensors: one after the other, or all are started and then waited for."""
    works = [dist.all_reduce(tensor, group=group, async_op=async_op) for tensor in tensors]
    for work in works if async_op else ():
        work.wait()


def trainer(group: Any) -> Callable[[], None]:
    """Make a training step of torch's DistributedDataParallel."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = nn.parallel.DistributedDataParallel(nn.Sequential(*layers), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return step


def on_backends(seconds: float) -> list[Row]:
    """Time all-reduces and training steps on the backend ringcoll against gloo."""
    gloo = dist.new_group(backend="gloo")
    tensors = [torch.zeros(1) for _ in range(MANY)]
    groups = (None, gloo)
    pairs: dict[str, list[Callable[[], None]]] = {
        f"{MANY} all-reduces, {how}": [partial(all_reduces, g, tensors, async_op) for g in groups]
        for how, async_op in (("blocking", False), ("async_op", True))
    }
    pairs["step of DDP"] = [trainer(group) for group in groups]
    meeting = Meeting()
    rows = [(what, *against(timed(meeting, pair, seconds, 1))) for what, pair in pairs.items()]
    meeting.close()
    dist.destroy_process_group(gloo)
    return rows


def measure_backends(worlds: Sequence[int], busy: int, seconds: float) -> list[Row]:
    """Compare the backends on each number of ranks, idle and beside busy loops."""
    rows: list[Row] = []
    for world_size in worlds:
        with Ranks(world_size, backend="ringcoll", timeout_s=600.0) as ranks:
            for loops in dict.fromkeys((0, busy)):
                with busy_loops(loops):
                    measured = ranks.run(on_backends, seconds)[0]
                rows += [
                    (what, world_size, loops, *values, 1 / values[-1]) for what, *values in measured
                ]
    return rows


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--parts", default=",".join(PARTS), help="some of %(default)s")
    arguments.add_argument("-k", "--ranks", default="2,4", help="of the part backend")
    arguments.add_argument("--busy", type=int, default=2, metavar="N", help="number of busy loops")
    arguments.add_argument("--seconds", type=float, default=3.0, help="for each comparison")
    options = arguments.parse_args()
    parts, worlds = options.parts.split(","), [int(number) for number in options.ranks.split(",")]
    if unknown := set(parts) - set(PARTS):
        sys.exit(f"--parts: expected some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    facts = environment(max(worlds))
    introduce(facts)
    tables: list[Table] = []

    def show(caption: str, columns: dict[str, str], rows: Sequence[Row]) -> None:
        tables.append(Table(columns, rows, caption))
        tables[-1].show()

    def pair(own: str, peer: str, ratio: str) -> dict[str, str]:
        names = (own, f"{own}: spread", peer, f"{peer}: spread", ratio)
        return dict(zip(names, ("seconds", "share", "seconds", "share", "ratio"), strict=True))

    columns = {"function": "text", "block": "bytes", **pair("public", "prepared", "/ prepared")}
    if "functions" in parts:
        show("Functions over threads.", columns, functions_over_threads(options.seconds))
        with Ranks(2, timeout_s=3600.0) as ranks:
            rows = ranks.run(functions_over_ucx, options.seconds)[0]
        show("Functions over UCX.", columns, rows)
    if "by hand" in parts:
        with Ranks(2, timeout_s=3600.0) as ranks:
            rows = ranks.run(by_hand, 5 * options.seconds)[0]
        names = {"contender": "text", "median": "seconds", "spread": "share", "/ by hand": "ratio"}
        show("All-reduce of 4 bytes, 2 ranks, over UCX.", names, rows)
    if "backend" in parts:
        columns = {"what": "text", "k": "count", "busy loops": "count"}
        columns |= pair("ringcoll", "gloo", "/ gloo") | {"times gloo's speed": "ratio"}
        rows = measure_backends(worlds, options.busy, 2 * options.seconds)
        show("The backend ringcoll against gloo.", columns, rows)
    write(options.json, __doc__, facts, tables)


if __name__ == "__main__":
    main()
