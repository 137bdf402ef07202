"""A message of each rank to all others, through a board in its memory that all of them read.

A rank writes its message once, to one of two places that take turns, and counts its exchanges up; who has seen the
count of a peer reads that peer's place. It may be written again two exchanges later: by then every rank has seen this rank's
next count, and each rank counts only when it has read all that it was sent before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ringcoll.transport.base import Handle, Message, bytes_at
from ringcoll.transport.shared.channel import FENCES, PeerChannel
from ringcoll.transport.shared.memory import SharedMemory, fence
from ringcoll.transport.shared.memory_layout import EXCHANGES, HEAD, PLACE, SLEEPS, WHOM, WORD


class Board:
    """The board of a rank, and how many exchanges it has begun."""

    def __init__(self, rank: int, memory: SharedMemory, start: int) -> None:
        self.rank, self.memory, self.start = rank, memory, start
        self.number = 0


class BoardReceive:
    """A message on the board of a peer."""

    __slots__ = ("_into", "_sources", "_tags", "base", "channel", "done", "number", "tag", "words")

    def __init__(self, channel: PeerChannel, message: Message, start: int) -> None:
        _, tensor, self.base, is_lent = message
        self.channel, self.words = channel, channel.other_words
        places = [start + place * PLACE for place in range(2)]
        self._tags = [place // WORD for place in places]
        nbytes = tensor.nbytes
        self._into = None if is_lent else bytes_at(tensor.data_ptr(), nbytes)
        data = channel.other.data
        self._sources = [data[place + HEAD : place + HEAD + nbytes] for place in places]
        self.tag = self.number = 0
        self.done = False

    def look(self) -> bool:
        """Whether the message has come; one of another exchange, as ranks have disagreed, never does."""
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
    """See `ringcoll.transport.base.Exchange`."""

    def __init__(
        self,
        board: Board,
        channels: Mapping[int, PeerChannel],
        receives: Sequence[Message],
        send: Tensor,
        tag: int,
    ) -> None:
        self._board, self._words, self._tag = board, board.memory.words, tag
        self._tensor, self._source = send, bytes_at(send.data_ptr(), send.nbytes)
        places = [board.start + place * PLACE for place in range(2)]
        self._tags = [place // WORD for place in places]
        data = board.memory.data
        self._places = [data[place + HEAD : place + HEAD + send.nbytes] for place in places]
        self._receives = [BoardReceive(channels[one.peer], one, board.start) for one in receives]
        self._messages = receives
        self._channels = [one.channel for one in self._receives]
        self._sent = [None] * len(receives)
        self.place = 0

    def __call__(self, mixed: int) -> list[Handle]:
        """Write the message, and count."""
        board, words = self._board, self._words
        board.number = number = board.number + 1
        self.place = place = number & 1
        self._places[place][:] = self._source
        words[self._tags[place]] = self._tag ^ mixed
        for receive in self._receives:
            receive.number, receive.tag, receive.done = number, receive.base ^ mixed, False
        if FENCES:
            fence()
        words[EXCHANGES] = number
        fence()
        for channel in self._channels:
            if channel.other_words[SLEEPS] >> WHOM == board.rank:
                channel.ring_if_needed()
        return [*self._receives, *self._sent]

    def view(self, position: int, place: int) -> Tensor:
        """Where a receive comes to a place."""
        message, start = self._messages[position], self._board.start + place * PLACE + HEAD
        memory = self._receives[position].channel.other.data
        tensor = message.tensor
        if not tensor.numel():
            return tensor
        return torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=start)
