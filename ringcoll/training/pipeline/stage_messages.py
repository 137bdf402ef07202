"""The messages of a pipeline: a mailbox sends and receives what the schedule asks for.

- A rank posts the next receive from each neighbour before it computes, and waits for no send that
  may be incomplete. So the transport moves data while the rank computes.
- A message that arrives proves that its sender has received all that its earlier actions needed.
  The sends to that rank are then complete, and their memory is released.
- The tag of a message is its place in the schedule, and a rank posts its receives in the order in
  which the peer sends.
- The first activation between two stages follows a message with its shape and dtype.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringcoll.training.checks import require
from ringcoll.training.messages import Messages
from ringcoll.training.pipeline.pipeline_schedule import (
    Action,
    PipelineSchedule,
    Transfer,
    consumed,
    produced,
)

_Completion = Callable[[], None]  # waits until a message is complete

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # their index is sent
_MOST_DIMENSIONS = 8


class _Pending(NamedTuple):
    """A send that may be incomplete, and the place of the action that receives it."""

    peer: int
    place: int
    wait: _Completion


class Mailbox:
    """The messages of a rank: activations and gradients, by a proved schedule."""

    def __init__(self, schedule: PipelineSchedule, group: Any, device: torch.device) -> None:
        self._messages, self._device = Messages(group), device
        self._rank = self._messages.rank
        self._num_stages, self._num_microbatches = schedule.num_stages, schedule.num_microbatches
        self._header_tags = 2 * schedule.num_stages * schedule.num_microbatches
        # The rank, and the place in its program, of the action that sends or receives.
        self._senders: dict[Transfer, tuple[int, int]] = {}
        self._receivers: dict[Transfer, tuple[int, int]] = {}
        for rank, program in enumerate(schedule.programs):
            for place, action in enumerate(program):
                if (sent := produced(action, schedule.num_stages)) is not None:
                    self._senders[sent] = rank, place
                if (received := consumed(action, schedule.num_stages)) is not None:
                    self._receivers[received] = rank, place
        self._layouts: dict[int, tuple[torch.Size, torch.dtype]] = {}  # by boundary
        self.waited_s = 0.0  # time in which this rank waited for messages, in this step
        self.nbytes_sent = 0  # to other ranks, in all steps

    def begin(self, *, has_new_shapes: bool) -> None:
        """Begin a step; whether shapes are new is alike on all ranks."""
        if has_new_shapes:
            self._layouts.clear()
        self._posted: dict[Transfer, tuple[Tensor, _Completion]] = {}
        self._pending: list[_Pending] = []
        self._incoming: dict[int, deque[Transfer]] = {}
        for transfer, (peer, _) in self._senders.items():  # in the order in which the peer sends
            if self._receivers[transfer][0] == self._rank != peer:
                self._incoming.setdefault(peer, deque()).append(transfer)
        self.waited_s = 0.0
        for peer in self._incoming:
            self._post_early(peer)

    def send(self, action: Action, tensor: Tensor) -> None:
        """Start to send what an action has produced to the rank that needs it."""
        transfer = produced(action, self._num_stages)
        assert transfer is not None, action
        tensor, boundary = tensor.contiguous(), transfer.boundary
        can_be_sent = tensor.dtype in _DTYPES and tensor.ndim <= _MOST_DIMENSIONS
        require(can_be_sent, "stages", f"the result of stage {boundary} cannot be sent",
                f"one of {_DTYPES}, at most {_MOST_DIMENSIONS} dimensions",
                f"{tensor.dtype}, {tensor.ndim} dimensions", self._rank)  # fmt: skip
        is_first, layout = boundary not in self._layouts, (tensor.shape, tensor.dtype)
        expected = self._layouts.setdefault(boundary, layout)
        require(layout == expected, "stages",
                f"the result of stage {boundary} is not as for the micro-batch before",
                expected, layout, self._rank)  # fmt: skip
        peer, place = self._receivers[transfer]
        if peer == self._rank:
            self._posted[transfer] = tensor, lambda: None
            return
        if is_first:
            numbers = [_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
            numbers += [0] * (_MOST_DIMENSIONS - tensor.ndim)
            header = torch.tensor(numbers, device=self._device)
            wait = self._messages.send(header, peer, self._header_tags + boundary)
            self._pending.append(_Pending(peer, place, wait))
        self.nbytes_sent += tensor.nbytes
        wait = self._messages.send(tensor, peer, self._tag(transfer))
        self._pending.append(_Pending(peer, place, wait))

    def take(self, action: Action) -> Tensor | None:
        """Wait for what an action needs, if anything, and post the next receive from that peer."""
        transfer = consumed(action, self._num_stages)
        if transfer is None:
            return None
        begin_s = time.perf_counter()
        peer, place = self._senders[transfer]
        while transfer not in self._posted:
            self._post(peer)
        tensor, wait = self._posted.pop(transfer)
        wait()
        for item in [item for item in self._pending if item.peer == peer and item.place <= place]:
            item.wait()
            self._pending.remove(item)
        self.waited_s += time.perf_counter() - begin_s
        self._post_early(peer)
        return tensor

    def finish(self) -> None:
        """Wait for all sends."""
        for item in self._pending:
            item.wait()
        self._pending.clear()

    def _tag(self, transfer: Transfer) -> int:
        place = transfer.boundary * self._num_microbatches + transfer.microbatch
        return 2 * place + transfer.is_gradient

    def _post_early(self, peer: int) -> None:
        """Post the next receive from a peer, if there is another and its shape is known."""
        incoming = self._incoming.get(peer)
        if incoming and incoming[0].boundary in self._layouts:
            self._post(peer)

    def _post(self, peer: int) -> None:
        """Post the next receive from a peer; wait for the shape if it is not known."""
        transfer = self._incoming[peer].popleft()
        if transfer.boundary not in self._layouts:
            header = torch.empty(2 + _MOST_DIMENSIONS, dtype=torch.int64, device=self._device)
            self._messages.recv(header, peer, self._header_tags + transfer.boundary)
            index, ndim, *lengths = header.tolist()
            self._layouts[transfer.boundary] = torch.Size(lengths[:ndim]), _DTYPES[index]
        shape, dtype = self._layouts[transfer.boundary]
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        wait = self._messages.receive(tensor, peer, self._tag(transfer))
        self._posted[transfer] = tensor, wait
