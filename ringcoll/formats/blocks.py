"""The thread blocks of MSCCL: what waits for what, as far as it is not known otherwise.

A step waits for the last steps, in other thread blocks of its rank, that write what it reads or
writes, or read what it writes. It need not wait for what has ended for certain, because an earlier
step of its thread block waited for it, or for a step that waited for it in turn.

Source of the limits: ``src/include/msccl/msccl_struct.h`` and ``src/include/device.h`` of
Azure/msccl-executor-nccl.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ringcoll.errors import ScheduleError
from ringcoll.formats.pieces import Memory, Piece
from ringcoll.formats.places import Places

_BLOCKS = 32  # MSCCL_MAX_NUM_THREAD_BLOCKS_PER_CHANNEL: connections of a channel, each way
_CHANNELS = 32  # MAXCHANNELS


@dataclass
class ThreadBlock:
    """A thread block that is being written: its peers, its channel, and its steps."""

    send: int = -1
    recv: int = -1
    channel: int = 0
    steps: list[tuple[Piece | None, tuple[int, int]]] = field(default_factory=list)
    knows: dict[int, int] = field(default_factory=dict)
    """The last step, of each other block, that has ended for certain."""


def blocks_of(
    places: Places, rank: int, steps: Sequence[Sequence[Piece]], max_steps: int
) -> list[ThreadBlock]:
    """The thread blocks of a rank: one for each connection, and one for what is local."""
    blocks: list[ThreadBlock] = []
    numbers: dict[tuple[str, int], int] = {}
    writer: dict[Memory, tuple[int, int]] = {}
    readers: dict[Memory, dict[int, int]] = {}  # the last step of each block
    known: dict[tuple[int, int], dict[int, int]] = {}  # by step, what `ThreadBlock.knows` was
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
        waits.sort(key=lambda wait: wait[1], reverse=True)
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


def _new_block(places: Places, rank: int, way: str, peer: int) -> ThreadBlock:
    """A thread block for a connection, on a channel that has room at both ends."""
    distance = (peer - rank if way == "send" else rank - peer) % places.world_size
    channel = (distance - 1) // _BLOCKS if way else 0
    if channel >= _CHANNELS:
        raise ScheduleError(
            f"rank {rank} has connections over a distance of {distance} ranks: MSCCL has "
            f"{_CHANNELS} channels with {_BLOCKS} connections each way"
        )
    return ThreadBlock(peer if way == "send" else -1, peer if way == "recv" else -1, channel)
