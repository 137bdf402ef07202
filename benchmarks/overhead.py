"""Overhead of schedule, plan and executor: ring all-reduce against a ring written by hand.

Both work in place on the same tensors, over the same process group, with the same
calls: ``recv``, ``send`` and ``wait`` of the gloo process group that ringcoll made for itself.
A third contender is the loop that most people write first: dist.isend and dist.irecv.

Wanted: at most 1.05 times the hand loop from 1 MiB up, and no slower at 4 bytes.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from common import Table, environment, introduce, parser, write

import ringcoll
from ringcoll.runtime import TRANSPORT_VARIABLES, Ranks, communicator
from ringcoll.tools.bench import Meeting, Oracle, alternate, count_wrong, parse_size, summarize

SIZES = (4, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
CONTENDERS = ("ringcoll", "by hand", "isend/irecv")


class HandRing:
    """The ring, written with nothing but send and receive."""

    def __init__(self, tensor: torch.Tensor, group: Any) -> None:
        self.tensor, self.group = tensor, group
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.next_rank = (self.rank + 1) % self.world_size
        self.prev_rank = (self.rank - 1) % self.world_size
        self.staging = torch.empty_like(tensor[: -(-len(tensor) // self.world_size)])

    def start(self, outgoing: torch.Tensor, incoming: torch.Tensor) -> tuple[Any, Any]:
        """Post the receive first: a send completes only when it is met."""
        if self.group is None:
            receive = dist.irecv(incoming, self.prev_rank)
            return receive, dist.isend(outgoing, self.next_rank)
        receive = self.group.recv([incoming], self.prev_rank, 0)
        return receive, self.group.send([outgoing], self.next_rank, 0)

    def __call__(self) -> None:
        """Reduce-scatter, then all-gather."""
        rank, world_size = self.rank, self.world_size
        chunks = self.tensor.tensor_split(world_size)
        for step in range(world_size - 1):
            outgoing = chunks[(rank - step - 1) % world_size]
            mine = chunks[(rank - step - 2) % world_size]
            incoming = self.staging[: len(mine)]
            receive, send = self.start(outgoing, incoming)
            receive.wait()
            torch.add(incoming, mine, out=mine)
            send.wait()
        for step in range(world_size - 1):
            outgoing = chunks[(rank - step) % world_size]
            incoming = chunks[(rank - step - 1) % world_size]
            receive, send = self.start(outgoing, incoming)
            receive.wait()
            send.wait()


def repeated(function: Any, times: int) -> None:
    """Do so many operations, as `alternate` asks for them."""
    for _ in range(times):
        function()


def checked(meeting: Meeting, tensor: torch.Tensor, functions: list[Any]) -> None:
    """Check that every function computes the sum, on every rank."""
    oracle = Oracle("all_reduce", "sum", tensor.dtype, meeting.world_size)
    expected = oracle.output(meeting.rank, tensor.numel())
    assert expected is not None
    for function in functions:
        tensor.copy_(oracle.input(meeting.rank, tensor.numel()))
        function()
        (wrong,) = meeting.totals(count_wrong(tensor, expected))
        if wrong:
            raise RuntimeError(f"{wrong} elements are wrong")


def on_rank(nbytes: int, seconds: float) -> tuple[list[tuple[float, ...]], int]:
    """Check and time the contenders at one size."""
    ringcoll.all_reduce(torch.ones(1))  # the ranks have met, and connected
    transport: Any = communicator(None, torch.device("cpu")).transport
    tensor = torch.ones(nbytes // 4)
    functions: list[Any] = [
        partial(ringcoll.all_reduce, tensor, algorithm="ring"),
        HandRing(tensor, transport._group),
        HandRing(tensor, None),
    ]
    meeting = Meeting()
    checked(meeting, tensor, functions)
    samples = alternate(
        meeting,
        [partial(repeated, function) for function in functions],
        warmup=2,
        least=7,
        most=400,
        seconds=seconds,
    )
    meeting.close()
    return samples.times_s, samples.turns[0]


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("-k", "--ranks", type=int, default=4)
    arguments.add_argument("--sizes", default=",".join(map(str, SIZES)))
    arguments.add_argument("--seconds", type=float, default=10.0, help="for each size")
    options = arguments.parse_args()
    os.environ[TRANSPORT_VARIABLES["cpu"]] = "gloo"
    facts = environment(options.ranks)
    introduce(facts)
    rows = []
    with Ranks(options.ranks, timeout_s=600.0) as ranks:
        for nbytes in map(parse_size, options.sizes.split(",")):
            times, turn = ranks.run(on_rank, nbytes, options.seconds)[0]
            summaries = dict(zip(CONTENDERS, map(summarize, times), strict=True))
            by_hand = summaries["by hand"]
            rows += [
                (
                    nbytes,
                    name,
                    summary.p50_s,
                    summary.spread,
                    summary.p50_s / by_hand.p50_s,
                    summary.samples * turn,
                )
                for name, summary in summaries.items()
            ]
    columns = {
        "size": "bytes",
        "contender": "text",
        "median": "seconds",
        "spread": "share",
        "/ by hand": "ratio",
        "operations": "count",
    }
    table = Table(columns, rows, f"{options.ranks} ranks.")
    table.show()
    write(options.json, __doc__, facts, [table])


if __name__ == "__main__":
    main()
