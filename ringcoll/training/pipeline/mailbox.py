"""The messages of a pipeline: activations and gradients, between neighbouring stages.

- A rank posts the next receive from each neighbour before it computes, and waits for no send that
  may be incomplete. So the transport moves data while the rank computes.
- A message that arrives proves that its sender has received all that its earlier actions needed.
  The sends to that rank are then complete, and their memory is released.
- The tag of a message is its micro-batch, and a rank posts its receives in the order in which the
  peer sends.
- The first activation between two stages follows a message with its shape and dtype.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringcoll.training.arguments import require
from ringcoll.training.messages import Messages
from ringcoll.training.pipeline.pipeline_schedule import Action, PipelineSchedule

_Completion = Callable[[], None]  # waits until a message is complete

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # their index is sent
_MOST_DIMENSIONS = 8


class Mailbox:
    """The messages of a rank to and from its neighbours: activations and gradients."""

    def __init__(self, schedule: PipelineSchedule, group: Any, device: torch.device) -> None:
        self._messages, self._device = Messages(group), device
        self._rank = self._messages.rank
        self._program = schedule.program(self._rank)
        self._header_tag = schedule.num_microbatches  # those of other messages are below
        peers = {self._rank - 1, self._rank + 1} & {*range(schedule.world_size)}
        # By neighbour: the places of its actions in its program.
        self._places = {
            peer: {action: place for place, action in enumerate(schedule.program(peer))}
            for peer in peers
        }
        self._layouts: dict[int, tuple[torch.Size, torch.dtype]] = {}  # by neighbour
        self.waited_s = 0.0  # time in which this rank waited for messages, in this step
        self.nbytes_sent = 0  # in all steps

    def begin(self, *, has_new_shapes: bool) -> None:
        """Begin a step; whether shapes are new is alike on all ranks."""
        if has_new_shapes:
            self._layouts.clear()
        self._posted: dict[Action, tuple[Tensor, _Completion]] = {}
        # Sends that may be incomplete: by neighbour, with the place of the action that receives.
        self._pending: dict[int, deque[tuple[int, _Completion]]] = {
            peer: deque() for peer in self._places
        }
        # By neighbour: the actions that need its messages, in the order in which it sends.
        self._incoming: dict[int, deque[Action]] = {peer: deque() for peer in self._places}
        for action in self._program:
            if (source := action.neighbour(-1)).stage in self._places:
                self._incoming[source.stage].append(action)
        self.waited_s = 0.0
        for peer in self._incoming:
            self._post_early(peer)

    def send(self, action: Action, tensor: Tensor) -> None:
        """Start to send what an action has produced to the rank that needs it."""
        receiver = action.neighbour(1)
        peer, tensor = receiver.stage, tensor.contiguous()
        boundary = min(self._rank, peer)
        can_be_sent = tensor.dtype in _DTYPES and tensor.ndim <= _MOST_DIMENSIONS
        require(can_be_sent, "stage", f"the result of stage {boundary} cannot be sent",
                f"one of {_DTYPES}, at most {_MOST_DIMENSIONS} dimensions",
                f"{tensor.dtype}, {tensor.ndim} dimensions", self._rank)  # fmt: skip
        is_first, layout = peer not in self._layouts, (tensor.shape, tensor.dtype)
        expected = self._layouts.setdefault(peer, layout)
        require(layout == expected, "stage",
                f"the result of stage {boundary} is not as for the micro-batch before",
                expected, layout, self._rank)  # fmt: skip
        messages = [(tensor, action.microbatch)]
        if is_first:
            padding = [0] * (_MOST_DIMENSIONS - tensor.ndim)
            numbers = [_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape, *padding]
            messages.insert(0, (torch.tensor(numbers, device=self._device), self._header_tag))
        self.nbytes_sent += tensor.nbytes
        place = self._places[peer][receiver]
        for message, tag in messages:
            self._pending[peer].append((place, self._messages.send(message, peer, tag)))

    def take(self, action: Action) -> Tensor | None:
        """Wait for what an action needs, if anything, and post the next receive from that peer."""
        sender = action.neighbour(-1)
        peer = sender.stage
        if peer not in self._places:
            return None
        begin_s = time.perf_counter()
        while action not in self._posted:
            self._post(peer)
        tensor, wait = self._posted.pop(action)
        wait()
        self._complete(peer, self._places[peer][sender])
        self.waited_s += time.perf_counter() - begin_s
        self._post_early(peer)
        return tensor

    def finish(self) -> None:
        """Wait for all sends."""
        for peer, places in self._places.items():
            self._complete(peer, len(places))

    def _complete(self, peer: int, last: int) -> None:
        """Wait for the sends to a peer whose actions there have at most a place."""
        sends = self._pending[peer]
        while sends and sends[0][0] <= last:  # both ranks take micro-batches in the same order
            _, wait = sends.popleft()
            wait()

    def _post_early(self, peer: int) -> None:
        """Post the next receive from a peer, if there is another and its shape is known."""
        if self._incoming[peer] and peer in self._layouts:
            self._post(peer)

    def _post(self, peer: int) -> None:
        """Post the next receive from a peer; wait for the shape if it is not known."""
        action = self._incoming[peer].popleft()
        if peer not in self._layouts:
            header = torch.empty(2 + _MOST_DIMENSIONS, dtype=torch.int64, device=self._device)
            self._messages.recv(header, peer, self._header_tag)
            index, ndim, *lengths = header.tolist()
            self._layouts[peer] = torch.Size(lengths[:ndim]), _DTYPES[index]
        shape, dtype = self._layouts[peer]
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        self._posted[action] = tensor, self._messages.receive(tensor, peer, action.microbatch)
