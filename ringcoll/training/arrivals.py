"""Messages from several ranks, each as it comes; and which rank was lost.

Problem: a server takes the message of whichever rank is ready. gloo has a receive from any rank,
but does not notice in it that a rank has left. So each expected message has a thread of its own,
which waits for its rank alone: it notices the end of the connection at once, and the messages of
the other ranks go on.

Cost: a thread for each message, some 0.1 ms.
"""

from __future__ import annotations

from queue import SimpleQueue

import torch
from torch import Tensor

from ringcoll.machine.ending import started
from ringcoll.training.messages import Messages
from ringcoll.training.phases import waiting

__all__ = ["Arrivals"]


class Arrivals:
    """Receives messages of one length from several ranks.

    Parameters
    ----------
    messages
        Messages of this rank; nothing else receives from the same ranks.
    like
        Tensor of the length, dtype and device of a message.
    """

    def __init__(self, messages: Messages, like: Tensor) -> None:
        self._messages, self._like = messages, like
        self._arrived: SimpleQueue[tuple[int, Tensor | Exception]] = SimpleQueue()

    def expect(self, peer: int, reply: Tensor | None = None) -> None:
        """Begin to wait for a message of a rank; for each rank, one message at a time.

        Parameters
        ----------
        peer
            The rank.
        reply
            Tensor that is sent to the rank before; it must not change any more.
        """
        # A thread that still waits when the program ends does not hold up the program.
        started(self._converse, "ringcoll-arrivals", peer, reply)

    def _converse(self, peer: int, reply: Tensor | None) -> None:
        message = torch.empty_like(self._like)
        try:
            if reply is not None:
                self._messages.send(reply, peer)()
            self._messages.recv(message, peer)
        except Exception as error:  # noqa: BLE001  # `take` hands it over
            self._arrived.put((peer, error))
        else:
            self._arrived.put((peer, message))

    def take(self) -> tuple[int, Tensor | Exception]:
        """Wait for the next message.

        Returns
        -------
        tuple
            The rank, and its message, or the error of the reply or of the wait: a `PeerLostError` if
            the rank was lost. The wait ends, because each message has a time limit.
        """
        with waiting(None, self._messages.group) as awaited:
            peer, message = self._arrived.get()
            awaited.peer = peer
        return peer, message
