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

A rank that writes for a sleeping peer rings the peer's bell: each ring is another number, so that
none is missed that comes between a look and the sleep. A rank says that it sleeps before it looks
for the last time; a rank looks for sleepers after it has written, each with a fence between: one of
the two always sees the other.
"""

from __future__ import annotations

import ctypes
import select
from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

from ringcoll.errors import PeerLostError, TransportError
from ringcoll.runtime.transport.base import Message, bytes_at
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


class Pieces:
    """A rank's places for pieces of long messages.

    Of each peer at most `PIECES` places wait to be read, so that there is a free one for every
    other peer.
    """

    def __init__(self, memory: SharedMemory, start: int, number: int) -> None:
        self._memory, self._start = memory, start
        # For each place, what its peers write when they have read it: words, position, and number.
        self._readers: list[list[tuple[memoryview, int, int]]] = [[] for _ in range(number)]
        self._writes = [0] * number  # how often a place was written to

    def write(self, source: memoryview) -> tuple[int, int]:
        """Write a piece to the first free place, and return place and stamp.

        That place is likely to be in a cache.
        """
        place = next(
            place
            for place, readers in enumerate(self._readers)
            if all(words[at] >= number for words, at, number in readers)
        )
        self._readers[place].clear()
        start = self._start + place * PIECE
        self._memory.data[start : start + len(source)] = source
        self._writes[place] += 1
        return place, self._writes[place]

    def holds(self, place: int, stamp: int) -> bool:
        """Whether nothing else was written to a place since."""
        return self._writes[place] == stamp

    def note_reader(self, place: int, words: memoryview, at: int, number: int) -> None:
        """Remember that a peer has to read a place, and will then write a number."""
        self._readers[place].append((words, at, number))


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
        self._rank, self._num_rings = rank, 0
        # To the peer.
        self.pending: deque[RingSend] = deque()
        self._next_out = DEPTH
        self._ring_out = places.rings[peer]
        self._ring_out_word = self._ring_out // WORD
        self._acked = places.acks[rank] // WORD  # in the peer's memory
        self._pieces = pieces
        # Messages that the peer may still have to read in places for pieces.
        self._unread: list[int] = []
        # The memory of short messages of a length in each entry of the ring.
        self.outgoing = _entries(own, self._ring_out)
        # From the peer.
        self.posted: deque[RingReceive] = deque()
        self.early: dict[int, deque[RingReceive]] = {}
        self.unread: deque[RingReceive] = deque()  # that lie in the peer's memory
        self.next_in = DEPTH
        self._ring_in = places.rings[rank]  # in the peer's memory
        self.word_in = self._ring_in_word = self._ring_in // WORD  # of the next message
        self._acks = places.acks[peer] // WORD
        self._pieces_in = places.pieces
        self._num_held = 0  # places for pieces
        # Views of places for pieces.
        self._view = lru_cache(_MOST_KNOWN)(partial(torch.frombuffer, other.data))
        self._partial: RingReceive | None = None  # whose pieces are coming
        self.incoming = _entries(other, self._ring_in)
        self._regions = PeerRegions(pid)
        self.peer_reads = False  # whether the peer can read this process's memory
        self.reads_peer = False
        self.direct_from = 0  # bytes of a message that the peer reads here
        for entry in range(DEPTH):
            self._words[self._acks + entry] = entry

    # --- to the peer ----------------------------------------------------------------------

    def start(self, send: RingSend) -> RingSend | None:
        """Start a message; ``None`` if it is complete."""
        number = self._next_out
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
            self._next_out = number + 1
            return None
        send.number = send.copied = 0
        send.done = False
        if self.pending or not self._put(send):
            self.pending.append(send)
            return send
        return None if send.done else send

    def flush(self) -> None:
        """Send what had no place before."""
        before = self._next_out
        while self.pending and self._put(self.pending[0]):
            self.pending.popleft()
        if self._next_out != before:
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
        nbytes, words = send.nbytes, self._words
        is_all = False
        while not is_all:
            number = self._next_out
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
            elif self.peer_reads and nbytes >= self.direct_from:
                words[at + 1], words[at + 2] = nbytes << 2 | _REMOTE, send.address
                send.number, is_all = number, True
            else:
                if len(self._unread) >= PIECES:
                    self._unread = [sent for sent in self._unread if not self.is_taken(sent)]
                    if len(self._unread) >= PIECES:
                        return False
                begin, count = send.copied, min(PIECE, nbytes - send.copied)
                piece = send.pieces.get(begin)  # place and stamp
                if piece is None or not self._pieces.holds(*piece):
                    piece = self._pieces.write(send.source[begin : begin + count])
                    send.pieces[begin] = piece
                self._pieces.note_reader(piece[0], self.other_words, self._acked + entry, number)
                words[at + 1], words[at + 2] = nbytes << 2 | _IN_PIECES, count
                words[at + 4] = piece[0]
                self._unread.append(number)
                send.copied += count
                is_all = send.done = send.copied == nbytes
            words[at + 3] = send.tag
            if FENCES:
                fence()
            words[at] = number  # now the message can be seen
            self._next_out = number + 1
        return True

    def ring(self) -> None:
        """Wake the peer, if it sleeps."""
        self._num_rings += 1
        self.other_words[BELL] = (self._rank << 20 | self._num_rings & 0xFFFFF) & 0xFFFFFFFF
        futex_wake(self.other.address + BELL * WORD)

    # --- from the peer --------------------------------------------------------------------

    def post(self, receive: RingReceive) -> None:
        """Begin to receive a message, which may have come already."""
        receive.filled = receive.number = 0
        receive.done = False
        early = self.early.get(receive.tag) if self.early else None
        if not early:
            self.posted.append(receive)
            return
        first = early.popleft()
        if not early:
            del self.early[receive.tag]
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

    def has_come(self) -> bool:
        """Whether there is a message to take."""
        return self.other_words[self.word_in] == self.next_in

    def take(self) -> None:
        """Take the message that has come."""
        if FENCES:
            fence()
        number, at, words = self.next_in, self.word_in, self.other_words
        what, tag = words[at + 1], words[at + 3]
        nbytes, kind = what >> 2, what & 3
        entry = number & (DEPTH - 1)
        self.next_in = number + 1
        self.word_in = self._ring_in_word + (self.next_in & (DEPTH - 1)) * _ENTRY_WORDS
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
                self._num_held += 1
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
        return count == nbytes and self._num_held < PIECES - 1

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
            self._num_held -= 1
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


def _entries(memory: SharedMemory, ring: int) -> Callable[[int], list[memoryview]]:
    """A function of a length: the memory of such messages in each entry of a ring."""
    starts = [ring + entry * ENTRY + HEAD for entry in range(DEPTH)]

    @lru_cache(_MOST_KNOWN)
    def places(nbytes: int) -> list[memoryview]:
        return [memory.data[start : start + nbytes] for start in starts]

    return places
