"""Stores of torch: served, connected to, and asked, also where their host is stopped or gone."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Callable
from concurrent.futures import wait
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from ringcoll.errors import CollectiveTimeoutError, TransportError
from ringcoll.runtime.machine import family_of, place, sockets
from ringcoll.runtime.process import (
    CONNECTIONS,
    Answer,
    NoAnswerError,
    PendingCall,
    call_in_thread,
    call_within,
)
from ringcoll.runtime.rendezvous.lines import Address, end_of

_CONNECTING_S = 1.0
_LOOK_S = 0.02  # between two looks whether the host of a store lives, while torch connects to it
# torch looks up the name of the host it connects to. Where a name server does not answer, that
# takes 5 seconds or more, once in a process: the next try does without.
_TRIES = 3
# For an answer that comes at the time limit, and says more: a quarter of the limit, within these.
_LEAST_LATE_S, _LATE_S = 0.25, 1.0


def unreachable(store: dist.Store) -> str:
    """The error of a store that does not answer any more."""
    below = _below(store)
    where = f" at {below.host}:{below.port}" if isinstance(below, dist.TCPStore) else ""
    return f"the store{where}, which rank 0 or the launcher holds, cannot be reached"


def is_served_here(store: dist.Store) -> bool:
    """Whether this process serves a store, which ends with it."""
    below = _below(store)
    return isinstance(below, dist.TCPStore) and any(
        connection.getsockname()[1] == below.port
        and connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        for connection in sockets()
    )


def store_host(store: dist.Store) -> str:
    """The host that serves a store; the loopback interface, for a store without a network."""
    below = _below(store)
    return below.host if isinstance(below, dist.TCPStore) else "127.0.0.1"


def _below(store: dist.Store) -> dist.Store:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def own_connection(store: dist.Store) -> dist.Store:
    """A connection of its own to a store: a long wait on a connection blocks all its other users.

    Raises `TransportError` if the store is there, and cannot be connected to.
    """
    reason = ""
    for _ in range(_TRIES):
        try:
            store.check(["alive"])
        except (AttributeError, RuntimeError):
            return store  # it is gone: whoever uses it next says so, and for what it is needed
        try:
            connected = _connected(store)
        except (dist.DistError, OSError) as error:
            reason = str(error).partition("\n")[0]
        except (AttributeError, RuntimeError, NotImplementedError):
            return store  # within the process, or on disk: there is no connection
        else:
            return store if connected is None else connected
    raise TransportError(f"{unreachable(store)}: {reason}")


_common: dict[tuple[str, int, str], dist.Store] = {}  # by host, port, and place of this process
_MOST_COMMON = 8
os.register_at_fork(after_in_child=_common.clear)


def common_connection(store: dist.Store, name: str = "") -> dist.Store:
    """A part of a store that all callers with the store share, over one connection of the process.

    ``name`` is that of the part, if the callers have agreed on one: see `fresh_group_name`. The
    connection is not the user's; no look over it may be a long wait. Raises as `own_connection`.
    """
    below = _below(store)
    if not isinstance(below, dist.TCPStore):
        return dist.PrefixStore(name, own_connection(store)) if name else own_connection(store)
    key = below.host, below.port, place()
    connection = _common.get(key)
    try:
        if not name:
            name = store.compare_set("common", "", uuid.uuid4().hex).decode(errors="replace")
        if connection is not None:
            connection.check(["alive"])
    except RuntimeError:  # the store is gone, or the one that was at its address before
        connection = None
    if connection is None:
        connection = own_connection(below)
        if connection is below:  # it is gone: see `own_connection`
            return store
        while len(_common) >= _MOST_COMMON:
            del _common[next(iter(_common))]
        _common[key] = connection
    return dist.PrefixStore(name, connection)


def _connected(store: dist.Store) -> dist.Store | None:
    """Another connection to a store; ``None`` if its host dies meanwhile.

    torch then connects for up to 3 s more, whatever the limit. So a socket tells of the death.
    """
    below = _below(store)
    if not isinstance(below, dist.TCPStore):
        return _clone(store)
    with socket.create_connection((below.host, below.port), _CONNECTING_S) as line:
        line.setblocking(False)
        os.close(os.dup(line.fileno()))  # where no descriptor is left, torch tries for seconds
        clone = call_in_thread(partial(_clone, store), CONNECTIONS)
        try:
            while not wait([clone], _LOOK_S).done:
                if end_of(line) is not None:
                    return None
            return clone.result()
        finally:
            del clone  # or its error, which refers to this frame, would keep it


def _clone(store: Any) -> dist.Store:
    limit = store.timeout
    store.set_timeout(timedelta(seconds=_CONNECTING_S))
    try:
        clone = store.clone()
    finally:
        store.set_timeout(limit)
    clone.set_timeout(limit)
    return clone  # type: ignore[no-any-return]


def ask_store(store: dist.Store, limit_s: float, function: Callable[[], Answer]) -> Answer:
    """Call a function that asks a store, whose host may be stopped; see `call_in_thread`.

    Raises `CollectiveTimeoutError` if no answer comes within ``limit_s`` seconds, and
    `TransportError` if the store is gone.
    """
    try:
        return call_within(limit_s + max(_LEAST_LATE_S, min(_LATE_S, limit_s / 4)), function)
    except NoAnswerError:
        text = f"no answer within {limit_s:g} s: {unreachable(store)}"
        raise CollectiveTimeoutError(text, peer=0) from None
    except dist.DistError as error:
        raise store_gone_error(store, error) from error


_owed: dict[Address, set[PendingCall]] = {}  # by store
os.register_at_fork(after_in_child=_owed.clear)


def poll_store(store: dist.Store, limit_s: float, question: Callable[[], Answer]) -> Answer:
    """Ask a store that usually answers at once, and whose host may be stopped.

    Raises `TimeoutError` if the store has owed an answer for ``limit_s`` seconds, to this question
    or to one before, of any group of the process: only the first one waits.
    """
    below = _below(store)
    if not isinstance(below, dist.TCPStore):  # in this process, or on disk
        return question()
    owed, now = _owed.setdefault((below.host, below.port), set()), time.monotonic()
    left_s = min((call.begun_s for call in owed.copy()), default=now) + limit_s - now
    if left_s <= 0:
        raise NoAnswerError(unreachable(store))
    return call_within(left_s, question, owed)


def store_gone_error(store: dist.Store, error: dist.DistError) -> TransportError:
    """The error of a store that cannot be reached any more, from torch's."""
    return TransportError(f"{unreachable(store)}: {str(error).partition(chr(10))[0]}", peer=0)


def serve_store(host: str = "127.0.0.1") -> dist.TCPStore:
    """Serve a store on a free port of one interface; torch's own would listen on all."""
    with socket.create_server((host, 0), family=family_of(host), backlog=1024) as server:
        port = server.getsockname()[1]
        listening = server.detach()
        return dist.TCPStore(
            host, port, None, True, wait_for_workers=False, master_listen_fd=listening
        )
