"""Measure collectives on real processes, against each other and torch's own.

================  =============================================================
`exact`           inputs whose exact result is known
`contenders`      one call, by ringcoll or by torch.distributed; sizes
`measure`         the rounds, on every rank
`limits`          what transport and memory allow: an exchange, an addition, a copy
`efficiency`      how near the contenders come to that
`peers`           MPI libraries beside ours; `mpi_peer` is what their ranks run
`summary`         statistics, bandwidths
`environment`     what a measurement has to be read with
`table`           the table and the JSON of nccl-tests
`findings`        who wins where, in sentences
`plot`            curves; needs matplotlib
`gpu`             kernels and collectives on a GPU, for ``benchmarks/gpu.py``
`tune`            costs and fastest algorithms, for `ringcoll.choice.tuning`
`units`           how sizes and times are written and read
================  =============================================================

::

    from ringcoll.bench import Request, on_rank
    from ringcoll.launch import Ranks

    request = Request("all_reduce", ("ring", "tree", "native"), (4, 65536, 1 << 20))
    with Ranks(4) as ranks:
        results = ranks.run(on_rank, request)[0]
"""

from ringcoll.bench.contenders import AUTO, DTYPES, NATIVE, OPS, PERSISTENT, Workload
from ringcoll.bench.measure import (
    Meeting,
    Request,
    Result,
    Samples,
    Timing,
    alternate,
    measure,
    on_rank,
)
from ringcoll.bench.summary import Summary, algbw, busbw, summarize

__all__ = [
    "AUTO",
    "DTYPES",
    "NATIVE",
    "OPS",
    "PERSISTENT",
    "Meeting",
    "Request",
    "Result",
    "Samples",
    "Summary",
    "Timing",
    "Workload",
    "algbw",
    "alternate",
    "busbw",
    "measure",
    "on_rank",
    "summarize",
]
