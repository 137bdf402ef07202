"""Measure collectives on real processes, against each other and torch's own.

================  =============================================================
`exact`           inputs whose exact result is known
`contenders`      one call, by ringcoll or by torch.distributed; sizes
`measure`         the rounds, on every rank
`limits`          what transport and memory allow: an exchange, an addition, a copy
`efficiency`      how near the contenders come to that
`peers`           MPI libraries beside ours
`summary`         statistics, bandwidths
`environment`     what a measurement has to be read with
`table`           the table and the JSON of nccl-tests
`findings`        who wins where, in sentences
`plot`            curves; needs matplotlib
`pareto_plot`     the Pareto front of a collective; needs matplotlib
`training_plot`   losses, time, schedules, memory of training; needs matplotlib
`training`        trainers side by side, for ``ringcoll train``
`traced`          a collective, or a trainer, under `ringcoll.trace`
`tune`            costs and fastest algorithms, for `ringcoll.machine.tuning`
`units`           how sizes and times are written and read
================  =============================================================

::

    from ringcoll.bench import BenchRequest, on_rank
    from ringcoll.launch.processes import Ranks

    request = BenchRequest("all_reduce", ("ring", "tree", "native"), (4, 65536, 1 << 20))
    with Ranks(4) as ranks:
        results = ranks.run(on_rank, request)[0]

May be imported from outside: ``__all__``, and each module's own.
"""

from ringcoll.bench.contenders import AUTO, DTYPES, NATIVE, OVER, PERSISTENT, SHARED, Workload
from ringcoll.bench.measure import (
    BenchRequest,
    Meeting,
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
    "OVER",
    "PERSISTENT",
    "SHARED",
    "BenchRequest",
    "Meeting",
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
