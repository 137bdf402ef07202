"""A stand-in for a GPU: tensors in CPU memory whose copies run as streams have them run.

A copy is enqueued on the stream that is current. When it runs is up to the test: ``late``, when
the host waits for its stream, an event, or another stream that waits for it; ``early``, at once.
Whoever forgets to wait, or lets memory go too soon, meets the wrong data in one of the two.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ringcoll.transport import staged
from ringcoll.transport.around import AroundTransport
from ringcoll.transport.base import Handle, Message

__all__ = ["DEVICE", "WHEN", "FakeTensor", "Looking", "fake_cuda", "off_device", "on_device"]

DEVICE = torch.device("cuda", 0)
_random = Random(7)
WHEN: dict[str, Callable[[], bool]] = {
    "late": lambda: False,
    "early": lambda: True,
    "now and then": lambda: _random.random() < 0.5,
}
_GARBAGE = 0xA5
_running = threading.RLock()


class FakeEvent:
    """A place in a stream; one that was not recorded is complete, as CUDA has it."""

    def __init__(self, stream: FakeStream | None = None) -> None:
        self.stream, self.place = stream, 0 if stream is None else stream.issued

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.run(self.place)


class FakeStream:
    """What was enqueued, in order."""

    hurries: Callable[[], bool] = WHEN["late"]

    def __init__(self, device: object = None) -> None:
        self.issued = self.done = 0
        self._left: deque[Callable[[], object]] = deque()

    def enqueue(self, work: Callable[[], object]) -> None:
        with _running:
            self._left.append(work)
            self.issued += 1
        if FakeStream.hurries():
            self.synchronize()

    def run(self, place: int) -> None:
        with _running:
            while self.done < place:
                self._left.popleft()()
                self.done += 1

    def synchronize(self) -> None:
        self.run(self.issued)

    def record_event(self) -> FakeEvent:
        return FakeEvent(self)

    def wait_stream(self, other: FakeStream) -> None:
        self.enqueue(other.record_event().synchronize)


_default = FakeStream()
_current = threading.local()


def current_stream(device: object = None) -> FakeStream:
    found: FakeStream = getattr(_current, "stream", _default)
    return found


@contextlib.contextmanager
def _use(stream: FakeStream) -> Iterator[None]:
    before = current_stream()
    _current.stream = stream
    try:
        yield
    finally:
        _current.stream = before


class FakeTensor(Tensor):
    """A tensor that says that it is on a GPU, and is copied by streams."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.device.__get__:
            return DEVICE
        if func is not Tensor.copy_:
            return super().__torch_function__(func, types, args, kwargs or {})
        into, source = args
        plain = [off_device(one) for one in args]
        current_stream().enqueue(lambda: plain[0].copy_(plain[1]))
        within = isinstance(into, cls) and isinstance(source, cls)
        if not within and not (kwargs or {}).get("non_blocking"):
            current_stream().synchronize()
        return into


def on_device(tensor: Tensor) -> FakeTensor:
    """The same memory, as the GPU's."""
    return tensor.as_subclass(FakeTensor)


def off_device(tensor: Tensor) -> Tensor:
    """The same memory, for the test to look at."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def pinned(nbytes: int) -> Tensor:
    return torch.full((nbytes,), _GARBAGE, dtype=torch.uint8)


@contextlib.contextmanager
def fake_cuda(hurries: Callable[[], bool] = WHEN["late"]) -> Iterator[None]:
    """Put the stand-in in CUDA's place; copies run early whenever ``hurries`` says so."""
    with (
        mock.patch.multiple(
            torch.cuda, Stream=FakeStream, stream=_use, current_stream=current_stream
        ),
        mock.patch.object(staged, "_pinned", pinned),
        mock.patch.object(FakeStream, "hurries", staticmethod(hurries)),
    ):
        yield


class Looking(AroundTransport):
    """A transport whose messages' tensors are on the fake GPU, to those who look at CPU memory.

    What they wrote is done; before they read, the stream has run dry.
    """

    def bind(
        self, receives: Sequence[Message], sends: Sequence[Message]
    ) -> Callable[[int], list[Handle]]:
        arriving, leaving = (
            [one._replace(tensor=on_device(one.tensor)) for one in some]
            for some in (receives, sends)
        )
        return self.below.bind(arriving, leaving)

    def wait(self, handle: Handle, timeout_s: float) -> None:
        self.below.wait(handle, timeout_s)
        current_stream().synchronize()
