"""Execution plans of MSCCL++, as JSON: out, and in if they are plain.

Here nothing is received: a rank writes into a peer's memory (``put``) and tells it (``signal``),
and the peer waits for that. Out: a rank has one thread block, which does its steps one after the
other. A message into a place that was never used before is put there. Every other message is put
into a place of its own in scratch memory, and is copied or reduced from there, so that nothing is
overwritten before it was used. At the beginning a rank tells its peers that it is there:
a plan may run many times.

In: plans of ``put``, ``get``, ``copy``, ``re``, ``res``, ``rre``, ``rres``, ``signal`` and
``wait``, with memory or port channels. A ``put`` is a send and, at once, a receive of the peer; a
``get`` is a send of the peer and a receive. The n-th channel of a rank to a peer and the n-th of
the peer to the rank are two ends of one, on which the i-th wait needs the i-th signal. Semaphores,
barriers, packets, multicast, pipelines and groups of thread blocks are refused.

Sources: ``src/core/executor/execution_plan.cc``, ``src/core/include/execution_kernel.hpp`` and
``execution_common.hpp`` of microsoft/mscclpp; the plans of its tests, such as ``reduce.json``.

`schedule_in` and `topology_in` read a text of any format, as a schedule or as a network.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

from ringcoll.errors import ScheduleError
from ringcoll.lab.formats.documents import JsonValue, parse_json
from ringcoll.lab.formats.levelling import Event, EventKind, levelled
from ringcoll.lab.formats.msccl import from_msccl
from ringcoll.lab.formats.network_files import topology_from_nccl
from ringcoll.lab.formats.places import Piece, Place, Places, pieces
from ringcoll.lab.simulation import Topology, topology_from_text
from ringcoll.schedules import Schedule, contract

_KNOWN = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
_COLLECTIVES = {name.replace("_", ""): name for name in _KNOWN}
_NAMES = {ours: theirs for theirs, ours in _COLLECTIVES.items()}
_MOST_OPERATIONS = 64  # MAX_OPERATION
_MOST_CHANNELS = 16  # MAX_CHANNEL
_NOTHING: dict[str, Any] = {"name": "nop"}
_LONGEST = 1 << 30  # chunks of an operation: there is no limit
_SIGNALS = ("signal", "rlxsignal")
_WAITS = ("wait", "rlxwait")
_KINDS = ("memory", "port")
_Channel = tuple[int, int, str, int]
"""From rank, to rank, type, and number among those between the two."""
_Run = tuple[int, tuple[Place, ...]]
"""A rank, and places of adjacent chunks there."""


# --- out ------------------------------------------------------------------------------


def to_mscclpp(schedule: Schedule) -> str:
    """Write a schedule that keeps its contract as an execution plan of MSCCL++, in JSON.

    Raises
    ------
    ScheduleError
        A plan cannot hold the schedule; the message names the limit.
    """
    if schedule.collective not in _NAMES:
        raise ScheduleError(
            f"plans of MSCCL++ are for {', '.join(_NAMES)}, not for {schedule.collective}"
        )
    places, world_size = Places.of(schedule), schedule.world_size
    cut = pieces(schedule, places, _LONGEST)
    ranks = [_Rank(places, rank, cut[rank], schedule.num_slots) for rank in range(world_size)]
    for step in range(max(map(len, cut), default=0)):
        landings: dict[tuple[int, int], list[Place]] = {}
        for rank in ranks:
            rank.plan_landings(step, landings)
        for rank in ranks:
            rank.do(step, landings)
    plan = {
        "name": schedule.algorithm,
        "collective": _NAMES[schedule.collective],
        "protocol": "Simple",
        "inplace": False,
        "reuse_resources": False,
        "gpus": [rank.as_json() for rank in ranks],
        "num_threads_per_block": 1024,
        "use_double_scratch_buffer": False,
        "buffer_alignment": 16,
        "min_message_size": 0,
        "max_message_size": (1 << 64) - 1,
    }
    return json.dumps(plan, indent=1) + "\n"


class _Rank:
    """The plan of a rank, as it is written."""

    def __init__(
        self, places: Places, rank: int, steps: Sequence[Sequence[Piece]], num_slots: int
    ) -> None:
        self.places, self.rank, self.steps, self.num_slots = places, rank, steps, num_slots
        self.peers = sorted({piece.peer for piece in chain(*steps)} - {-1})
        if len(self.peers) > _MOST_CHANNELS:
            raise ScheduleError(
                f"rank {rank} has {len(self.peers)} peers, and a thread block of MSCCL++ has at "
                f"most {_MOST_CHANNELS} channels (MAX_CHANNEL)"
            )
        self.operations: list[dict[str, Any]] = []
        self.remote: list[tuple[int, str]] = []  # buffers of peers that are written
        self._used: set[Place] = set()
        self._read: set[Place] = set()  # since all threads have waited for each other
        self._written: set[Place] = set()
        self._must_wait = False
        self._landed: list[Place] = []
        if self.peers:
            self._channels("rlxsignal", self.peers)
            self._channels("rlxwait", self.peers)

    def plan_landings(self, step: int, landings: dict[tuple[int, int], list[Place]]) -> None:
        """Decide where the messages of a step are put, in the order in which they are sent."""
        own = self.steps[step]
        touched = [{*self._places(piece.sources), *self._places(piece.targets)} for piece in own]
        self._landed = []
        for index, piece in enumerate(own):
            if piece.kind not in ("recv", "recv_reduce"):
                continue
            others = self._used.union(*touched[:index], *touched[index + 1 :])
            landing = self.places.index(self.rank, piece.targets[0])
            if piece.kind == "recv_reduce" or others & touched[index]:
                landing = ("s", self.num_slots)
                self.num_slots += piece.count
            self._landed.append(landing)
            landings.setdefault((piece.peer, self.rank), []).append(landing)
        self._used.update(*touched)

    def do(self, step: int, landings: dict[tuple[int, int], list[Place]]) -> None:
        """Write the operations of a step: put, signal, wait, and use the messages that came."""
        sends = [piece for piece in self.steps[step] if piece.kind == "send"]
        others = [piece for piece in self.steps[step] if piece.kind != "send"]
        for piece in sends:
            self._put(piece, landings[self.rank, piece.peer].pop(0))
        if sends:
            self._wait_for_threads()
            self._channels("signal", sorted({piece.peer for piece in sends}))
        if sources := sorted({piece.peer for piece in others} - {-1}):
            self._channels("wait", sources)
            self._must_wait = True
        for piece in others:
            self._local(piece)

    def as_json(self) -> dict[str, Any]:
        """The rank's entry in the plan."""
        if len(self.operations) > _MOST_OPERATIONS:
            raise ScheduleError(
                f"rank {self.rank} has {len(self.operations)} operations in its thread block, and "
                f"MSCCL++ runs at most {_MOST_OPERATIONS} (MAX_OPERATION)"
            )
        if len(self.remote) > _MOST_CHANNELS:
            raise ScheduleError(
                f"rank {self.rank} writes {len(self.remote)} buffers of peers, and MSCCL++ knows "
                f"at most {_MOST_CHANNELS} (MAX_CHANNEL)"
            )
        ids = [{"channel_type": "memory", "channel_ids": [*range(len(self.peers))]}]
        buffers = {"access_channel_type": "memory", "remote_buffer_ids": [*range(len(self.remote))]}
        block = {
            "id": 0,
            "ops": self.operations,
            "channels": ids if self.peers else [],
            "remote_buffer_refs": [buffers] if self.remote else [],
        }
        channels = [{"channel_type": "memory", "connected_to": self.peers}]
        return {
            "id": self.rank,
            "input_chunks": self.places.num_places(self.rank, "i"),
            "output_chunks": self.places.num_places(self.rank, "o"),
            "scratch_chunks": self.num_slots,
            "threadblocks": [block],
            "channels": channels if self.peers else [],
            "remote_buffers": [
                {"rank": peer, "type": letter, "access_channel_types": ["memory"]}
                for peer, letter in self.remote
            ],
            "semaphores": [],
        }

    def _places(self, refs: Sequence[Any]) -> list[Place]:
        return [self.places.index(self.rank, ref) for ref in refs]

    def _channels(self, name: str, peers: Sequence[int]) -> None:
        ids = [self.peers.index(peer) for peer in peers]
        self.operations.append({"name": name, "channel_ids": ids, "channel_type": "memory"})
        self._must_wait = self._must_wait or name == "rlxwait"

    def _wait_for_threads(self, reads: Sequence[Place] = (), writes: Sequence[Place] = ()) -> None:
        """Let the threads of the block wait for each other, if a thread may need another's data."""
        clash = self._written.intersection(reads) or {*self._read, *self._written}.intersection(
            writes
        )
        if self._must_wait or clash or not (reads or writes):
            self.operations.append(_NOTHING)
            self._read, self._written, self._must_wait = set(), set(), False
        self._read.update(reads)
        self._written.update(writes)

    def _put(self, piece: Piece, landing: Place) -> None:
        sources = self._places(piece.sources)
        self._wait_for_threads(sources)
        remote = (piece.peer, landing[0])
        if remote not in self.remote:
            self.remote.append(remote)
        target = {"buffer_id": self.remote.index(remote), "index": landing[1], "size": piece.count}
        ends = {"src_buff": [_as_run(sources)], "dst_buff": [target]}
        self.operations.append({"name": "put", **ends, "channel_type": "memory"})

    def _local(self, piece: Piece) -> None:
        sources, targets = self._places(piece.sources), self._places(piece.targets)
        name = "re"
        if piece.kind == "copy":
            name = "copy"
        elif piece.kind == "add":
            sources = [*targets, *sources]
        else:
            letter, first = self._landed.pop(0)
            landed = [(letter, first + index) for index in range(piece.count)]
            if landed == targets:
                return
            sources = [*sources, *landed]
            name = "copy" if piece.kind == "recv" else "re"
        self._wait_for_threads(sources, targets)
        operands = [
            _as_run(sources[first : first + piece.count])
            for first in range(0, len(sources), piece.count)
        ]
        operation = {"name": name, "src_buff": operands, "dst_buff": [_as_run(targets)]}
        self.operations.append(operation | ({"reduce_op": "sum"} if name == "re" else {}))


def _as_run(places: Sequence[Place]) -> dict[str, Any]:
    return {"type": places[0][0], "index": places[0][1], "size": len(places)}


# --- in -------------------------------------------------------------------------------


def from_mscclpp(text: str) -> Schedule:
    """Read a plain execution plan of MSCCL++, as a schedule that is still to be verified.

    Raises
    ------
    ScheduleError
        The text is malformed, or no plain plan, or its thread blocks wait for each other in a
        circle; the message names the line or the place.
    """
    plan = parse_json(text)
    theirs = plan["collective"].word()
    if theirs not in _COLLECTIVES:
        raise plan["collective"].error(f"{theirs!r} is none of {', '.join(_COLLECTIVES)}")
    collective, gpus = _COLLECTIVES[theirs], plan.items("gpus")
    if not gpus:
        raise plan.error("has no gpus")
    world_size, named = len(gpus), 0
    rules = contract(collective)
    is_gathered = len(rules.inputs(0, world_size, 0)) < len(rules.outputs(0, world_size, 0))
    side = "output_chunks" if is_gathered else "input_chunks"
    per_rank = rules.num_blocks(world_size) // rules.blocks_of_rank(world_size)
    num_chunks = gpus[0][side].number(1) * per_rank
    for block in (block for gpu in gpus for block in gpu.items("threadblocks")):
        for operation in block.items("ops"):
            for end in ("src_buff", "dst_buff"):
                named += sum(run["size"].number() for run in operation.items(end))
    try:
        places = Places(collective, world_size, num_chunks)
        places.check_room(named)
    except ScheduleError as error:
        raise gpus[0][side].error(str(error)) from None
    in_place = plan["inplace"].flag()
    name = "_".join(plan["name"].word().split()) or "mscclpp"
    return levelled(places, name, _PlanReader(places, gpus, in_place).events, in_place=in_place)


class _PlanReader:
    """The events of a plan."""

    def __init__(self, places: Places, gpus: Sequence[JsonValue], in_place: bool) -> None:
        self.places, self.in_place = places, in_place
        self.events: list[Event] = []
        self._signals: dict[_Channel, list[tuple[int, JsonValue]]] = {}
        self._waits: dict[_Channel, list[tuple[int, JsonValue]]] = {}
        for rank, gpu in enumerate(gpus):
            gpu["id"].number(rank, rank)
            for block in gpu.items("threadblocks"):
                self._rank, self._gpu, self._block = rank, gpu, block
                self._last: list[int] = []
                for operation in block.items("ops"):
                    if operation.has("tbg_info"):
                        raise operation.error("a group of thread blocks is not plain")
                    self._read(operation)
        self._pair()

    def _read(self, operation: JsonValue) -> None:
        name = operation["name"].word()
        if name in ("nop", "flush"):
            return
        if name in _SIGNALS or name in _WAITS:
            table = self._signals if name in _SIGNALS else self._waits
            for channel in self._channels(operation):
                from_peer = (channel[1], channel[0], *channel[2:])
                key = channel if name in _SIGNALS else from_peer
                self._event(operation, self._rank, EventKind.NOTHING)
                table.setdefault(key, []).append((self._last[0], operation))
            return
        sources = [self._run(operation, run) for run in operation.items("src_buff")]
        targets = [self._run(operation, run) for run in operation.items("dst_buff")]
        counts = len(sources), len(targets)
        right = {"copy": (1, 1), "put": (counts[1], counts[1]), "get": (counts[0], counts[0])}
        if name not in (*right, "re", "res", "rre", "rres"):
            raise operation.error(f"{name!r} is not an operation of a plain plan")
        if 0 in counts or counts != right.get(name, counts):
            raise operation.error("has too few or too many runs in src_buff or dst_buff")
        sizes = {len(chunks) for _, chunks in [*sources, *targets]}
        if len(sizes) > 1 and name not in ("put", "get"):
            raise operation.error("has runs of different sizes")
        if name in right:
            for pair in zip(sources, targets, strict=True):
                self._move(operation, *pair)
        else:
            self._reduce(operation, sources, targets)

    def _reduce(self, op: JsonValue, sources: Sequence[_Run], targets: Sequence[_Run]) -> None:
        """Reduce the first operand with the others, and put the sum to peers."""
        (rank, own), (target_rank, into) = sources[0], targets[0]
        if rank != self._rank or target_rank != self._rank:
            raise op.error("the first run of src_buff and of dst_buff is a peer's")
        if all(source == self._rank for source, _ in sources):
            for place, *operands in zip(into, *(chunks for _, chunks in sources), strict=True):
                self._event(op, rank, EventKind.ADD, tuple(operands), (place,))
        else:
            for source, chunks in sources[1:]:
                if source == self._rank:
                    raise op.error("reads a peer's run and, behind the first, its own")
                self._event(op, source, EventKind.SEND, chunks)
                self._event(op, rank, EventKind.REDUCE, own, into)
                own = into
        for target in targets[1:]:
            self._move(op, (rank, into), target)

    def _move(self, operation: JsonValue, source: _Run, target: _Run) -> None:
        (sender, reads), (receiver, writes) = source, target
        if len(reads) != len(writes):
            raise operation.error("has runs of different sizes")
        if sender == receiver:
            self._event(operation, sender, EventKind.COPY, reads, writes)
        else:
            self._event(operation, sender, EventKind.SEND, reads)
            self._event(operation, receiver, EventKind.RECV, (), writes)

    def _event(
        self,
        operation: JsonValue,
        rank: int,
        kind: EventKind,
        reads: tuple[Place, ...] = (),
        writes: tuple[Place, ...] = (),
    ) -> None:
        event = Event(rank, kind, reads, writes, self._last, operation.path)
        if kind in (EventKind.RECV, EventKind.REDUCE):
            event.message = len(self.events) - 1
        self.events.append(event)
        self._last = [len(self.events) - 1]

    def _run(self, operation: JsonValue, run: JsonValue) -> _Run:
        rank, size, first = self._rank, run["size"].number(1), run["index"].number()
        if run.has("buffer_id"):
            kind, key = operation["channel_type"].word(), "access_channel_type"
            ids = _of_kind(kind, self._block, "remote_buffer_refs", "remote_buffer_ids", key)
            buffers = self._gpu.items("remote_buffers")
            number = ids[run["buffer_id"].number(0, len(ids) - 1)].number(0, len(buffers) - 1)
            rank = buffers[number]["rank"].number(0, self.places.world_size - 1)
            letter = buffers[number]["type"].word()
        else:
            letter = run["type"].word()
        if letter not in ("i", "o", "s"):
            raise run.error(f"{letter!r} is none of i, o, s")
        if letter != "s" and first + size > (room := self.places.num_places(rank, letter)):
            raise run.error(
                f"chunks {first} to {first + size - 1} are not in the {room} of {letter}"
            )
        indices = range(first, first + size)
        return rank, self.places.run(rank, letter, indices, in_place=self.in_place)

    def _channels(self, operation: JsonValue) -> list[_Channel]:
        """The channels of an operation, from this rank to its peers."""
        kind = operation["channel_type"].word()
        if kind not in _KINDS:
            raise operation["channel_type"].error(f"{kind!r} is none of {', '.join(_KINDS)}")
        ends: list[_Channel] = []
        counts: Counter[int] = Counter()
        for end in _of_kind(kind, self._gpu, "channels", "connected_to"):
            peer = end.number(0, self.places.world_size - 1)
            ends.append((self._rank, peer, kind, counts[peer]))
            counts[peer] += 1
        ids = _of_kind(kind, self._block, "channels", "channel_ids")
        used = operation.items("channel_ids")
        return [ends[ids[each.number(0, len(ids) - 1)].number(0, len(ends) - 1)] for each in used]

    def _pair(self) -> None:
        """Let the i-th wait of each channel wait for its i-th signal."""
        for channel in {**self._signals, **self._waits}:
            signals, waits = self._signals.get(channel, []), self._waits.get(channel, [])
            for (signal, _), (wait, _) in zip(signals, waits, strict=False):
                self.events[wait].before = [*self.events[wait].before, signal]
            if len(signals) != len(waits):
                _, operation = max(signals, waits, key=len)[min(len(signals), len(waits))]
                raise operation.error(
                    f"rank {channel[0]} signals {len(signals)} times to rank {channel[1]} over a "
                    f"{channel[2]} channel, but rank {channel[1]} waits {len(waits)} times"
                )


def _of_kind(
    kind: str, parent: JsonValue, lists: str, items: str, key: str = "channel_type"
) -> list[JsonValue]:
    """The items of those lists of a node that are for a type of channels."""
    own = (entry for entry in parent.items(lists) if entry[key].value == kind)
    return [item for entry in own for item in entry.items(items)]


def schedule_in(text: str) -> Schedule:
    """Read a schedule: XML of MSCCL, JSON of MSCCL++, or a text of `Schedule.to_text`.

    Raises
    ------
    ScheduleError
        The text is malformed; the message names the line.
    """
    first = text.lstrip("\ufeff \t\r\n")[:1]
    if first == "<":
        return from_msccl(text)
    return from_mscclpp(text) if first == "{" else Schedule.from_text(text)


def topology_in(text: str, *, name: str = "graph") -> Topology:
    """Read a network: XML of NCCL, or a text of `topology_text`.

    Raises
    ------
    ArgumentError
        The text is malformed; the message names the line.
    """
    text = text.removeprefix("\ufeff")
    reader = topology_from_nccl if text.lstrip().startswith("<") else topology_from_text
    return reader(text, name=name)
