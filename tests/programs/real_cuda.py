"""Messages of CPU tensors that travel as CUDA tensors, on a GPU that is kept busy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.runtime.transport import (
    AroundTransport,
    GlooTransport,
    Handle,
    Message,
    StagedTransport,
    Transport,
    UcxTransport,
)

__all__ = ["ON_GPU", "Busy", "gpu"]

_BUSY_CYCLES = 4_000_000  # some 2 ms: longer than a message takes that does not wait for it


def gpu(rank: int) -> torch.device:
    """The GPU of a rank; ranks share them where there are fewer."""
    return torch.device("cuda", rank % torch.cuda.device_count())


class _Landing(NamedTuple):
    """A message: what is sent below, and the CPU tensor that it is for, if it arrives."""

    handle: Handle
    device: Tensor
    into: Tensor | None


class Busy(AroundTransport):
    """A transport below which all tensors are on a GPU.

    What is sent is written, and what is received into was used, by kernels that come after a
    long one; so a transport that does not wait for the stream is too early.
    """

    def __init__(self, below: Transport, device: torch.device) -> None:
        super().__init__(below)
        self.device = device

    def bind(
        self, receives: Sequence[Message], sends: Sequence[Message]
    ) -> Callable[[int], list[Handle]]:
        originals = [*receives, *sends]
        values = [one.tensor.to(self.device) for one in originals]
        used = [torch.zeros_like(one) for one in values]
        messages = [one._replace(tensor=t) for one, t in zip(originals, used, strict=True)]
        start = self.below.bind(messages[: len(receives)], messages[len(receives) :])
        into = [*(one.tensor for one in receives), *(None for _ in sends)]

        def post(mixed: int) -> list[Handle]:
            with torch.cuda.device(self.device):
                torch.cuda._sleep(_BUSY_CYCLES)
            for tensor, value in zip(used, values, strict=True):
                tensor.copy_(value)  # on the device, so the host does not wait
            return [*map(_Landing, start(mixed), used, into)]

        return post

    def wait(self, handle: Handle, timeout_s: float) -> None:
        assert isinstance(handle, _Landing)
        self.below.wait(handle.handle, timeout_s)
        if handle.into is not None:
            handle.into.copy_(handle.device)


def _staged(store: dist.Store, rank: int, world_size: int) -> Transport:
    below = GlooTransport(store, rank, world_size)
    return Busy(StagedTransport(below, gpu(rank)), gpu(rank))


def _staged_in_pieces(store: dist.Store, rank: int, world_size: int) -> Transport:
    below = GlooTransport(store, rank, world_size)
    return Busy(StagedTransport(below, gpu(rank), segment_bytes=10_007), gpu(rank))


def _ucx(store: dist.Store, rank: int, world_size: int) -> Transport:
    return Busy(UcxTransport(store, rank, world_size, gpu(rank)), gpu(rank))


ON_GPU: dict[str, Callable[..., Transport]] = {
    "gpu, staged gloo": _staged,
    "gpu, staged gloo in pieces": _staged_in_pieces,
    "gpu, ucx": _ucx,
}
