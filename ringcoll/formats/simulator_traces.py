"""Programs of simulators that know messages and no data: GOAL, and execution traces of Chakra.

A step of a rank begins when its step before has ended, as in the executor. The end of a step is a
computation that requires all of it; its length is that of the reductions. The n-th message from one
rank to another has the tag n at both ends.

*GOAL*, for LogGOPSim and ATLAHS: sends, receives and computations (``calc``, of one nanosecond at
least where there is a reduction) with what they require. Sources: ``txt2bin.re`` of spcl/LogGOPSim,
for the grammar (a line must not begin with white space); T. Hoefler, T. Schneider, A. Lumsdaine,
"LogGOPSim", LSAP 2010, for the meaning.

*Chakra*, for ASTRA-sim: one file for each rank, a row of messages of protobuf, each behind its
length: one ``GlobalMetadata``, then a ``Node`` for each send, receive and computation. Of
protobuf's encoding two kinds of fields are needed, so that it is written here: numbers, and what
has a length. Sources: ``schema/protobuf/et_def.proto`` of mlcommons/chakra; its feeder of ASTRA-sim
(``et_feeder_node.cpp``) for the names and types of attributes; protobuf.dev, "Encoding".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from ringcoll.errors import ScheduleError
from ringcoll.schedule import (
    Recv,
    RecvReduce,
    Reduce,
    Schedule,
    Send,
    balanced_share,
    chunks_of_data,
    contract,
)

_COMP, _SEND, _RECV = 4, 5, 6  # enum NodeType
_INT32, _INT64, _BOOL = 7, 9, 27  # fields of AttributeProto's value


class _Message(NamedTuple):
    is_send: bool
    peer: int
    nbytes: int
    tag: int


def _traffic(
    schedule: Schedule, rank: int, nbytes: int
) -> Iterator[tuple[int, list[_Message], int]]:
    """The steps in which a rank does anything: number, messages, and bytes that it reduces."""
    length = _chunk_nbytes(schedule, nbytes)
    tags: Counter[tuple[bool, int]] = Counter()
    for number, step in enumerate(schedule.steps(rank)):
        messages, reduced = [], 0
        for operation in step:
            if isinstance(operation, Reduce):
                reduced += length(operation.into.chunk) * (len(operation.sources) - 1)
            elif isinstance(operation, Send | Recv | RecvReduce):
                size = sum(length(ref.chunk) for ref in operation.writes or operation.reads)
                reduced += size if isinstance(operation, RecvReduce) else 0
                way = isinstance(operation, Send), operation.peer
                messages.append(_Message(*way, size, tags[way]))
                tags[way] += 1
        if messages or reduced:
            yield number, messages, reduced


def _chunk_nbytes(schedule: Schedule, nbytes: int) -> Callable[[int], int]:
    """Make the function that says how long a chunk is, in bytes.

    >>> from ringcoll.algorithms import schedule_of
    >>> [*map(_chunk_nbytes(schedule_of("all_reduce", "ring", 3), 10), range(3))]
    [4, 3, 3]
    """
    rules = contract(schedule.collective)
    per_block = rules.chunks_per_block(schedule.num_chunks, schedule.world_size)
    blocks = chunks_of_data(schedule) // per_block
    if nbytes < 0 or nbytes % blocks:
        raise ScheduleError(
            f"{schedule.collective} on {schedule.world_size} ranks cannot divide {nbytes} bytes "
            f"into blocks of equal length: expected a multiple of {blocks}, at least 0"
        )
    return lambda chunk: balanced_share(nbytes // blocks, per_block, chunk % per_block)[1]


def to_goal(schedule: Schedule, nbytes: int, *, gamma_ns_per_byte: float = 0.0) -> str:
    """Write a schedule that keeps its contract as a GOAL text, all ranks in one.

    Parameters
    ----------
    schedule
        The schedule.
    nbytes
        Bytes of the whole data: of the vector, or of all blocks of a rank.
    gamma_ns_per_byte
        Nanoseconds that it takes to reduce a byte.

    Raises
    ------
    ScheduleError
        The blocks of a rank would not have equal lengths, or ``gamma_ns_per_byte`` is below 0.

    Examples
    --------
    >>> from ringcoll.algorithms import schedule_of
    >>> print(to_goal(schedule_of("reduce", "binomial_tree", 2), 8, gamma_ns_per_byte=2), end="")
    num_ranks 2
    rank 0 {
    l1: recv 8b from 1 tag 0
    l2: calc 16
    l2 requires l1
    }
    rank 1 {
    l1: send 8b to 0 tag 0
    l2: calc 0
    l2 requires l1
    }
    """
    if not gamma_ns_per_byte >= 0:
        raise ScheduleError(f"gamma_ns_per_byte must be at least 0, got {gamma_ns_per_byte}")
    lines = [f"num_ranks {schedule.world_size}"]
    for rank in range(schedule.world_size):
        lines += [f"rank {rank} {{", *_program(schedule, rank, nbytes, gamma_ns_per_byte), "}"]
    return "\n".join(lines) + "\n"


def _program(schedule: Schedule, rank: int, nbytes: int, gamma: float) -> Iterator[str]:
    label, ended = 0, ""
    for _, messages, reduced in _traffic(schedule, rank, nbytes):
        labels = []
        for message in messages:
            label += 1
            labels.append(f"l{label}")
            word, way = ("send", "to") if message.is_send else ("recv", "from")
            yield f"l{label}: {word} {message.nbytes}b {way} {message.peer} tag {message.tag}"
            if ended:
                yield f"l{label} requires {ended}"
        label += 1
        yield f"l{label}: calc {round(reduced * gamma)}"
        yield from (f"l{label} requires {each}" for each in labels or [ended] if each)
        ended = f"l{label}"


def to_chakra(schedule: Schedule, nbytes: int, *, gamma_us_per_byte: float = 0.0) -> list[bytes]:
    """Write a schedule that keeps its contract as traces: ``NAME.RANK.et`` for each rank.

    Parameters
    ----------
    schedule
        The schedule.
    nbytes
        Bytes of the whole data: of the vector, or of all blocks of a rank.
    gamma_us_per_byte
        Microseconds that it takes to reduce a byte; a trace holds whole microseconds.

    Raises
    ------
    ScheduleError
        The blocks of a rank would not have equal lengths, or ``gamma_us_per_byte`` is below 0.
    """
    if not gamma_us_per_byte >= 0:
        raise ScheduleError(f"gamma_us_per_byte must be at least 0, got {gamma_us_per_byte}")
    header = _message(_text(1, "0.0.4"))
    return [
        header + b"".join(map(_message, _nodes(schedule, rank, nbytes, gamma_us_per_byte)))
        for rank in range(schedule.world_size)
    ]


def _nodes(schedule: Schedule, rank: int, nbytes: int, gamma: float) -> Iterator[bytes]:
    number = 0
    ended: list[int] = []
    for index, messages, reduced in _traffic(schedule, rank, nbytes):
        first = number
        for is_send, peer, size, tag in messages:
            kind, words = (_SEND, "send to") if is_send else (_RECV, "receive from")
            source, target = (rank, peer) if is_send else (peer, rank)
            attributes = [
                _attribute("comm_type", _INT64, kind),
                _attribute("comm_size", _INT64, size),
                _attribute("comm_src", _INT32, source),
                _attribute("comm_dst", _INT32, target),
                _attribute("comm_tag", _INT32, tag),
            ]
            yield _node(number, f"step {index}: {words} {peer}", kind, ended, 0, attributes)
            number += 1
        before, micros = [*range(first, number)] or ended, round(reduced * gamma)
        yield _node(number, f"step {index}: reduce", _COMP, before, micros, ())
        ended, number = [number], number + 1


def _node(
    number: int,
    name: str,
    kind: int,
    before: Iterable[int],
    micros: int,
    attributes: Iterable[bytes],
) -> bytes:
    fields = [_number(1, number), _text(2, name), _number(3, kind)]
    packed = b"".join(map(_varint, before))
    fields += [_sized(5, packed)] if packed else []
    fields += [_number(7, micros), *attributes]
    return b"".join([*fields, _attribute("is_cpu_op", _BOOL, 0)])


def _attribute(name: str, field: int, value: int) -> bytes:
    # A member of a oneof is written even if it is 0: otherwise there would be no value.
    return _sized(10, _text(1, name) + _varint(field << 3) + _varint(value))


def _varint(number: int) -> bytes:
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*data, number])


def _number(field: int, value: int) -> bytes:
    """A field with a number; none if it is 0, which is what is read where there is none."""
    return _varint(field << 3) + _varint(value) if value else b""


def _sized(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _message(data)


def _text(field: int, text: str) -> bytes:
    return _sized(field, text.encode())


def _message(data: bytes) -> bytes:
    """A message behind its length."""
    return _varint(len(data)) + data
