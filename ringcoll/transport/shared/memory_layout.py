"""Where things lie in the memory of a rank, which all ranks of its host map.

A rank writes to its own memory only, but for the bell that wakes a peer::

    control    the bell, what the rank sleeps for, how its end of the group is
    acks       for each peer, by entry: number of the last message that was taken from that entry
    can read   for each peer: whether this rank can read the memory of its process
    rings      for each peer, 16 entries: number, length, kind, tag, and a short message itself
    pieces     places for pieces of long messages, so many for each peer
    board      two places for messages to all ranks: tag, and the message

The memory itself is from `ringcoll.transport.shared.memory`; `ringcoll.transport.shared.channel` says
how messages travel in it.
"""

from __future__ import annotations

from collections.abc import Sequence

WORD = 8
"""Bytes of a word."""
DEPTH = 16
"""Entries of a ring, a power of two."""
ENTRY = 36 << 10
"""Bytes of an entry, whole pages."""
HEAD = 32
"""Bytes at the begin of an entry: number, length and kind, address or length of a piece, tag. Behind them,
of a mapped message: offset in its region, and the region's descriptor and identity."""
SHORT = ENTRY - HEAD
"""Bytes of the longest message that travels in an entry."""
PIECE, PIECES = 512 << 10, 3
"""Bytes of a piece of a long message, and places with pieces that a peer has not read yet."""
EXCHANGED, PLACE = 256 << 10, 260 << 10
"""Bytes of the longest message to all ranks, and of a place of the board, whole pages."""
BELL, SLEEPS, STATE, EXCHANGES = 0, 8, 16, 24
"""Numbers of the words of the control block, each on a cache line of its own."""
_CONTROL = 256  # bytes
AWAKE, ASLEEP, FOR_ROOM, WHOM = 0, 1, 2, 2
"""A rank sleeps for nothing, or for a message of the peer above ``WHOM`` bits; with ``FOR_ROOM`` also
for room in a ring, or the end of a send."""
OPEN, BROKEN, CLOSED = 0, 1, 2
"""States of a rank's end of the group."""


class SharedLayout:
    """Where things lie in a rank's memory, in bytes; ``ranks`` are those of the host.

    The memory up to ``num_taken`` is needed, that of pieces and of the board perhaps never.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        end = _CONTROL + len(ranks) * DEPTH * WORD
        first = -(-(end + len(ranks) * WORD) // ENTRY) * ENTRY
        self.num_taken = first + len(ranks) * DEPTH * ENTRY
        self.board = self.num_taken + len(ranks) * PIECES * PIECE
        self.nbytes = self.board + 2 * PLACE
        places = {rank: place for place, rank in enumerate(ranks)}
        self.acks = {rank: _CONTROL + n * DEPTH * WORD for rank, n in places.items()}
        self.can_read = {rank: end + n * WORD for rank, n in places.items()}
        self.rings = {rank: first + n * DEPTH * ENTRY for rank, n in places.items()}
        self.pieces, self.num_pieces = self.num_taken, len(ranks) * PIECES
