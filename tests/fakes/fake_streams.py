"""A stand-in for CUDA's streams: CPU tensors stand for CUDA tensors, and order is looked at.

Whatever is computed is enqueued on a stream, and a thread that stands for the GPU computes it: in
order within a stream, and behind the host, which waits only where CUDA lets it wait. A message of NCCL
occupies its stream until it has met its other end. So a lost peer is a stream that
goes no further, while the host goes on. What a thread needs is looked at, too: CUDA's current device
and its mode for captures are those of the thread, and a thread that has begun nothing has neither.

Whether results would be right on any GPU is looked at as well: each stream has a vector clock, each operation of torch is
noted with the stream that was current, and two that use the same memory, of which one
writes, must be ordered by events, or by a host that has waited. Otherwise there is a *race*.
Captures follow CUDA's rules: no wait crosses their border, no captured event is asked
for, and what has forked from the capture must join it again.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from ringcoll import LocalGroup
from ringcoll.runtime.group import Communicator
from ringcoll.runtime.transport import Handle, Hub, LocalTransport, NcclTransport, streams
from tests.fakes.fake_nccl import LIMIT_S, FakeGroup, FakeWork, World
from tests.programs.threads import together

__all__ = ["HOST", "FakeCuda", "StreamedGroup", "in_place", "over_nccl", "run"]

Clock = dict[int, int]
HOST = "the host"  # what has accessed memory; it needs no allocator, as it waits
DEVICE = torch.device("cpu")


def _merge(into: Clock, other: Clock) -> None:
    for number, time in other.items():
        into[number] = max(into.get(number, 0), time)


@dataclass(frozen=True)
class Access:
    """A read or write of memory: by which stream, at which time of its own."""

    start: int
    end: int
    writes: bool
    stream: int
    time: int
    what: str


@dataclass
class Capture:
    """A graph that is being captured."""

    active: bool = True
    streams: list[FakeStream] = field(default_factory=list)
    touched: set[int] = field(default_factory=set)
    """Storages that were used in it."""


class Gpu:
    """A thread that works off what streams hold; what has not begun returns `False`."""

    def __init__(self) -> None:
        self._streams: list[FakeStream] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.is_held = False
        self.failures: list[BaseException] = []

    def enqueue(self, stream: FakeStream, work: Callable[[], bool]) -> None:
        with self._changed:
            if not stream.left:
                self._streams.append(stream)
            stream.left.append(work)
            stream.issued += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="fake GPU", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def hold(self, *, is_held: bool = True) -> None:
        """Do nothing more, or go on."""
        with self._changed:
            self.is_held = is_held
            self._changed.notify_all()

    def wait(self, stream: FakeStream, place: int) -> None:
        """Let the host wait until a stream has come to a place."""
        with self._changed:
            has_come = self._changed.wait_for(lambda: stream.done >= place, LIMIT_S)
        assert has_come, "the GPU hangs, and nobody aborts what it waits for"
        if self.failures:
            raise self.failures[0]

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._streams or self.is_held:
                    if not self._changed.wait(1.0) and not self._streams:
                        self._thread = None
                        return
                    continue
                streams = tuple(self._streams)
            goes_on = [self._work_off(stream) for stream in streams]
            if not any(goes_on):
                with self._changed:
                    self._changed.wait(
                        0.002
                    )  # for the host: an abort, or the other end of a message

    def _work_off(self, stream: FakeStream) -> bool:
        """Do what comes next in a stream; return whether it is done."""
        try:
            is_done = stream.left[0]()
        except BaseException as error:  # noqa: BLE001  # raised where the host waits
            self.failures.append(error)
            is_done = True
        if is_done:
            with self._changed:
                stream.left.popleft()
                stream.done += 1
                if not stream.left:
                    self._streams.remove(stream)
                self._changed.notify_all()
        return is_done


class FakeEvent:
    """Where a stream was."""

    def __init__(self, cuda: FakeCuda, stream: FakeStream) -> None:
        self._cuda, self.clock, self.capture = cuda, dict(stream.clock), stream.capturing()
        self._stream, self._place = stream, stream.issued

    def is_over(self) -> bool:
        return self._stream.done >= self._place

    def query(self) -> bool:
        if self.capture is not None:
            raise RuntimeError("cudaErrorCapturedEvent: asked for in a capture")
        self._cuda.begun("asks for an event")
        return self.is_over()

    def synchronize(self) -> None:
        if self.capture is not None:
            raise RuntimeError("cudaErrorStreamCaptureUnsupported: the host waits in a capture")
        self._cuda.begun("waits for an event")
        self._cuda.waits_of_host += 1
        self._cuda.gpu.wait(self._stream, self._place)
        _merge(self._cuda.host(), self.clock)


class FakeStream:
    """A stream; `cuda_stream` is its number."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda, self.cuda_stream = cuda, next(cuda.numbers)
        self.clock: Clock = {}
        self.left: deque[Callable[[], bool]] = deque()
        self.issued = self.done = 0
        self._capture: Capture | None = None

    def __ne__(self, other: object) -> bool:
        # As `torch.cuda.Stream`: what is no stream is not unequal to one.
        return isinstance(other, FakeStream) and other is not self

    __hash__ = object.__hash__

    def capturing(self) -> Capture | None:
        if self._capture is not None and not self._capture.active:
            self._capture = None
        return self._capture

    def join_capture(self, capture: Capture) -> None:
        self._capture = capture
        capture.streams.append(self)

    def record_event(self) -> FakeEvent:
        _merge(self.clock, self._cuda.host())  # whoever waits for it also waits for its being made
        return FakeEvent(self._cuda, self)

    def wait_event(self, event: FakeEvent) -> None:
        mine = self.capturing()
        if mine is not None and event.capture is not mine:
            raise RuntimeError("cudaErrorStreamCaptureIsolation: waits for what is not captured")
        if event.capture is not None and mine is None:
            if not event.capture.active:
                raise RuntimeError("cudaErrorCapturedEvent: waits for what was captured")
            self.join_capture(event.capture)
        _merge(self.clock, event.clock)
        if not event.is_over():
            self._cuda.gpu.enqueue(self, event.is_over)

    def synchronize(self) -> None:
        self.record_event().synchronize()


class _Watch(TorchDispatchMode):
    """Notes what every operation of torch reads and writes."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, returns = kwargs or {}, func._schema.returns
        if any(one.alias_info is not None and not one.alias_info.is_write for one in returns):
            return func(*args, **kwargs)  # a view
        result = self._enqueue(func, args, kwargs)
        name, cuda = str(func), self._cuda
        given = dict(zip((one.name for one in func._schema.arguments), args, strict=False))
        given.update(kwargs or {})
        for argument in func._schema.arguments:
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(given.get(argument.name)):
                cuda.access(tensor, writes=writes, what=name)
        if not any(one.alias_info for one in returns):
            for tensor in _tensors(result):
                cuda.allocated(tensor)
                if "empty" not in name:
                    cuda.access(tensor, writes=True, what=name)
        return result

    def _enqueue(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Let the GPU do it; the result is there at once, but not yet what it will hold."""
        gpu, stream = self._cuda.gpu, self._cuda.current_stream()
        named = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
        written = [
            named[one.name]
            for one in func._schema.arguments
            if one.alias_info is not None and one.alias_info.is_write and one.name in named
        ]

        def later(work: Callable[[], object]) -> None:
            def run() -> bool:
                with torch.inference_mode(is_inference):
                    work()
                return True

            is_inference = torch.is_inference_mode_enabled()
            gpu.enqueue(stream, run)

        self._cuda.launched(func, [one for value in named.values() for one in _tensors(value)])
        if written:
            later(lambda: func(*args, **kwargs))
            return written[0] if func._schema.returns else None
        if not any(_tensors(value) for value in named.values()):
            return func(*args, **kwargs)  # new memory, with the same values each time
        if not any("Tensor" in str(one.type) for one in func._schema.returns):
            gpu.wait(stream, stream.issued)  # the host asks for a value
            return func(*args, **kwargs)
        with _disable_current_modes(), FakeTensorMode(allow_non_fake_inputs=True):
            shapes = func(*args, **kwargs)
        results = tree_map(
            lambda one: torch.empty_strided(one.shape, one.stride(), dtype=one.dtype), shapes
        )
        if "empty" not in str(func):
            later(
                lambda: tree_map(
                    lambda into, value: into.copy_(value), results, func(*args, **kwargs)
                )
            )
        return results


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return (
        [one for one in value if isinstance(one, Tensor)] if isinstance(value, list | tuple) else []
    )


class FakeCuda:
    """What `ringcoll.runtime.transport.streams` needs of ``torch.cuda``.

    Attributes
    ----------
    races
        Pairs of accesses that nothing orders, in words.
    strays
        What threads have done that had not begun for it, in words.
    gpu
        Works off what is enqueued.
    late_loads
        Kernels that a rank has launched for the first time after messages of the same operation, in words.
    """

    def __init__(self) -> None:
        self.numbers = itertools.count(1)
        self.races: list[str] = []
        self.strays: list[str] = []
        self.gpu = Gpu()
        self.late_loads: list[str] = []
        self.waits_of_host = 0
        self._captures: list[tuple[Capture, int]] = []  # under way, each with its thread
        self.futures: list[list[torch.device]] = []
        self._accesses: dict[int, list[Access]] = defaultdict(list)
        self._owners: dict[int, int] = {}  # of storages: the stream for which they were allocated
        self._recorded: set[tuple[int, int]] = set()
        self._alive: dict[int, Any] = {}  # so that no address is used twice
        self._local = threading.local()
        self._lock = threading.Lock()

    # --- what torch.cuda has ----------------------------------------------------------

    def Stream(self, device: torch.device | None = None) -> FakeStream:  # noqa: N802
        return FakeStream(self)

    def current_stream(self, device: torch.device | None = None) -> FakeStream:
        if not hasattr(self._local, "stream"):
            self._local.stream = FakeStream(self)  # one a thread: each is another rank's device
        found: FakeStream = self._local.stream
        return found

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._local.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._local.stream = before

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        """Every operation enters it, in whatever thread: so here one begins to watch."""
        before, self._local.has_device = getattr(self._local, "has_device", False), True
        try:
            with self.watching():
                yield
        finally:
            self._local.has_device = before

    def launched(self, func: Any, tensors: Sequence[Tensor]) -> None:
        """Note a launch, which loads the kernel if it is the first in this thread."""
        kernel = " ".join([str(func), *(str(tensor.dtype) for tensor in tensors)])
        loaded = self._local.__dict__.setdefault("loaded", set())
        if getattr(self._local, "has_sent", False) and kernel not in loaded:
            self.late_loads.append(kernel)
        loaded.add(kernel)

    def sent(self, *, has_sent: bool = True) -> None:
        """Note whether this thread has sent messages of the operation that it is at."""
        self._local.has_sent = has_sent

    def exchange_capture_mode(self, mode: int) -> None:
        self._local.mode = mode

    def begun(self, what: str) -> None:
        """Note what a thread does that has no device, or that would end another thread's capture."""
        name = threading.current_thread().name
        if not (getattr(self._local, "has_device", False) or self._is_watching()):
            self.strays.append(f"{name} {what} without a device")
        own = threading.get_ident()
        if not getattr(self._local, "mode", 0) and any(one != own for _, one in self._captures):
            self.strays.append(f"{name} {what} during a capture of another thread")

    def is_current_stream_capturing(self) -> bool:
        return self.current_stream().capturing() is not None

    # --- what the tests use -------------------------------------------------------------

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Note what this thread does."""
        if self._is_watching():
            yield
            return
        self._local.watching = True
        try:
            with _Watch(self):
                yield
        finally:
            self._local.watching = False

    def _is_watching(self) -> bool:
        return getattr(self._local, "watching", False)

    @contextlib.contextmanager
    def graph(self) -> Iterator[Capture]:
        """Capture what this thread does, on a stream of its own."""
        origin, capture = FakeStream(self), Capture()
        origin.wait_event(self.current_stream().record_event())
        origin.join_capture(capture)
        self._captures.append((capture, threading.get_ident()))
        with self.stream(origin), self.watching():
            try:
                yield capture
            finally:
                capture.active = False
                self._captures.remove((capture, threading.get_ident()))
        self.current_stream().wait_event(FakeEvent(self, origin))  # as if it were replayed there
        for one in capture.streams:
            if origin.clock.get(one.cuda_stream, 0) < one.clock.get(one.cuda_stream, 0):
                raise RuntimeError("cudaErrorStreamCaptureUnjoined: a stream has not joined again")

    def host(self) -> Clock:
        """What this thread knows to be done."""
        if not hasattr(self._local, "host"):
            self._local.host = {}
        found: Clock = self._local.host
        return found

    def access(
        self, tensor: Tensor, *, writes: bool, what: str, stream: FakeStream | None = None
    ) -> None:
        """Note that a stream, by default the current one, reads or writes a tensor."""
        if not tensor.numel():
            return
        stream = self.current_stream() if stream is None else stream
        _merge(stream.clock, self.host())
        time = stream.clock[stream.cuda_stream] = stream.clock.get(stream.cuda_stream, 0) + 1
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        start = tensor.data_ptr()
        end = start + reach * tensor.itemsize
        self._note(tensor, Access(start, end, writes, stream.cuda_stream, time, what), stream)

    def _note(self, tensor: Tensor, new: Access, stream: FakeStream) -> None:
        with _disable_current_modes():
            storage = tensor.untyped_storage()
            key = storage.data_ptr()
        capture = stream.capturing()
        if capture is not None:
            capture.touched.add(key)
        with self._lock:
            self._alive[key] = storage
            for old in self._accesses[key]:
                conflict = (
                    (old.writes or new.writes) and old.start < new.end and new.start < old.end
                )
                if conflict and stream.clock.get(old.stream, 0) < old.time:
                    self.races.append(
                        f"{new.what} on {new.stream} after {old.what} on {old.stream}"
                    )
            self._accesses[key].append(new)

    def allocated(self, tensor: Tensor) -> None:
        """Note for which stream memory was allocated."""
        with _disable_current_modes():
            storage = tensor.untyped_storage()
        with self._lock:
            self._alive[storage.data_ptr()] = storage
            self._owners[storage.data_ptr()] = self.current_stream().cuda_stream

    def record_stream(self, tensor: Tensor, stream: FakeStream) -> None:
        with _disable_current_modes(), self._lock:
            self._recorded.add((tensor.untyped_storage().data_ptr(), stream.cuda_stream))

    def looked_after(self, tensor: Tensor) -> Tensor:
        """A tensor that the test keeps alive itself, whatever streams it is used on."""
        with _disable_current_modes(), self._lock:
            self._owners.pop(tensor.untyped_storage().data_ptr(), None)
        return tensor

    def unrecorded(self) -> list[str]:
        """Uses of memory by other streams than its owner's, of which the allocator was not told."""
        return [
            f"{one.what} on {one.stream} of memory of {self._owners[key]}"
            for key, accesses in self._accesses.items()
            for one in accesses
            if key in self._owners
            and one.what != HOST
            and one.stream != self._owners[key]
            and (key, one.stream) not in self._recorded
        ]

    def new_future(self, *, devices: Sequence[torch.device] = ()) -> torch.futures.Future[None]:
        """A future whose callbacks run on a stream of their own, as those of torch do."""
        self.futures.append([*devices])
        cuda = self

        class OnItsOwnStream(torch.futures.Future):  # type: ignore[type-arg]
            def then(self, callback: Any) -> Any:
                def on_its_own(future: Any) -> Any:
                    with cuda.stream(FakeStream(cuda)):
                        value = callback(future)
                        for tensor in value:
                            cuda.access(tensor, writes=False, what="a callback")
                        return value

                return super().then(on_its_own)

        return OnItsOwnStream()


class _StreamedWork:
    """What orders streams after a group, and never says that anything has failed."""

    def __init__(self, cuda: FakeCuda, event: FakeEvent) -> None:
        self._cuda, self._event = cuda, event

    def wait(self) -> bool:
        self._cuda.current_stream().wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        self._cuda.begun("asks for a work")
        return self._event.is_over()


class StreamedGroup(FakeGroup):
    """A stand-in for ``ProcessGroupNCCL`` with its stream, which messages occupy until they have met."""

    def __init__(self, world: World, rank: int, cuda: FakeCuda) -> None:
        super().__init__(world, rank)
        self._cuda, self._stream = cuda, cuda.Stream()

    def _add(self, is_send: bool, tensors: list[Tensor], peer: int) -> None:
        self._stream.wait_event(self._cuda.current_stream().record_event())
        super()._add(is_send, tensors, peer)
        what = f"{'send to' if is_send else 'receive from'} {peer}"
        self._cuda.record_stream(tensors[0], self._stream)
        self._cuda.access(tensors[0], writes=not is_send, what=what, stream=self._stream)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self._cuda.begun("connects")
        super().eager_connect_single_device(device)

    def _end_coalescing(self) -> Any:
        work = super()._end_coalescing()
        return work and _StreamedWork(self._cuda, self._stream.record_event())

    def _start(self, work: FakeWork) -> None:
        self._cuda.sent()
        start = iter([lambda: FakeGroup._start(self, work)])

        def kernel() -> bool:
            for begin in start:
                begin()
            return work.finished.is_set()

        self._cuda.gpu.enqueue(self._stream, kernel)

    def abort(self) -> None:
        self._cuda.begun("aborts")
        super().abort()


@contextlib.contextmanager
def in_place() -> Iterator[FakeCuda]:
    """Put the stand-in in the place of ``torch.cuda``: CPU tensors are taken for CUDA tensors."""
    made = FakeCuda()
    with mock.patch.multiple(
        streams,
        cuda=made,
        with_streams=frozenset({"cpu"}),
        record_stream=made.record_stream,
        new_future=made.new_future,
        exchange_capture_mode=made.exchange_capture_mode,
        _modes=threading.local(),
    ):
        yield made


def over_nccl(cuda: FakeCuda, world: World, rank: int, store: dist.Store) -> NcclTransport:
    """A rank's transport, over the stand-in for NCCL with streams."""
    return NcclTransport(StreamedGroup(world, rank, cuda), DEVICE, store)


class OnTheHost(LocalTransport):
    """Messages that the host moves, with what such a transport does for streams' order."""

    def __init__(self, hub: Hub, rank: int, cuda: FakeCuda) -> None:
        super().__init__(hub, rank)
        self._cuda = cuda

    def bind(self, receives: Any, sends: Any) -> Callable[[int], list[Handle]]:
        post = super().bind(receives, sends)

        def settle_and_post(mixed: int) -> list[Handle]:
            self._cuda.current_stream().synchronize()
            host = self._cuda.Stream()  # what the host does now
            for messages, writes in ((receives, True), (sends, False)):
                for message in messages:
                    self._cuda.access(message.tensor, writes=writes, what=HOST, stream=host)
            host.synchronize()
            with _disable_current_modes():
                return post(mixed)

        return settle_and_post


def run(
    cuda: FakeCuda,
    world_size: int,
    main: Callable[[LocalGroup], Any],
    *,
    on_host: bool = False,
    limit_s: float = 20.0,
) -> list[Any]:
    """Run a function on ranks with streams; what it raises is its result."""
    world, hub, store = World(world_size), Hub(world_size), dist.HashStore()

    def rank_main(rank: int) -> Any:
        if on_host:
            transport: Any = OnTheHost(hub, rank, cuda)
        else:
            transport = over_nccl(cuda, world, rank, dist.PrefixStore("meet", store))
        member = Communicator(transport, dist.PrefixStore("monitor", store), limit_s)
        try:
            with cuda.watching():
                return main(LocalGroup(member))
        finally:
            member.close(5.0)

    results = together(world_size, rank_main)
    assert cuda.strays == []
    return results
