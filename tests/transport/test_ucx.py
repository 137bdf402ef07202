"""UCX: what it is handed, and when."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringcoll.errors import ArgumentError, MissingExtraError, PeerLostError, TransportError
from ringcoll.runtime.transport import Message, catalogue, nccl, ucx
from tests.fakes.fake_cuda import DEVICE, fake_cuda, on_device

CPU = torch.device("cpu")


def test_ucx_takes_bytes_of_the_device_by_their_address():
    for dtype in (torch.bfloat16, torch.float8_e5m2, torch.complex64, torch.bool):
        memory = torch.zeros(10).to(dtype)[3:8]
        buffer = ucx.buffer_of(on_device(memory))
        assert buffer.cuda
        assert buffer.ptr == memory.data_ptr()
        assert buffer.nbytes == buffer.shape[0] == memory.nbytes
        assert ucx.buffer_of(on_device(memory)) is buffer
        host = ucx.buffer_of(memory)  # the same address, as it may be after memory was freed
        assert not host.cuda
        assert host.ptr == buffer.ptr
        assert ucx.buffer_of(on_device(memory)) is buffer
    empty = ucx.buffer_of(on_device(torch.zeros(0)))
    assert not empty.cuda
    assert empty.nbytes == 1


class Worker:
    """Notes what UCX is asked to do."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def tag_recv(self, buffer: Any, *tags: Any) -> None:
        self.log.append("receive")

    def tag_send(self, buffer: Any, *tags: Any) -> None:
        self.log.append("send")

    def progress(self) -> None:
        self.log.append("progress")


def test_ucx_posts_when_the_current_stream_has_run_dry():
    log: list[str] = []
    transport = ucx.UcxTransport(dist.HashStore(), 0, 2)
    transport._worker = Worker(log)
    transport._endpoints = {1: Worker(log)}
    host = torch.zeros(3)
    device = on_device(host)
    with fake_cuda(), torch.cuda.stream(torch.cuda.Stream()):
        post = transport.bind([Message(1, device, 0)], [Message(1, device, 0), Message(1, host, 0)])
        for _ in range(2):
            torch.cuda.current_stream().enqueue(lambda: log.append("kernel"))  # type: ignore[attr-defined]
            post(0)
        assert log == ["kernel", "receive", "send", "send"] * 2
        log.clear()
        torch.cuda.current_stream().enqueue(lambda: log.append("kernel"))  # type: ignore[attr-defined]
        transport.post([Message(1, host, 0)], [Message(1, host, 0)])
    assert log == ["receive", "send"], "CPU tensors wait for no stream"


def test_a_ucx_context_is_made_with_its_device_current(monkeypatch: pytest.MonkeyPatch):
    made: list[torch.device] = []
    inside: list[torch.device] = []

    class Current:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            inside.append(self.device)

        def __exit__(self, *error: object) -> None:
            inside.pop()

    monkeypatch.setattr(torch.cuda, "device", Current)
    monkeypatch.setattr(ucx, "settle", made.extend)
    with ucx.current(DEVICE):
        assert inside == [DEVICE]
        assert made == [DEVICE], "the device has a context when something is done on it"
    with ucx.current(torch.device("cpu")):
        assert (inside, made) == ([], [DEVICE])


# --- where UCX is missing -------------------------------------------------------------


def test_a_missing_ucx_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setitem(sys.modules, "ucxx._lib.libucxx", None)
    ucx.core.cache_clear()
    with pytest.raises(MissingExtraError, match=r"pip install 'ringcoll\[ucx\]'"):
        ucx.check()
    # Beside shared memory, there is gloo.
    catalogue._automatic.cache_clear()
    with caplog.at_level(logging.DEBUG, logger="ringcoll"):
        assert catalogue.beside("shared", "cpu").name == "gloo"
    (line,) = caplog.messages
    assert "does not stand for ucx" in line
    assert "ringcoll[ucx]" in line
    ucx.core.cache_clear()
    catalogue._automatic.cache_clear()
    assert catalogue.resolved("cpu", "gloo") == "gloo"


def test_a_ucx_that_cannot_be_loaded_is_as_if_missing(monkeypatch: pytest.MonkeyPatch):
    """As beside an MPI library that has loaded another UCX."""

    def load(name: str) -> None:
        raise OSError(f"{name}: undefined symbol")

    monkeypatch.setattr(ucx, "import_module", load)
    ucx.core.cache_clear()
    catalogue._automatic.cache_clear()
    try:
        with pytest.raises(MissingExtraError, match=r"cannot be loaded.*undefined symbol"):
            ucx.check()
        assert catalogue.beside("shared", "cpu").name == "gloo"
    finally:
        ucx.core.cache_clear()
        catalogue._automatic.cache_clear()


def test_the_error_of_a_message_is_told():
    transport = ucx.UcxTransport(dist.HashStore(), 0, 2)
    transport._worker = Worker([])

    class Failed:
        completed = True

        def check_error(self) -> None:
            raise transport._ucx.UCXError("it was cut off")

    with pytest.raises(PeerLostError, match="it was cut off"):
        transport.wait((Failed(), 1, torch.zeros(1)), 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("is_send", [False, True])
def test_memory_lives_as_long_as_its_message(is_send: bool):
    transport = ucx.UcxTransport(dist.HashStore(), 0, 2)
    transport._worker = Worker([])
    transport._endpoints = {1: Worker([])}
    tensor = torch.zeros(3)
    alive, messages = weakref.ref(tensor), [Message(1, tensor, 0)]
    handles = transport.post(*(([], messages) if is_send else (messages, [])))
    del tensor, messages
    gc.collect()
    assert alive() is not None
    del handles
    assert alive() is None


# --- what UCX cannot send -----------------------------------------------------------------

FULL = """
#      resource 0  :  md 0  dev 0  flags -- self/memory
#      resource 1  :  md 1  dev 1  flags -- cuda_copy/cuda
#      resource 2  :  md 2  dev 1  flags -- cuda_ipc/cuda
"""


@pytest.fixture
def listing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """UCX where it lists what the test says; the fixture's function gets the text."""

    def lists(info: str) -> None:
        context = SimpleNamespace(info=info, cuda_support=True)
        core = SimpleNamespace(
            UCXContext=lambda *_: context,
            Feature=ucx.core().Feature,
            UCXError=ucx.core().UCXError,
        )
        monkeypatch.setattr(ucx, "core", lambda: core)

    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "RINGCOLL_CUDA_TRANSPORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ucx, "current", contextlib.nullcontext)
    monkeypatch.setattr(nccl, "check", lambda: _raise(ArgumentError("no NCCL")))
    ucx.context_of.cache_clear()
    catalogue._automatic.cache_clear()
    yield lists
    ucx.context_of.cache_clear()
    catalogue._automatic.cache_clear()


def _raise(error: Exception) -> None:
    raise error


@pytest.mark.usefixtures("listing")
def test_a_ucx_without_cuda_is_refused_whatever_it_says_of_itself():
    """The true UCX, which has no CUDA library to load where there is no GPU."""
    if "cuda_copy/" in ucx.context_of(CPU, True).info:
        ucx.check_device(DEVICE)  # with a GPU there is nothing to refuse
        return
    assert ucx.context_of(CPU, True).cuda_support
    with pytest.raises(ArgumentError, match=r"no CUDA support.*libcuda\.so\.1.*UCX_TLS"):
        ucx.check_device(DEVICE)


@pytest.mark.parametrize("info", ["", FULL.replace("cuda_copy/", "self/")])
def test_what_ucx_cannot_do_names_who_asked_for_it(listing: Callable[[str], None], info: str):
    listing(info)
    with pytest.raises(
        ArgumentError,
        match=r"^rank 3: argument 'cuda_transport': UCX has no CUDA support.*"
        r"expected one of auto, nccl, gloo, got ucx",
    ):
        catalogue.resolved("cuda", "ucx", 3, DEVICE)
    assert catalogue.resolved("cuda", "ucx", 3) == "ucx", "no device is in use yet"
    assert catalogue.resolved("cpu", "ucx", 3, CPU) == "ucx"


def test_auto_takes_another_way_and_says_so(
    listing: Callable[[str], None], caplog: pytest.LogCaptureFixture
):
    listing("")
    for _ in range(2):
        assert catalogue.resolved("cuda", None, 0, DEVICE) == "gloo"
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.startswith('"auto" stands for gloo on cuda:0, not ucx: UCX has no CUDA support')


@pytest.mark.parametrize("is_whole", [False, True])
def test_auto_takes_ucx_where_it_can(
    listing: Callable[[str], None], is_whole: bool, caplog: pytest.LogCaptureFixture
):
    listing(FULL if is_whole else FULL.replace("cuda_ipc/", "self/"))
    assert catalogue.resolved("cuda", None, 0, DEVICE) == "ucx"
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_are_refused(
    listing: Callable[[str], None], name: str, monkeypatch: pytest.MonkeyPatch
):
    listing(FULL)
    monkeypatch.setenv(name, "max_split_size_mb:64, expandable_segments:True")
    setting = rf"{name}=expandable_segments:True.*cannot export.*got ucx"
    with pytest.raises(ArgumentError, match=setting):
        catalogue.resolved("cuda", "ucx", 0, DEVICE)
    assert catalogue.resolved("cuda", None, 0, DEVICE) == "gloo"
    monkeypatch.setenv(name, "expandable_segments:False")
    assert catalogue.resolved("cuda", "ucx", 0, DEVICE) == "ucx"


def test_expandable_segments_are_no_matter_without_cuda_ipc(
    listing: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
):
    listing(FULL.replace("cuda_ipc/", "self/"))
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert catalogue.resolved("cuda", "ucx", 0, DEVICE) == "ucx"


def test_a_ucx_that_does_not_start_is_an_error_of_the_transport(
    listing: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
):
    listing(FULL)
    error = ucx.core().UCXError("no memory")
    monkeypatch.setattr(ucx.core(), "UCXContext", lambda *_: _raise(error))
    with pytest.raises(TransportError, match="UCX cannot start: no memory"):
        ucx.check_device(DEVICE)
    assert catalogue.resolved("cuda", None, 0, DEVICE) == "gloo"


def test_a_worker_that_cannot_be_made_is_an_error_of_the_transport(
    monkeypatch: pytest.MonkeyPatch,
):
    """As where there is no room for its shared memory."""
    error = ucx.core().UCXError("no memory")
    monkeypatch.setattr(ucx.core(), "UCXWorker", lambda _: _raise(error))
    transport = ucx.UcxTransport(dist.HashStore(), 0, 1)
    with pytest.raises(TransportError, match="rank 0 cannot start UCX: no memory"):
        transport.connect(10.0)
    transport.close()


def _connected(log: list[str], hosts: tuple[int, ...] = (0, 0)) -> ucx.UcxTransport:
    transport = ucx.UcxTransport(dist.HashStore(), 0, 2, DEVICE)
    transport._worker, transport._endpoints = Worker(log), {1: Worker(log)}
    transport.hosts, transport._exports = hosts, True
    return transport


@pytest.mark.parametrize("is_send", [False, True])
def test_memory_that_cannot_be_exported_is_refused_before_anything_is_sent(
    is_send: bool, monkeypatch: pytest.MonkeyPatch
):
    log: list[str] = []
    host = torch.zeros(3)
    device = on_device(torch.zeros(3))
    monkeypatch.setattr(ucx, "is_exportable", lambda address: address != device.data_ptr())

    def post(transport: ucx.UcxTransport, *tensors: torch.Tensor) -> None:
        messages = [Message(1, tensor, 0) for tensor in tensors]
        transport.post(*(([], messages) if is_send else (messages, [])))

    with fake_cuda():
        with pytest.raises(ArgumentError, match=r"^rank 0: argument 'tensor': rank 1 cannot open"):
            post(_connected(log), host, device)
        assert log == []
        post(_connected(log), host, on_device(host), on_device(torch.zeros(0)))
        post(_connected(log, (0, 1)), device)  # to another host no memory is exported
        local = _connected(log)
        local._exports = False  # nor without CUDA IPC
        post(local, device)
    assert len(log) == 5


@pytest.mark.parametrize(
    "is_legacy, handles, failed, is_exportable",
    [
        (1, 0, (), True),
        (0, 0, (), False),
        (0, 1 | 2, (), False),  # a file descriptor, or a handle of Windows
        (0, 8, (), True),
        (0, 0, (10,), True),  # a driver that does not know: UCX will find out
        (0, 8, (14,), False),
    ],
)
def test_cuda_says_what_can_be_exported(
    is_legacy: int,
    handles: int,
    failed: tuple[int, ...],
    is_exportable: bool,
    monkeypatch: pytest.MonkeyPatch,
):
    asked = []

    def attribute(into: Any, number: int, pointer: ctypes.c_uint64) -> int:
        asked.append(pointer.value)
        into._obj.value = {10: is_legacy, 14: handles}[number]
        return 1 if number in failed else 0

    driver = SimpleNamespace(cuPointerGetAttribute=attribute)
    monkeypatch.setattr(ucx, "_driver", lambda: driver)
    assert ucx.is_exportable(0x7F1234567890) is is_exportable
    assert set(asked) == {0x7F1234567890}


# --- the device of the thread ---------------------------------------------------------------


class Ending(Worker):
    """Notes in which device it is asked for what."""

    def __init__(self, log: list[str], inside: threading.local) -> None:
        super().__init__(log)
        self.inside = inside

    def _note(self, what: str) -> None:
        self.log.append(f"{what} in {getattr(self.inside, 'device', None)}")

    def progress(self) -> None:
        if not self.log or not self.log[-1].startswith("progress"):
            self._note("progress")

    def cancel_inflight_requests(self) -> None:
        self._note("cancel")

    def tag_send(self, buffer: Any, *tags: Any) -> None:
        self._note("tell")


@pytest.mark.parametrize("device", [DEVICE, CPU])
@pytest.mark.parametrize("end", ["abort", "close", "_give_up"])
@pytest.mark.parametrize("has_failed", [False, True])
def test_who_ends_ucx_is_inside_its_device(
    end: str, device: torch.device, has_failed: bool, monkeypatch: pytest.MonkeyPatch
):
    """In whatever thread; CPU transports never touch CUDA, and a device that has failed stops nobody."""
    inside = threading.local()
    log: list[str] = []
    queried: list[torch.device] = []

    @contextlib.contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        assert device == DEVICE
        if has_failed:
            raise RuntimeError("CUDA error: an illegal memory access")
        inside.device = device
        yield
        del inside.device

    stream = SimpleNamespace(query=lambda: queried.append(inside.device))
    monkeypatch.setattr(torch.cuda, "device", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    transport = ucx.UcxTransport(dist.HashStore(), 0, 2, device)
    transport._worker = transport._endpoints[1] = Ending(log, inside)
    if end == "close":
        transport._descriptor = -1  # as after `connect`
        transport._endpoints.clear()
    thread = threading.Thread(target=getattr(transport, end))
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    place = None if has_failed or device == CPU else DEVICE
    wanted = {
        "abort": ["tell", "progress"],
        "close": ["cancel", "progress"],
        "_give_up": ["cancel"],
    }
    assert log == [f"{what} in {place}" for what in wanted[end]]
    assert queried == ([] if place is None else [DEVICE])
    assert not hasattr(inside, "device")
