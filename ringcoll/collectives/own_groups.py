"""Groups that bring their own end of each rank, and that torch does not know."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.errors import ArgumentError, TransportError
from ringcoll.group import Call, Communicator, Work
from ringcoll.machine import answered, common, seconds_of, whole
from ringcoll.operation import is_plain
from ringcoll.transport import Handle, Message, as_asked, catalogue, streams, with_memory

ANY_GPU = torch.device("cuda")
"""The current GPU of a process, whichever that is."""

messages_in_flight: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
"""Works of sends and receives: of each, ``tensor`` is in use, and ``None`` when it was waited for."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class MessageWork:
    """A message of an `OwnGroup` that is on its way; ``tensor`` is in use until the work was waited for."""

    member: Communicator
    handle: Handle
    tensor: Tensor | None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message is complete, at most the group's time limit by default."""
        limit_s = self.member.timeout_s if timeout is None else seconds_of(timeout)
        self.member.transport.wait(self.handle, limit_s)
        self.tensor = None
        return True


class OwnGroup:
    """One rank of a group that torch does not know: the group brings its communicator.

    ``members`` are all communicators of the rank; `on` may add communicators. `isend` and `irecv`
    are as those of ``torch.distributed``, in which a process group of torch has them. They follow the
    group's first collective, in which the ranks meet, and no operation runs meanwhile. Two ends that
    expect other lengths do not match, and their tags are apart from those of operations as the tags of
    two operations are.
    """

    retries = False  # whether calls go through `retried`

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self.members = [communicator]

    def rank(self) -> int:
        """Rank of this process or thread."""
        return self.communicator.rank

    def size(self) -> int:
        """Number of ranks."""
        return self.communicator.world_size

    def on(self, device: torch.device) -> Communicator:
        """The communicator for tensors on a device."""
        return self.communicator

    def retried(self, make: Callable[[OwnGroup], Call], async_op: bool) -> Work | None:
        """Run a call that ``make`` makes for a group, in a way of the group's own."""
        raise NotImplementedError

    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> MessageWork:
        """Start to send a contiguous tensor, which stays as it is until the message is complete."""
        return self._start(tensor, dst, tag, is_receive=False)

    def irecv(self, tensor: Tensor, src: int, tag: int = 0) -> MessageWork:
        """Start to receive into a contiguous tensor; messages of a tag arrive in order."""
        return self._start(tensor, src, tag, is_receive=True)

    def _start(self, tensor: Tensor, peer: int, tag: int, *, is_receive: bool) -> MessageWork:
        tensor = with_memory(tensor, self.rank())
        if not is_plain(tensor):
            raise ArgumentError(
                "cannot be sent or received into",
                rank=self.rank(),
                argument="tensor",
                expected="a contiguous tensor, no conjugate or negative view",
                got=f"strides {tensor.stride()}",
            )
        member = self.on(tensor.device)
        member.check_usable()
        own = zlib.crc32(f"message {tag} of {tensor.nbytes} bytes".encode()) & 0x7FFFFFFF
        # As bytes: torch cannot copy every dtype. `data` has a version of its own, as in torch's receives.
        messages = [Message(whole(peer), tensor.data.view(-1).view(torch.uint8), own)]
        receives, sends = (messages, []) if is_receive else ([], messages)
        (handle,) = member.transport.post(receives, sends)
        work = MessageWork(member, handle, tensor)
        messages_in_flight[work] = None
        return work

    def close(self, drain_s: float = 0.0) -> None:
        """Release the group's resources, on all its ranks; the group cannot be used any more.

        ``drain_s`` is the time limit, in seconds, for operations that nobody has waited for yet.
        """
        for member in self.members:
            member.close(drain_s)


class StoreGroup(OwnGroup):
    """One rank of a group for CPU tensors, whose ranks meet at a store.

    Parameters
    ----------
    store
        Store that all ranks see, and that nobody else uses.
    rank, world_size
        This rank, and number of ranks.
    timeout_s
        Time limit, in seconds, of operations that have no time limit of their own.
    transport, verify_messages, refits
        As for `use`, which calls the last one ``refit``.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout_s: float,
        transport: str | None = None,
        *,
        verify_messages: bool | None = None,
        refits: bool = False,
    ) -> None:
        where = store, rank, world_size, timeout_s, torch.device("cpu"), transport
        super().__init__(member_at(*where, verify_messages=verify_messages, refits=refits))

    def on(self, device: torch.device) -> Communicator:
        """The communicator for tensors on a device.

        Raises
        ------
        ArgumentError
            The device is not the CPU.
        """
        if device.type != "cpu":
            raise ArgumentError(
                "this group is for CPU tensors",
                rank=self.rank(),
                argument="tensor",
                expected="cpu",
                got=device,
            )
        return self.communicator


def member_at(
    store: dist.Store,
    rank: int,
    world_size: int,
    timeout_s: float,
    device: torch.device,
    asked: str | None,
    *,
    prefix: str = "ringcoll",
    verify_messages: bool | None = None,
    fit: str | None = None,
    refits: bool = False,
) -> Communicator:
    """A rank's end of a group whose ranks meet at a store, for tensors on a device."""
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError(
            "tensors on this device cannot be sent",
            rank=rank,
            argument="tensor",
            expected="cpu or cuda",
            got=device,
        )
    # A long wait on the user's connection would block it.
    own = answered(store, timeout_s, lambda: common(store))
    store = dist.PrefixStore(prefix, own)
    if device == ANY_GPU:
        device = torch.device("cuda", streams.current_device())
    name = catalogue.resolved(device.type, asked, rank, device)
    # The same prefix for every transport: there the ranks see that they have different transports.
    meeting, monitor = dist.PrefixStore("transport", store), dist.PrefixStore("monitor", store)
    try:
        made = catalogue.entry(name).make(meeting, rank, world_size, device, timeout_s)
    except OSError as error:  # no descriptors are left, for instance
        raise TransportError(f"rank {rank} cannot have the transport {name}: {error}") from error
    made.is_automatic = catalogue.named(device.type, asked, rank) == "auto"
    transport = as_asked(made, verify_messages=verify_messages)
    sends = None if device.type == "cpu" else device
    return Communicator(transport, monitor, timeout_s, sends, own, fit, refits)
