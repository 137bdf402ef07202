"""Programs over shared memory, laid out for the interpreter in C (``program.c``).

Problem: in Python, each message of a rank costs some hundred lines, which add up where ranks share
cores. A program of a bound operation is known before it runs. So its messages and its local work
are laid out as rows of words, once, and a small interpreter runs them. Nothing in a peer's memory
shows who runs a program: the messages are those of `ringcoll.runtime.transport.shared.channel`.

===========  ====================================================================================
instruction  what it does
===========  ====================================================================================
RECEIVE      ask for a message
SEND         write a message for a peer, or let it wait for room
RING         wake the peers that sleep until what was sent comes
EXCHANGE     write a message to the board, for all peers
WAIT         wait for a message, or until a message was taken
COPY         copy bytes
COMBINE      reduce vectors, of which some lie where they came, and give these back
PYTHON       return, as Python has to do something: a user's operator, a dtype of torch's
===========  ====================================================================================

The interpreter is optional. Without a compiler when the package was installed, or on the user's
wish (``RINGCOLL_INTERPRETER=python``), Python runs all programs, with the same messages and bits.
What is unusual is Python's in any case: a message that nobody has asked for, a tensor in shared
memory, a wait that takes long. Then the interpreter returns, and the run goes on in Python.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
import zlib
from array import array
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from ringcoll.errors import ArgumentError, PeerLostError, TransportError
from ringcoll.runtime.machine import INTERPRETERS, interpreter
from ringcoll.runtime.transport.base import Handle, LocalWork, Quick
from ringcoll.runtime.transport.shared.channel import (
    PeerChannel,
    Pieces,
    Postings,
    RingReceive,
    RingSend,
)
from ringcoll.runtime.transport.shared.memory import (
    BELL,
    DEPTH,
    ENTRY,
    EXCHANGES,
    FOR_ROOM,
    HEAD,
    NUMBER,
    PIECE,
    PIECES,
    PLACE,
    SHORT,
    SLEEPS,
    STATE,
    WHOM,
    SharedMemory,
)

_log = logging.getLogger("ringcoll")

_LAYOUT = (
    *(DEPTH, ENTRY, HEAD, SHORT, PIECE, PIECES, PLACE),
    *(BELL, SLEEPS, STATE, EXCHANGES, FOR_ROOM, WHOM),
)
_RECEIVE, _SEND, _RING, _EXCHANGE, _WAIT, _COPY, _COMBINE, _PYTHON = range(8)
_CODE_WORDS, _MESSAGE_WORDS = 8, 16
# Words of a message: channel, address, bytes, tag of the operation alone, kind, first message of
# the same bytes; in a run tag, state, number, bytes so far, where it lies.
_KIND, _TAG, _STATE, _NUMBER, _COUNT, _SOURCE = 4, 6, 7, 8, 9, 10
_PLAIN, _LENT, _OUT, _BOARD, _BOARD_LENT = range(5)
_IDLE, _POSTED, _DONE, _HELD, _HELD_REMOTE, _WITH_PEER = range(6)
_END, _AT_PYTHON, _EARLY, _ASLEEP, _UNUSUAL, _LOST, _DAMAGED = range(7)
_STRANGE, _PEER_LOST = -1, -2  # what `look` finds
# Operators in the order of the interpreter's loops, and dtypes, by the size of what is added.
_OPERATORS = {"sum": 0, "avg": 0, "product": 1, "min": 2, "max": 3, "band": 4, "bor": 5, "bxor": 6}
_OF_BOOL = {"sum": "bor", "max": "bor", "product": "band", "min": "band"}
_DTYPES = {
    torch.float32: 0, torch.float64: 1, torch.uint8: 2, torch.bool: 2, torch.int8: 3,
    torch.int16: 4, torch.int32: 5, torch.int64: 6, torch.complex64: 0, torch.complex128: 1,
}  # fmt: skip
_FLOATS = (0, 1)
_TO_GET = "install ringcoll with a C compiler and Python's headers"


class Rank(Protocol):
    """A rank's end of shared memory: `ringcoll.runtime.transport.SharedTransport`."""

    words: array[int]
    pieces: Pieces | None
    memory: SharedMemory | None
    channels: dict[int, PeerChannel]

    def sleep(self, message: Any, timeout_s: float) -> None:
        """Wait for a message asleep, and look around meanwhile."""


@cache
def compiled() -> tuple[Any, str]:
    """The interpreter in C, and why there is none if it is ``None``."""
    asked = interpreter()
    if asked == "python":
        return None, "RINGCOLL_INTERPRETER=python"
    try:
        module = importlib.import_module("ringcoll.runtime.transport.shared._program")
        source = Path(__file__).with_suffix(".c").read_bytes()
        if zlib.crc32(source) != module.SOURCE:
            raise ImportError("it was compiled from another version")
        module.layout(_LAYOUT)
    except (ImportError, OSError, ValueError) as error:
        why = f"there is no interpreter in C ({error})"
        if asked == "c":
            raise ArgumentError(why, INTERPRETERS, _TO_GET, "none") from error
        why = f"{why}; to get it: {_TO_GET}"
        _log.info("programs over shared memory run in Python: %s", why)
        return None, why
    _log.info("programs over shared memory run in C")
    return module, ""


def interpret(
    transport: Rank, items: Sequence[Any], works: Mapping[int, LocalWork]
) -> SharedProgram | None:
    """A program for the interpreter; ``None`` if Python has to run it."""
    module, _ = compiled()
    if module is None:
        return None
    return _Assembler(transport, items, works).program(module)


class _Assembler:
    """Lays a program out as rows of words."""

    def __init__(
        self, transport: Rank, items: Sequence[Any], works: Mapping[int, LocalWork]
    ) -> None:
        self.transport, self.items, self.works = transport, items, works
        self.code, self.messages, self.operands = array("q"), array("q"), array("q")
        self.channels: list[PeerChannel] = []
        self.item_of: list[int] = []  # of each instruction
        self.bound: list[Any] = []  # the object of each message, in Python
        self.exchanges: dict[int, Any] = {}  # by their first message

    def instruct(self, item: int, *words: int) -> None:
        """Write an instruction."""
        self.item_of.append(item)
        self.code.extend([*words, *(_CODE_WORDS - len(words)) * [0]])

    def message(self, bound: Any, kind: int, *about: int, state: int = _IDLE) -> int:
        """Write a message, and return its number; ``about`` are address, bytes and tag."""
        channel, number = -1, len(self.bound)
        if bound is not None:
            if bound.channel not in self.channels:
                self.channels.append(bound.channel)
            channel = self.channels.index(bound.channel)
        self.messages.extend([channel, *about, kind, number, 0, state, *8 * [0]])
        self.bound.append(bound)
        return number

    def program(self, module: Any) -> SharedProgram | None:
        """The whole program; ``None`` if it has no messages, or is one for Python."""
        for index, item in enumerate(self.items):
            post = getattr(item, "post", None)
            if isinstance(post, Postings):
                if any(send.nbytes > SHORT and send.region() for send in post.leaving):
                    return None  # which peers map
                self.postings(index, post)
            elif post is not None:
                self.exchange(index, post)
            elif hasattr(item, "message"):
                self.instruct(index, _WAIT, item.message)
            elif index in self.works and self.work(index, self.works[index]):
                continue
            elif hasattr(item, "messages"):
                return None  # lent messages that only Python can reduce
            else:
                self.instruct(index, _PYTHON)
        return SharedProgram(self, module) if self.channels else None

    def postings(self, index: int, post: Postings) -> None:
        """Messages to and from peers."""
        for receive in post.arriving:
            assert receive.tensor is not None
            about = receive.tensor.data_ptr(), receive.nbytes, receive.base
            number = self.message(receive, _LENT if receive.lent else _PLAIN, *about)
            self.instruct(index, _RECEIVE, number)
        first: dict[tuple[int, int], int] = {}  # message of the same bytes
        for send in post.leaving:
            number = self.message(send, _OUT, send.address, send.nbytes, send.base)
            twin = first.setdefault((send.address, send.nbytes), number)
            self.messages[number * _MESSAGE_WORDS + _KIND + 1] = twin
            self.instruct(index, _SEND, number)
        if post.leaving:
            self.instruct(index, _RING)

    def exchange(self, index: int, exchange: Any) -> None:
        """A message to all peers, and theirs."""
        first = len(self.bound)
        for receive, message in zip(exchange.receives, exchange.messages, strict=True):
            kind = _BOARD_LENT if message.lent else _BOARD
            about = message.tensor.data_ptr(), message.tensor.nbytes, message.tag
            self.message(receive, kind, *about)
        for _ in exchange.messages:
            self.message(None, _OUT, 0, 0, 0, state=_DONE)
        tensor, count = exchange.tensor, len(exchange.messages)
        address = tensor.data_ptr()
        self.instruct(index, _EXCHANGE, first, count, address, tensor.nbytes, exchange.tag)
        self.exchanges[first] = exchange

    def work(self, index: int, work: LocalWork) -> bool:
        """Local work, if the interpreter knows it."""
        into, nbytes = work.into, work.into.nbytes
        dtype, operator = _DTYPES.get(into.dtype), work.operator
        if operator is None:
            self.instruct(index, _COPY, into.data_ptr(), work.sources[0].data_ptr(), nbytes)
            return True
        if into.dtype is torch.bool:
            operator = _OF_BOOL.get(operator, operator)
        known = _OPERATORS.get(operator)
        if known is None or dtype is None or (dtype in _FLOATS and known > _OPERATORS["product"]):
            return False
        if into.is_complex() and (known != _OPERATORS["sum"] or work.divisor):
            return False
        if work.divisor and dtype not in _FLOATS:
            return False
        addresses = [source.data_ptr() for source in work.sources]
        for position, number in work.lent.items():
            addresses[position] = -1 - number
        first = len(self.operands)
        self.operands.extend(addresses)
        how = known << 4 | dtype, len(addresses), first, work.divisor
        self.instruct(index, _COMBINE, into.data_ptr(), nbytes, *how)
        return True


def _address(words: array[int]) -> int:
    return words.buffer_info()[0]


class SharedProgram:
    """A program that the interpreter runs; see `ringcoll.runtime.transport.Interpreted`."""

    done = False  # as something to wait for
    is_late = False  # whether that takes long

    def __init__(self, assembler: _Assembler, module: Any) -> None:
        transport = self._transport = assembler.transport
        self._items, self._item_of = assembler.items, assembler.item_of
        self._messages, self._bound = assembler.messages, assembler.bound
        self._exchanges, self._words = assembler.exchanges, assembler.code
        pieces, channels = transport.pieces, assembler.channels
        self.channels = channels  # which the interpreter serves
        assert pieces is not None
        queues = [
            queue
            for channel in transport.channels.values()
            for queue in (channel.posted, channel.unread, channel.pending)
        ]
        arrays = assembler.code, self._messages, assembler.operands, transport.words, pieces.words
        states = [channel.state for channel in channels]
        self._native = module.Program(
            tuple(map(_address, arrays)),
            tuple(map(_address, states)),
            len(self._item_of),
            len(self._bound),
            tuple(queues),
            (*arrays, *states, assembler.items, transport.memory, channels),
        )
        self._code, self._module = 0, module
        self._is_strange = False  # whether a message has come for which only Python has a place
        self.channel: Any = None  # of the message that is waited for

    def quick(
        self, group: array[int], valid: array[int], about: Sequence[int], objects: Sequence[object]
    ) -> Quick:
        """Make a function for whole calls; see `Interpreted`."""
        arrays = group, valid
        made: Quick = self._module.Quick(
            self._native, *map(_address, arrays), *about, (*objects, *arrays)
        )
        return made

    def adopt(self) -> int:
        """Take over a run that a whole call has begun; return its tag."""
        *_, self._code, tag = self._native.facts
        return cast("int", tag)

    def begin(self, tag: int) -> None:
        """Begin a run; see `Interpreted`."""
        self._code = self._native.run(tag)

    def go_on(self, deadline: float, watch: Any) -> tuple[int, list[Handle]] | None:
        """Run on; see `Interpreted`."""
        native, code = self._native, self._code
        while (why := code & 255) != _END:
            at = code >> 8
            item = self._item_of[at]
            if why == _AT_PYTHON:
                for exchange in self._exchanges.values():
                    exchange.place = self._transport.words[NUMBER] & 1
                self._items[item]()
            elif why == _EARLY:
                self._take_early(self._words[at * _CODE_WORDS + 1])
            elif why == _ASLEEP:
                watch.wait = wait = self._items[item]
                self.channel = self._bound[wait.message].channel
                self._transport.sleep(self, max(deadline - time.monotonic(), 0.001))
                if self._is_strange:
                    return item, self._handles()
            elif why == _UNUSUAL:
                return item, self._handles()
            else:
                self._raise(why)
            self._code = code = native.run()
        return None

    def look(self) -> bool:
        """Whether the wait is over, or Python has to go on. Raises as `Transport.wait`."""
        found = self._native.look(self.is_late)
        if found < _STRANGE:
            self._raise(_LOST if found == _PEER_LOST else _DAMAGED)
        self._is_strange = found == _STRANGE
        return bool(found)

    @property
    def is_for_room(self) -> bool:
        """Whether something of this rank's waits for room, or until it is read."""
        return bool(self._native.facts[3])

    def _raise(self, why: int) -> None:
        _, number, peer, *_ = self._native.facts
        if why == _DAMAGED:
            raise TransportError(f"the memory of rank {peer} is damaged", peer=peer)
        text = "the connection was broken"
        if number:
            text = f"the memory of rank {peer} cannot be read: {os.strerror(number)}"
        raise PeerLostError(text, peer=peer)

    def _take_early(self, number: int) -> None:
        """Let a message that was just begun have what Python has taken before."""
        row = number * _MESSAGE_WORDS
        words, receive = self._messages, self._bound[number]
        channel: PeerChannel = receive.channel
        first = channel.taken_early(words[row + _TAG])
        if first is None:
            return
        receive.tag, receive.filled, receive.number, receive.done = words[row + _TAG], 0, 0, False
        channel.meet(receive, first)
        if receive.filled:  # the rest is still to come
            channel.posted.clear()
            channel.go_on_with(None)
        words[row + _COUNT], words[row + _NUMBER] = receive.filled, receive.number
        if not receive.number:
            words[row + _STATE] = _DONE if receive.done else _POSTED
        elif receive.lent and receive.memory in (None, channel.other):
            words[row + _STATE] = _HELD if receive.memory else _HELD_REMOTE
            start = receive.memory.address if receive.memory else 0
            words[row + _SOURCE] = start + receive.address
        else:
            channel.read(receive, 0, receive.tensor.data_ptr(), receive.nbytes)
            channel.unread.clear()
            channel.release(receive)
            words[row + _STATE] = _DONE

    def _handles(self) -> list[Handle]:
        """The messages that were begun, as Python has them, for Python to go on with."""
        handles: list[Handle] = []
        for number in range(self._native.facts[0]):
            row = self._messages[number * _MESSAGE_WORDS : (number + 1) * _MESSAGE_WORDS]
            bound, state, kind = self._bound[number], row[_STATE], row[_KIND]
            handles.append(bound)
            if bound is None:
                continue
            bound.tag, bound.number, bound.done = row[_TAG], row[_NUMBER], state != _POSTED
            if isinstance(bound, RingReceive):
                self._hand_over(bound, row, state)
            elif isinstance(bound, RingSend):
                bound.pieces.clear()
                bound.done, bound.copied = state == _DONE, row[_COUNT]
                if state == _POSTED:
                    bound.channel.pending.append(bound)
            elif kind in (_BOARD, _BOARD_LENT) and number in self._exchanges:
                self._exchanges[number].place = row[_NUMBER] & 1
        return handles

    def _hand_over(self, receive: RingReceive, row: Sequence[int], state: int) -> None:
        channel = receive.channel
        receive.filled, receive.memory = row[_COUNT], None
        if state == _POSTED:
            receive.number = 0
            channel.posted.append(receive)
            if receive.filled:
                channel.go_on_with(receive)
        elif state == _HELD:
            receive.memory, receive.address = channel.other, row[_SOURCE] - channel.other.address
        elif state == _HELD_REMOTE:
            receive.address = row[_SOURCE]
        else:
            receive.number = 0
