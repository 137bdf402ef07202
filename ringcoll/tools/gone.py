"""Where the modules and names of earlier versions are now, and what takes the place of others."""

from __future__ import annotations

_MOVED = {
    "algorithms": "schedules.algorithms",
    "backend": "training.backend",
    "bench": "tools.bench",
    "cli": "tools.cli",
    "collectives": "runtime.collectives",
    "cost": "schedules.cost",
    "formats": "lab.formats",
    "group": "runtime.group",
    "launch": "runtime.launch",
    "machine": "runtime.machine",
    "operation": "runtime.operation",
    "pictures": "lab.pictures",
    "reduction": "runtime.reduction",
    "resilient": "training.resilient",
    "schedule": "schedules",
    "search": "lab.search",
    "simulation": "lab.simulation",
    "testing": "tools.testing",
    "tracing": "tools.tracing",
    "transport": "runtime.transport",
    "watch": "runtime.watch",
}
"""The folders of earlier versions; all but `schedule` have the same names within."""

_MPI = (
    "MPI as a transport is gone: call ringcoll.runtime.launch.adopt_ranks() under mpiexec or srun, "
    "then torch.distributed.init_process_group"
)
_HOOKS = (
    "use torch's hooks (torch.distributed.algorithms.ddp_comm_hooks) under DistributedDataParallel "
    "on the backend 'ringcoll', or wire_dtype="
)
_PIPELINES = "use torch.distributed.pipelining on the backend 'ringcoll'"
_REFIT = "measure with `ringcoll probe`, run `ringcoll fit`, and start the group with fit="
_TRACES = "to_msccl and to_mscclpp write a schedule for GPUs, ringcoll.simulate simulates it"

_GONE = {
    "mpi_group": _MPI,
    "MpiGroup": _MPI,
    "refit": _REFIT,
    "lab.formats.to_chakra": _TRACES,
    "lab.formats.to_goal": _TRACES,
    "lab.formats.topology_from_infragraph": "write a link a line, for topology_from_text",
    "runtime.collectives.measurements": "ringcoll.tools.bench.measurements",
    "runtime.collectives.probe": "ringcoll.probe",
    "runtime.collectives.refit": _REFIT,
    "runtime.launch.MpiGroup": _MPI,
    "runtime.launch.mpi_group": _MPI,
    "runtime.transport.mpi": _MPI,
    "runtime.transport.MpiTransport": _MPI,
    "tools.bench.comparison_records": "csv_records has speed_against_native and best_of_the_rest",
    "tools.bench.peers": "the comparison with MPI is benchmarks/peers.py of the source tree",
    "tools.tracing.phase": "ringcoll.training.phase",
    "tools.tracing.waiting": "ringcoll.training.waiting",
    "training.CompressedBuckets": _HOOKS,
    "training.CompressedGradients": _HOOKS,
    "training.Compressor": _HOOKS,
    "training.Int8": _HOOKS,
    "training.PowerSGD": _HOOKS,
    "training.Sent": _HOOKS,
    "training.TopK": _HOOKS,
    "training.UNIT_COSTS": "a backward is drawn as two forwards",
    "training.check": "gpipe and one_f_one_b are right by construction",
    "training.compressed_hook": _HOOKS,
    "training.diloco": "LocalSGD with outer=partial(torch.optim.SGD, lr=0.7, momentum=0.9, "
    "nesterov=True)",
    "training.gap_table": "call spectral_gap for each number of ranks",
    "training.interleaved": _PIPELINES,
    "training.vocabulary_loss": "tensor_parallel returns all scores: use next_token_loss",
    "training.zero_bubble": _PIPELINES,
}


def sentence(name: str) -> str | None:
    """The sentence on a dotted name of an earlier version; ``None`` for another name.

    >>> sentence("ringcoll.machine.facts")
    'ringcoll.machine is ringcoll.runtime.machine now'
    >>> sentence("ringcoll.refit")[:44]
    'ringcoll.refit is gone: measure with `ringco'
    """
    below = name.removeprefix("ringcoll.")
    old, dot, rest = below.partition(".")
    now = _MOVED.get(old)
    successor = _GONE.get(f"{now}{dot}{rest}" if now else below)
    if successor is None:
        return f"ringcoll.{old} is ringcoll.{now} now" if now else None
    has_moved = successor.startswith("ringcoll.")
    return f"{name} is {successor} now" if has_moved else f"{name} is gone: {successor}"
