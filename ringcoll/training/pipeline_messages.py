"""The messages of a pipeline: point-to-point on any group, and a mailbox that follows a schedule.

`send` and `receive` work on a process group of torch, by torch's ``isend`` and ``irecv``, and on
the groups of `ringcoll.run_threads` and `ringcoll.mpi_group`, by their transport. `tie` sums the
gradients of a parameter that several ranks hold.

`Mailbox` sends and receives what the schedule of a pipeline asks for:

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
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.collectives.groups import OwnGroup, as_group
from ringcoll.errors import ArgumentError
from ringcoll.training.pipeline_schedule import PipelineSchedule, Transfer, consumed, produced
from ringcoll.transport.base import Message

__all__ = ["Completion", "Mailbox", "receive", "send", "tie"]

Completion = Callable[[], object]
"""A function that waits until a message is complete."""

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # their index is sent
_MOST_DIMENSIONS = 8


def send(tensor: Tensor, peer: int, group: Any = None, *, tag: int = 0) -> Completion:
    """Start to send a tensor to a rank of a group.

    Parameters
    ----------
    tensor
        Contiguous tensor; not to be written before the message is complete.
    peer
        Rank in the group.
    group
        A process group of torch, a group of `ringcoll.run_threads` or `ringcoll.mpi_group` that has
        run a collective, or ``None`` for the default group.
    tag
        Number of the message; messages with the same tag arrive in order.
    """
    group = as_group(group)
    if isinstance(group, OwnGroup):
        return _post(group, tensor, [], [Message(peer, tensor.view(-1), tag)])
    work = dist.isend(tensor, group=group, group_dst=peer, tag=tag)
    assert work is not None  # as_group refuses a group without this process
    return work.wait


def receive(tensor: Tensor, peer: int, group: Any = None, *, tag: int = 0) -> Completion:
    """Start to receive a contiguous tensor from a rank of a group; parameters as for `send`."""
    group = as_group(group)
    if isinstance(group, OwnGroup):
        return _post(group, tensor, [Message(peer, tensor.view(-1), tag)], [])
    work = dist.irecv(tensor, group=group, group_src=peer, tag=tag)
    assert work is not None
    return work.wait


def _post(
    group: OwnGroup, tensor: Tensor, receives: list[Message], sends: list[Message]
) -> Completion:
    member = group.on(tensor.device)
    (handle,) = member.transport.post(receives, sends)
    return partial(member.transport.wait, handle, member.timeout_s)


def tie(param: Tensor, ranks: Sequence[int], group: Any = None) -> None:
    """Sum the gradients of a parameter that several ranks hold, such as a tied embedding.

    Call it on those ranks, after the step of the pipeline. With equal copies at first and the same
    optimizer, the copies stay equal to the last bit: each rank adds the gradients in the order of
    the ranks.

    Parameters
    ----------
    param
        This rank's copy, of the same shape and dtype on all ranks that hold a copy. Its ``.grad``
        is overwritten; ``None`` counts as zeros.
    ranks
        The ranks of the group that hold a copy; a single rank needs no messages.
    group
        As for `send`.

    Raises
    ------
    ArgumentError
        This rank is not among the ranks, or a rank is repeated or not in the group.
    """
    group = as_group(group)
    rank, peers = group.rank(), sorted(set(ranks))
    if (
        rank not in peers
        or len(peers) != len(ranks)
        or not 0 <= peers[0] <= peers[-1] < group.size()
    ):
        raise ArgumentError(
            "the ranks cannot share a parameter",
            rank=rank,
            argument="ranks",
            expected=f"different ranks below {group.size()}, among them {rank}",
            got=list(ranks),
        )
    grads = {peer: torch.zeros_like(param, memory_format=torch.contiguous_format) for peer in peers}
    if param.grad is not None:
        grads[rank].copy_(param.grad)
    others = [peer for peer in peers if peer != rank]
    waits = [receive(grads[peer], peer, group) for peer in others]
    waits += [send(grads[rank], peer, group) for peer in others]
    for wait in waits:
        wait()
    param.grad = reduce(torch.add, grads.values())


class _Pending(NamedTuple):
    """A send that may be incomplete, and the place of the action that receives it."""

    peer: int
    place: int
    wait: Completion


class Mailbox:
    """The activations and gradients that a rank sends and receives.

    Parameters
    ----------
    schedule
        Schedule that `check` has proved.
    group
        Group of the ranks, not ``None``.
    device
        Device of the tensors.
    """

    def __init__(self, schedule: PipelineSchedule, group: Any, device: torch.device) -> None:
        self._rank, self._group, self._device = group.rank(), group, device
        self._num_microbatches = schedule.num_microbatches
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
        """Begin a step.

        Parameters
        ----------
        has_new_shapes
            Whether activations may have other shapes than in the step before; alike on all ranks.
        """
        if has_new_shapes:
            self._layouts.clear()
        self._posted: dict[Transfer, tuple[Tensor, Completion]] = {}
        self._pending: list[_Pending] = []
        self._incoming: dict[int, deque[Transfer]] = {}
        for transfer, (peer, _) in self._senders.items():  # in the order in which the peer sends
            if self._receivers[transfer][0] == self._rank != peer:
                self._incoming.setdefault(peer, deque()).append(transfer)
        self.waited_s = 0.0
        for peer in self._incoming:
            self._post_early(peer)

    def send(self, transfer: Transfer, tensor: Tensor) -> None:
        """Start to send a tensor to the rank that needs it.

        Raises
        ------
        ArgumentError
            The tensor cannot be described, or differs from the tensor of the micro-batch before.
        """
        tensor, boundary = tensor.contiguous(), transfer.boundary
        if tensor.dtype not in _DTYPES or tensor.ndim > _MOST_DIMENSIONS:
            raise ArgumentError(
                f"the result of stage {boundary} cannot be sent",
                rank=self._rank,
                argument="stages",
                expected=f"one of {_DTYPES}, at most {_MOST_DIMENSIONS} dimensions",
                got=f"{tensor.dtype}, {tensor.ndim} dimensions",
            )
        is_first, layout = boundary not in self._layouts, (tensor.shape, tensor.dtype)
        if self._layouts.setdefault(boundary, layout) != layout:
            raise ArgumentError(
                f"the result of stage {boundary} is not as for the micro-batch before",
                rank=self._rank,
                argument="stages",
                expected=self._layouts[boundary],
                got=layout,
            )
        peer, place = self._receivers[transfer]
        if peer == self._rank:
            self._posted[transfer] = tensor, lambda: None
            return
        if is_first:
            numbers = [_DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
            numbers += [0] * (_MOST_DIMENSIONS - tensor.ndim)
            header = torch.tensor(numbers, device=self._device)
            wait = send(header, peer, self._group, tag=self._header_tags + boundary)
            self._pending.append(_Pending(peer, place, wait))
        self.nbytes_sent += tensor.nbytes
        wait = send(tensor, peer, self._group, tag=self._tag(transfer))
        self._pending.append(_Pending(peer, place, wait))

    def take(self, transfer: Transfer) -> Tensor:
        """Wait for a tensor, and post the next receive from the same peer."""
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
            receive(header, peer, self._group, tag=self._header_tags + transfer.boundary)()
            index, ndim, *lengths = header.tolist()
            self._layouts[transfer.boundary] = torch.Size(lengths[:ndim]), _DTYPES[index]
        shape, dtype = self._layouts[transfer.boundary]
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        wait = receive(tensor, peer, self._group, tag=self._tag(transfer))
        self._posted[transfer] = tensor, wait
