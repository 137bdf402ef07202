"""Point-to-point messages through memory that the ranks of one host share; nothing to install.

It needs Linux. How a message travels between two ranks is in
`ringcoll.runtime.transport.shared.channel`. Nothing moves by itself: a rank that waits takes what
has come from all peers, and sends what had no place. It looks for a while, and then sleeps on its
bell, a word on which the kernel lets it sleep (a futex). Ranks that share cores first give the
processor away a few times: the rank that they wait for may then run at once.

Data that a rank has read in another's memory are right if that rank still lives afterwards, and has
not given up: until the read is acknowledged, it may not change what it sends.

A message of each rank to all others goes through a board in its memory that all of them read. A
rank writes its message once, to one of two places that take turns, and counts its exchanges up; a
rank that has seen the count of a peer reads that peer's place. It may be written again two
exchanges later: by then every rank has seen this rank's next count, and each rank counts only when
it has read all that it was sent before.

With ranks on several hosts, each pair has its own way: `PairsTransport` has another transport
beside.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, repeat
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.errors import ArgumentError, CollectiveTimeoutError, PeerLostError, TransportError
from ringcoll.runtime.machine import cores, free_bytes
from ringcoll.runtime.rendezvous import await_ranks, parse_json, read_text, read_texts
from ringcoll.runtime.transport.base import (
    Handle,
    LocalWork,
    Message,
    NotYetError,
    Start,
    Transport,
    bytes_at,
    left_s,
)
from ringcoll.runtime.transport.meeting import meet_with_texts
from ringcoll.runtime.transport.pairs import OutOfReachError, PairsTransport
from ringcoll.runtime.transport.shared.channel import (
    FENCES,
    PeerChannel,
    PendingSends,
    Pieces,
    Postings,
    RingReceive,
    RingSend,
)
from ringcoll.runtime.transport.shared.memory import (
    ASLEEP,
    AWAKE,
    BELL,
    BROKEN,
    CLOSED,
    EXCHANGED,
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
    WORD,
    Identity,
    SharedLayout,
    SharedMemory,
    fence,
    forbids_reading,
    free_fence,
    futex_wait,
    futex_wake,
    identity,
    is_ordered,
    missing_means,
    read_process,
    reserve,
)
from ringcoll.runtime.transport.shared.program import SharedProgram, compiled, interpret

_FAILED = 1 << 20  # ranks; what they count together has the failures above it
_DIRECT_FROM = PIECES * PIECE + 1  # bytes, until a group has measured
_FEW = 16  # ranks; places for pieces of more would take too much memory: they grow with the square
_SPINS, _CROWDED_SPINS = 700, 20  # looks before sleeping: 0.05 ms for a receive, 0.7 for a send
_SPIN_NS, _CROWDED_SPIN_NS = 50_000, 1_000  # as long, of the interpreter in C
_YIELD_NS = 100_000  # in which it gives the processor away before it sleeps
_YIELDS = 5  # times that a rank without a core of its own gives the processor away before it sleeps
_PROMPT_S = 0.0005  # if that took longer, for each rank of a core, so many waits do without
_WITHOUT_YIELD, _MOST_WITHOUT_YIELD = 100, 12800
# The words of a rank, for the interpreter in C: its memory, its board and how often it has written
# there; how long it looks, how long it gives the processor away, the nanoseconds of `_PROMPT_S`,
# how many waits do without, now and next, and the two limits of that.
_CROWDED, _WITHOUT, _NEXT_WITHOUT = slice(3, 6), 6, 7
_LATE_S = 0.1  # from which on a program lets messages come that it has not asked for
_NAP_S = 0.02  # between two looks at the clock and at the processes of the peers: see `announce`
_SHORT_NAP_S = 0.0001  # while messages between hosts are on their way, which have to be moved


@dataclass(slots=True, eq=False)
class Board:
    """The board of a rank; ``words`` hold the number of exchanges that the rank has begun."""

    rank: int
    memory: SharedMemory
    start: int
    words: array[int]


def _board_places(
    memory: SharedMemory, start: int, nbytes: int
) -> tuple[list[int], list[memoryview]]:
    """Words with the tags of the two places of a board, and their memory for so many bytes."""
    places = (start, start + PLACE)
    memories = [memory.data[place + HEAD : place + HEAD + nbytes] for place in places]
    return [place // WORD for place in places], memories


class BoardReceive:
    """A message on the board of a peer."""

    __slots__ = ("_into", "_sources", "_tags", "base", "channel", "done", "number", "tag", "words")

    def __init__(self, channel: PeerChannel, message: Message, start: int) -> None:
        _, tensor, self.base, is_lent = message
        self.channel, self.words = channel, channel.other_words
        self._into = None if is_lent else bytes_at(tensor.data_ptr(), tensor.nbytes)
        self._tags, self._sources = _board_places(channel.other, start, tensor.nbytes)
        self.tag = self.number = 0
        self.done = False

    def look(self) -> bool:
        """Whether the message has come; one of another exchange (ranks disagree) never does."""
        if not self.done and self.words[EXCHANGES] >= self.number:
            if FENCES:
                fence()
            place = self.number & 1
            if self.words[self._tags[place]] == self.tag:
                if self._into is not None:
                    self._into[:] = self._sources[place]
                self.done = True
        return self.done


class BoardExchange:
    """See `ringcoll.runtime.transport.base.Exchange`."""

    def __init__(
        self,
        board: Board,
        channels: Mapping[int, PeerChannel],
        receives: Sequence[Message],
        send: Tensor,
        tag: int,
    ) -> None:
        self._board, self._words, self.tag = board, board.memory.words, tag
        self.tensor, self._source = send, bytes_at(send.data_ptr(), send.nbytes)
        self._tags, self._places = _board_places(board.memory, board.start, send.nbytes)
        self.receives = [
            BoardReceive(channels[message.peer], message, board.start) for message in receives
        ]
        self.messages = receives
        self._channels = [receive.channel for receive in self.receives]
        self._sent = [None] * len(receives)
        self.place = 0

    def __call__(self, mixed: int) -> list[Handle]:
        """Write the message, and count."""
        board, words = self._board, self._words
        board.words[NUMBER] = number = board.words[NUMBER] + 1
        self.place = place = number & 1
        self._places[place][:] = self._source
        words[self._tags[place]] = self.tag ^ mixed
        for receive in self.receives:
            receive.number, receive.tag, receive.done = number, receive.base ^ mixed, False
        if FENCES:
            fence()
        words[EXCHANGES] = number
        fence()
        for channel in self._channels:
            if channel.other_words[SLEEPS] >> WHOM == board.rank:
                channel.ring_if_needed()
        return [*self.receives, *self._sent]

    def view(self, position: int, place: int) -> Tensor:
        """The memory in which a receive comes to a place."""
        message, start = self.messages[position], self._board.start + place * PLACE + HEAD
        memory = self.receives[position].channel.other.data
        tensor = message.tensor
        if not tensor.numel():
            return tensor
        return torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)


Awaited = RingSend | RingReceive | BoardReceive | PendingSends | SharedProgram


def check() -> None:
    """Make sure that the machine has what it takes."""
    if means := missing_means():
        raise ArgumentError(f"the transport shared needs {means}")


def check_automatic() -> None:
    """Make sure that the transport has been run on such a machine."""
    if not is_ordered():
        raise ArgumentError(
            'the transport shared has only been run on x86-64; elsewhere ask for it: "shared"'
        )


def remark() -> str:
    """What interprets programs, and the reasons why the transport could be faster."""
    reason, (_, why) = forbids_reading(), compiled()
    remarks = [f"long messages are copied in pieces: {reason}"] if reason else []
    return "; ".join([*remarks, f"programs run in Python: {why}" if why else "programs run in C"])


def make(
    store: dist.Store, rank: int, world_size: int, device: torch.device, timeout_s: float
) -> Transport:
    """Make the transport."""
    compiled()  # raises, if the user asks for an interpreter that is not there
    return PairsTransport(SharedTransport(store, rank, world_size), store, timeout_s)


class _About(NamedTuple):
    """Facts of a rank that its peers need; the memory that it shares is a descriptor of its own."""

    pid: int
    descriptor: int
    place: Identity
    secret: int
    address: int  # of the secret: who can read it there can read all memory of the rank
    exchanges_to: int

    @classmethod
    def of(cls, values: Any) -> _About:
        """From JSON."""
        pid, descriptor, place, *more = values
        return cls(pid, descriptor, Identity(*place), *more)


class SharedTransport(Transport):
    """Messages through shared memory, among the ranks of one host: to others there is no channel.

    All ranks see the store, and nobody else uses it.
    """

    name = "shared"
    ordered = False
    waits_briefly = True
    lends_from: float = SHORT + 1
    slice_bytes: int | None = PIECE
    exchanges_to: int = EXCHANGED
    beside: Callable[[], bool] | None = None

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.hosts: tuple[int, ...] = ()
        self._store, self._aborted = store, False
        self._pid = os.getpid()  # a process that is forked off does not have the group
        self.memory: SharedMemory | None = None
        self.pieces: Pieces | None = None
        self._board: Board | None = None
        self.channels: dict[int, PeerChannel] = {}
        self._lives: dict[int, int] = {}  # pidfds of the peers
        self._direct_from: int | None = None
        self._spins, self._is_crowded = _SPINS, False
        # `_WITHOUT`: so many next waits do not give the processor away.
        few, most = _WITHOUT_YIELD, _MOST_WITHOUT_YIELD
        self.words = array("q", [0, 0, 0, _SPIN_NS, 0, 0, 0, few, few, most, 1])

    def connect(self, timeout_s: float) -> None:
        """Map the memory of the ranks of this host; see `Transport.connect`."""
        rank, store, everyone = self.rank, self._store, range(self.world_size)
        deadline = time.monotonic() + timeout_s
        given_up: Callable[[], bool] = lambda: self._aborted  # noqa: E731
        # How many ranks are here is known when they have met; what is not used takes no room.
        most_nbytes = SharedLayout(everyone).nbytes
        try:
            descriptor = reserve(most_nbytes)
        except OSError as error:
            raise self._has_no_memory(most_nbytes, error) from error
        try:
            secret = ctypes.c_uint64(int.from_bytes(os.urandom(7), "little"))
            memory, at = identity(descriptor), ctypes.addressof(secret)
            own = _About(os.getpid(), descriptor, memory, secret.value, at, self.exchanges_to)
            self.hosts, abouts = meet_with_texts(store, self, timeout_s, given_up, json.dumps(own))
            here = [peer for peer, host in enumerate(self.hosts) if host == self.hosts[rank]]
            if len(here) > cores():
                self._spins, self._is_crowded = _CROWDED_SPINS, True
                self.words[_CROWDED] = array("q", [
                    _CROWDED_SPIN_NS, _YIELD_NS, int(1e9 * _PROMPT_S * len(here) / cores())
                ])  # fmt: skip
            places = SharedLayout(here)
            self.memory = self._own_memory(descriptor, places, len(here))
            self.pieces = Pieces(self.memory, places.pieces, places.num_pieces, len(here))
            self.words[:2] = array("q", [self.memory.address, places.board])
            self._board = Board(rank, self.memory, places.board, self.words)
            others = [peer for peer in here if peer != rank]
            peers = {peer: parse_json(f"here/{peer}", abouts[peer], _About.of) for peer in others}
            reasons = [self._open(peer, about, places) for peer, about in peers.items()]
            # All ranks have to know, as all of them take another transport then.
            store.set(f"unopened/{rank}", "; ".join(filter(None, reasons)))
            came = store.add("opened", _FAILED + 1 if any(reasons) else 1)
            if came % _FAILED == self.world_size:
                store.set("all opened", str(came // _FAILED))
            keys = {peer: f"unopened/{peer}" for peer in everyone}
            await_ranks(store, rank, keys, deadline, timeout_s, given_up, last_key="all opened")
            if read_text(store, "all opened") != "0":
                why = "; ".join(filter(None, read_texts(store, [*keys.values()])))
                raise OutOfReachError(f"{why}; gloo needs no such memory: RINGCOLL_TRANSPORT=gloo")
            for channel in self.channels.values():
                channel.peer_reads = bool(channel.other_words[places.can_read[rank] // WORD])
            self.direct_from = _DIRECT_FROM if len(here) <= _FEW else None
            offered = [self.exchanges_to, *(about.exchanges_to for about in peers.values())]
            self.exchanges_to = min(offered) if len(here) == self.world_size <= _FEW else 0
        finally:
            os.close(descriptor)

    @property
    def direct_from(self) -> int | None:
        """See `Transport.direct_from`."""
        return self._direct_from

    @direct_from.setter
    def direct_from(self, nbytes: int | None) -> None:
        self._direct_from = nbytes
        for channel in self.channels.values():
            channel.read_from(nbytes or 0)

    def _own_memory(self, descriptor: int, places: SharedLayout, num_ranks: int) -> SharedMemory:
        """Allocate this rank's memory; so many ranks of the host allocate as much."""
        try:
            free = free_bytes()
            if places.nbytes * num_ranks > free:  # the kernel would end a process, perhaps this one
                reason = f"only {free} bytes are free for {num_ranks} ranks of the host"
                raise OSError(errno.ENOMEM, reason)
            return SharedMemory.allocate(descriptor, places.nbytes, places.num_taken)
        except OSError as error:
            raise self._has_no_memory(places.nbytes, error) from error

    def _has_no_memory(self, nbytes: int, error: OSError) -> TransportError:
        return TransportError(
            f"rank {self.rank} cannot have {nbytes} bytes of shared memory: {error}"
        )

    def _open(self, peer: int, about: _About, places: SharedLayout) -> str:
        """Map the memory of a peer, and try to read more of it; return why it cannot be mapped."""
        pid, own = about.pid, self.memory
        assert own is not None
        try:
            life = self._lives[peer] = os.pidfd_open(pid)
            memory = SharedMemory.open(pid, about.descriptor, about.place, nbytes=places.nbytes)
        except ProcessLookupError as error:
            raise PeerLostError(f"the process of rank {peer} has ended", peer=peer) from error
        except (PermissionError, FileNotFoundError) as error:
            return f"rank {self.rank} cannot open the memory of rank {peer}: {error}"
        except (OSError, OverflowError) as error:  # no descriptors are left, for instance
            raise TransportError(
                f"rank {self.rank} cannot open the memory of rank {peer}: {error}"
            ) from error
        assert self.pieces is not None
        channel = PeerChannel(self.rank, peer, own, memory, places, self.pieces, pid, life)
        self.channels[peer] = channel
        probe = ctypes.c_uint64()
        with contextlib.suppress(OSError):  # not allowed here: messages go in pieces
            read_process(pid, about.address, ctypes.addressof(probe), WORD)
        channel.reads_peer = probe.value == about.secret
        own.words[places.can_read[peer] // WORD] = channel.reads_peer
        return ""

    def bind(self, receives: Sequence[Message], sends: Sequence[Message]) -> Start:
        """Make messages ready; see `Transport.bind`. Each is over before it is posted again."""
        return Postings(self.channels, receives, sends, self.words)

    def interpret(
        self, items: Sequence[Any], works: Mapping[int, LocalWork]
    ) -> SharedProgram | None:
        """Make a program for the interpreter in C; see `Transport.interpret`."""
        return interpret(self, items, works)

    def bind_exchange(self, receives: Sequence[Message], send: Tensor, tag: int) -> BoardExchange:
        """Make a message to all ranks ready; see `Transport.bind_exchange`."""
        assert self._board is not None
        return BoardExchange(self._board, self.channels, receives, send, tag)

    def wait(self, handle: Handle, timeout_s: float) -> None:
        """Wait for one message; see `Transport.wait`."""
        message: Any = handle
        if message is None or message.done:
            return
        is_here, kind = False, type(message)
        if kind is BoardReceive:
            words, number = message.words, message.number
            for _ in repeat(None, self._spins):
                if words[EXCHANGES] >= number:
                    is_here = message.look()
                    break
        elif kind is RingReceive:
            if message.number:
                message.channel.fetch(message)
                return
            channel = message.channel
            words, (at, number) = channel.other_words, channel.awaited()
            for _ in repeat(None, self._spins):
                if words[at] == number:
                    channel.take()
                    if message.done:
                        return
                    at, number = channel.awaited()
        else:
            is_here = any(message.look() for _ in repeat(None, self._spins))
        if not is_here:
            self.sleep(message, timeout_s)

    def view(self, handle: Handle, dtype: torch.dtype) -> Tensor | None:
        """The elements of a lent message, if it is mapped here; see `Transport.view`."""
        receive: Any = handle
        if not receive.number:  # it came another way
            tensor: Tensor = receive.tensor
            return tensor
        if receive.memory is None:
            return None
        channel: PeerChannel = receive.channel
        return channel.view(receive, dtype)

    def read(self, handle: Handle, start: int, into: Tensor) -> None:
        """Copy elements of a lent message; see `Transport.read`."""
        receive: Any = handle
        receive.channel.read(receive, start * into.itemsize, into.data_ptr(), into.nbytes)

    def release(self, handle: Handle) -> None:
        """End the loan of a message; see `Transport.release`."""
        receive: Any = handle
        if receive.number:
            receive.channel.release(receive)

    def push(self, timeout_s: float) -> None:
        """Wait until all messages have room, and so reach their receivers; raises as `wait`."""
        deadline = time.monotonic() + timeout_s
        for channel in self.channels.values():
            if channel.pending:
                self.sleep(PendingSends(channel), left_s(deadline))

    def sleep(self, message: Awaited, timeout_s: float) -> None:
        """Wait for a message asleep, and serve all peers when something else happens."""
        now, until_s = time.monotonic(), self.until_s
        deadline = now + timeout_s if until_s is None else until_s
        left_s = deadline - now
        program = message if isinstance(message, SharedProgram) else None
        if program is None and self._is_crowded and self._yielded(message):
            return
        if until_s is None and self.gives_way is not None and self.gives_way():
            raise NotYetError
        memory, peer = self.memory, message.channel.peer
        served = () if program is None else program.channels  # by the interpreter
        channels = [each for each in self.channels.values() if each not in served]
        if memory is None:
            raise PeerLostError("the connection was broken", peer=peer)
        words = memory.words
        for number in count():
            is_for_room = type(message) is RingSend or any(each.pending for each in channels)
            if program is not None:
                is_for_room = is_for_room or program.is_for_room
                program.is_late = time.monotonic() - now > _LATE_S
            words[SLEEPS] = peer << WHOM | (FOR_ROOM if is_for_room else 0) | ASLEEP
            fence()
            seen = words[BELL]
            for channel in channels:
                while channel.unread:
                    channel.fetch(channel.unread[0])
                while channel.has_come():
                    channel.take()
                channel.flush()
            if message.look():
                words[SLEEPS] = AWAKE
                return
            if until_s is not None and left_s <= 0:
                words[SLEEPS] = AWAKE
                raise NotYetError
            if number:  # most messages come in the first sleep, which is a short one if none comes
                self._look_around(message, timeout_s if left_s <= 0 else None)
            is_hurried = self.beside is not None and self.beside()
            nap_s = _SHORT_NAP_S if is_hurried else _NAP_S
            futex_wait(memory.address + BELL * WORD, seen, min(max(left_s, 0.0), nap_s))
            left_s = deadline - time.monotonic()

    def _yielded(self, message: Awaited) -> bool:
        """Give the processor to the ranks that share it; return whether the message came.

        Where other programs are busy, that takes milliseconds, and the next waits do without.
        """
        words = self.words
        if words[_WITHOUT] > 0:
            words[_WITHOUT] -= 1
            return False
        begin_s = time.monotonic()
        for _ in range(_YIELDS):
            os.sched_yield()
            if message.look():
                break
        if (time.monotonic() - begin_s) * 1e9 < words[_CROWDED][2]:
            words[_NEXT_WITHOUT] = _WITHOUT_YIELD
        else:
            words[_WITHOUT] = words[_NEXT_WITHOUT]
            words[_NEXT_WITHOUT] = min(2 * words[_NEXT_WITHOUT], _MOST_WITHOUT_YIELD)
        return message.done

    def _look_around(self, message: Awaited, exceeded_s: float | None) -> None:
        peer = message.channel.peer
        error: TransportError | None = None
        states = {channel.other_words[STATE] for channel in self.channels.values()}
        if self._aborted or BROKEN in states or message.channel.other_words[STATE] == CLOSED:
            error = PeerLostError("the connection was broken", peer=peer)
        elif message.channel.has_ended():
            error = PeerLostError(f"the process of rank {peer} has ended", peer=peer)
        elif exceeded_s is not None:
            error = CollectiveTimeoutError(f"no message within {exceeded_s:g} s", peer=peer)
        if error is not None and not message.look():  # it may have come before the end
            self._give_up()
            try:
                raise error
            finally:
                del error  # or its traceback keeps this frame, and the frame keeps it

    def _give_up(self) -> None:
        """Tell the peers that this rank's memory must not be trusted any more."""
        self._aborted = True
        free_fence()
        memory = self.memory
        if memory is not None and self._pid == os.getpid():
            memory.words[SLEEPS] = AWAKE
            memory.words[STATE] = BROKEN
            fence()

    def abort(self) -> None:
        """Wake all who wait, here and at the peers."""
        self._give_up()
        self._ring_all()

    def _ring_all(self) -> None:
        memory = self.memory
        if memory is None or self._pid != os.getpid():
            return
        for channel in tuple(self.channels.values()):
            channel.ring()
        memory.words[BELL] = (memory.words[BELL] + 1) & 0xFFFFFFFF  # another thread may wait here
        futex_wake(memory.address + BELL * WORD)

    def close(self) -> None:
        """Let go of the memory."""
        was_broken, self._aborted = self._aborted, True
        memory = self.memory
        if memory is not None and self._pid == os.getpid():
            memory.words[STATE] = BROKEN if was_broken else CLOSED
            fence()
            self._ring_all()
        self.memory = self.pieces = self._board = None
        lives, self._lives = self._lives, {}
        self.channels = {}
        for life in lives.values():
            os.close(life)
