"""The user's own sends and receives on a group of the backend.

Problem: the messages of ``dist.send`` and its kin must not meet the library's messages. So they
use torch's own point-to-point, on inner groups: a gloo group for CPU tensors, and an NCCL group
for CUDA tensors. The first message of a CUDA tensor makes the NCCL group, because ranks that
share a GPU cannot have an NCCL group.

Nothing here waits in a loop: torch's works wait, in C++; see `ringcoll.runtime.process.threads`.
`ringcoll.runtime.watch.waits` reports a rank that waits for long.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.errors import (
    FORKED,
    ArgumentError,
    CollectiveTimeoutError,
    GroupBrokenError,
    PeerLostError,
    TransportError,
)
from ringcoll.runtime.collectives import messages_in_flight, peer_of
from ringcoll.runtime.machine import FOREVER_S, hang_notice_s, whole
from ringcoll.runtime.process import (
    MESSAGES,
    call_in_thread,
    call_within,
    hears_signals,
    untraced,
)
from ringcoll.runtime.tensors import with_memory
from ringcoll.runtime.transport import GlooMesh, nccl
from ringcoll.runtime.watch import (
    SENDS,
    Lives,
    Names,
    UserMessage,
    begin_wait,
    flight_recorder,
    waits,
)

_LARGEST_TAG = 2**31 - 1
_MOST_LEFT = 64
_FOREVER = timedelta(seconds=FOREVER_S)
_LOOK_S = 0.5  # for a look at the processes of the other ranks; who asks waits for 2 s


class PointToPoint:
    """The inner groups that carry the user's messages, over the store of the group.

    ``life`` is a text that no other group has; ``names_of`` returns the names of group and ranks.
    """

    def __init__(
        self,
        store: dist.Store,
        timeout: timedelta,
        lives: Lives,
        life: str,
        names_of: Callable[[], Names] = Names,
    ) -> None:
        rank, world_size = lives.rank, lives.world_size
        self._store, self.rank, self._world_size = store, rank, world_size
        inner, limit_s = dist.PrefixStore("cpu", store), timeout.total_seconds()
        self.gloo = GlooMesh.connect(inner, rank, world_size, limit_s).group
        self.has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
        self._nccl: Any = None
        self._ending: nccl.Ending | None = None
        self._making = threading.Lock()
        # The last messages for which the program has not waited.
        self.left: deque[object] = deque(maxlen=_MOST_LEFT)
        self._pid = os.getpid()  # a process that is forked off does not have the group
        self.notice_s, self._lives, self.num_started = hang_notice_s(), lives, 0
        self._token, self._names_of = f"{life}/messages", names_of
        if world_size > 1:
            flight_recorder.watch(self)

    @cached_property
    def names(self) -> Names:
        """The names of the group and its ranks; torch knows them by the first message."""
        return self._names_of()

    @property
    def timeout(self) -> timedelta:
        """Time limit of a message that has no time limit of its own."""
        # torch's functions that set the limit write it there.
        limit: timedelta = self.gloo.options._timeout
        return limit

    @timeout.setter
    def timeout(self, limit: timedelta) -> None:
        self.gloo._set_default_timeout(limit)

    def groups(self) -> list[Any]:
        """The inner groups that exist so far."""
        return [self.gloo, *([] if self._nccl is None else [self._nccl])]

    def checked(
        self, method: str, tensors: Any, peer: Any, tag: Any
    ) -> tuple[list[Tensor], int | None, int]:
        """The arguments of ``send``, ``recv``, or ``recv_anysource``, which has no peer.

        gloo checks none of them: a peer that does not exist ends the process.
        """
        is_list = isinstance(tensors, list | tuple)
        if not is_list or len(tensors) != 1 or not isinstance(tensors[0], Tensor):
            got = [type(each).__name__ for each in tensors] if is_list else type(tensors)
            message = f"{method} takes a single tensor"
            raise ArgumentError(message, "tensors", "a list of one tensor", got, self.rank)
        if method != "recv_anysource":
            # In a batch of NCCL a rank may send to itself.
            may_be_self = tensors[0].device.type == "cuda"
            name = "dst" if method == "send" else "src"
            peer = peer_of(name, peer, self.rank, self._world_size, may_be_self=may_be_self)
        tag = whole(tag)
        if not isinstance(tag, int) or not 0 <= tag <= _LARGEST_TAG:
            raise ArgumentError("not a tag", "tag", f"0 to {_LARGEST_TAG}", tag, self.rank)
        return [*tensors], peer, tag

    def start(
        self, method: str, tensors: Sequence[Tensor], peer: int | None, tag: int
    ) -> dist.Work:
        """Start a message with arguments that were `checked`."""
        tensor = self.memory_of(*tensors, is_receive=method != "send")
        arguments = (tag,) if peer is None else (peer, tag)
        post = getattr(self.of(tensor), method)
        self.num_started += 1
        works: list[Any] = []
        is_empty = not tensor.numel()
        work = PointToPointWork(self, works, method, tensor, peer, tag, is_empty=is_empty)
        # In one step of Python: an interrupt comes before it, or finds the work of gloo.
        works.extend(map(post, [[tensor]], *([argument] for argument in arguments)))
        return work

    def snapshot(self) -> dict[str, Any]:
        """The message that this rank waits for: see `ringcoll.runtime.watch.flight_report`."""
        own = (message for message in waits.copy() if message.group == id(self))
        running = next((message.record() for message in own), None)
        if running is not None:
            with suppress(TimeoutError):
                call_within(_LOOK_S, self._lives.look)
        last = {"number": self.num_started - 1, "call": "message", "complete": True}
        return {
            "group": self._token,
            "transport": SENDS,
            "rank": self.rank,
            "world_size": self._world_size,
            "ranks": self.names.members,
            "failure": None,
            "operations": [last] * bool(self.num_started),
            "running": running,
            "queued": [],
            **self._lives.by_host(),
        }

    def memory_of(self, tensor: Tensor, *, is_receive: bool) -> Tensor:
        """The tensor whose memory is sent or received into; gloo and NCCL take memory as it is."""
        tensor = with_memory(tensor, self.rank, is_written=is_receive)
        is_view = tensor.is_conj() or tensor.is_neg()
        if not tensor.is_contiguous() or (is_receive and is_view):
            expected = "a contiguous tensor, no conjugate or negative view to receive into"
            got = "a conjugate or negative view" if is_view else f"strides {tensor.stride()}"
            raise ArgumentError(
                "the memory cannot be a message's", "tensor", expected, got, self.rank
            )
        return tensor.resolve_conj().resolve_neg() if is_view else tensor

    def batched(
        self, start: Callable[[], list[dist.Work]], tensors: Sequence[tuple[str, Tensor]]
    ) -> list[dist.Work]:
        """Start several messages, of tensors on one device; of each, its method.

        Nothing is started if a message cannot be. Over NCCL all messages are one operation: message
        by message, they would wait for each other.
        """
        for method, tensor in tensors:
            self.memory_of(tensor, is_receive=method != "send")
        device = tensors[0][1].device
        if device.type != "cuda" or not self.has_nccl:
            return start()
        failure = f"rank {self.rank} lost a rank, in a batch of sends and receives"
        messages: list[Any] = []
        try:
            work = nccl.as_one(self._of_cuda(device), [lambda: messages.extend(start())])
        except RuntimeError as error:
            raise PeerLostError(f"{failure}: {error}") from None
        is_empty = all(message.is_empty for message in messages)
        if work is None and not is_empty:
            raise TransportError(
                f"rank {self.rank} gave NCCL a batch of {len(messages)} sends and receives, and "
                "got no work for them"
            )
        works = [] if work is None else [work]
        return [PointToPointWork(self, works, "batch", tensors[0][1], is_empty=is_empty)]

    def of(self, tensor: Tensor) -> Any:
        """The inner group that carries a tensor."""
        if os.getpid() != self._pid:
            raise GroupBrokenError(FORKED)
        if tensor.device.type == "cuda" and self.has_nccl:
            return self._of_cuda(tensor.device)
        if tensor.device.type != "cpu":
            expected = "cpu or cuda" if self.has_nccl else "cpu"
            message = "tensors on this device cannot be sent"
            raise ArgumentError(message, "tensor", expected, tensor.device, self.rank)
        return self.gloo

    def _of_cuda(self, device: torch.device) -> Any:
        with self._making:
            if self._nccl is None:
                store = dist.PrefixStore("cuda", self._store)
                self._nccl = nccl.private_group(store, self.rank, self._world_size, self.timeout)
                self._ending = nccl.Ending(self._nccl, device)
            # torch's functions set the limit of gloo's group only.
            self._nccl._set_default_timeout(self.timeout)
            return self._nccl

    def abort(self) -> None:
        """Make all messages fail, here and at the peers that take part in them."""
        flight_recorder.forget(self)
        self.gloo.abort()
        if self._ending is not None:
            self._ending.abort()

    def shutdown(self) -> None:
        """Close NCCL's connections; gloo's end with the group."""
        flight_recorder.forget(self)
        if self._ending is not None:
            self._ending.shutdown()


class PointToPointWork(dist.Work):
    """A send or a receive of the user, or a batch of them.

    ``works`` has the inner group's work; none, if that has started nothing, or tells it by the work
    of a batch. ``peer`` is ``None`` if the other rank is not known; ``is_empty`` says whether there
    is nothing to send. The tensor is in use until the work has been waited for.
    """

    def __init__(
        self,
        messages: PointToPoint,
        works: Sequence[dist.Work],
        method: str,
        tensor: Tensor,
        peer: int | None = None,
        tag: int = 0,
        *,
        is_empty: bool = False,
    ) -> None:
        super().__init__()
        self.is_empty, self._waited = is_empty, False
        self.tensor: Tensor | None = tensor
        messages_in_flight[self] = None
        self._messages, self._works = messages, works
        number = messages.num_started - 1
        self._message = UserMessage(
            id(messages), number, messages.rank, method, peer, tag, messages.names
        )
        self._on_stream = tensor.device.type == "cuda"  # a wait orders the stream that is current
        self._aside: Future[None] | None = None  # the wait, where another thread waits

    @untraced
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the message; a second wait does no harm, as on gloo's own works."""
        if self._on_stream:
            _wait(self._works, timeout, self._message)
        elif not self._waited:
            # gloo alone would go on with the limit that the group had at first.
            limit = min(timeout or self._messages.timeout, _FOREVER)
            try:
                begin_wait(self._message, self._messages.notice_s)
                if self._aside is None and hears_signals():
                    with suppress(RuntimeError):  # the system has no thread left
                        wait = partial(_wait, self._works, limit, self._message)
                        self._aside = call_in_thread(wait, MESSAGES)
                if self._aside is None:
                    _wait(self._works, limit, self._message)
                else:
                    self._aside.result()
            finally:
                waits.pop(self._message, None)
        self._waited, self.tensor = True, None
        return True

    def __del__(self) -> None:
        """Keep a message for which the program has not waited, as after an interrupt.

        gloo would forget the message, and the message after it would come in its place.
        """
        if self._works and not (self._waited or self._on_stream):
            self._messages.left.append((self._works, self.tensor))

    def is_completed(self) -> bool:
        """Whether the message is complete; gloo does not know before a wait."""
        if self._waited and not self._on_stream:
            return True
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether the message is complete, without an error."""
        return self._waited and self.is_completed()

    def get_future(self) -> Any:
        """The future of the inner group's work, if that work has a future."""
        return self._works[0].get_future() if self._works else None

    def _source_rank(self) -> int:
        """The rank from which a receive from any rank has received."""
        (work,) = self._works
        return int(work._source_rank())

    source_rank = _source_rank


def _wait(works: Sequence[dist.Work], timeout: timedelta, message: UserMessage) -> None:
    """Wait for works of torch; a thread that runs it holds no group of torch."""
    try:
        for work in works:
            work.wait(timeout)
    except RuntimeError as error:
        # A rank that is late may live. gloo and NCCL have no class for a time limit that is over.
        is_late = "imed out" in str(error) or "imeout" in str(error)
        kind = CollectiveTimeoutError if is_late else PeerLostError
        text = message.in_words("timed out waiting for" if is_late else "lost")
        raise kind(f"{text}: {error}", peer=message.peer) from None
