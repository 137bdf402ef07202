"""Where the time goes: a picture of all ranks on one clock, and its summary.

Problem: an operation is slow, and it is not seen whether ranks wait for each other, move
bytes, reduce, or run Python. `trace` notes every send, receive, wait, reduction and copy of
the operations of a group, and rank 0 writes them to a file that Perfetto reads.

Cost: without a trace nothing (an operation looks whether there is one). With one, two looks
at the clock and a small tuple for each instruction; docs/trace.md has it in microseconds.

- `clocks`: one clock for all ranks.
- `records`: what a rank notes.
- `recorder`: how it does.
- `events`, `summary`: the picture, and the numbers.

What ranks tell each other goes over the group's own point-to-point messages. Only whether
the traced block ended well is said through the store, so that a rank on which it did not
needs to wait for nobody.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from ringcoll import api
from ringcoll.algorithms import schedule_of
from ringcoll.communicator import Communicator, Decision
from ringcoll.errors import ArgumentError, RingcollError, TraceError
from ringcoll.groups import communicator
from ringcoll.plan import Plan
from ringcoll.stage import Opened
from ringcoll.tracing.clocks import Sighting
from ringcoll.tracing.events import document
from ringcoll.tracing.recorder import Clocks, Meeting, Tracer
from ringcoll.tracing.records import Records
from ringcoll.tracing.summary import Shares, summarize
from ringcoll.transport.base import Message

__all__ = ["Recording", "Shares", "trace"]

_PINGS = 24  # for each rank, before and after
_TAG = 0x5157C10C  # of the pings; operations have tags that are hashes
_MOST = 10_000  # operations


@dataclass
class Recording:
    """What `trace` gives to its block.

    Parameters
    ----------
    path
        Of the file.
    summary
        After the block, on rank 0: for each rank, what each call has taken, by its
        description, and ``"total"``. Empty on the others.
    clocks
        After the block, on rank 0: for each rank its clock's ``offset_us`` against that of
        rank 0 and the ``uncertainty_us`` of it, as in the file.
    transport
        What the messages went over.
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
        Where rank 0 writes the file. It appears when it is complete.
    group
        As for `ringcoll.all_reduce`.
    device
        Of the tensors whose operations are traced.
    max_operations
        More than these are counted, and not kept; the same on all ranks.
    clock
        Of this rank: gives nanoseconds, and never goes back.

    Yields
    ------
    Recording
        Filled in when the block is left.

    Raises
    ------
    ArgumentError
        The group is being traced already, or there is no such group.
    TraceError
        The block failed on another rank, or rank 0 could not write the file. The group can
        be used on.
    RingcollError
        An operation failed, or the ranks could not be brought together.

    Notes
    -----
    If the block raises, there is no file, and the error is passed on at once. Operations
    that were started in the block and not yet waited for belong to the trace.

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
    # The number of the next operation: on all ranks the same, and never again.
    store, key = meeting._store, f"trace/{meeting._issued}"
    try:
        yield recording
    except BaseException as error:
        tracer.detach()
        with suppress(RuntimeError):  # the store may be gone
            store.set(f"{key}/{meeting.rank}", f"{type(error).__name__}: {error}")
        raise
    try:
        _all_ended_well(meeting, key)
        _meet(meeting, clock, end, tracer.detach)
    finally:
        tracer.detach()
    _write(tracer.records, recording, group)


def _meet(
    member: Communicator, clock: Clocks, into: list[Sighting], then: Callable[[], None]
) -> None:
    """Compare clocks, in the order of the group's operations; then do something else."""

    def open_() -> Opened:
        _compare(member, clock, into)
        then()
        return (), (), None

    schedule = schedule_of("barrier", "dissemination", member.world_size)
    nothing = Plan(schedule, member.rank, 1, (), (), 0, 0, frozenset())
    decision = Decision(nothing, torch.uint8, "trace", 0)
    call = Meeting(
        name="trace",
        decide=lambda: decision,
        device=torch.device("cpu"),
        reduction=None,
        open=open_,
        timeout_s=member.timeout_s,
    )
    member.run(call, async_op=False)


def _compare(member: Communicator, clock: Clocks, into: list[Sighting]) -> None:
    """Ping-pong between rank 0 and each other one; each notes both messages of each turn."""
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


def _all_ended_well(member: Communicator, key: str) -> None:
    """Wait until all ranks have left the block.

    Raises
    ------
    TraceError
        One has failed, or did not come within the group's time limit.
    """
    keys = [f"{key}/{peer}" for peer in range(member.world_size)]
    member._store.set(keys[member.rank], "")
    deadline, pause_s = time.monotonic() + member.timeout_s, 0.0005
    missing = list(enumerate(keys))
    while missing:
        for peer, item in tuple(missing):
            if not member._store.check([item]):
                continue
            missing.remove((peer, item))
            if told := member._store.get(item).decode():
                raise TraceError(f"no trace: in the block rank {peer} raised {told}")
        if missing and time.monotonic() > deadline:
            raise TraceError(f"no trace: rank {missing[0][0]} has not left the block")
        if missing:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.02)


def _write(records: Records, recording: Recording, group: Any) -> None:
    """Bring all records to rank 0, which writes the file and says whether it could."""
    packed = _gathered(records, group)
    verdict = torch.zeros(1, dtype=torch.uint8, device="cpu")
    failure: OSError | RingcollError | None = None
    if records.rank == 0:
        ranks = [Records.unpacked(one) for one in packed]
        try:
            found = document(ranks)
            _replace(recording.path, json.dumps(found))
        except (OSError, RingcollError) as error:
            failure = error
            verdict += 1
        else:
            recording.summary = [summarize(one) for one in ranks]
            recording.clocks = found["otherData"]["clocks"]
    api.broadcast(verdict, group_src=0, group=group)
    if failure is not None:
        raise TraceError(f"no trace: {failure}") from failure
    if verdict.item():
        raise TraceError("no trace: rank 0 could not write the file")


def _gathered(records: Records, group: Any) -> list[bytes]:
    """The records of all ranks, on rank 0; nothing in them on the others."""
    rank, world_size = records.rank, records.world_size
    mine = torch.frombuffer(bytearray(records.packed()), dtype=torch.uint8)
    lengths = torch.zeros(world_size, dtype=torch.int64, device="cpu")
    api.all_gather_single(lengths, torch.tensor([mine.numel()], device="cpu"), group)
    incoming = lengths.tolist() if rank == 0 else [0] * world_size
    outgoing = [mine.numel(), *[0] * (world_size - 1)]
    whole = torch.empty(sum(incoming), dtype=torch.uint8, device="cpu")
    api.all_to_all_single(whole, mine, incoming, outgoing, group)
    data = whole.numpy().tobytes()
    ends = list(accumulate(incoming))
    return [data[end - one : end] for one, end in zip(incoming, ends, strict=True)]


def _replace(path: Path, text: str) -> None:
    """Write a file that is never seen incomplete."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
