"""Connecting over gloo to ranks of other hosts that do not come so far."""

from __future__ import annotations

import threading
import time
from importlib import import_module
from typing import Any

import pytest
import torch.distributed as dist

from ringcoll.errors import CollectiveTimeoutError, TransportError
from ringcoll.transport.gloo import GlooTransport

gloo: Any = import_module("ringcoll.transport.gloo")


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> GlooTransport:
    """Rank 0 of two hosts; rank 1 has come, and died before it told its address."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(gloo, "meet", lambda *arguments: (0, 1))
    return GlooTransport(dist.HashStore(), 0, 2)


def test_the_time_limit_names_who_does_not_come(transport: GlooTransport) -> None:
    with pytest.raises(CollectiveTimeoutError, match="rank 1"):
        transport.connect(0.2)


def test_who_waits_for_an_address_can_be_woken(transport: GlooTransport) -> None:
    began = time.monotonic()
    waker = threading.Timer(0.1, transport.abort)
    waker.start()
    with pytest.raises(TransportError, match="gave up"):
        transport.connect(30.0)
    waker.join()
    assert time.monotonic() - began < 10
