"""Messages between two ranks of one host, each of which writes to its own memory.

A message to a peer takes the next entry of its ring (`ringcoll.runtime.transport.shared.memory`);
the store of its number, which is the last, makes it visible. The receiver takes messages in order,
and matches them by tag.

==========  ==========  ==================================================  =====================
message     kind        how it travels                                      its send is over
==========  ==========  ==================================================  =====================
to 36 KiB   inline      in the entry: copied in, copied out                 at once
longer      mapped      the receiver reads it where it lies, if that is a   when it has been read
                        tensor in shared memory (`ringcoll.empty_shared`)
longer      in pieces   512 KiB at a time: copied in, copied out, or read   when it is copied in
                        there by a reduction
long        remote      the receiver reads the sender's memory, if the      when it has been read
                        kernel lets it (probed when the ranks connect)
==========  ==========  ==================================================  =====================

A piece that several peers get lies in one place, which is written once. A receiver may keep a
message of one piece where it came (*lent*), but for the last of the places that its sender may fill
for it: so messages always come through.

The kernel needs time to find each of the sender's pages. From some length on that time is shorter
than a second copy takes; the length differs from machine to machine, and groups measure it
(`Transport.direct_from`).

How far a channel is lies in an array of words, which the interpreter of programs in C reads and
writes, too (`ringcoll.runtime.transport.shared.program`).

A rank that writes for a sleeping peer rings the peer's bell: each ring is another number, so that
none is missed that comes between a look and the sleep. A rank says that it sleeps before it looks
for the last time; a rank looks for sleepers after it has written, each with a fence between: one of
the two always sees the other.
"""

from __future__ import annotations

import ctypes
import select
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

import torch
from torch import Tensor

from ringcoll.errors import PeerLostError, TransportError
from ringcoll.runtime.transport.base import Handle, Message, bytes_at
from ringcoll.runtime.transport.shared.memory import (
    BELL,
    DEPTH,
    ENTRY,
    FOR_ROOM,
    HEAD,
    OPEN,
    PIECE,
    PIECES,
    SHORT,
    SLEEPS,
    STATE,
    WHOM,
    WORD,
    Identity,
    SharedLayout,
    SharedMemory,
    fence,
    futex_wake,
    is_ordered,
    read_process,
)
from ringcoll.runtime.transport.shared.tensors import (
    PeerRegions,
    SharedRegion,
    region_of,
    regions_now,
)

_INLINE, _REMOTE, _IN_PIECES, _MAPPED = 0, 1, 2, 3  # kinds of messages
_IN_PLACE = (_REMOTE, _MAPPED)  # kinds that are read where they lie
_ENTRY_WORDS = ENTRY // WORD
FENCES = not is_ordered()
"""Whether what is written, and what is read, has to be kept in order."""
_MOST_KNOWN = 256  # lengths of messages whose places are remembered
# The words of a channel: the two ranks; addresses of their memory, and of what lies there (messages
# to the peer, its acknowledgements, its messages, own acknowledgements, its pieces, and how many);
# the peer's process, what ends with it, the bytes from which it reads messages here; how far it is.
_ACKED, _DIRECT_FROM, _NEXT_OUT, NEXT_IN, _NUM_RINGS, NUM_HELD, _NUM_EARLY = 5, *range(12, 18)
_UNREAD = range(18, 18 + PIECES)
"""Numbers of pieces that the peer may still have to read, or 0."""
# The words of all places for pieces, and of each of them: how often it was written, its readers,
# and for each of these where its number will stand, and the number.
_FIRST_ROW, _FIRST_READER = 3, 2
BY_PYTHON = 10
"""The word of a rank that is set where Python starts messages, which may stay in its queues."""


class Pieces:
    """A rank's places for pieces of long messages.

    Of each peer at most `PIECES` places wait to be read, so that there is a free one for every
    other peer.
    """

    def __init__(self, memory: SharedMemory, start: int, number: int, most_readers: int) -> None:
        self._memory, self._start = memory, start
        self._width = _FIRST_READER + 2 * most_readers
        head = memory.address + start, number, most_readers
        self.words = array("q", [*head, *number * self._width * [0]])
        self._rows = range(_FIRST_ROW, len(self.words), self._width)
        self._number_at = lru_cache(None)(ctypes.c_int64.from_address)

    def write(self, source: memoryview) -> tuple[int, int]:
        """Write a piece to the first free place, and return place and stamp.

        That place is likely to be in a cache.
        """
        words = self.words
        for place, row in enumerate(self._rows):  # noqa: B007
            readers = range(row + _FIRST_READER, row + _FIRST_READER + 2 * words[row + 1], 2)
            if all(self._number_at(words[at]).value >= words[at + 1] for at in readers):
                break
        words[row + 1] = 0
        start = self._start + place * PIECE
        self._memory.data[start : start + len(source)] = source
        words[row] += 1
        return place, words[row]

    @property
    def num_written(self) -> int:
        """Pieces that were written so far."""
        return sum(self.words[row] for row in self._rows)

    def holds(self, place: int, stamp: int) -> bool:
        """Whether nothing else was written to a place since, and one more may read it."""
        row = self._rows[place]
        return self.words[row] == stamp and self.words[row + 1] < self.words[2]

    def note_reader(self, place: int, address: int, number: int) -> None:
        """Remember that a peer has to read a place, and will then write a number at an address."""
        words, row = self.words, self._rows[place]
        at = row + _FIRST_READER + 2 * words[row + 1]
        words[at], words[at + 1] = address, number
        words[row + 1] += 1


class RingSend:
    """A message to a peer.

    ``pieces`` are those of it that were written already, by where they begin; messages of the same
    bytes to other peers have them in common.
    """

    __slots__ = ("_region", "_regions", "address", "base", "channel", "copied", "done", "nbytes",
                 "number", "pieces", "places", "source", "tag", "tensor")  # fmt: skip

    def __init__(
        self, channel: PeerChannel, message: Message, pieces: dict[int, tuple[int, int]]
    ) -> None:
        _, self.tensor, self.base, _ = message
        self.channel, self.nbytes, self.pieces = channel, self.tensor.nbytes, pieces
        self.address = self.tensor.data_ptr()
        self.source = bytes_at(self.address, self.nbytes)
        self.places = channel.outgoing(self.nbytes) if self.nbytes <= SHORT else []
        self.tag = self.number = self.copied = 0
        self.done = False
        self._region: SharedRegion | None = None
        self._regions: object = None

    def region(self) -> SharedRegion | None:
        """The region of shared memory that the message lies in now."""
        if self._regions is not regions_now():
            self._regions = regions_now()
            self._region = region_of(self.address, self.nbytes)
        region = self._region
        return region if region is not None and region.is_here() else None

    def look(self) -> bool:
        """Whether the message is complete."""
        self.channel.flush()  # which may complete it
        if self.number and not self.done:
            self.done = self.channel.is_taken(self.number)
        return self.done


class RingReceive:
    """A message from a peer: into a tensor, or, if it came early, into memory of its own."""

    __slots__ = ("address", "base", "channel", "done", "filled", "into", "lent", "memory",
                 "nbytes", "number", "sources", "tag", "tensor")  # fmt: skip

    def __init__(
        self, channel: PeerChannel, nbytes: int, tag: int, tensor: Tensor | None, lent: bool
    ) -> None:
        self.channel, self.nbytes, self.tensor, self.lent = channel, nbytes, tensor, lent
        self.base = self.tag = tag
        self.into = memoryview(b"") if tensor is None else bytes_at(tensor.data_ptr(), nbytes)
        self.sources = channel.incoming(nbytes) if nbytes <= SHORT else []
        # Of a message that is to be read in the peer's memory: its place there, or in memory that
        # is mapped here; and its number.
        self.address = self.number = 0
        self.memory: SharedMemory | None = None
        self.filled, self.done = 0, False

    def make_room(self) -> None:
        """Make memory for a message that came early; what is read where it lies needs none."""
        if self.tensor is None and not self.into:
            self.into = memoryview(bytearray(self.nbytes))

    def look(self) -> bool:
        """Whether the message has come."""
        while not self.done and self.channel.has_come():
            self.channel.take()
        if not self.done and self.number:
            self.channel.fetch(self)
        return self.done


class PendingSends:
    """Messages that wait for room on their way to a peer, as something to wait for."""

    done = False

    def __init__(self, channel: PeerChannel) -> None:
        self.channel = channel

    def look(self) -> bool:
        """Whether all is sent."""
        self.channel.flush()
        return not self.channel.pending


class PeerChannel:
    """Both directions between this rank and a peer."""

    def __init__(
        self,
        rank: int,
        peer: int,
        own: SharedMemory,
        other: SharedMemory,
        places: SharedLayout,
        pieces: Pieces,
        pid: int,
        life: int,
    ) -> None:
        self.peer, self.pid = peer, pid
        self._life = select.poll()
        self._life.register(life, select.POLLIN)
        self.own, self.other = own, other
        self._words, self.other_words = own.words, other.words
        self._rank = rank
        # To the peer.
        self.pending: deque[RingSend] = deque()
        self._ring_out_word = places.rings[peer] // WORD
        self._acked = places.acks[rank] // WORD  # in the peer's memory
        self._pieces = pieces
        # The memory of short messages of a length in each entry of the ring.
        self.outgoing = _entries(own, places.rings[peer])
        # From the peer.
        self.posted: deque[RingReceive] = deque()
        self.early: dict[int, deque[RingReceive]] = {}
        self.unread: deque[RingReceive] = deque()  # that lie in the peer's memory
        self._ring_in_word = places.rings[rank] // WORD  # in the peer's memory
        self._acks = places.acks[peer] // WORD
        self._pieces_in = places.pieces
        # Views of places for pieces.
        self._view = lru_cache(_MOST_KNOWN)(partial(torch.frombuffer, other.data))
        self._partial: RingReceive | None = None  # whose pieces are coming
        self.incoming = _entries(other, places.rings[rank])
        self._regions = PeerRegions(pid)
        self.peer_reads = False  # whether the peer can read this process's memory
        self.reads_peer = False
        here, there = own.address, other.address
        self.state = array("q", [
            peer, rank, here, there, here + places.rings[peer], there + places.acks[rank],
            there + places.rings[rank], here + places.acks[peer], there + places.pieces,
            places.num_pieces, pid, life, 0, DEPTH, DEPTH, 0, 0, 0, *PIECES * [0],
        ])  # fmt: skip
        for entry in range(DEPTH):
            self._words[self._acks + entry] = entry

    def read_from(self, nbytes: int) -> None:
        """Let the peer read messages of so many bytes here, if it can."""
        self.state[_DIRECT_FROM] = max(nbytes, 1) if self.peer_reads else 0

    # --- to the peer ----------------------------------------------------------------------

    def start(self, send: RingSend) -> RingSend | None:
        """Start a message; ``None`` if it is complete."""
        number = self.state[_NEXT_OUT]
        entry = number & (DEPTH - 1)
        # The most frequent case comes first: a short message that has room.
        if (
            send.places
            and not self.pending
            and self.other_words[self._acked + entry] == number - DEPTH
        ):
            if FENCES:
                fence()
            send.places[entry][:] = send.source
            words, at = self._words, self._ring_out_word + entry * _ENTRY_WORDS
            words[at + 1], words[at + 3] = send.nbytes << 2 | _INLINE, send.tag
            if FENCES:
                fence()
            words[at] = number  # now the message can be seen
            self.state[_NEXT_OUT] = number + 1
            return None
        send.number = send.copied = 0
        send.done = False
        if self.pending or not self._put(send):
            self.pending.append(send)
            return send
        return None if send.done else send

    def flush(self) -> None:
        """Send what had no place before."""
        before = self.state[_NEXT_OUT]
        while self.pending and self._put(self.pending[0]):
            self.pending.popleft()
        if self.state[_NEXT_OUT] != before:
            fence()
            self.ring_if_needed()

    def ring_if_needed(self) -> None:
        """Wake the peer if it sleeps until a message of this rank comes, or if its ring is full.

        A fence comes before it, after the stores of messages.
        """
        sleeps = self.other_words[SLEEPS]
        if sleeps and (sleeps >> WHOM == self._rank or self.pending):
            self.ring()

    def is_taken(self, number: int) -> bool:
        """Whether the peer has taken a message."""
        return self.other_words[self._acked + (number & (DEPTH - 1))] >= number

    def _put(self, send: RingSend) -> bool:
        """Write as much of a message as there is room for; return whether that is all."""
        nbytes, words, state = send.nbytes, self._words, self.state
        is_all = False
        while not is_all:
            number = state[_NEXT_OUT]
            entry = number & (DEPTH - 1)
            if self.other_words[self._acked + entry] != number - DEPTH:
                return False
            if FENCES:
                fence()
            at = self._ring_out_word + entry * _ENTRY_WORDS
            if nbytes <= SHORT:
                send.places[entry][:] = send.source
                words[at + 1] = nbytes << 2 | _INLINE
                is_all = send.done = True
            elif not send.copied and (region := send.region()) is not None:
                words[at + 1], words[at + 2] = nbytes << 2 | _MAPPED, send.address
                words[at + 4], words[at + 5] = send.address - region.start, region.descriptor
                words[at + 6], words[at + 7], words[at + 8] = region.identity
                send.number, is_all = number, True
            elif 0 < state[_DIRECT_FROM] <= nbytes:
                words[at + 1], words[at + 2] = nbytes << 2 | _REMOTE, send.address
                send.number, is_all = number, True
            else:
                free = [at for at in _UNREAD if not state[at] or self.is_taken(state[at])]
                if not free:
                    return False
                begin, count = send.copied, min(PIECE, nbytes - send.copied)
                piece = send.pieces.get(begin)  # place and stamp
                if piece is None or not self._pieces.holds(*piece):
                    piece = self._pieces.write(send.source[begin : begin + count])
                    send.pieces[begin] = piece
                acked = state[_ACKED] + WORD * entry
                self._pieces.note_reader(piece[0], acked, number)
                words[at + 1], words[at + 2] = nbytes << 2 | _IN_PIECES, count
                words[at + 4] = piece[0]
                state[free[0]] = number
                send.copied += count
                is_all = send.done = send.copied == nbytes
            words[at + 3] = send.tag
            if FENCES:
                fence()
            words[at] = number  # now the message can be seen
            state[_NEXT_OUT] = number + 1
        return True

    def ring(self) -> None:
        """Wake the peer, if it sleeps."""
        self.state[_NUM_RINGS] += 1
        bell = (self._rank << 20 | self.state[_NUM_RINGS] & 0xFFFFF) & 0xFFFFFFFF
        self.other_words[BELL] = bell
        futex_wake(self.other.address + BELL * WORD)

    # --- from the peer --------------------------------------------------------------------

    def post(self, receive: RingReceive) -> None:
        """Begin to receive a message, which may have come already."""
        receive.filled = receive.number = 0
        receive.done = False
        first = self.taken_early(receive.tag) if self.early else None
        if first is None:
            self.posted.append(receive)
        else:
            self.meet(receive, first)

    def meet(self, receive: RingReceive, first: RingReceive) -> None:
        """Let a receive have a message that came before, as far as it is here."""
        self._check_length(receive, first.nbytes)
        if first.number:
            receive.address, receive.memory = first.address, first.memory
            receive.number, receive.done = first.number, receive.lent
            if not receive.lent:
                self.unread.append(receive)  # read when it is waited for: to post takes no time
            return
        if first.done:
            receive.into[:] = first.into
            receive.done = True
            return
        receive.into[: first.filled] = first.into[: first.filled]
        receive.filled = first.filled
        self._partial = receive
        self.posted.appendleft(receive)

    def awaited(self) -> tuple[int, int]:
        """The word in the peer's memory that shows the next message, and its number there."""
        number = self.state[NEXT_IN]
        return self._ring_in_word + (number & (DEPTH - 1)) * _ENTRY_WORDS, number

    def taken_early(self, tag: int) -> RingReceive | None:
        """The first message with a tag that came before it was asked for."""
        early = self.early.get(tag)
        if not early:
            return None
        first = early.popleft()
        self.state[_NUM_EARLY] -= 1
        if not early:
            del self.early[tag]
        return first

    def go_on_with(self, receive: RingReceive | None) -> None:
        """Note whose pieces are coming."""
        self._partial = receive

    def has_come(self) -> bool:
        """Whether there is a message to take."""
        at, number = self.awaited()
        return self.other_words[at] == number

    def take(self) -> None:
        """Take the message that has come."""
        if FENCES:
            fence()
        (at, number), words = self.awaited(), self.other_words
        entry = number & (DEPTH - 1)
        what, tag = words[at + 1], words[at + 3]
        nbytes, kind = what >> 2, what & 3
        self.state[NEXT_IN] = number + 1
        posted = self.posted
        if posted and kind == _INLINE and posted[0].tag == tag and posted[0].nbytes == nbytes:
            first = posted.popleft()  # the most frequent case
            first.into[:] = first.sources[entry]
            first.done = True
            self._acknowledge(number)
            return
        receive = self._partial or next((post for post in posted if post.tag == tag), None)
        if receive is None:
            receive = RingReceive(self, nbytes, tag, None, lent=True)  # nobody has asked for it yet
            self.early.setdefault(tag, deque()).append(receive)
            self.state[_NUM_EARLY] += 1
        if receive.nbytes != nbytes:
            self._check_length(receive, nbytes)
        if kind == _INLINE:
            receive.make_room()
            receive.into[:] = receive.sources[entry]
            receive.done = True
        elif kind in _IN_PLACE or (receive.lent and self._holds(nbytes, words[at + 2])):
            receive.address, receive.memory = words[at + 2], None
            if kind == _MAPPED:
                self._map(receive, at)
            elif kind == _IN_PIECES:
                self.state[NUM_HELD] += 1
                receive.memory = self.other
                receive.address = self._pieces_in + words[at + 4] * PIECE
            receive.number, receive.done = number, receive.lent
            if receive.tensor is not None:
                self._finish(receive)
                if not receive.lent:
                    self.unread.append(receive)
                    self.fetch(receive)
            return
        else:
            receive.make_room()
            count, start = words[at + 2], receive.filled
            place = self._pieces_in + words[at + 4] * PIECE
            receive.into[start : start + count] = self.other.data[place : place + count]
            receive.filled += count
            receive.done = receive.filled == nbytes
            self._partial = None if receive.done else receive
        if receive.done:
            self._finish(receive)
        self._acknowledge(number)

    def _holds(self, nbytes: int, count: int) -> bool:
        """Whether a message may stay in its place for pieces: one is left, for others."""
        return count == nbytes and self.state[NUM_HELD] < PIECES - 1

    def _map(self, receive: RingReceive, at: int) -> None:
        """Map the region that a message lies in, or leave the message to be read remotely."""
        words = self.other_words
        expected = Identity(words[at + 6], words[at + 7], words[at + 8])
        try:
            receive.memory = self._regions.map(words[at + 5], expected)
            receive.address = words[at + 4]
        except OSError as error:
            if not self.reads_peer:
                raise TransportError(
                    f"the shared tensor of rank {self.peer} cannot be mapped: {error}",
                    peer=self.peer,
                ) from error

    def _finish(self, receive: RingReceive) -> None:
        if receive.tensor is not None:
            self.posted.remove(receive)

    def fetch(self, receive: RingReceive) -> None:
        """Read a whole message in the peer's memory."""
        assert receive.tensor is not None
        self.unread.remove(receive)
        self.read(receive, 0, receive.tensor.data_ptr(), receive.nbytes)
        self.release(receive)
        receive.done = True

    def view(self, receive: RingReceive, dtype: torch.dtype) -> Tensor:
        """The elements of a message that is mapped here; views of places for pieces are kept."""
        memory, count = receive.memory, receive.nbytes // dtype.itemsize
        assert memory is not None
        view = self._view if memory is self.other else partial(torch.frombuffer, memory.data)
        return view(dtype=dtype, count=count, offset=receive.address)

    def read(self, receive: RingReceive, start: int, into: int, nbytes: int) -> None:
        """Read bytes of a message in the peer's memory, to an address."""
        if receive.memory is not None:
            ctypes.memmove(into, receive.memory.address + receive.address + start, nbytes)
            return
        try:
            read_process(self.pid, receive.address + start, into, nbytes)
        except OSError as error:
            raise PeerLostError(
                f"the memory of rank {self.peer} cannot be read: {error}", peer=self.peer
            ) from error

    def release(self, receive: RingReceive) -> None:
        """Let go of a message in the peer's memory, which has held still so far."""
        if FENCES:
            fence()
        if receive.memory is self.other:  # nobody writes there before it is acknowledged
            self.state[NUM_HELD] -= 1
        elif self.other_words[STATE] != OPEN or self.has_ended():
            raise PeerLostError("the connection was broken", peer=self.peer)
        self._acknowledge(receive.number)
        receive.number, receive.memory = 0, None

    def has_ended(self) -> bool:
        """Whether the peer's process has ended; its number may then be another's."""
        return bool(self._life.poll(0))

    def _acknowledge(self, number: int) -> None:
        if FENCES:
            fence()
        self._words[self._acks + (number & (DEPTH - 1))] = number
        fence()
        if self.other_words[SLEEPS] & FOR_ROOM:
            self.ring()

    def _check_length(self, receive: RingReceive, nbytes: int) -> None:
        if receive.nbytes != nbytes:
            raise TransportError(
                f"a message of {nbytes} bytes from rank {self.peer} met a receive of "
                f"{receive.nbytes} bytes"
            )


class Postings:
    """Messages that are ready, as `Transport.bind` returns them; each is over before the next."""

    def __init__(
        self,
        channels: Mapping[int, PeerChannel],
        receives: Sequence[Message],
        sends: Sequence[Message],
        words: array[int],
    ) -> None:
        self._words = words  # of the rank
        self.arriving = [
            RingReceive(channels[peer], tensor.nbytes, tag, tensor, lent)
            for peer, tensor, tag, lent in receives
        ]
        written: dict[tuple[int, int], dict[int, tuple[int, int]]] = {}
        self.leaving = []
        for message in sends:
            place = message.tensor.data_ptr(), message.tensor.nbytes
            pieces = written.setdefault(place, {})
            self.leaving.append(RingSend(channels[message.peer], message, pieces))
        self._starts = [(send, send.channel.start) for send in self.leaving]
        self._long = [pieces for (_, nbytes), pieces in written.items() if nbytes > SHORT]
        self._informed = [channels[peer] for peer in {message.peer for message in sends}]

    def __call__(self, mixed: int) -> list[Handle]:
        """Start the messages."""
        self._words[BY_PYTHON] = 1
        handles: list[Handle] = [*self.arriving]
        for receive in self.arriving:
            receive.tag = receive.base ^ mixed
            receive.channel.post(receive)
        for pieces in self._long:
            pieces.clear()
        for send, start in self._starts:
            send.tag = send.base ^ mixed
            handles.append(start(send))
        if self._informed:  # when all is written, as who wakes may take the processor
            fence()
            for channel in self._informed:
                if channel.other_words[SLEEPS]:
                    channel.ring_if_needed()
        return handles


def _entries(memory: SharedMemory, ring: int) -> Callable[[int], list[memoryview]]:
    """A function of a length: the memory of such messages in each entry of a ring."""
    starts = [ring + entry * ENTRY + HEAD for entry in range(DEPTH)]

    @lru_cache(_MOST_KNOWN)
    def places(nbytes: int) -> list[memoryview]:
        return [memory.data[start : start + nbytes] for start in starts]

    return places
