"""Stores: served, waited for and read; and what to say when one is gone.

A rank trusts the others of its group, and the store. What cannot be read there, as another version
or a stranger has written it, is a `TransportError`, which `as_json` raises.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from types import UnionType
from typing import Any, TypeVar

import torch.distributed as dist

from ringcoll.errors import CollectiveTimeoutError, GroupBrokenError, TransportError
from ringcoll.runtime.machine.facts import family_of, place
from ringcoll.runtime.machine.lines import Address, end_of, sockets
from ringcoll.runtime.machine.program import at_end, started

Answer = TypeVar("Answer")

_FIRST_PAUSE_S, _PAUSE_S = 0.0001, 0.02  # between two looks into a store
_CONNECTING_S = 1.0
_LOOK_S = 0.02  # between two looks whether the host of a store lives, while torch connects to it
_GIVING_UP_S = 5.0  # for torch to give up: 0.6 to 3.1 s in 12 tries with the limit above
# torch looks up the name of the host it connects to. Where a name server does not answer, that
# takes 5 seconds or more, once in a process: the next try does without.
_TRIES = 3
# For an answer that comes at the time limit, and says more: a quarter of the limit, within these.
_LEAST_LATE_S, _LATE_S = 0.25, 1.0


class _NoAnswerError(TimeoutError):
    """A function did not return in time."""


def appears(
    store: dist.Store,
    keys: list[str],
    deadline: float,
    given_up: Callable[[], bool] = lambda: False,
) -> bool:
    """Wait until a store has some keys, and return whether it has them.

    The wait looks into the store, with growing pauses between the looks: a wait in the store itself
    would block the store for other threads. It ends at ``deadline``, as ``time.monotonic`` counts,
    or when ``given_up`` says that it is in vain.
    """
    pause_s = _FIRST_PAUSE_S
    while not store.check(keys):
        if given_up() or time.monotonic() > deadline:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S)
    return True


def read_text(store: dist.Store, key: str) -> str:
    """The text under a key of a store; bytes that are no text are replaced."""
    return store.get(key).decode(errors="replace")


def read_all(store: Any, keys: list[str]) -> list[str]:  # torch's stubs lack two methods
    """The texts under keys that a store has, in one look if the store can do that."""
    if not store.has_extended_api():
        return [read_text(store, key) for key in keys]
    return [text.decode(errors="replace") for text in store.multi_get(keys)]


def read_json(
    store: dist.Store, key: str, parse: Callable[[Any], Any] = lambda value: value
) -> Any:
    """The value under a key of a store, which a rank has written as JSON; see `as_json`."""
    return as_json(key, read_text(store, key), parse)


def as_json(key: str, text: str, parse: Callable[[Any], Any] = lambda value: value) -> Any:
    """What a rank has told under a key, in JSON that ``parse`` reads; or `TransportError`."""
    try:
        return parse(json.loads(text))
    except (LookupError, RecursionError, TypeError, ValueError) as error:
        words = f"no rank writes what the store has under {key!r}: {text[:80]!r}"
        raise TransportError(words) from error


def fields_of(value: Any, *kinds: type | UnionType) -> list[Any]:
    """The values of a list in JSON; `TypeError` or `ValueError` if one is not of its kind.

    >>> fields_of(["a0", 3], str, int)
    ['a0', 3]
    """
    fields = [*value]
    for field, kind in zip(fields, kinds, strict=True):
        if not isinstance(field, kind):
            raise TypeError(f"{field!r:.80} is no {kind}")
    return fields


def address_of(value: Any) -> Address:
    """A host and a port, from JSON; `TypeError` or `ValueError` if no socket can take them."""
    host, port = fields_of(value, str, int)
    host.encode("ascii" if host.isascii() else "idna")
    if "\0" in host or not 0 <= port < 1 << 16:
        raise ValueError(f"{host!r:.80} and {port} are no address")
    return host, port


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


def life(store: dist.Store, rank: int, world_size: int, limit_s: float) -> str:
    """A text that all ranks of a group get, and no earlier group at the store has got.

    All ranks call it. A store may outlive its ranks (``torchrun --max-restarts``, a file), and the
    keys that they have left there look like those of the next ranks, wherever a rank was killed.
    So each rank asks with a word that it draws, and rank 0 answers to the word, by its own word:
    nobody hears what was answered in an earlier life. Rank 0 goes on, as words of earlier lives are
    replaced, until each rank has told, in a key with rank 0's word, that it has heard.

    Raises `CollectiveTimeoutError` if a rank does not come within ``limit_s`` seconds.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + limit_s
    missing = [0] if rank else [*range(1, world_size)]
    if rank:
        store.set(f"word/{rank}", own)
        if appears(store, [f"answer/{own}"], deadline):
            word = read_text(store, f"answer/{own}")
            store.set(f"heard/{word}/{rank}", "")
            return word
    elif _heard_by(store, own, missing, deadline):
        return own
    ranks = ", ".join(f"rank {peer}" for peer in missing)
    text = f"rank {rank} waited {limit_s:g} s for {ranks} to make the group"
    raise CollectiveTimeoutError(text, peer=missing[0])


def _heard_by(store: dist.Store, own: str, missing: list[int], deadline: float) -> bool:
    """Answer to the ranks that are missing until all have heard it: see `life`."""
    answered_words = dict[int, str]()
    pause_s = _FIRST_PAUSE_S
    while True:
        for peer in missing:
            if store.check([f"word/{peer}"]):
                word = read_text(store, f"word/{peer}")
                if answered_words.get(peer) != word:
                    store.set(f"answer/{word}", own)
                    answered_words[peer] = word
        missing[:] = [peer for peer in missing if not store.check([f"heard/{own}/{peer}"])]
        if not missing or time.monotonic() > deadline:
            return not missing
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_S)


def private(store: dist.Store) -> dist.Store:
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


def common(store: dist.Store, name: str = "") -> dist.Store:
    """A part of a store that all callers with the store share, over one connection of the process.

    ``name`` is that of the part, if the callers have agreed on one: see `life`. The connection is
    not the user's; no look over it may be a long wait. Raises as `private`.
    """
    below = _below(store)
    if not isinstance(below, dist.TCPStore):
        return dist.PrefixStore(name, private(store)) if name else private(store)
    key = below.host, below.port, place()
    known = _common.get(key)
    try:
        if not name:
            name = store.compare_set("common", "", uuid.uuid4().hex).decode(errors="replace")
        if known is not None:
            known.check(["alive"])
    except RuntimeError:  # the store is gone, or the one that was at its address before
        known = None
    if known is None:
        known = private(below)
        if known is below:  # it is gone: see `private`
            return store
        while len(_common) >= _MOST_COMMON:
            del _common[next(iter(_common))]
        _common[key] = known
    return dist.PrefixStore(name, known)


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
        clone = begun(partial(_clone, store), _clones)
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


_clones: set[Future[Any]] = set()  # connections that torch is making
MESSAGES: set[Future[Any]] = set()
"""Waits for messages in C++, which end with their connections."""


def _end_calls() -> None:
    """Wait until torch has given up: threads that come back from C++ at the end end the process."""
    for connection in sockets() if MESSAGES else ():  # nothing of the program comes after this
        with contextlib.suppress(OSError):
            connection.getpeername()  # gloo aborts the process if its listening socket is shut down
            connection.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + _GIVING_UP_S
    while (calls := (*_clones, *MESSAGES)) and time.monotonic() < deadline:
        wait(calls, deadline - time.monotonic())


at_end(_end_calls)
for _calls in (_clones, MESSAGES):
    os.register_at_fork(after_in_child=_calls.clear)


class _OwedAnswer(Future[Any]):
    """What a function will have returned, and when it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.begun_s = time.monotonic()


def begun(function: Callable[[], Answer], among: set[Any] | None = None) -> Future[Answer]:
    """Call a function that may never return, such as a look into a stopped process's store.

    Its thread stays behind if it does not return; ``among`` holds its answer meanwhile.
    """
    answer = _OwedAnswer()
    try:
        started(_ask, "ringcoll-asks", function, answer)
    except GroupBrokenError:  # the program ends
        _ask(function, answer)
    if among is not None:
        among.add(answer)
        answer.add_done_callback(among.discard)
    return answer


def _ask(function: Callable[[], Answer], answer: Future[Answer]) -> None:
    try:
        answer.set_result(function())
    except BaseException as error:  # noqa: BLE001  # `Future.result` raises it
        answer.set_exception(error)
        del function, answer  # or the error, which refers to this frame, would keep both


def within(limit_s: float, function: Callable[[], Answer], among: set[Any] | None = None) -> Answer:
    """Call a function that may never return; see `begun`. Raises `TimeoutError` after the limit."""
    answer = begun(function, among)
    try:
        wait([answer], min(limit_s, threading.TIMEOUT_MAX))
        if not answer.done():
            raise _NoAnswerError(f"no answer within {limit_s:g} s")
        return answer.result()
    finally:
        del answer  # or its error, which refers to this frame, would keep it


def answered(store: dist.Store, limit_s: float, function: Callable[[], Answer]) -> Answer:
    """Call a function that asks a store, whose host may be stopped; see `begun`.

    Raises `CollectiveTimeoutError` if no answer comes within ``limit_s`` seconds, and
    `TransportError` if the store is gone.
    """
    try:
        return within(limit_s + max(_LEAST_LATE_S, min(_LATE_S, limit_s / 4)), function)
    except _NoAnswerError:
        text = f"no answer within {limit_s:g} s: {unreachable(store)}"
        raise CollectiveTimeoutError(text, peer=0) from None
    except dist.DistError as error:
        raise gone(store, error) from error


_owed: dict[Address, set[_OwedAnswer]] = {}  # by store
os.register_at_fork(after_in_child=_owed.clear)


def asked(store: dist.Store, limit_s: float, question: Callable[[], Answer]) -> Answer:
    """Ask a store that usually answers at once, and whose host may be stopped; see `begun`.

    Raises `TimeoutError` if the store has owed an answer for ``limit_s`` seconds, to this question
    or to one before, of any group of the process: only the first one waits.
    """
    below = _below(store)
    if not isinstance(below, dist.TCPStore):  # in this process, or on disk
        return question()
    owed, now = _owed.setdefault((below.host, below.port), set()), time.monotonic()
    left_s = min((answer.begun_s for answer in owed.copy()), default=now) + limit_s - now
    if left_s <= 0:
        raise _NoAnswerError(unreachable(store))
    return within(left_s, question, owed)


def gone(store: dist.Store, error: dist.DistError) -> TransportError:
    """The error of a store that cannot be reached any more, from torch's."""
    return TransportError(f"{unreachable(store)}: {str(error).partition(chr(10))[0]}", peer=0)


def served(host: str = "127.0.0.1") -> dist.TCPStore:
    """Serve a store on a free port of one interface; torch's own would listen on all."""
    with socket.create_server((host, 0), family=family_of(host), backlog=1024) as server:
        port = server.getsockname()[1]
        listening = server.detach()
        return dist.TCPStore(
            host, port, None, True, wait_for_workers=False, master_listen_fd=listening
        )
