"""The user's own sends and receives on a group of the backend.

Problem: the messages of ``dist.send`` and its kin must not meet the library's messages. So they
use torch's own point-to-point, on inner groups: a gloo group for CPU tensors, and an NCCL group
for CUDA tensors. The first message of a CUDA tensor makes the NCCL group, because ranks that
share a GPU cannot have an NCCL group.

Nothing here waits in a loop: torch's works wait, in C++; see `ringcoll.machine.program`.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.collectives import messages_in_flight
from ringcoll.errors import (
    FORKED,
    ArgumentError,
    CollectiveTimeoutError,
    GroupBrokenError,
    PeerLostError,
    TransportError,
)
from ringcoll.machine import (
    MESSAGES,
    begun,
    hang_notice_s,
    hears_signals,
    in_words,
    untraced,
    user_line,
)
from ringcoll.transport import GlooMesh, nccl, with_memory
from ringcoll.watch import say


class PointToPoint:
    """The inner groups that carry the user's messages, over the store of the group."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        inner, limit_s = dist.PrefixStore("cpu", store), timeout.total_seconds()
        self.gloo = GlooMesh.connect(inner, rank, world_size, limit_s).group
        self.has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
        self._nccl: Any = None
        self._ending: nccl.Ending | None = None
        self._making = threading.Lock()
        self._pid = os.getpid()  # a process that is forked off does not have the group

    @property
    def timeout(self) -> timedelta:
        """Time limit of a message that has no time limit of its own."""
        # torch's functions that set the limit write it there.
        limit: timedelta = self.gloo.options._timeout
        return limit

    @timeout.setter
    def timeout(self, limit: timedelta) -> None:
        for group in self.groups():
            group._set_default_timeout(limit)

    def groups(self) -> list[Any]:
        """The inner groups that exist so far."""
        return [self.gloo, *([] if self._nccl is None else [self._nccl])]

    def start(
        self, method: str, tensors: Sequence[Tensor], peer: int | None, tag: int
    ) -> dist.Work:
        """Start a message of one tensor: ``send``, ``recv``, or ``recv_anysource`` with no peer.

        Raises
        ------
        ArgumentError
            See `memory_of`.
        """
        tensor = self.memory_of(*tensors, is_receive=method != "send")
        arguments = (tag,) if peer is None else (peer, tag)
        work = getattr(self.of(tensor), method)([tensor], *arguments)
        loss = {
            "send": f"rank {peer}, while it sent to it",
            "recv": f"rank {peer}, while it received from it",
            "recv_anysource": "a rank, while it received from any",
        }[method]
        failure = f"rank {self._rank} lost {loss} with tag {tag}"
        device, is_empty = tensor.device, not tensor.numel()
        return PointToPointWork(work, failure, peer, device, tensor, is_empty=is_empty)

    def memory_of(self, tensor: Tensor, *, is_receive: bool) -> Tensor:
        """The tensor whose memory is sent or received into; gloo and NCCL take memory as it is.

        Raises
        ------
        ArgumentError
            The tensor has no memory, is not contiguous, or is a conjugate or negative view to
            receive into.
        """
        tensor = with_memory(tensor, self._rank)
        is_view = tensor.is_conj() or tensor.is_neg()
        if not tensor.is_contiguous() or (is_receive and is_view):
            raise ArgumentError(
                "the memory cannot be a message's",
                rank=self._rank,
                argument="tensor",
                expected="a contiguous tensor, no conjugate or negative view to receive into",
                got="a conjugate or negative view" if is_view else f"strides {tensor.stride()}",
            )
        return tensor.resolve_conj().resolve_neg() if is_view else tensor

    def batched(
        self, start: Callable[[], list[dist.Work]], messages_of: Sequence[tuple[Tensor, bool]]
    ) -> list[dist.Work]:
        """Start several messages, of tensors on one device; of each, whether it is a receive.

        Nothing is started if a message cannot be. Over NCCL all messages are one operation: message
        by message, they would wait for each other.
        """
        for tensor, is_receive in messages_of:
            self.memory_of(tensor, is_receive=is_receive)
        device = messages_of[0][0].device
        if device.type != "cuda" or not self.has_nccl:
            return start()
        failure = f"rank {self._rank} lost a rank, in a batch of sends and receives"
        messages: list[Any] = []
        try:
            work = nccl.as_one(self._of_cuda(device), [lambda: messages.extend(start())])
        except RuntimeError as error:
            raise PeerLostError(f"{failure}: {error}") from None
        is_empty = all(message.is_empty for message in messages)
        if work is None and not is_empty:
            raise TransportError(
                f"rank {self._rank} gave NCCL a batch of {len(messages)} sends and receives, and "
                "got no work for them"
            )
        return [PointToPointWork(work, failure, None, device, is_empty=is_empty)]

    def of(self, tensor: Tensor) -> Any:
        """The inner group that carries a tensor.

        Raises
        ------
        ArgumentError
            No inner group carries tensors of this device.
        GroupBrokenError
            This process was forked off a rank.
        """
        if os.getpid() != self._pid:
            raise GroupBrokenError(FORKED)
        if tensor.device.type == "cuda" and self.has_nccl:
            return self._of_cuda(tensor.device)
        if tensor.device.type != "cpu":
            raise ArgumentError(
                "tensors on this device cannot be sent",
                rank=self._rank,
                argument="tensor",
                expected="cpu or cuda" if self.has_nccl else "cpu",
                got=tensor.device,
            )
        return self.gloo

    def _of_cuda(self, device: torch.device) -> Any:
        with self._making:
            if self._nccl is None:
                store = dist.PrefixStore("cuda", self._store)
                self._nccl = nccl.private_group(store, self._rank, self._world_size, self.timeout)
                self._ending = nccl.Ending(self._nccl, device)
            return self._nccl

    def abort(self) -> None:
        """Make all messages fail, here and at the peers that take part in them."""
        self.gloo.abort()
        if self._ending is not None:
            self._ending.abort()

    def shutdown(self) -> None:
        """Close NCCL's connections; gloo's end with the group."""
        if self._ending is not None:
            self._ending.shutdown()


class PointToPointWork(dist.Work):
    """A send or a receive of the user.

    ``work`` is ``None`` if the inner group has started nothing, or tells it by the work of a batch;
    ``failure`` is the text of the error if the inner group's work fails; ``peer`` is ``None`` if
    the other rank is not known; ``tensor`` is in use until the work has been waited for;
    ``is_empty`` says whether there is nothing to send.
    """

    def __init__(
        self,
        work: dist.Work | None,
        failure: str,
        peer: int | None,
        device: torch.device,
        tensor: Tensor | None = None,
        *,
        is_empty: bool = False,
    ) -> None:
        super().__init__()
        self.is_empty, self.tensor = is_empty, tensor
        messages_in_flight[self] = None
        self._work, self._failure, self._peer = work, failure, peer
        self._on_stream = device.type == "cuda"  # a wait orders the stream that is current
        self._waited = False
        self._aside: Future[None] | None = None  # the wait, where another thread waits

    @untraced
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the message; a second wait does no harm, as on gloo's own works."""
        if self._on_stream or not self._waited:
            if self._aside is None and hears_signals() and not self._on_stream:
                with suppress(RuntimeError):  # the system has no thread left
                    self._aside = begun(partial(self._wait, timeout), MESSAGES)
            try:
                if self._aside is None:
                    self._wait(timeout)
                else:
                    self._say_it_waits(self._aside)
                    self._aside.result()
            except RuntimeError as error:
                # Of who is late nobody knows that it is lost. gloo and NCCL have no class for it.
                is_late = "imed out" in str(error) or "imeout" in str(error)
                kind = CollectiveTimeoutError if is_late else PeerLostError
                text = self._failure.replace(" lost ", " timed out waiting for ", is_late)
                raise kind(f"{text}: {error}", peer=self._peer) from None
            self._waited, self.tensor = True, None
        return True

    def _say_it_waits(self, aside: Future[None]) -> None:
        """Say for which rank this rank waits, and where, if the wait is long."""
        notice_s = hang_notice_s()
        try:
            aside.exception(None if math.isinf(notice_s) else notice_s)
        except TimeoutError:
            file, line = user_line(sys._getframe())
            waits = self._failure.replace(" lost ", f" has waited {notice_s:g} s for ")
            say(f"{waits} ({in_words(file, line)})")

    def _wait(self, timeout: timedelta) -> None:
        if self._work is not None:
            self._work.wait(timeout)

    def is_completed(self) -> bool:
        """Whether the message is complete; gloo does not know before a wait."""
        if self._work is None or (self._waited and not self._on_stream):
            return True
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Whether the message is complete, without an error."""
        return self._waited and self.is_completed()

    def get_future(self) -> Any:
        """The future of the inner group's work, if that work has a future."""
        return None if self._work is None else self._work.get_future()

    def _source_rank(self) -> int:
        """The rank from which a receive from any rank has received."""
        assert self._work is not None
        return int(self._work._source_rank())

    source_rank = _source_rank
