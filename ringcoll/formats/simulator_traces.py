"""The bytes that ranks of a schedule send and reduce, for formats that know messages and no data.

GOAL: sends, receives and computations with what they require, for LogGOPSim and ATLAHS.

A step of a rank begins when its step before has ended, as in the executor. The end of a step is a
``calc`` that requires all of it; its length is that of the reductions, one of one nanosecond at least
where there are any. The n-th message from one rank to another has the tag n at both ends.

Sources: ``txt2bin.re`` of spcl/LogGOPSim, for the grammar (a line must not begin with white space);
T. Hoefler, T. Schneider, A. Lumsdaine, "LogGOPSim", LSAP 2010, for the meaning.

Execution traces of Chakra, one file for each rank: for ASTRA-sim.

A trace is a row of messages of protobuf, each behind its length: one ``GlobalMetadata``, then a
``Node`` for each send, receive and computation. As in `ringcoll.formats.simulator_traces`, a step ends with a
computation that depends on all of it, and the next step depends on that.

Of protobuf's encoding two kinds of fields are needed, so that it is written here: numbers, and what has
a length. Sources: ``schema/protobuf/et_def.proto`` of mlcommons/chakra; its feeder of ASTRA-sim
(``et_feeder_node.cpp``) for the names and types of attributes; protobuf.dev, "Encoding".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from ringcoll.errors import ScheduleError
from ringcoll.schedule import (
    Recv,
    RecvReduce,
    Reduce,
    Schedule,
    Send,
    Step,
    balanced_share,
    chunks_of_data,
    contract,
)


def traffic(
    step: Step, length: Callable[[int], int]
) -> tuple[list[tuple[Send | Recv | RecvReduce, int]], int]:
    """The messages of a rank's step, each with its bytes, and the bytes that the rank reduces.

    ``length`` says how long a chunk is: `chunk_nbytes`.
    """
    messages: list[tuple[Send | Recv | RecvReduce, int]] = []
    reduced = 0
    for operation in step:
        if isinstance(operation, Reduce):
            reduced += length(operation.into.chunk) * (len(operation.sources) - 1)
        elif isinstance(operation, Send | Recv | RecvReduce):
            nbytes = sum(length(ref.chunk) for ref in operation.writes or operation.reads)
            reduced += nbytes if isinstance(operation, RecvReduce) else 0
            messages.append((operation, nbytes))
    return messages, reduced


def chunk_nbytes(schedule: Schedule, nbytes: int) -> Callable[[int], int]:
    """Make the function that says how long a chunk is, in bytes.

    Examples
    --------
    >>> from ringcoll.algorithms import schedule_of
    >>> [*map(chunk_nbytes(schedule_of("all_reduce", "ring", 3), 10), range(3))]
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
    """Write a schedule as a GOAL text, all ranks in one.

    Parameters
    ----------
    schedule
        A schedule that keeps its contract.
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
    length = chunk_nbytes(schedule, nbytes)
    tags: Counter[tuple[str, int]] = Counter()
    label, ended = 0, ""
    for step in schedule.steps(rank):
        messages, reduced = traffic(step, length)
        labels = []
        for operation, size in messages:
            word = "send" if isinstance(operation, Send) else "recv"
            way = "to" if word == "send" else "from"
            label += 1
            yield f"l{label}: {word} {size}b {way} {operation.peer} tag {tags[word, operation.peer]}"
            tags[word, operation.peer] += 1
            labels.append(f"l{label}")
            if ended:
                yield f"l{label} requires {ended}"
        if not labels and not reduced:
            continue
        label += 1
        yield f"l{label}: calc {round(reduced * gamma)}"
        yield from (f"l{label} requires {each}" for each in labels or [ended] if each)
        ended = f"l{label}"


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
