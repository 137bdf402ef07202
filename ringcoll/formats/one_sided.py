"""The events of an execution plan of MSCCL++, in which ranks write and read each other's memory.

A ``put`` is a send and, at once, a receive of the peer; a ``get`` is a send of the peer and a receive.
The n-th channel of a rank to a peer and the n-th of the peer to the rank are two ends of one, on
which the i-th wait needs the i-th signal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ringcoll.formats.block_events import Event, EventKind, Place
from ringcoll.formats.places import Places
from ringcoll.formats.tree import Node

_SIGNALS = ("signal", "rlxsignal")
_WAITS = ("wait", "rlxwait")
_KINDS = ("memory", "port")
_Channel = tuple[int, int, str, int]
"""From rank, to rank, type, and number among those between the two."""


def events_of(places: Places, gpus: Sequence[Node], *, in_place: bool) -> list[Event]:
    """The events of all ranks."""
    reader = _PlanReader(places, in_place)
    for rank, gpu in enumerate(gpus):
        gpu["id"].number(rank, rank)
        for block in gpu.items("threadblocks"):
            reader.read_block(rank, gpu, block)
    reader.pair()
    return reader.events


class _PlanReader:
    def __init__(self, places: Places, in_place: bool) -> None:
        self.places, self.in_place = places, in_place
        self.events: list[Event] = []
        self._signals: dict[_Channel, list[tuple[int, Node]]] = {}
        self._waits: dict[_Channel, list[tuple[int, Node]]] = {}
        self._last: list[int] = []
        self._gpu = self._block = Node(None)
        self._rank = 0

    def read_block(self, rank: int, gpu: Node, block: Node) -> None:
        self._rank, self._gpu, self._block, self._last = rank, gpu, block, []
        for operation in block.items("ops"):
            if operation.has("tbg_info"):
                raise operation.error("a group of thread blocks is not plain")
            self._read(operation)

    def _read(self, operation: Node) -> None:
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
        right = {"copy": (1, 1), "put": (len(targets), len(targets)), "get": (len(sources),) * 2}
        if name not in (*right, "re", "res", "rre", "rres"):
            raise operation.error(f"{name!r} is not an operation of a plain plan")
        if min(len(sources), len(targets)) < 1 or right.get(name, (0, 0)) not in (
            (0, 0), (len(sources), len(targets))
        ):  # fmt: skip
            raise operation.error("has too few or too many runs in src_buff or dst_buff")
        if len({len(chunks) for _, chunks in [*sources, *targets]}) > 1 and name not in (
            "put",
            "get",
        ):
            raise operation.error("has runs of different sizes")
        if name in ("copy", "put", "get"):
            for pair in zip(sources, targets, strict=True):
                self._move(operation, *pair)
            return
        self._reduce(operation, sources, targets)

    def _reduce(
        self,
        operation: Node,
        sources: Sequence[tuple[int, tuple[Place, ...]]],
        targets: Sequence[tuple[int, tuple[Place, ...]]],
    ) -> None:
        """Reduce the first operand with the others, and put the sum to peers."""
        (rank, own), (_, into) = sources[0], targets[0]
        if rank != self._rank or targets[0][0] != self._rank:
            raise operation.error("the first run of src_buff and of dst_buff is a peer's")
        if all(source == self._rank for source, _ in sources):
            for place, *operands in zip(into, *(chunks for _, chunks in sources), strict=True):
                self._event(operation, rank, EventKind.ADD, tuple(operands), (place,))
        else:
            for source, chunks in sources[1:]:
                if source == self._rank:
                    raise operation.error("reads a peer's run and, behind the first, its own")
                self._event(operation, source, EventKind.SEND, chunks)
                self._event(operation, rank, EventKind.REDUCE, own, into)
                own = into
        for target in targets[1:]:
            self._move(operation, (rank, into), target)

    def _move(
        self,
        operation: Node,
        source: tuple[int, tuple[Place, ...]],
        target: tuple[int, tuple[Place, ...]],
    ) -> None:
        if len(source[1]) != len(target[1]):
            raise operation.error("has runs of different sizes")
        if source[0] == target[0]:
            self._event(operation, source[0], EventKind.COPY, source[1], target[1])
        else:
            self._event(operation, source[0], EventKind.SEND, source[1])
            self._event(operation, target[0], EventKind.RECV, (), target[1])

    def _event(
        self,
        operation: Node,
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

    def _run(self, operation: Node, run: Node) -> tuple[int, tuple[Place, ...]]:
        """The rank and the places of adjacent chunks."""
        rank, size, first = self._rank, run["size"].number(1), run["index"].number()
        if run.has("buffer_id"):
            kind = operation["channel_type"].word()
            ids = [
                each
                for refs in self._block.items("remote_buffer_refs")
                if refs["access_channel_type"].value == kind
                for each in refs.items("remote_buffer_ids")
            ]
            buffers = self._gpu.items("remote_buffers")
            number = ids[run["buffer_id"].number(0, len(ids) - 1)].number(0, len(buffers) - 1)
            rank = buffers[number]["rank"].number(0, self.places.world_size - 1)
            letter = buffers[number]["type"].word()
        else:
            letter = run["type"].word()
        if letter not in ("i", "o", "s"):
            raise run.error(f"{letter!r} is none of i, o, s")
        if letter == "s":
            return rank, tuple(("s", first + index) for index in range(size))
        room = self.places.num_places(rank, letter)
        if first + size > room:
            raise run.error(
                f"chunks {first} to {first + size - 1} are not in the {room} of {letter}"
            )
        word = "io" if self.in_place else letter
        indices = range(first, first + size)
        return rank, tuple((word, self.places.chunk(rank, letter, index)) for index in indices)

    def _channels(self, operation: Node) -> list[_Channel]:
        """The channels of an operation, from this rank to its peers."""
        kind = operation["channel_type"].word()
        if kind not in _KINDS:
            raise operation["channel_type"].error(f"{kind!r} is none of {', '.join(_KINDS)}")
        ends: list[_Channel] = []
        counts: Counter[int] = Counter()
        for channel in self._gpu.items("channels"):
            if channel["channel_type"].value == kind:
                for end in channel.items("connected_to"):
                    peer = end.number(0, self.places.world_size - 1)
                    ends.append((self._rank, peer, kind, counts[peer]))
                    counts[peer] += 1
        ids = [
            each
            for channel in self._block.items("channels")
            if channel["channel_type"].value == kind
            for each in channel.items("channel_ids")
        ]
        used = operation.items("channel_ids")
        return [ends[ids[each.number(0, len(ids) - 1)].number(0, len(ends) - 1)] for each in used]

    def pair(self) -> None:
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
