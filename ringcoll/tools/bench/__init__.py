"""Measure collectives on real processes, against each other and torch's own.

===============  =============================================================
`names`          names of contenders and dtypes, and usual values; without torch
`contenders`     the contenders: ringcoll, torch.distributed, limits; and their tensors
`exact_inputs`   inputs whose exact result is known
`units`          statistics, bandwidths, sizes and times in words; without torch
`rounds`         functions that take turns, and where the ranks meet before each turn
`measure`        what is measured, and the measurement on every rank
`network`        the network between ranks, measured: ``ringcoll.probe``
`reports`        measurements as JSON, CSV and sentences, and what they have to be read with
`plot`           curves, the Pareto front, pictures of training systems; needs matplotlib
`traced`         a collective, or a trainer, under `ringcoll.trace`
`tuner`          costs and fastest algorithms, for `ringcoll.runtime.user_files.tuning`
===============  =============================================================

::

    from ringcoll.tools.bench import BenchRequest, on_rank
    from ringcoll.runtime.launch import Ranks

    request = BenchRequest("all_reduce", ("ring", "tree", "native"), (4, 65536, 1 << 20))
    with Ranks(4) as ranks:
        results = ranks.run(on_rank, request)[0]
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
