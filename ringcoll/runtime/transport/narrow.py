"""Messages of another transport, rounded to a wire dtype.

`NarrowTransport` rounds messages to the wire dtype before a send, and widens them after a receive.
Nothing above knows, and partial results are added in the wide dtype. A message that is in the wire
dtype already passes as it is: a reduction can widen it.

The sender's own copy is rounded as well. If two ranks exchange partial results and both add them
up (recursive doubling), each rank would otherwise add its own exact result to the other's rounded
result, and the ranks would end with different sums. So the tensors must be the library's own
working copies, never the user's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ringcoll.runtime.reduction import TORCH, Engine
from ringcoll.runtime.transport.base import AroundTransport, Handle, Message, Start, Transport


class _Arriving(NamedTuple):
    """A receive in the wire dtype, and the tensor to widen it into."""

    handle: Handle
    narrow: Tensor
    into: Tensor


class NarrowTransport(AroundTransport):
    """Messages of another transport, sent in a wire dtype; the engine rounds them."""

    def __init__(self, below: Transport, wire_dtype: torch.dtype, engine: Engine = TORCH) -> None:
        super().__init__(below)
        self._wire_dtype, self._engine = wire_dtype, engine

    def bind(self, receives: Sequence[Message], sends: Sequence[Message]) -> Start:
        """Make messages ready; see `Transport.bind`."""
        arriving, leaving = [*map(self._narrow, receives)], [*map(self._narrow, sends)]
        start = self.below.bind(arriving, leaving)
        rounding = [
            self._engine.round(narrow.tensor, wide.tensor)
            for wide, narrow in zip(sends, leaving, strict=True)
            if narrow is not wide
        ]

        def post(mixed: int) -> list[Handle]:
            for round_ in rounding:
                round_()
            handles = start(mixed)
            for index, (wide, narrow) in enumerate(zip(receives, arriving, strict=True)):
                if narrow is not wide:
                    handles[index] = _Arriving(handles[index], narrow.tensor, wide.tensor)
            return handles

        return post

    def _narrow(self, message: Message) -> Message:
        if message.tensor.dtype is self._wire_dtype:
            return message
        narrow = torch.empty_like(message.tensor, dtype=self._wire_dtype)
        return message._replace(tensor=narrow)

    def wait(self, handle: Handle, timeout_s: float) -> None:
        """Wait for one message; see `Transport.wait`."""
        if isinstance(handle, _Arriving):
            self.below.wait(handle.handle, timeout_s)
            handle.into.copy_(handle.narrow)
        else:
            self.below.wait(handle, timeout_s)

    def is_over(self, handle: Handle) -> bool:
        """Whether a message is over; see `Transport.is_over`."""
        return self.below.is_over(handle.handle if isinstance(handle, _Arriving) else handle)
