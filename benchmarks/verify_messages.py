"""Cost of checksums: all-reduce with and without ``verify_messages``.

Two groups of the same 2 ranks, over shared memory and over gloo, one of them with a checksum for each
message (CRC-32, which each end computes, and a message of 8 bytes beside it). They take turns in one run,
on the same tensors. Messages with checksums are not lent: over shared memory a reduction does not read
them in place, which is a part of the cost.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from calls import against, timed
from common import Table, environment, introduce, parser, write

import ringcoll
from ringcoll.runtime import Ranks
from ringcoll.tools.bench import Meeting

TRANSPORTS = ("shared", "gloo")
SIZES = (4, 64 << 10, 1 << 20, 16 << 20)

Row = tuple[object, ...]


def on_rank(transport: str, seconds: float) -> list[Row]:
    """Time all-reduces of each size with checksums against those without: rows of a table."""
    groups = [dist.new_group(), dist.new_group()]
    for group, verifies in zip(groups, (True, False), strict=True):
        ringcoll.use(group, transport=transport, verify_messages=verifies)
    ringcoll.barrier(groups[1])  # it measures the costs by which both choose algorithms
    meeting, rows = Meeting(), []
    for nbytes in SIZES:
        tensor = torch.zeros(nbytes // 4)
        operations = [ringcoll.all_reduce.plan(tensor, group=group) for group in groups]
        rows.append((transport, nbytes, *against(timed(meeting, operations, seconds))))
    meeting.close()
    for group in groups:
        ringcoll.close(group)
    return rows


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--seconds", type=float, default=5.0, help="for each comparison")
    options = arguments.parse_args()
    facts = environment(2)
    introduce(facts)
    rows: list[Row] = []
    for transport in TRANSPORTS:
        with Ranks(2, timeout_s=600.0) as ranks:
            rows += ranks.run(on_rank, transport, options.seconds)[0]
    kinds = ("text", "bytes", "seconds", "share", "seconds", "share", "ratio")
    names = ("transport", "bytes", "verified", "verified: spread", "plain", "plain: spread")
    columns = dict(zip((*names, "/ plain"), kinds, strict=True))
    table = Table(columns, rows, "All-reduce, prepared, 2 ranks.")
    table.show()
    write(options.json, __doc__, facts, [table])


if __name__ == "__main__":
    main()
