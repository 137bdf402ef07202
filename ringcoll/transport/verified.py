"""Messages with their checksums.

A transport around another transport: beside each message travels its CRC-32, as a message of 8 bytes
under a tag of its own, so that lengths fit whatever happens to either. The receiver computes the
checksum again when both have come.

The checksum begins with the number of the message among those of its tag from its sender. So a message
that is lost, or comes twice, is found by the next one, also if its checksum is lost or comes twice, too.

Nothing is lent: what a receiver reads piece by piece in its peer's memory has no moment at which all of
it is there to be verified. CUDA tensors are copied to the host to be verified.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringcoll.errors import CorruptMessageError
from ringcoll.transport.around import AroundTransport
from ringcoll.transport.base import Handle, Message, Transport, bytes_at

_BESIDE = 0x2C9277B5  # mixed into the tags of checksums; any number of 31 bits
_MOST_TAGS = 1 << 14  # whose messages are counted: far more than are in use at a time


class _Numbers:
    """Numbers of messages, by peer and tag. Tags of operations do not come again."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, int], int] = {}

    def next(self, message: Message, mixed: int) -> int:
        """Number of the message that is posted now."""
        counts, key = self._counts, (message.peer, message.tag ^ mixed)
        number = counts.pop(key, 0)
        counts[key] = number + 1  # now the latest of all
        if len(counts) > _MOST_TAGS:
            del counts[next(iter(counts))]
        return number & 0xFFFFFFFF


class _Beside:
    """A message and the message with its checksum."""

    def __init__(self, message: Message) -> None:
        self.message = message
        with torch.inference_mode(False):  # the other end may be outside of that mode
            tensor = torch.zeros(1, dtype=torch.int64, device="cpu")
        self.checksum = Message(message.peer, tensor, message.tag ^ _BESIDE)
        self._word = bytes_at(tensor.data_ptr(), 8).cast("q")

    def compute(self, number: int) -> int:
        """CRC-32 of what is in the message's memory."""
        host: Tensor = self.message.tensor.cpu()
        return zlib.crc32(bytes_at(host.data_ptr(), host.nbytes), number)

    def write(self, number: int) -> None:
        """Write the checksum, before it is sent."""
        self._word[0] = self.compute(number)

    def read(self) -> int:
        """The checksum that has come."""
        return self._word[0]


@dataclass(slots=True)
class _Checked:
    """A message and its checksum on their way below; of a receive also what is to be verified."""

    message: Handle
    checksum: Handle
    beside: _Beside | None = None
    number: int = 0


class VerifiedTransport(AroundTransport):
    """Messages of another transport, on all ranks, each with its checksum beside it."""

    def __init__(self, below: Transport) -> None:
        super().__init__(below)
        self.verifies = True
        self._sent, self._received = _Numbers(), _Numbers()

    def bind(
        self, receives: Sequence[Message], sends: Sequence[Message]
    ) -> Callable[[int], list[Handle]]:
        """Make messages ready; see `Transport.bind`."""
        arriving, leaving = [*map(_Beside, receives)], [*map(_Beside, sends)]
        start = self.below.bind(
            [*receives, *(beside.checksum for beside in arriving)],
            [*sends, *(beside.checksum for beside in leaving)],
        )
        split = len(arriving)

        def post(mixed: int) -> list[Handle]:
            for beside in leaving:
                beside.write(self._sent.next(beside.message, mixed))
            handles = start(mixed)
            into, out_of = handles[: 2 * split], handles[2 * split :]
            pairs = [*map(_Checked, into[:split], into[split:])]
            for pair, beside in zip(pairs, arriving, strict=True):
                pair.beside, pair.number = beside, self._received.next(beside.message, mixed)
            pairs += map(_Checked, out_of[: len(leaving)], out_of[len(leaving) :])
            return [*pairs]

        return post

    def wait(self, handle: Handle, timeout_s: float) -> None:
        """Wait for one message; see `Transport.wait`.

        Raises
        ------
        CorruptMessageError
            The message is not what was sent.
        """
        assert isinstance(handle, _Checked)
        deadline = time.monotonic() + timeout_s
        self.below.wait(handle.message, timeout_s)
        self.below.wait(handle.checksum, max(deadline - time.monotonic(), 0.001))
        beside, handle.beside = handle.beside, None  # a second wait verifies nothing
        if beside is not None:
            self._verify(beside, handle.number)

    def _verify(self, beside: _Beside, number: int) -> None:
        """Raise an error if a message is not what was sent."""
        found, sent = beside.compute(number), beside.read()
        if found != sent:
            peer, tensor = beside.message.peer, beside.message.tensor
            raise CorruptMessageError(
                f"rank {self.rank} got a message of {tensor.nbytes} bytes from rank {peer} with the "
                f"checksum {found:#010x} instead of {sent:#010x}: it was changed, lost or doubled on "
                "its way",
                peer=peer,
            )
