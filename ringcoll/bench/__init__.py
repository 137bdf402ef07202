"""Measure collectives on real processes, against each other and torch's own.

===============  =============================================================
`exact_inputs`   inputs whose exact result is known
`contenders`     the table of contenders: ringcoll, torch.distributed, limits
`rounds`         functions that take turns, without torch
`measure`        what is measured, and the measurement on every rank
`peers`          MPI libraries beside ours
`mpi_peer`       the script that measures under their ``mpiexec``
`statistics`     statistics, bandwidths
`environment`    what a measurement has to be read with
`rows`           measurements as JSON and CSV
`verdicts`       who wins where, in sentences; how near all come to the limits
`plot`           curves, and the Pareto front; needs matplotlib
`training`       trainers side by side, for ``ringcoll train``
`training_plot`  losses, time, schedules, memory of training; needs matplotlib
`traced`         a collective, or a trainer, under `ringcoll.trace`
`tuner`          costs and fastest algorithms, for `ringcoll.machine.tuning`
`units`          how sizes and times are written and read
===============  =============================================================

::

    from ringcoll.bench import BenchRequest, on_rank
    from ringcoll.launch import Ranks

    request = BenchRequest("all_reduce", ("ring", "tree", "native"), (4, 65536, 1 << 20))
    with Ranks(4) as ranks:
        results = ranks.run(on_rank, request)[0]
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
