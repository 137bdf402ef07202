"""The user's own sends and receives on a group of the backend.

Problem: ``dist.send`` and its kin must not meet the library's messages, and must go over torch's
own point-to-point. So each group has two of torch's groups for them: one of gloo's for CPU tensors,
and one of NCCL's for CUDA tensors, which is made when the first of them comes: ranks that share a GPU
cannot have one, and need none unless they use it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.errors import ArgumentError, PeerLostError
from ringcoll.transport import nccl

__all__ = ["PointToPoint", "PointToPointWork"]


class PointToPoint:
    """What carries the user's messages in one group.

    Parameters
    ----------
    store
        That of the group.
    rank, world_size
        This rank, and the number of ranks.
    timeout
        Time limit of a message that gives none of its own.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self.gloo: Any = dist.ProcessGroupGloo(
            dist.PrefixStore("cpu", store), rank, world_size, timeout=timeout
        )
        self.has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
        self._nccl: Any = None
        self._ending: nccl.Ending | None = None
        self._making = threading.Lock()

    @property
    def timeout(self) -> timedelta:
        """Time limit of a message that gives none of its own."""
        # Kept where torch's functions that set it put it.
        limit: timedelta = self.gloo.options._timeout
        return limit

    @timeout.setter
    def timeout(self, limit: timedelta) -> None:
        for group in self.made():
            group._set_default_timeout(limit)

    def made(self) -> list[Any]:
        """Torch's groups that there are so far."""
        return [self.gloo, *([] if self._nccl is None else [self._nccl])]

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int) -> dist.Work:
        """Send a list of one tensor."""
        (tensor,) = tensors
        what = f"rank {self._rank} lost rank {dst}, while it sent to it with tag {tag}"
        return PointToPointWork(self.of(tensor).send([tensor], dst, tag), what, dst, tensor.device)

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int) -> dist.Work:
        """Receive a list of one tensor."""
        (tensor,) = tensors
        what = f"rank {self._rank} lost rank {src}, while it received from it with tag {tag}"
        return PointToPointWork(self.of(tensor).recv([tensor], src, tag), what, src, tensor.device)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> dist.Work:
        """Receive a list of one tensor from whoever sends first."""
        (tensor,) = tensors
        what = f"rank {self._rank} lost a rank, while it received from any with tag {tag}"
        return PointToPointWork(
            self.of(tensor).recv_anysource([tensor], tag), what, None, tensor.device
        )

    def batched(
        self, start: Callable[[], list[dist.Work]], device: torch.device
    ) -> list[dist.Work]:
        """Start several messages, of tensors on one device.

        Over NCCL they are one operation: one by one, they would wait for each other.
        """
        if device.type != "cuda" or not self.has_nccl:
            return start()
        what = f"rank {self._rank} lost a rank, in a batch of sends and receives"
        try:
            work = nccl.as_one(self._of_cuda(), [start])
        except RuntimeError as error:
            raise PeerLostError(f"{what}: {error}") from error
        return [PointToPointWork(work, what, None, device)]

    def of(self, tensor: Tensor) -> Any:
        """The group of torch's that carries a tensor.

        Raises
        ------
        ArgumentError
            None does.
        """
        if tensor.device.type == "cuda" and self.has_nccl:
            return self._of_cuda()
        if tensor.device.type != "cpu":
            raise ArgumentError(
                "tensors on this device cannot be sent",
                rank=self._rank,
                argument="tensor",
                expected="cpu or cuda" if self.has_nccl else "cpu",
                got=tensor.device,
            )
        return self.gloo

    def _of_cuda(self) -> Any:
        with self._making:
            if self._nccl is None:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self.timeout
                self._nccl = dist.ProcessGroupNCCL(
                    dist.PrefixStore("cuda", self._store), self._rank, self._world_size, options
                )
                self._ending = nccl.Ending(self._nccl)
            return self._nccl

    def abort(self) -> None:
        """Make all messages fail, here and at the peers that take part in them."""
        self.gloo.abort()
        if self._ending is not None:
            self._ending.abort()

    def shutdown(self) -> None:
        """Let go of NCCL's connections; gloo's go with the group."""
        if self._ending is not None:
            self._ending.shutdown()


class PointToPointWork(dist.Work):
    """A send or a receive of the user's.

    Parameters
    ----------
    work
        Of torch's own group.
    failure
        What has happened if it fails, in words.
    peer
        The other rank, if it is known.
    device
        Of the tensor.
    """

    def __init__(
        self, work: dist.Work, failure: str, peer: int | None, device: torch.device
    ) -> None:
        super().__init__()
        self._work, self._failure, self._peer = work, failure, peer
        self._on_stream = device.type == "cuda"  # to wait is to order the stream that is current
        self._waited = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for it; more than once does no harm, as it does on gloo's own."""
        if self._on_stream or not self._waited:
            try:
                self._work.wait(timeout)
            except RuntimeError as error:
                raise PeerLostError(f"{self._failure}: {error}", peer=self._peer) from error
            self._waited = True
        return True

    def is_completed(self) -> bool:
        """Whether it is over; gloo does not know before it is waited for."""
        return (self._waited and not self._on_stream) or self._work.is_completed()

    def is_success(self) -> bool:
        """Whether it is over and went well."""
        return self._waited and self.is_completed()

    def get_future(self) -> Any:
        """The future of torch's own work, where it has one."""
        return self._work.get_future()

    def _source_rank(self) -> int:
        """Whom a receive from any rank has received from."""
        return int(self._work._source_rank())

    source_rank = _source_rank
