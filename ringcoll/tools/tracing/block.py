"""The traced block: all ranks begin and end it together, and rank 0 writes the file.

The ranks exchange clocks and records in point-to-point messages and operations of the group. Only
the end of the block goes through the store: a rank whose block has failed waits for nobody.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringcoll.errors import ArgumentError, RingcollError, TraceError
from ringcoll.lab.pictures import time_picture
from ringcoll.runtime.collectives import as_group, communicator
from ringcoll.runtime.collectives import functions as api
from ringcoll.runtime.group import Communicator
from ringcoll.runtime.machine import json_text, peaks_of, read_json_file, replace_file
from ringcoll.runtime.rendezvous import read_text, wait_for_keys
from ringcoll.runtime.transport import Message
from ringcoll.runtime.watch import PhaseLog
from ringcoll.tools.tracing.clocks import ReadClock, Sighting
from ringcoll.tools.tracing.recorder import Tracer
from ringcoll.tools.tracing.records import Records
from ringcoll.tools.tracing.summary import PhaseTimes, Shares, findings, summarize, summarize_phases
from ringcoll.tools.tracing.trace_events import document

_PINGS = 24  # pings for each rank, before and after the block
_TAG = 0x5157C10C  # tag of the pings; the tags of operations are hashes
_MOST = 10_000  # operations of a group, and phases


@dataclass
class Recording:
    """The value of `trace`, which is filled in at the end of the block.

    Parameters
    ----------
    path
        Path of the file.
    summary
        On rank 0, for each rank: the shares of each call, by its description, and of
        ``"total"``. Empty on the other ranks.
    phases
        On rank 0, for each rank: the times of each phase (`ringcoll.runtime.watch.phases`), by its
        name, and of ``"total"``; empty without phases.
    findings
        On rank 0, sentences: which rank waits for which rank, in which phase, and the peak of
        memory by phase.
    clocks
        On rank 0, for each rank: the ``offset_us`` of its clock against the clock of rank 0, and
        the ``uncertainty_us`` of the offset, as in the file.
    transport
        Name of the transport.
    """

    path: Path
    summary: list[dict[str, Shares]] = field(default_factory=list)
    phases: list[dict[str, PhaseTimes]] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    clocks: list[dict[str, float]] = field(default_factory=list)
    transport: str = ""

    def _repr_html_(self) -> str | None:
        try:
            return time_picture(read_json_file(self.path))._repr_html_()
        except (OSError, ValueError):  # the block has not ended, or it is too long
            return None


@contextmanager
def trace(
    path: str | os.PathLike[str],
    group: Any = None,
    *,
    also: Iterable[Any] = (),
    device: torch.device | str = "cpu",
    max_operations: int = _MOST,
    clock: ReadClock = time.perf_counter_ns,
) -> Iterator[Recording]:
    """Trace the operations of a group, and the phases of this thread; all its ranks do so together.

    Parameters
    ----------
    path
        Path of the file that rank 0 writes. The file appears when it is complete.
    group
        As for `ringcoll.all_reduce`.
    also
        Further groups of this rank, such as those of a mesh, whose ranks are all in ``group``. Each
        has the same place on all its ranks, and all ranks have equally many.
    device
        Device of the tensors whose operations are traced.
    max_operations
        Number of operations that are kept of each group, the same on all ranks, and of phases
        and waits; further ones are counted only.
    clock
        Clock of this rank: it gives nanoseconds, and never goes back.

    Yields
    ------
    Recording
        The recording, which is filled in at the end of the block.

    Raises
    ------
    ArgumentError
        A trace of a group is running, there is no such group, a group was named twice, or a rank of
        ``also`` is not in ``group``.
    TraceError
        The block failed on another rank, or rank 0 could not write the file. The group can
        still be used.
    RingcollError
        An operation failed, or the ranks could not be brought together.

    Notes
    -----
    If the block raises, there is no file, and the error is passed on at once. Operations that the
    block has started, and that nobody has waited for yet, belong to the trace. Where traces are
    nested, phases belong to the inner one. With phases, the peaks of memory are measured where
    each rank is a process of its own; the process's own peak (``VmHWM``) begins again each time.

    Examples
    --------
    >>> import json, tempfile, torch, ringcoll
    >>> def rank_main(group, path):
    ...     with ringcoll.trace(path, group) as recording:
    ...         ringcoll.all_reduce(torch.ones(8), group=group, algorithm="ring")
    ...     return [parts["total"].sent_bytes for parts in recording.summary]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = f"{folder}/trace.json"
    ...     ringcoll.run_threads(lambda group: rank_main(group, path), 2)
    ...     with open(path) as file:
    ...         len(json.load(file)["otherData"]["clocks"])
    [[32, 32], []]
    2
    """
    recording = Recording(Path(path))
    meeting = communicator(group, torch.device("cpu"))
    device = torch.device(device)
    groups = [group, *also]
    traced = [communicator(each, device) for each in groups]
    for place, member in enumerate(traced):
        if member.tracer is not None or member in traced[:place]:
            raise ArgumentError("is being traced already", "group", rank=meeting.rank)
    transport = traced[0].transport
    records = Records(meeting.rank, meeting.world_size, transport.name)
    records.groups = _ranks_of(groups)
    peaks = None if transport.shares_process else peaks_of(device)
    log = PhaseLog(clock, max_operations, peaks)
    tracers = [
        Tracer(member, records, log, number, clock, max_operations)
        for number, member in enumerate(traced)
    ]
    recording.transport = records.transport
    begin, end = records.sightings
    with ExitStack() as ends:
        for tracer in tracers:
            ends.callback(tracer.detach)
        for member, tracer in zip(traced[1:], tracers[1:], strict=True):
            member.in_turn(tracer.attach, "trace")
        meeting.in_turn(partial(_compare, meeting, clock, begin, tracers[0].attach), "trace")
        # The number of the next operation is the same on all ranks, and never comes again.
        store, key = meeting.store, f"trace/{meeting.num_issued}"
        try:
            with log.recording():
                yield recording
        except BaseException as error:
            with suppress(RuntimeError):  # the store may be gone
                if not store.check([f"{key}/failed"]):  # the first failure is the cause of others
                    text = f"rank {meeting.rank} raised {type(error).__name__}: {error}"
                    store.set(f"{key}/failed", text)
            raise
        _all_have_left(meeting, key)
        for member, tracer in zip(traced[1:], tracers[1:], strict=True):
            member.in_turn(tracer.detach, "trace")
        meeting.in_turn(partial(_compare, meeting, clock, end, tracers[0].detach), "trace")
    _take(log, records, _global_ranks(group))
    _write(records, recording, group)


def _global_ranks(group: Any) -> list[int]:
    """The ranks of a group in the default group; those of a group that torch does not know."""
    group = as_group(group)
    if isinstance(group, dist.ProcessGroup):
        return dist.get_process_group_ranks(group)
    return list(range(group.size()))


def _ranks_of(groups: Sequence[Any]) -> list[list[int]]:
    """The ranks of each group, as ranks in the first group."""
    first, *others = map(_global_ranks, groups)
    for ranks in others:
        if not {*ranks} <= {*first}:
            raise ArgumentError("a rank is not in the first group", "also", first, ranks)
    return [[first.index(rank) for rank in ranks] for ranks in (first, *others)]


def _take(log: PhaseLog, records: Records, ranks: list[int]) -> None:
    """Take the phases, and the waits for other ranks, into the notes of a rank."""
    records.phases, records.phases_left_out = log.phases, log.left_out
    for wait in log.waits:
        if wait.peer < 0:
            records.waits.append(wait)
        elif wait.peer in ranks and wait.peer != ranks[records.rank]:
            records.waits.append(wait._replace(peer=ranks.index(wait.peer)))


def _compare(
    member: Communicator, clock: ReadClock, into: list[Sighting], then: Callable[[], None]
) -> None:
    """Play ping-pong between rank 0 and each other rank, which notes both messages.

    It is an operation of the group; at its end a function is called.
    """
    for peer in range(1, member.world_size):
        for _ in range(_PINGS):
            if member.rank == 0:
                _answer(member, clock, peer)
            elif member.rank == peer:
                into += _ping(member, clock)
    then()


def _ping(member: Communicator, clock: ReadClock) -> list[Sighting]:
    token, answer = torch.zeros(2, 1, dtype=torch.int64, device="cpu")
    transport, limit_s = member.transport, member.timeout_s
    (arriving,) = transport.post([Message(0, answer, _TAG)], [])
    sent = clock()
    (leaving,) = transport.post([], [Message(0, token, _TAG)])
    transport.wait(arriving, limit_s)
    received = clock()
    transport.wait(leaving, limit_s)
    there = int(answer.item())
    return [Sighting(member.rank, 0, sent, there), Sighting(0, member.rank, there, received)]


def _answer(member: Communicator, clock: ReadClock, peer: int) -> None:
    token, answer = torch.zeros(2, 1, dtype=torch.int64, device="cpu")
    transport, limit_s = member.transport, member.timeout_s
    (arriving,) = transport.post([Message(peer, token, _TAG)], [])
    transport.wait(arriving, limit_s)
    answer[0] = clock()
    (leaving,) = transport.post([], [Message(peer, answer, _TAG)])
    transport.wait(leaving, limit_s)


def _all_have_left(member: Communicator, key: str) -> None:
    """Wait until all ranks have left the block; go through the store, as ranks may be lost."""
    store, failed = member.store, f"{key}/failed"
    keys = [f"{key}/{peer}" for peer in range(member.world_size)]
    store.set(keys[member.rank], "")
    deadline = time.monotonic() + member.timeout_s
    if wait_for_keys(store, keys, deadline, lambda: store.check([failed])):
        return
    if store.check([failed]):
        raise TraceError(f"no trace: in the block {read_text(store, failed)}")
    peer = next(peer for peer, item in enumerate(keys) if not store.check([item]))
    raise TraceError(f"no trace: rank {peer} has not left the block")


def _write(records: Records, recording: Recording, group: Any) -> None:
    """Bring all records to rank 0, which writes the file and says whether it could."""
    packed = _gathered(records, group)
    verdict = torch.zeros(1, dtype=torch.uint8, device="cpu")
    failure: OSError | RingcollError | None = None
    if records.rank == 0:
        try:
            ranks = [Records.unpacked(data) for data in packed]
            picture = document(ranks)
            replace_file(recording.path, json_text(picture))
        except (OSError, RingcollError) as error:
            failure = error
            verdict += 1
        else:
            recording.summary = [summarize(rank) for rank in ranks]
            recording.phases = [summarize_phases(rank) for rank in ranks]
            recording.findings = findings(ranks)
            recording.clocks = picture["otherData"]["clocks"]
    api.broadcast(verdict, group_src=0, group=group)
    if failure is not None:
        raise TraceError(f"no trace: {failure}") from failure
    if verdict.item():
        raise TraceError("no trace: rank 0 could not write the file")


def _gathered(records: Records, group: Any) -> list[bytes]:
    """The packed records of all ranks, on rank 0; empty records on the other ranks."""
    rank, world_size = records.rank, records.world_size
    own = torch.frombuffer(bytearray(records.packed()), dtype=torch.uint8)
    lengths = torch.zeros(world_size, dtype=torch.int64, device="cpu")
    api.all_gather_single(lengths, torch.tensor([own.numel()], device="cpu"), group)
    incoming = lengths.tolist() if rank == 0 else [0] * world_size
    outgoing = [own.numel(), *[0] * (world_size - 1)]
    whole = torch.empty(sum(incoming), dtype=torch.uint8, device="cpu")
    api.all_to_all_single(whole, own, incoming, outgoing, group)
    return [block.numpy().tobytes() for block in torch.split(whole, incoming)]
