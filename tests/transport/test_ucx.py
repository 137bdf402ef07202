"""UCX: what it is handed, and when."""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringcoll.errors import MissingExtraError, PeerLostError
from ringcoll.transport import catalogue, ucx
from ringcoll.transport.base import Message
from tests.fakes.fake_cuda import DEVICE, fake_cuda, on_device


def test_ucx_takes_bytes_of_the_device_by_their_address():
    for dtype in (torch.bfloat16, torch.float8_e5m2, torch.complex64, torch.bool):
        memory = torch.zeros(10).to(dtype)[3:8]
        buffer = ucx._buffer(on_device(memory))
        assert buffer.cuda
        assert buffer.ptr == memory.data_ptr()
        assert buffer.nbytes == buffer.shape[0] == memory.nbytes
        assert ucx._buffer(on_device(memory)) is buffer
        host = ucx._buffer(memory)  # the same address, as it may be after memory was freed
        assert not host.cuda
        assert host.ptr == buffer.ptr
        assert ucx._buffer(on_device(memory)) is buffer
    empty = ucx._buffer(on_device(torch.zeros(0)))
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
    with ucx._current(DEVICE):
        assert inside == [DEVICE]
        assert made == [DEVICE], "the device has a context when something is done on it"
    with ucx._current(torch.device("cpu")):
        assert (inside, made) == ([], [DEVICE])


# --- where UCX is missing -------------------------------------------------------------


def test_a_missing_ucx_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setitem(sys.modules, "ucxx._lib.libucxx", None)
    ucx._ucx.cache_clear()
    with pytest.raises(MissingExtraError, match=r"pip install 'ringcoll\[ucx\]'"):
        ucx.check()
    # Beside shared memory, there is gloo.
    catalogue._automatic.cache_clear()
    with caplog.at_level(logging.DEBUG, logger="ringcoll"):
        assert catalogue.beside("shared", "cpu").name == "gloo"
    (line,) = caplog.messages
    assert "does not stand for ucx" in line
    assert "ringcoll[ucx]" in line
    ucx._ucx.cache_clear()
    catalogue._automatic.cache_clear()
    assert catalogue.resolved("cpu", "gloo") == "gloo"


def test_a_ucx_that_cannot_be_loaded_is_as_if_missing(monkeypatch: pytest.MonkeyPatch):
    """As beside an MPI library that has loaded another UCX."""

    def load(name: str) -> None:
        raise OSError(f"{name}: undefined symbol")

    monkeypatch.setattr(ucx, "import_module", load)
    ucx._ucx.cache_clear()
    catalogue._automatic.cache_clear()
    try:
        with pytest.raises(MissingExtraError, match=r"cannot be loaded.*undefined symbol"):
            ucx.check()
        assert catalogue.beside("shared", "cpu").name == "gloo"
    finally:
        ucx._ucx.cache_clear()
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
