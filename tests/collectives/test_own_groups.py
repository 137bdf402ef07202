"""Messages of a user's own on groups that torch does not know."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import ringcoll
from ringcoll import testing
from ringcoll.errors import FORKED, CollectiveTimeoutError, TransportError
from ringcoll.runtime.collectives import StoreGroup
from tests.programs import own_groups as program

TRANSPORTS = ("shared", "ucx", "gloo")
SERVER = """
import sys
from ringcoll.runtime.rendezvous.stores import serve_store
store = serve_store()
print(store.port, flush=True)
sys.stdin.read()
"""


def skip_without(transport: str) -> None:
    if transport == "ucx":
        pytest.importorskip("ucxx")


@pytest.mark.processes
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_messages_of_a_tag_are_told_apart_by_their_senders(transport: str):
    """Over UCX ranks 0 and 1 were not; over gloo the tag was refused."""
    skip_without(transport)
    *others, last = testing.ranks(4, backend="gloo").run(program.messages, transport)
    assert others == [[[6.0] * 3, None]] * 3
    assert last == [[6.0] * 3, [[10.0] * 2, [11.0] * 2, [12.0] * 2]]


@pytest.mark.processes
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("sent,wanted", [(2, 4), (4, 2)])
def test_lengths_that_differ_are_errors(transport: str, sent: int, wanted: int):
    skip_without(transport)
    _, (text, tensor) = testing.ranks(2, backend="gloo").run(
        program.lengths_that_differ, transport, sent, wanted
    )
    assert text != "nothing"
    assert tensor == [-1.0] * wanted


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["shared", "ucx", "backend"])
def test_a_process_that_is_forked_off_sends_nothing(transport: str):
    skip_without(transport)
    assert testing.ranks(2, backend="gloo").run(program.forked, transport) == [
        [FORKED, "4.0"],
        ["", "4.0"],
    ]


@pytest.mark.processes
class TestStoreWithoutAnswer:
    """The store's host is killed, or stopped."""

    @pytest.fixture
    def server(self):
        command = [sys.executable, "-c", SERVER]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            yield process
            process.kill()

    def store_at(self, server: subprocess.Popen[str]) -> dist.Store:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        return dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=15))

    def test_monitored_barrier_after_the_store_is_gone(self, server: subprocess.Popen[str]):
        group = StoreGroup(self.store_at(server), 1, 2, 2.0, "gloo")
        server.kill()
        server.wait()
        with pytest.raises(TransportError, match=r"the store at 127\.0\.0\.1:\d+, which rank 0"):
            ringcoll.monitored_barrier(group)
        group.close()

    @pytest.mark.parametrize("call", ["all_reduce", "monitored_barrier", "group"])
    def test_a_stopped_host_of_the_store(self, server: subprocess.Popen[str], call: str):
        store = self.store_at(server)
        calls: dict[str, Callable[[], object]] = {}
        if call != "group":
            group = StoreGroup(store, 1, 2, 1.0, "gloo")
            calls["all_reduce"] = lambda: ringcoll.all_reduce(torch.ones(3), group=group)
            calls["monitored_barrier"] = lambda: ringcoll.monitored_barrier(group)
        calls["group"] = lambda: StoreGroup(store, 1, 2, 1.0, "gloo")
        server.send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match="cannot be reached"):
            calls[call]()
        assert time.monotonic() - begin < 20
        server.send_signal(signal.SIGCONT)
        if call != "group":
            group.close()
