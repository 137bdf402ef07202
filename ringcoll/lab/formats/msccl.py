"""MSCCL's XML, out and in.

Out: a rank gets a thread block for each connection (to a peer, or from a peer), and one for local
steps. A thread block does its steps in order. A step waits for the last steps, in other thread
blocks of its rank, that write a place which it reads or writes, or read a place which it writes.
The wait is left out if an earlier step of the thread block waited for that step, directly or
through other steps. A second wait, and each further one, is a ``nop`` step before the step. In:
thread blocks become steps of a schedule by `ringcoll.lab.formats.levelling`.

In the file, ``s`` sends the source, ``r`` receives into the destination, ``rrc`` receives, reduces
with the source and stores in the destination; ``rcs`` and ``rrcs`` then send the destination;
``rrs`` sends the sum without storing it; ``cpy`` copies, and ``re`` adds the source to the
destination. An in-place file (``inplace="1"``) has one memory for input and output.

The file has no place for a root, so that ``root`` is an attribute of our own, which MSCCL passes
over; nor for the side of an operand or the order of a local sum: a file keeps the data, and not the
bits of float sums. Lengths are in chunks of one length.

Sources: ``src/misc/msccl/msccl_parser.cc``, ``src/include/msccl/msccl_struct.h``,
``src/include/device.h`` and ``src/device/msccl_kernel.cu`` of Azure/msccl-executor-nccl;
``msccl/language/ir.py`` of microsoft/msccl-tools. The limit of 256 steps is that of microsoft/msccl
and of RCCL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ringcoll.errors import ScheduleError
from ringcoll.lab.formats.documents import XmlElement, parse_xml
from ringcoll.lab.formats.levelling import Event, EventKind, levelled
from ringcoll.lab.formats.places import Piece, Place, Places, pieces
from ringcoll.schedules import Buffer, Schedule, chunks_of_data, contract

_BLOCKS = 32  # MSCCL_MAX_NUM_THREAD_BLOCKS_PER_CHANNEL: connections of a channel, each way
_CHANNELS = 32  # MAXCHANNELS
_KNOWN = (
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "gather", "scatter",
    "all_to_all",
)  # fmt: skip
_COLLECTIVES = {name.replace("_", ""): name for name in _KNOWN}
_NAMES = {ours: theirs for theirs, ours in _COLLECTIVES.items()}
_MOST_COUNT = 71  # MSCCL_MAX_COUNT is 72, and a count is below it
_INSIDE = {"": "algo", "algo": "gpu", "gpu": "tb", "tb": "step", "step": ""}
_TYPES = {"send": "s", "recv": "r", "recv_reduce": "rrc", "copy": "cpy", "add": "re"}
_ACTIONS = {  # of each type: what it does, from where, to where
    "s": [(EventKind.SEND, "src", "")],
    "r": [(EventKind.RECV, "", "dst")],
    "rcs": [(EventKind.RECV, "", "dst"), (EventKind.SEND, "dst", "")],
    "rrc": [(EventKind.REDUCE, "src", "dst")],
    "rrs": [(EventKind.REDUCE, "src", "block"), (EventKind.SEND, "block", "")],
    "rrcs": [(EventKind.REDUCE, "src", "dst"), (EventKind.SEND, "dst", "")],
    "cpy": [(EventKind.COPY, "src", "dst")],
    "re": [],  # an addition of each chunk
    "nop": [(EventKind.NOTHING, "", "")],
}


# --- out ------------------------------------------------------------------------------


def to_msccl(schedule: Schedule, *, max_steps: int = 64) -> str:
    """Write a schedule that keeps its contract as an algorithm of MSCCL, in XML.

    Parameters
    ----------
    schedule
        The schedule.
    max_steps
        Most steps of a thread block: 64 for msccl-executor-nccl, 256 for MSCCL and RCCL.

    Raises
    ------
    ScheduleError
        The format cannot hold the schedule; the message names the limit.
    """
    if schedule.collective not in _NAMES:
        raise ScheduleError(
            f"MSCCL has no {schedule.collective}; it has {', '.join(map(str, _NAMES))}"
        )
    places = Places.of(schedule)
    cut = pieces(schedule, places, _MOST_COUNT)
    gpus = [_blocks_of(places, rank, cut[rank], max_steps) for rank in range(schedule.world_size)]
    channels = 1 + max((block.channel for blocks in gpus for block in blocks), default=0)
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", schedule.algorithm)[:200]
    root = f' root="{schedule.root}"' if places.rules.rooted else ""
    lines = [
        f'<algo name="{name}" proto="Simple" nchannels="{channels}" '
        f'nchunksperloop="{chunks_of_data(schedule)}" ngpus="{schedule.world_size}" '
        f'coll="{_NAMES[schedule.collective]}" inplace="{int(places.rules.in_place)}" '
        f'outofplace="1" minBytes="0" maxBytes="0"{root}>'
    ]
    for rank, blocks in enumerate(gpus):
        sizes = [places.num_places(rank, letter) for letter in "io"]
        lines.append(
            f'  <gpu id="{rank}" i_chunks="{sizes[0]}" o_chunks="{sizes[1]}" '
            f's_chunks="{schedule.num_slots}">'
        )
        waited = {step[1] for block in blocks for step in block.steps}
        for number, block in enumerate(blocks):
            lines.append(
                f'    <tb id="{number}" send="{block.send}" recv="{block.recv}" '
                f'chan="{block.channel}">'
            )
            lines += [
                _step(places, rank, index, *step, has_dep=(number, index) in waited)
                for index, step in enumerate(block.steps)
            ]
            lines.append("    </tb>")
        lines.append("  </gpu>")
    return "\n".join([*lines, "</algo>"]) + "\n"


def _step(
    places: Places, rank: int, index: int, piece: Piece | None, wait: tuple[int, int], has_dep: bool
) -> str:
    kind, source, target, count = "nop", ("i", -1), ("o", -1), 0
    if piece is not None:
        kind, count = _TYPES[piece.kind], piece.count
        source = places.index(rank, (piece.sources or piece.targets)[0])
        target = places.index(rank, (piece.targets or piece.sources)[0])
    return (
        f'      <step s="{index}" type="{kind}" srcbuf="{source[0]}" srcoff="{source[1]}" '
        f'dstbuf="{target[0]}" dstoff="{target[1]}" cnt="{count}" depid="{wait[0]}" '
        f'deps="{wait[1]}" hasdep="{int(has_dep)}"/>'
    )


@dataclass
class _ThreadBlock:
    """A thread block that is being written: its peers, its channel, and its steps."""

    send: int
    recv: int
    channel: int
    steps: list[tuple[Piece | None, tuple[int, int]]] = field(default_factory=list)
    knows: dict[int, int] = field(default_factory=dict)  # by block, a step that has surely ended


def _blocks_of(
    places: Places, rank: int, steps: Sequence[Sequence[Piece]], max_steps: int
) -> list[_ThreadBlock]:
    """The thread blocks of a rank: one for each connection, and one for local steps."""
    blocks: list[_ThreadBlock] = []
    numbers: dict[tuple[str, int], int] = {}
    writer: dict[tuple[Buffer, int], tuple[int, int]] = {}
    readers: dict[tuple[Buffer, int], dict[int, int]] = {}  # the last step of each block
    known: dict[tuple[int, int], dict[int, int]] = {}  # by step, what `_ThreadBlock.knows` was
    for piece in (piece for step in steps for piece in step):
        way = {"send": "send", "copy": "", "add": ""}.get(piece.kind, "recv")
        if (way, piece.peer) not in numbers:
            numbers[way, piece.peer] = len(blocks)
            blocks.append(_new_block(places, rank, way, piece.peer))
        number = numbers[way, piece.peer]
        block = blocks[number]
        read = {places.memory(rank, ref) for ref in piece.sources}
        written = {places.memory(rank, ref) for ref in piece.targets}
        waits = [writer[place] for place in read | written if place in writer]
        waits += [wait for place in written for wait in readers.get(place, {}).items()]
        waits.sort(key=lambda wait: wait[::-1], reverse=True)  # sets have no order
        needed = []
        for other, step in waits:
            if other != number and block.knows.get(other, -1) < step:
                needed.append((other, step))
                for third, end in (known[other, step] | {other: step}).items():
                    block.knows[third] = max(end, block.knows.get(third, -1))
        for wait in needed[1:]:
            block.steps.append((None, wait))
        here = (number, len(block.steps))
        block.steps.append((piece, needed[0] if needed else (-1, -1)))
        known[here] = dict(block.knows)
        for place in read:
            readers.setdefault(place, {})[number] = here[1]
        for place in written:
            writer[place], readers[place] = here, {}
        if len(block.steps) > max_steps:
            raise ScheduleError(
                f"thread block {number} of rank {rank} has more than {max_steps} steps: "
                "msccl-executor-nccl runs at most 64, and MSCCL and RCCL 256 (max_steps)"
            )
    return blocks


def _new_block(places: Places, rank: int, way: str, peer: int) -> _ThreadBlock:
    """A thread block for a connection, on a channel that has room at both ends."""
    distance = (peer - rank if way == "send" else rank - peer) % places.world_size
    channel = (distance - 1) // _BLOCKS if way else 0
    if channel >= _CHANNELS:
        raise ScheduleError(
            f"rank {rank} has connections over a distance of {distance} ranks: MSCCL has "
            f"{_CHANNELS} channels with {_BLOCKS} connections each way"
        )
    return _ThreadBlock(peer if way == "send" else -1, peer if way == "recv" else -1, channel)


# --- in -------------------------------------------------------------------------------


def from_msccl(text: str) -> Schedule:
    """Read an algorithm of MSCCL, as a schedule that is still to be verified.

    Raises
    ------
    ScheduleError
        The text is malformed, or no algorithm of MSCCL, or its thread blocks wait for each other in
        a circle; the message names the line.
    """
    algo = parse_xml(text, _INSIDE)
    theirs = algo.word("coll")
    if theirs not in _COLLECTIVES:
        raise algo.error(f'coll="{theirs}" is none of {", ".join(_COLLECTIVES)}')
    collective, world_size = _COLLECTIVES[theirs], algo.number("ngpus", 1)
    if world_size != len(algo.children):
        raise algo.error(f'ngpus="{world_size}", but there are {len(algo.children)} gpus')
    num_chunks = algo.number("nchunksperloop", 1)
    rules = contract(collective)  # of the file the chunks are those of a rank
    num_chunks *= rules.num_blocks(world_size) // rules.blocks_of_rank(world_size)
    root = algo.number("root", 0, world_size - 1) if "root" in algo.attributes else 0
    name = "_".join(algo.word("name").split()) or "msccl"
    try:
        places = Places(collective, world_size, num_chunks, root)
        places.check_room(sum(step.number("cnt") for step in algo.each("step")))
    except ScheduleError as error:
        raise algo.error(str(error)) from None
    in_place = algo.number("inplace", 0, 1) == 1
    return levelled(places, name, _FileReader(algo, places, in_place).events, in_place=in_place)


class _FileReader:
    """The events of a file."""

    def __init__(self, algo: XmlElement, places: Places, in_place: bool) -> None:
        self.places, self.in_place = places, in_place
        self.events: list[Event] = []
        self._elements: list[XmlElement] = []  # of each event
        self._ends: dict[tuple[int, int, int], int] = {}  # the last event of each step
        self._sends: dict[tuple[int, int, int], list[int]] = {}
        self._receives: dict[tuple[int, int, int], list[int]] = {}
        self._waits: list[tuple[int, tuple[int, int, int], XmlElement]] = []
        for rank, gpu in enumerate(algo.children):
            gpu.expect("id", rank)
            self._scratch = gpu.number("s_chunks", 0)
            for letter in ("i_chunks", "o_chunks"):
                gpu.number(letter, 0)
            for number, tb in enumerate(sorted(gpu.children, key=lambda tb: tb.number("id"))):
                tb.expect("id", number)
                self._read_block(rank, number, tb)
        for event, step, element in self._waits:
            if step not in self._ends:
                raise element.error(
                    f"waits for step {step[2]} of thread block {step[1]}, which rank {step[0]} "
                    "does not have"
                )
            self.events[event].before = [*self.events[event].before, self._ends[step]]
        self._pair()

    def _read_block(self, rank: int, number: int, tb: XmlElement) -> None:
        most = self.places.world_size - 1
        send, recv = tb.number("send", -1, most), tb.number("recv", -1, most)
        channel = tb.number("chan", -1)
        own: list[list[int] | None] = [None, None]
        for way, (peer, table, ends) in enumerate(
            ((send, self._sends, (rank, send)), (recv, self._receives, (recv, rank)))
        ):
            if peer == rank:
                raise tb.error("a peer is the rank itself")
            if peer >= 0 and (*ends, channel) in table:
                raise tb.error(
                    f"another thread block has the connection from rank {ends[0]} to rank "
                    f"{ends[1]} on channel {channel}"
                )
            if peer >= 0:
                own[way] = table[(*ends, channel)] = []
        last: list[int] = []
        for index, step in enumerate(tb.children):
            step.expect("s", index)
            first = len(self.events)
            for kind, reads, writes in self._actions(rank, number, step):
                where = f"rank {rank}, thread block {number}, step {index} (line {step.line})"
                self._message(kind, own, step)
                self.events.append(Event(rank, kind, reads, writes, last, where))
                self._elements.append(step)
                last = [len(self.events) - 1]
            self._ends[rank, number, index] = last[0]
            other, _ = step.number("depid", -1), step.number("hasdep", 0, 1)
            if other >= 0:
                self._waits.append((first, (rank, other, step.number("deps")), step))

    def _message(self, kind: EventKind, own: list[list[int] | None], step: XmlElement) -> None:
        """Note that the next event sends or receives over a connection of its thread block."""
        if kind not in (EventKind.SEND, EventKind.RECV, EventKind.REDUCE):
            return
        way = int(kind is not EventKind.SEND)
        connection = own[way]
        if connection is None:
            raise step.error(f"the thread block has no peer to {('send to', 'receive from')[way]}")
        connection.append(len(self.events))

    def _actions(
        self, rank: int, block: int, step: XmlElement
    ) -> Iterator[tuple[EventKind, tuple[Place, ...], tuple[Place, ...]]]:
        """The actions of a step in order, with the places that each reads and writes."""
        kind, count = step.word("type"), step.number("cnt", 0)

        def side(name: str) -> tuple[Place, ...]:
            if name in ("", "block"):  # the last is a sum that is passed on
                return tuple((f"tb{block}", index) for index in range(count if name else 0))
            letter, first = step.word(f"{name}buf"), step.number(f"{name}off")
            if letter not in ("i", "o", "s"):
                raise step.error(f'{name}buf="{letter}" is none of i, o, s')
            room = self._scratch if letter == "s" else self.places.num_places(rank, letter)
            if not count or first + count > room:
                raise step.error(
                    f"{count} chunks from {name}off {first} are not in the {room} chunks of "
                    f"buffer {letter}"
                )
            indices = range(first, first + count)
            return self.places.run(rank, letter, indices, in_place=self.in_place)

        if kind not in _ACTIONS:
            raise step.error(f'type="{kind}" is none of {", ".join(_ACTIONS)}')
        for action, reads, writes in _ACTIONS[kind]:
            yield action, side(reads), side(writes)
        if kind == "re":
            for pair in zip(side("dst"), side("src"), strict=True):
                yield EventKind.ADD, pair, pair[:1]

    def _pair(self) -> None:
        """Pair the i-th send of each connection with its i-th receive."""
        for connection in {**self._sends, **self._receives}:
            sends = self._sends.get(connection, [])
            receives = self._receives.get(connection, [])
            for sent, received in zip(sends, receives, strict=False):
                event = self.events[received]
                event.message = sent
                if len(self.events[sent].reads) != len(event.writes):
                    raise self._elements[received].error(
                        f"receives {len(event.writes)} chunks, but {self.events[sent].where} "
                        f"sends {len(self.events[sent].reads)}"
                    )
            if len(sends) != len(receives):
                lonely = max(sends, receives, key=len)[min(len(sends), len(receives))]
                source, target, channel = connection
                raise self._elements[lonely].error(
                    f"rank {source} sends {len(sends)} messages to rank {target} on channel "
                    f"{channel}, but rank {target} receives {len(receives)}"
                )
