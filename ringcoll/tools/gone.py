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
    "lab.search.HARDLY": "ringcoll.lab.search.MIN_SPEEDUP",
    "lab.pictures.layout_of": "steps_picture and player_page place the ranks",
    "runtime.collectives.measurements": "ringcoll.tools.bench.measurements",
    "runtime.collectives.probe": "ringcoll.probe",
    "runtime.collectives.refit": _REFIT,
    "runtime.launch.MpiGroup": _MPI,
    "runtime.launch.mpi_group": _MPI,
    "runtime.transport.mpi": _MPI,
    "runtime.transport.MpiTransport": _MPI,
    "schedules.algorithms.blocks_on_hosts": "ringcoll.schedules.algorithms.hierarchical",
    "schedules.algorithms.chain": "ringcoll.schedules.algorithms.ring",
    "schedules.algorithms.dissemination": "ringcoll.schedules.algorithms.bruck",
    "schedules.algorithms.pairwise": "ringcoll.schedules.algorithms.direct",
    "schedules.algorithms.swing": "ringcoll.schedules.algorithms.exchanges",
    "tools.bench.comparison_records": "csv_records has speed_against_native and best_of_the_rest",
    **{
        f"tools.bench.{name}": f"ringcoll.tools.cli.train.{name}"
        for name in (
            "NATIVE_TRAINER",
            "WIRE_NAMES",
            "Comparison",
            "Contender",
            "Epoch",
            "TrainingRequest",
            "TrainingResult",
            "loss_curves",
            "train_on_rank",
        )
    },
    "schedules.cost.across_hosts": "built_in has these rules in its table",
    "schedules.opening_of": "ringcoll.schedules.ir.opening_of",
    "tools.bench.BUCKET_BYTES": "a TrainingRequest of ringcoll.tools.cli.train has it",
    "tools.bench.EPOCHS": "a TrainingRequest of ringcoll.tools.cli.train has it",
    "tools.bench.WIRE_DTYPES": "ringcoll.tools.cli.train.WIRE_NAMES are names of torch's dtypes",
    "tools.bench.check_fit": "call task.epoch(0, ranks), and ringcoll.training.check_trainer for "
    "each contender",
    "tools.bench.draw_losses": "draw ringcoll.tools.cli.train.loss_curves into a figure",
    "tools.bench.peers": "the comparison with MPI is benchmarks/peers.py of the source tree",
    "tools.bench.tolerances": "TrainingResult of ringcoll.tools.cli.train has tolerances",
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
    "training.pipeline.Pipeline": "ringcoll.training.Pipeline",
    "training.pipeline.PipelineReport": "ringcoll.training.PipelineReport",
    "training.vocabulary_loss": "tensor_parallel returns all scores: use next_token_loss",
    "training.zero_bubble": _PIPELINES,
}

_OTHER_ROOMS = {
    "machine.process": "Answer MESSAGES at_end begun=call_in_thread check_goes_on=check_not_ending "
    "hears_signals in_words=line_in_words line_of_thread note_observers observers "
    "stacks=thread_stacks started=start_thread untraced user_line users=user_frame "
    "with_threads=keep_in_forks within=call_within",
    "machine.rendezvous": "Address Inbox Lines address_of answered=ask_store appears=wait_for_keys "
    "as_json=parse_json asked=poll_store common=common_connection deliver fields_of "
    "gone=store_gone_error is_served_here life=fresh_group_name lines private=own_connection "
    "read_all=read_texts read_json read_text served=serve_store store_host unreachable",
    "machine.user_files": "Tuned UserModule algorithm_in algorithms_named as_algorithm fit_for "
    "has_files is_reference is_rules is_schedule_file read=read_tables read_fit read_schedule "
    "rules_in tuning update=update_tables write_fit",
    "operation.tensors": "check_apart is_plain share_blocks",
    "transport.rendezvous": "told_by=read_from_ranks",
    "transport.tensors": "can_write extent has_memory is_dense with_memory",
}
"""Names of rooms of `runtime`, as ``OLD_ROOM.ROOM``, that are in another room now."""
_GONE |= {
    f"runtime.{rooms.partition('.')[0]}.{name.partition('=')[0]}": (
        f"ringcoll.runtime.{rooms.partition('.')[2]}.{name.rpartition('=')[2]}"
    )
    for rooms, names in _OTHER_ROOMS.items()
    for name in names.split()
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
