"""Execution traces of Chakra, one file for each rank: for ASTRA-sim.

A trace is a row of messages of protobuf, each behind its length: one ``GlobalMetadata``, then a
``Node`` for each send, receive and computation. As in `ringcoll.formats.goal`, a step ends with a
computation that depends on all of it, and the next step depends on that.

Of protobuf's encoding two kinds of fields are needed, so that it is written here: numbers, and what has
a length. Sources: ``schema/protobuf/et_def.proto`` of mlcommons/chakra; its feeder of ASTRA-sim
(``et_feeder_node.cpp``) for the names and types of attributes; protobuf.dev, "Encoding".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from ringcoll.errors import ScheduleError
from ringcoll.formats.traffic import chunk_nbytes, traffic
from ringcoll.schedule import Schedule, Send

_COMP, _SEND, _RECV = 4, 5, 6  # enum NodeType
_INT32, _INT64, _BOOL = 7, 9, 27  # fields of AttributeProto's value


def to_chakra(schedule: Schedule, nbytes: int, *, gamma_us_per_byte: float = 0.0) -> list[bytes]:
    """Write a schedule as traces, one for each rank.

    Parameters
    ----------
    schedule
        A schedule that keeps its contract.
    nbytes
        Bytes of the whole data: of the vector, or of all blocks of a rank.
    gamma_us_per_byte
        Microseconds that it takes to reduce a byte; a trace holds whole microseconds.

    Returns
    -------
    list of bytes
        The content of ``NAME.RANK.et``, by rank.

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
    length = chunk_nbytes(schedule, nbytes)
    tags: Counter[tuple[int, int]] = Counter()
    number = 0
    ended: list[int] = []
    for index, step in enumerate(schedule.steps(rank)):
        messages, reduced = traffic(step, length)
        first = number
        for operation, size in messages:
            peer, sends = operation.peer, isinstance(operation, Send)
            ends = (rank, peer) if sends else (peer, rank)
            attributes = [
                _attribute("comm_type", _INT64, _SEND if sends else _RECV),
                _attribute("comm_size", _INT64, size),
                _attribute("comm_src", _INT32, ends[0]),
                _attribute("comm_dst", _INT32, ends[1]),
                _attribute("comm_tag", _INT32, tags[ends]),
            ]
            tags[ends] += 1
            name = f"step {index}: {'send to' if sends else 'receive from'} {peer}"
            yield _node(number, name, _SEND if sends else _RECV, ended, 0, attributes)
            number += 1
        if number == first and not reduced:
            continue
        micros = round(reduced * gamma)
        before = [*range(first, number)] or ended
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
