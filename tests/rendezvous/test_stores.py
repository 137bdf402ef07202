"""Connections to stores that are slow to be made."""

from __future__ import annotations

import contextlib
import gc
import itertools
import re
import threading
import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from ringcoll.errors import CollectiveTimeoutError, TransportError
from ringcoll.runtime.launch import Ranks
from ringcoll.runtime.process import CONNECTIONS, call_in_thread, call_within, end_calls
from ringcoll.runtime.rendezvous import fresh_group_name, own_connection, serve_store, stores
from tests.programs import few_files
from tests.programs.threads import together


class Reluctant:
    """A store to which some connections are not made in time."""

    def __init__(self, num_refused: int) -> None:
        self.store = serve_store()
        self.num_refused = num_refused

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def clone(self) -> dist.Store:
        if self.num_refused:
            self.num_refused -= 1
            raise dist.DistNetworkError("The client socket has timed out after 1000ms")
        clone: dist.Store = self.store.clone()  # type: ignore[attr-defined]
        return clone


@pytest.mark.parametrize("num_refused", [0, 1, 2])
def test_a_connection_is_tried_again(num_refused: int) -> None:
    store: Any = Reluctant(num_refused)
    store.set_timeout(timedelta(seconds=77))
    connection = own_connection(store)
    assert connection is not store
    assert store.num_refused == 0
    connection.set("here", "yes")
    assert store.get("here") == b"yes"
    connections: list[Any] = [store, connection]
    for one in connections:
        assert one.timeout == timedelta(seconds=77)


class Mortal:
    """A store that a rank uses, which is killed when it has made so many calls."""

    def __init__(self, store: dist.Store, num_calls: int) -> None:
        self.store, self.num_calls = store, num_calls

    def __getattr__(self, name: str) -> Any:
        if self.num_calls == 0:
            raise SystemError("killed")
        self.num_calls -= 1
        return getattr(self.store, name)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_agree_in_each_life_wherever_those_before_were_killed(world_size: int) -> None:
    for dying, num_calls in itertools.product(range(world_size), range(9)):
        store, earlier, lived = dist.HashStore(), set[str](), list[Any]()
        for limit_s, most in ((0.02, num_calls), (0.02, num_calls // 2), (20.0, 1 << 30)):

            def main(rank: int, most: int = most, limit_s: float = limit_s) -> str:
                own: Any = Mortal(store, most if rank == dying else 1 << 30)  # noqa: B023
                time.sleep(0.002 * ((rank - dying) % world_size))  # noqa: B023
                return fresh_group_name(own, rank, world_size, limit_s)

            earlier.update(name for name in lived if isinstance(name, str))
            lived = together(world_size, main)
        assert len(set(lived)) == 1, (dying, num_calls, lived)
        assert isinstance(lived[0], str), (dying, num_calls, lived)
        assert lived[0] not in earlier


def test_who_does_not_come_to_a_life_is_named() -> None:
    store = dist.HashStore()
    store.set("word/1", "of an earlier life")
    with pytest.raises(CollectiveTimeoutError, match=r"rank 0 waited 0.05 s for rank 1, rank 2"):
        fresh_group_name(store, 0, 3, 0.05)
    with pytest.raises(CollectiveTimeoutError, match=r"rank 2 waited 0.05 s for rank 0 to make"):
        fresh_group_name(store, 2, 3, 0.05)


def test_a_connection_that_others_use_is_never_handed_out() -> None:
    store: Any = Reluctant(1000)
    with pytest.raises(TransportError, match="cannot be reached"):
        own_connection(store)


def test_a_store_that_is_gone_says_so_where_it_is_used() -> None:
    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise dist.DistNetworkError("Broken pipe")

    gone: Any = Gone()
    assert own_connection(gone) is gone


def test_a_store_whose_host_dies_meanwhile_is_not_waited_for() -> None:
    """torch would try again, half a second later or more."""
    given_up = threading.Event()

    class Last(dist.TCPStore):
        """Its host dies while a connection is being made."""

        def clone(self) -> dist.Store:
            servers.clear()
            assert given_up.wait(30)
            raise dist.DistNetworkError("The client socket has timed out after 1000ms")

    servers = [serve_store()]
    store = Last(servers[0].host, servers[0].port, None, False)
    before = set(CONNECTIONS)
    assert own_connection(store) is store
    (connecting,) = CONNECTIONS - before
    threading.Timer(0.2, given_up.set).start()
    end_calls()  # at the end of the program
    assert connecting.done()


def test_a_store_at_which_nobody_listens_is_tried_by_nobody() -> None:
    class Last(dist.TCPStore):
        """It gives two more answers."""

        def check(self, keys: list[str]) -> bool:
            asked.append(keys)
            if len(asked) > 2:
                raise dist.DistNetworkError("Broken pipe")
            return False

        def clone(self) -> dist.Store:
            raise AssertionError("torch connects")

    asked: list[list[str]] = []
    server = serve_store()
    store = Last(server.host, server.port, None, False)
    del server
    assert own_connection(store) is store
    assert len(asked) == 3


@pytest.mark.processes
@pytest.mark.parametrize("num_left", [0, 1])
def test_a_lack_of_descriptors_is_told_at_once(num_left: int) -> None:
    """A connection takes two for a moment; without the second torch would try for seconds."""
    with Ranks(1) as ranks:  # no thread of another test's closes a descriptor there
        (text,) = ranks.run(few_files.private_store, num_left)
    assert re.search(r"cannot be reached: .*Too many open files", text)


def test_an_error_of_what_is_asked_keeps_nothing() -> None:
    class Asked:
        def fail(self) -> None:
            raise LookupError("none")

    asked = Asked()
    kept = weakref.ref(asked)
    gc.disable()
    try:
        with contextlib.suppress(LookupError):
            call_within(5.0, asked.fail)
        del asked
        deadline = time.monotonic() + 10  # for the end of the thread
        while kept() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("is_prefixed", [False, True])
def test_a_store_without_connections_is_its_own(is_prefixed: bool) -> None:
    store: dist.Store = dist.HashStore()
    if is_prefixed:
        store = dist.PrefixStore("a", store)
    own = own_connection(store)
    store.set("here", "yes")
    assert own.get("here") == b"yes"


def test_what_is_asked_has_a_limit() -> None:
    def fail() -> None:
        raise LookupError("none")

    assert call_within(5.0, lambda: 3) == 3
    assert call_in_thread(lambda: 4).result(5.0) == 4
    with pytest.raises(LookupError):
        call_within(5.0, fail)
    is_over = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.2 s"):
        call_within(0.2, is_over.wait)
    is_over.set()


def test_whether_a_store_ends_with_this_process() -> None:
    store = serve_store()
    other = dist.PrefixStore("other", store.clone())  # type: ignore[attr-defined]
    assert stores.is_served_here(other)
    del store
    gc.collect()
    assert not stores.is_served_here(other)
    assert not stores.is_served_here(dist.HashStore())


def test_a_store_that_owes_an_answer_is_asked_no_more() -> None:
    """Neither over another prefix or connection, nor for longer by who waits for less."""
    store, answers = serve_store(), threading.Event()
    other = dist.PrefixStore("other", store.clone())  # type: ignore[attr-defined]
    assert stores.poll_store(store, 5.0, lambda: 3) == 3
    with pytest.raises(TimeoutError, match="no answer within"):
        stores.poll_store(store, 0.2, lambda: answers.wait(30))
    calls: list[int] = []
    with pytest.raises(TimeoutError, match="which rank 0 or the launcher holds"):
        stores.poll_store(other, 0.1, lambda: calls.append(1))
    assert calls == []
    assert stores.poll_store(serve_store(), 0.1, lambda: 4) == 4
    assert (
        stores.poll_store(dist.HashStore(), 0.0, threading.current_thread)
        is threading.current_thread()
    )
    answers.set()
    deadline = time.monotonic() + 10
    while stores._owed[store.host, store.port]:
        assert time.monotonic() < deadline
    assert stores.poll_store(other, 5.0, lambda: 5) == 5
