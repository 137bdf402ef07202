"""A stand-in for a GPU: tensors in CPU memory whose copies run as streams have them run.

A copy is enqueued on the stream that is current. When it runs is up to the test: ``late``, when
the host waits for its stream, an event, or another stream that waits for it; ``early``, at once.
Whoever forgets to wait, or lets memory go too soon, meets the wrong data in one of the two.

A `Timeline` has what was copied between host and GPU, and how much memory was pinned.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ringcoll.runtime.transport import AroundTransport, Handle, Message, staged

__all__ = [
    "DEVICE",
    "WHEN",
    "FakeTensor",
    "Looking",
    "Timeline",
    "fake_cuda",
    "off_device",
    "on_device",
]

DEVICE = torch.device("cuda", 0)
_random = Random(7)
WHEN: dict[str, Callable[[], bool]] = {
    "late": lambda: False,
    "early": lambda: True,
    "now and then": lambda: _random.random() < 0.5,
}
_GARBAGE = 0xA5
_running = threading.RLock()


@dataclass
class Span:
    """A copy: when it was enqueued, and when it was done; times are numbers of happenings."""

    direction: str
    nbytes: int
    begin: int
    end: int | None = None


@dataclass
class Timeline:
    """Copies between host and GPU, ``"up"`` or ``"down"``, and the pinned memory of all ranks."""

    spans: list[Span] = field(default_factory=list)
    pinned: int = 0
    most_pinned: int = 0
    _now: int = 0

    def begin(self, direction: str, nbytes: int) -> Span:
        with _running:
            self._now += 1
            self.spans.append(Span(direction, nbytes, self._now))
            return self.spans[-1]

    def end(self, span: Span) -> None:
        self._now += 1
        span.end = self._now

    def pin(self, nbytes: int) -> None:
        with _running:
            self.pinned += nbytes
            self.most_pinned = max(self.most_pinned, self.pinned)

    def order(self) -> str:
        """The letter of each copy's direction, in the order in which they were enqueued."""
        return "".join(span.direction[0] for span in self.spans)

    def overlaps(self) -> int:
        """Number of pairs of copies in both directions of which each began before the other ended."""
        return sum(
            (up.end is None or down.begin < up.end) and (down.end is None or up.begin < down.end)
            for up in self.spans
            for down in self.spans
            if (up.direction, down.direction) == ("up", "down")
        )

    def __str__(self) -> str:
        """A line for each direction, and a column for each happening: ``=`` where copies are on their way."""
        lines = []
        for direction in ("down", "up"):
            spans = [span for span in self.spans if span.direction == direction]
            lines.append(
                f"{direction:>4} |"
                + "".join(
                    "="
                    if any(s.begin <= now <= (self._now if s.end is None else s.end) for s in spans)
                    else " "
                    for now in range(1, self._now + 1)
                )
            )
        return "\n".join(lines)


class FakeEvent:
    """A place in a stream; one that was not recorded is complete, as CUDA has it."""

    def __init__(self, stream: FakeStream | None = None) -> None:
        self.stream, self.place = stream, 0 if stream is None else stream.issued

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.run(self.place)

    def query(self) -> bool:
        return self.stream is None or self.stream.done >= self.place


class FakeStream:
    """What was enqueued, in order."""

    hurries: Callable[[], bool] = WHEN["late"]
    timeline = Timeline()

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
        self.wait_event(other.record_event())

    def wait_event(self, event: FakeEvent) -> None:
        self.enqueue(event.synchronize)


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
        within = isinstance(into, cls) and isinstance(source, cls)
        timeline = FakeStream.timeline
        direction = "up" if isinstance(into, cls) else "down"
        span = None if within else timeline.begin(direction, plain[0].nbytes)

        def copy() -> None:
            plain[0].copy_(plain[1])
            if span is not None:
                timeline.end(span)

        current_stream().enqueue(copy)
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
    host, timeline = torch.full((nbytes,), _GARBAGE, dtype=torch.uint8), FakeStream.timeline
    timeline.pin(nbytes)
    weakref.finalize(host, timeline.pin, -nbytes)
    return host


@contextlib.contextmanager
def fake_cuda(hurries: Callable[[], bool] = WHEN["late"]) -> Iterator[Timeline]:
    """Put the stand-in in CUDA's place; copies run early whenever ``hurries`` says so."""
    timeline = Timeline()
    with (
        mock.patch.multiple(
            torch.cuda, Stream=FakeStream, stream=_use, current_stream=current_stream
        ),
        mock.patch.object(staged, "_pinned", pinned),
        mock.patch.object(FakeStream, "hurries", staticmethod(hurries)),
        mock.patch.object(FakeStream, "timeline", timeline),
    ):
        yield timeline


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
