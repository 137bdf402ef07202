"""CUDA streams: where a group's operations run on a GPU, and what waits for what.

A `Lane` is one operation's way through the streams of its device::

    the caller's stream   --o-----------------------------------o---->
                            | called                       join | `Work.wait`
    the group's stream      +--> the operation ------> end -----+

- A blocking operation runs on the caller's current stream. An asynchronous one runs on a stream
  of the group's own, after what the caller had enqueued; so what is enqueued later overlaps
  with it. `Work.wait` makes the stream that is then current wait for its end, not the host.
- Operations of a group use memory that the group keeps, so each waits for the end of the one
  before, whatever their streams. What a call keeps to be run again (`Keeper`) belongs to the
  stream on which it was made, and is made anew for another. So it is given back to the allocator
  for the stream that has used it.
- Memory that is used on another stream than its owner's is made known to the allocator
  (``record_stream``): who drops it early does no harm.

In a CUDA graph
---------------
While a stream is captured nothing may wait for an event from before the capture
(cudaErrorStreamCaptureIsolation), and nothing afterwards for one that was captured
(cudaErrorCapturedEvent). So a captured operation is no link of that chain. It needs none: it
uses no memory that the group keeps. What it needs is allocated anew while capturing, from the
graph's own pool (torch does that for every stream of the capture), where it stays for as long as
the graph lives. The pool gives it out again within the same capture only, in the order of the
stream for which it was allocated, and, where another stream has used it, not at all.

This module alone calls ``torch.cuda`` for what is ordered by streams, beside the transports, and
the launch of kernels (`ringcoll.reduction.gpu`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

__all__ = [
    "Lane",
    "Mark",
    "Streams",
    "current_device",
    "future",
    "gpu",
    "has_streams",
    "mark_of",
    "nccl_version",
]

# What tests without a GPU replace.
cuda: Any = torch.cuda
with_streams = frozenset({"cuda"})
record_stream: Callable[[Tensor, Any], None] = Tensor.record_stream
new_future: Callable[..., torch.futures.Future[None]] = torch.futures.Future


def has_streams(device: torch.device) -> bool:
    """Whether work on a device is enqueued, and not done at once."""
    return device.type in with_streams


class Mark:
    """A point in the current stream of a device: all that was enqueued before.

    Parameters
    ----------
    device
        The device.
    captured
        Whether the stream is being captured in a CUDA graph.
    on_host
        Whether the host is to wait, too: for a barrier.
    """

    __slots__ = ("_captured", "_device", "_event", "_on_host")

    def __init__(
        self, device: torch.device, *, captured: bool = False, on_host: bool = False
    ) -> None:
        self._device, self._captured, self._on_host = device, captured, on_host
        self._event: Any = cuda.current_stream(device).record_event()

    def join(self) -> None:
        """Make the stream that is current now wait for it."""
        cuda.current_stream(self._device).wait_event(self._event)
        if self._on_host and not self._captured:
            self._event.synchronize()

    def is_over(self) -> bool:
        """Whether all that is done; in a capture nothing runs, so there is nothing to wait for."""
        return self._captured or bool(self._event.query())


class Streams:
    """The streams of one group on one device.

    Parameters
    ----------
    device
        The device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._own: Any = None
        self._last: tuple[int, Mark] | None = None

    @property
    def own(self) -> Any:
        """The group's own stream."""
        if self._own is None:
            self._own = cuda.Stream(self.device)
        return self._own

    def capturing(self) -> bool:
        """Whether the device's current stream is being captured in a CUDA graph."""
        return _capturing(self.device)

    def follow(self, stream: Any) -> None:
        """Make a stream, which is current, wait for the last operation."""
        if self._last is not None and self._last[0] != stream.cuda_stream:
            self._last[1].join()

    def ended(self, stream: Any, end: Mark) -> None:
        """Note the last operation's stream and end."""
        self._last = stream.cuda_stream, end


class Lane:
    """One operation's way through the streams of its device.

    Made at the call, by the thread that calls; entered by the one that runs the operation.

    Parameters
    ----------
    streams
        Those of the group.
    aside
        Whether it runs on the group's own stream, not on the caller's.
    capturing
        Whether the caller's is being captured; the other then is, too.
    on_host
        Whether whoever waits for it waits on the host.
    """

    def __init__(
        self, streams: Streams, *, aside: bool, capturing: bool, on_host: bool = False
    ) -> None:
        self._streams, self._aside, self._on_host = streams, aside, on_host
        self.capturing = capturing
        self.stream: Any = streams.own if aside else cuda.current_stream(streams.device)
        self._called = Mark(streams.device, captured=capturing) if aside else None
        self.end: Mark | None = None
        self._guards = contextlib.ExitStack()

    @property
    def key(self) -> object:
        """Equal for operations that may use the same kept memory: those of one stream.

        One that is captured shares none. A number, as torch's streams are not unequal to
        what is no stream (`THPStream_richcompare`).
        """
        return self if self.capturing else int(self.stream.cuda_stream)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as guards:
            guards.enter_context(cuda.device(self._streams.device))
            guards.enter_context(cuda.stream(self.stream))
            if self._called is not None:
                self._called.join()
            if not self.capturing:
                self._streams.follow(self.stream)
            self._guards = guards.pop_all()  # all went well: they stay until the end
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._guards, contextlib.suppress(*([] if kind is None else [RuntimeError])):
            device = self._streams.device
            self.end = Mark(device, captured=self.capturing, on_host=self._on_host)
            if not self.capturing:
                self._streams.ended(self.stream, self.end)

    def use(self, tensors: Iterable[Tensor]) -> None:
        """Use memory: it is not given out again before this lane's work on it is done."""
        for tensor in tensors:
            record_stream(tensor, self.stream)

    def join(self) -> None:
        """Make the stream that is current now wait for the operation."""
        if self.end is not None:
            self.end.join()


def mark_of(tensors: Sequence[Tensor]) -> Mark | None:
    """Mark where the current stream is, if the tensors' device, which is one, has any."""
    device = _device_of(tensors)
    return None if device is None else Mark(device, captured=_capturing(device))


def future(results: Sequence[Tensor]) -> torch.futures.Future[None]:
    """Make a future whose callbacks may hand on some tensors, all of one device.

    A future of torch records and waits for events on the devices that it is made with, and refuses
    tensors of others (``ivalue_inl.h``, ``Future::markCompleted``). Callbacks run on
    streams of their own.
    """
    device = _device_of(results)
    return new_future() if device is None else new_future(devices=[device])


def _capturing(device: torch.device) -> bool:
    with cuda.device(device):
        return bool(cuda.is_current_stream_capturing())


def _device_of(tensors: Sequence[Tensor]) -> torch.device | None:
    device = tensors[0].device if tensors else None
    return device if device is not None and has_streams(device) else None


def current_device() -> int:
    """The number of the current CUDA device."""
    return int(cuda.current_device())


def gpu(device: torch.device) -> str:
    """What tells a GPU from all others, on whatever host they are, and for every process alike."""
    about = cuda.get_device_properties(device)
    return f"{about.name} {about.uuid}"


def nccl_version() -> tuple[int, ...]:
    """The version of torch's NCCL."""
    return tuple(cuda.nccl.version())
