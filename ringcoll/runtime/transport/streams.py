"""CUDA streams: where a group's operations run on a GPU, and which stream waits for which.

A `Lane` is the way of an operation through the streams of its device::

    the caller's stream   --o-----------------------------------o---->
                            | called                       join | `Work.wait`
    the group's stream      +--> the operation ------> end -----+

- A blocking operation runs on the caller's current stream. An asynchronous operation runs on a
  stream of the group, after the caller's earlier work; the caller's later work overlaps with the
  operation. `Work.wait` makes the current stream wait for the end of the operation, not the host.
- Operations of a group use memory that the group keeps. So each operation waits for the end of
  the operation before it, whatever their streams. Memory that a call keeps for its next run
  belongs to the stream on which it was allocated, and each stream has memory of its own: the
  allocator gets memory back for the stream that has used it.
- If a stream uses memory that another stream owns, the allocator is informed
  (``record_stream``): a tensor that is dropped early does no harm.

In a CUDA graph
---------------
While a stream is captured nothing may wait for an event from before the capture
(cudaErrorStreamCaptureIsolation), and nothing afterwards may wait for a captured event
(cudaErrorCapturedEvent). So a captured operation is no link of that chain. It needs no link: it
uses no memory that the group keeps. Its memory is allocated anew while capturing, from the
graph's own pool (torch does that for every stream of the capture), and stays there for as long as
the graph lives. The pool reuses the memory within the same capture only, in the order of the
stream for which the memory was allocated, and never if another stream has used the memory.

No other module calls ``torch.cuda`` for the order of streams, except the transports and the
launch of kernels (`ringcoll.runtime.reduction.gpu`).
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

# Tests without a GPU replace these.
cuda: Any = torch.cuda
with_streams = frozenset({"cuda"})
record_stream: Callable[[Tensor, Any], None] = Tensor.record_stream
new_future: Callable[..., torch.futures.Future[None]] = torch.futures.Future


def exchange_capture_mode(mode: int) -> None:
    """Set the mode of this thread for captures; torch has no name for it."""
    ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(mode)))


_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: captures of other threads do not count
_modes = threading.local()


def has_streams(device: torch.device) -> bool:
    """Whether a device enqueues work, instead of doing it at once."""
    return device.type in with_streams


@contextlib.contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Use a device in a thread of the library's own, beside the user's threads.

    CUDA's current device is that of the thread. While a thread captures a graph, most calls of CUDA
    in other threads fail, and end the capture, unless those threads have set another mode.
    """
    if not has_streams(device):
        yield
        return
    with cuda.device(device):
        if not getattr(_modes, "is_local", False):
            exchange_capture_mode(_THREAD_LOCAL)
            _modes.is_local = True
        yield


class Mark:
    """A point in the current stream of a device, after all earlier work.

    ``captured`` says whether a CUDA graph captures the stream, ``on_host`` whether the host waits,
    too: for a barrier. ``error`` is the reason why the work before the mark was broken off: the
    mark is over then, too, and what the work has written is of no use.
    """

    __slots__ = ("_captured", "_device", "_event", "_on_host", "error")

    def __init__(
        self, device: torch.device, *, captured: bool = False, on_host: bool = False
    ) -> None:
        self._device, self._captured, self._on_host = device, captured, on_host
        self._event: Any = cuda.current_stream(device).record_event()
        self.error: BaseException | None = None

    def join(self) -> None:
        """Make the stream that is current now wait for the mark; raise its error, if it has one."""
        if self.error is None:
            cuda.current_stream(self._device).wait_event(self._event)
            if self._on_host and not self._captured:
                self._event.synchronize()
        if self.error is not None:  # the host may have waited until it had one
            raise self.error

    def is_over(self) -> bool:
        """Whether all work before the mark is done; in a capture nothing runs, so it is."""
        return self._captured or self.error is not None or bool(self._event.query())


class Streams:
    """The streams of a group on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._last: tuple[int, Mark] | None = None

    @cached_property
    def own(self) -> Any:
        """The group's own stream."""
        return cuda.Stream(self.device)

    def follow(self, stream: Any) -> None:
        """Make a stream, which is the current stream, wait for the last operation."""
        if self._last is not None and self._last[0] != stream.cuda_stream:
            self._last[1].join()

    def ended(self, stream: Any, end: Mark) -> None:
        """Note the last operation's stream and end."""
        self._last = stream.cuda_stream, end


class Lane:
    """The way of an operation through the streams of its device.

    The thread that calls makes the lane; the thread that runs the operation enters the lane. If it
    is ``aside``, the operation runs on the group's own stream, not on the caller's. If it is
    ``capturing``, a CUDA graph captures both. If it is ``on_host``, waits are on the host.
    """

    def __init__(
        self, streams: Streams, *, aside: bool, capturing: bool, on_host: bool = False
    ) -> None:
        self._streams, self._aside, self._on_host = streams, aside, on_host
        self.capturing = capturing
        self.stream: Any = streams.own if aside else cuda.current_stream(streams.device)
        self._called = Mark(streams.device, captured=capturing) if aside else None
        self.end: Mark | None = None
        self._error: BaseException | None = None
        self._guards = contextlib.ExitStack()

    @property
    def key(self) -> object:
        """Equal for operations that may use the same kept memory: operations of one stream.

        A captured operation shares no memory. The key is a number, because a stream of torch does
        not count as unequal to an object that is no stream (`THPStream_richcompare`).
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
            self._guards = guards.pop_all()  # without an error, the guards stay until the end
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        with self._guards, contextlib.suppress(*([] if kind is None else [RuntimeError])):
            device = self._streams.device
            self.end = Mark(device, captured=self.capturing, on_host=self._on_host)
            self.end.error = self._error  # `fail` may just be setting both
            if not self.capturing:
                self._streams.ended(self.stream, self.end)

    def use(self, tensors: Iterable[Tensor]) -> None:
        """Use tensors: the allocator keeps their memory until this lane's work is done."""
        for tensor in tensors:
            record_stream(tensor, self.stream)

    def join(self) -> None:
        """Make the stream that is current now wait for the operation."""
        if self.end is not None:
            self.end.join()

    def is_over(self) -> bool:
        """Whether the stream has come to the end of the operation, or the device to its own."""
        try:
            return self.end is not None and self.end.is_over()
        except RuntimeError:  # CUDA's errors stay: whoever uses the device next gets it
            return True

    def fail(self, error: BaseException) -> None:
        """Let whoever waits for the operation get an error; any thread may call it."""
        self._error = error
        if self.end is not None:
            self.end.error = error


def mark_of(tensors: Sequence[Tensor]) -> Mark | None:
    """Mark the current stream of the tensors' common device, if the device has streams."""
    device = _device_of(tensors)
    return None if device is None else Mark(device, captured=capturing(device))


def future(results: Sequence[Tensor]) -> torch.futures.Future[None]:
    """Make a future whose callbacks may hand on some tensors, all of one device.

    A future of torch records and waits for events on its devices, and refuses tensors of other
    devices (``ivalue_inl.h``, ``Future::markCompleted``). Callbacks run on streams of their own.
    """
    device = _device_of(results)
    return new_future() if device is None else new_future(devices=[device])


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph captures the device's current stream."""
    with cuda.device(device):
        return bool(cuda.is_current_stream_capturing())


def _device_of(tensors: Sequence[Tensor]) -> torch.device | None:
    device = tensors[0].device if tensors else None
    return device if device is not None and has_streams(device) else None


def current_device() -> int:
    """Number of the current CUDA device."""
    return int(cuda.current_device())


def gpu(device: torch.device) -> str:
    """Identity of a GPU, different from all other GPUs of all hosts, and alike in all processes."""
    about = cuda.get_device_properties(device)
    return f"{about.name} {about.uuid}"


def nccl_version() -> tuple[int, ...]:
    """Version of torch's NCCL."""
    return tuple(cuda.nccl.version())
