"""The traced block: all ranks begin and end it together, and rank 0 writes the file.

The ranks exchange clocks and records in point-to-point messages and operations of the group. Only
the end of the block goes through the store: a rank whose block has failed waits for nobody.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ringcoll.collectives import functions as api
from ringcoll.collectives.groups import communicator
from ringcoll.errors import ArgumentError, RingcollError, TraceError
from ringcoll.runtime.communicator import Communicator
from ringcoll.system.files import replace_file
from ringcoll.system.stores import appears
from ringcoll.tracing.clocks import Sighting
from ringcoll.tracing.events import document
from ringcoll.tracing.recorder import Clocks, Tracer
from ringcoll.tracing.records import Records
from ringcoll.tracing.summary import Shares, summarize
from ringcoll.transport.base import Message

__all__ = ["Recording", "trace"]

_PINGS = 24  # pings for each rank, before and after the block
_TAG = 0x5157C10C  # tag of the pings; the tags of operations are hashes
_MOST = 10_000  # operations


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
    clocks
        On rank 0, for each rank: the ``offset_us`` of its clock against the clock of rank 0, and
        the ``uncertainty_us`` of the offset, as in the file.
    transport
        Name of the transport.
    """

    path: Path
    summary: list[dict[str, Shares]] = field(default_factory=list)
    clocks: list[dict[str, float]] = field(default_factory=list)
    transport: str = ""


@contextmanager
def trace(
    path: str | os.PathLike[str],
    group: Any = None,
    *,
    device: torch.device | str = "cpu",
    max_operations: int = _MOST,
    clock: Clocks = time.perf_counter_ns,
) -> Iterator[Recording]:
    """Trace the operations of a group; all its ranks have to do so together.

    Parameters
    ----------
    path
        Path of the file that rank 0 writes. The file appears when it is complete.
    group
        As for `ringcoll.all_reduce`.
    device
        Device of the tensors whose operations are traced.
    max_operations
        Number of operations that are kept, the same on all ranks; further operations are
        counted only.
    clock
        Clock of this rank: it gives nanoseconds, and never goes back.

    Yields
    ------
    Recording
        The recording, which is filled in at the end of the block.

    Raises
    ------
    ArgumentError
        A trace of the group is running, or there is no such group.
    TraceError
        The block failed on another rank, or rank 0 could not write the file. The group can
        still be used.
    RingcollError
        An operation failed, or the ranks could not be brought together.

    Notes
    -----
    If the block raises, there is no file, and the error is passed on at once. Operations
    that the block has started, and that nobody has waited for yet, belong to the trace.

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
    traced = communicator(group, torch.device(device))
    if traced.tracer is not None:
        raise ArgumentError("is being traced already", rank=traced.rank, argument="group")
    tracer = Tracer(traced, clock, max_operations)
    recording.transport = tracer.records.transport
    begin, end = tracer.records.sightings
    _meet(meeting, clock, begin, tracer.attach)
    # The number of the next operation is the same on all ranks, and never comes again.
    store, key = meeting.store, f"trace/{meeting.num_issued}"
    try:
        yield recording
    except BaseException as error:
        tracer.detach()
        with suppress(RuntimeError):  # the store may be gone
            if not store.check([f"{key}/failed"]):  # the first failure is the cause of others
                text = f"rank {meeting.rank} raised {type(error).__name__}: {error}"
                store.set(f"{key}/failed", text)
        raise
    try:
        _all_have_left(meeting, key)
        _meet(meeting, clock, end, tracer.detach)
    finally:
        tracer.detach()
    _write(tracer.records, recording, group)


def _meet(
    member: Communicator, clock: Clocks, into: list[Sighting], then: Callable[[], None]
) -> None:
    """Compare clocks, as an operation of the group, and then call a function."""

    def compare() -> None:
        _compare(member, clock, into)
        then()

    member.in_turn(compare, "trace")


def _compare(member: Communicator, clock: Clocks, into: list[Sighting]) -> None:
    """Play ping-pong between rank 0 and each other rank, which notes both messages."""
    rank = member.rank
    for peer in range(1, member.world_size):
        for _ in range(_PINGS):
            if rank == 0:
                _answer(member, clock, peer)
            elif rank == peer:
                into += _ping(member, clock)


def _ping(member: Communicator, clock: Clocks) -> list[Sighting]:
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


def _answer(member: Communicator, clock: Clocks, peer: int) -> None:
    token, answer = torch.zeros(2, 1, dtype=torch.int64, device="cpu")
    transport, limit_s = member.transport, member.timeout_s
    (arriving,) = transport.post([Message(peer, token, _TAG)], [])
    transport.wait(arriving, limit_s)
    answer[0] = clock()
    (leaving,) = transport.post([], [Message(peer, answer, _TAG)])
    transport.wait(leaving, limit_s)


def _all_have_left(member: Communicator, key: str) -> None:
    """Wait until all ranks have left the block; go through the store, as ranks may be lost.

    Raises
    ------
    TraceError
        A rank has failed, or did not leave within the group's time limit.
    """
    store, failed = member.store, f"{key}/failed"
    keys = [f"{key}/{peer}" for peer in range(member.world_size)]
    store.set(keys[member.rank], "")
    deadline = time.monotonic() + member.timeout_s
    if appears(store, keys, deadline, lambda: store.check([failed])):
        return
    if store.check([failed]):
        raise TraceError(f"no trace: in the block {store.get(failed).decode()}")
    peer = next(peer for peer, item in enumerate(keys) if not store.check([item]))
    raise TraceError(f"no trace: rank {peer} has not left the block")


def _write(records: Records, recording: Recording, group: Any) -> None:
    """Bring all records to rank 0, which writes the file and says whether it could."""
    packed = _gathered(records, group)
    verdict = torch.zeros(1, dtype=torch.uint8, device="cpu")
    failure: OSError | RingcollError | None = None
    if records.rank == 0:
        ranks = [Records.unpacked(data) for data in packed]
        try:
            picture = document(ranks)
            replace_file(recording.path, json.dumps(picture))
        except (OSError, RingcollError) as error:
            failure = error
            verdict += 1
        else:
            recording.summary = [summarize(rank) for rank in ranks]
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
