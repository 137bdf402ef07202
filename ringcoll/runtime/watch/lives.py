"""Which ranks of a group have ended, as far as that can be seen from outside.

Transports hear of most deaths by themselves. They do not hear of all: before the ranks are
connected nobody does, and gloo does not in the middle of a long message. The processes of this host
can be looked at. A process is known by its number and the time of its start, as numbers are given
away again; in another time name space than its own by its number alone, as its clock is another
there. To those of other hosts there are lines (`ringcoll.runtime.rendezvous.lines`).

A rank that has made no call yet has not told its process. torch's own group may know that it has
ended: gloo's connection to it ends with it, and a receive then fails at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ringcoll.runtime.machine import own_address, place, process_state
from ringcoll.runtime.rendezvous import (
    address_of,
    fields_of,
    lines,
    parse_json,
    poll_store,
    read_texts,
    store_host,
)

_KEY = "ringcoll/process/{}"
_LOOK_S = 0.5  # for an answer of the store; the next look asks again
_PAUSE_S = 1.0  # between two tries of torch's connections: a try leaves a few bytes behind
_TRY_TAG = 0x7E57C059  # nobody sends such a message
_SMALL = 32  # ranks of a group in which all have lines to all


class Process(NamedTuple):
    """A process: number, time of its start, `place`, and the address of its lines, if any."""

    pid: int
    start: str
    place: str
    address: lines.Address | None = None

    @classmethod
    def own(cls, host: str = "127.0.0.1") -> Process:
        """The process that asks; without a start where ``/proc`` does not show processes.

        ``host`` is this machine's address on the way to the others.
        """
        start = ""
        with contextlib.suppress(OSError):
            start = process_state(os.getpid()).start
        return cls(os.getpid(), start, place(), lines.listening_at(host))

    @classmethod
    def of(cls, fields: Any) -> Process:
        """The process that a rank has told, from JSON."""
        pid, start, where, address = fields_of(fields, int, str, str, list | None)
        return cls(pid, start, where, None if address is None else address_of(address))

    @property
    def is_here(self) -> bool:
        """Whether it is another process of this host."""
        return self.place == place() and self.pid != os.getpid()

    def has_ended(self) -> bool:
        """Whether it has surely ended."""
        if self.place != place():
            return self.address is not None and lines.has_ended(self.address)
        if not self.start or not self.is_here:
            return False
        try:
            now = process_state(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return True
        except OSError:  # this process has no descriptors left
            return False
        if now.state in "ZX":  # a zombie only waits to be reaped
            return True
        start, _, clock = self.start.partition(" ")
        start_now, _, clock_now = now.start.partition(" ")
        return start != start_now and clock in ("", clock_now)


def tell(store: dist.Store, rank: int, process: Process) -> None:
    """Tell the ranks of a group, through the group's store, which process a rank is."""
    with contextlib.suppress(RuntimeError):  # there is no store any more
        store.set(_KEY.format(rank), json.dumps(process))


class Lives:
    """The processes of a group's ranks, each of which calls `tell`.

    ``processes`` are those of other ranks on this host, and ``elsewhere`` those on other hosts,
    as they have been seen.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.store, self.is_published, self._is_gone = store, False, False
        self._unknown = set(range(world_size)) - {rank}
        # Ranks to which there are lines if they are on other hosts: in large groups the ranks at
        # distances that are powers of two, with which most algorithms exchange messages.
        steps = [1 << step for step in range((world_size - 1).bit_length())]
        if world_size <= _SMALL:
            steps = [*range(world_size)]
        self._near = {(rank + way) % world_size for step in steps for way in (step, -step)} - {rank}
        self.processes: dict[int, Process] = {}
        self.elsewhere: dict[int, Process] = {}
        self.native: Callable[[], Any] = lambda: None  # torch's own group, if it is gloo's
        self._cut, self._tried_s = set[int](), time.monotonic()

    def tell(self) -> None:
        """Tell which process this rank is, and make lines to those that have told it before.

        Of two ranks, the second makes a line to the first, which finds that when it looks.
        """
        host = "127.0.0.1"
        with contextlib.suppress(OSError):  # there is no way any more
            host = own_address(store_host(self.store))
        own = Process.own(host)
        self.is_published = True
        tell(self.store, self.rank, own)
        if own.address is not None:
            self._learn(self._near)
            far = (process for peer, process in self.elsewhere.items() if peer in self._near)
            lines.greet(process.address for process in far if process.address is not None)

    def ended(self, *awaited: int | None) -> set[int]:
        """The ranks whose process has surely ended, of those that have told their process.

        Of other hosts, those are looked at to which this rank has lines, and those ``awaited``.
        """
        self._learn()
        others, looked_at = self.elsewhere.copy(), {*self._near, *awaited}
        far = {peer: process for peer, process in others.items() if peer in looked_at}
        ended = {peer for peer, process in (self.processes | far).items() if process.has_ended()}
        return ended | self._cut_off()

    def _cut_off(self) -> set[int]:
        """The ranks that have told no process, and to which torch's own group has no connection."""
        # A try moves the group's sequence number, which torch compares for debugging.
        is_compared = dist.get_debug_level() is dist.DebugLevel.DETAIL
        group = self.native() if self._unknown and not is_compared else None
        if group is not None and time.monotonic() - self._tried_s > _PAUSE_S:
            self._tried_s = time.monotonic()
            gloo = group._get_backend(torch.device("cpu"))
            for peer in self._unknown - self._cut:
                try:
                    gloo.recv([torch.empty(0, device="cpu")], peer, _TRY_TAG)
                except RuntimeError:
                    self._cut.add(peer)
        return self._cut

    def by_host(self) -> dict[str, Any]:
        """The ranks on this host and elsewhere, for the flight report."""
        pids = {str(rank): process.pid for rank, process in self.processes.items()}
        return {"pids": pids, "elsewhere": sorted(self.elsewhere)}

    def look(self) -> None:
        """Learn which processes the ranks are, and begin the lines to other hosts."""
        self._learn()
        if self.elsewhere:
            self.ended()

    def _learn(self, among: Iterable[int] | None = None) -> None:
        """Read the processes of ranks that are not known yet, as far as they have told them."""
        if self._unknown and not self._is_gone:
            with contextlib.suppress(TimeoutError):
                poll_store(self.store, _LOOK_S, partial(self._read, among))

    def _read(self, among: Iterable[int] | None) -> None:
        peers = [*(self._unknown if among is None else self._unknown.intersection(among))]
        keys = [_KEY.format(peer) for peer in peers]
        try:
            if not keys:
                return
            if not self.store.check(keys):  # some have not told it yet
                known = [self.store.check([key]) for key in keys]
                peers, keys = [*compress(peers, known)], [*compress(keys, known)]
            for peer, key, text in zip(peers, keys, read_texts(self.store, keys), strict=True):
                self._unknown.discard(peer)
                process = parse_json(key, text, Process.of)
                if process.is_here:
                    self.processes[peer] = process
                elif process.place != place():
                    self.elsewhere[peer] = process
        except dist.DistNetworkError:  # the store is gone, and torch tells each try at length
            self._is_gone = True
            self._tried_s = -_PAUSE_S  # rank 0 may have had it: torch's connections are tried now
        except RuntimeError:
            pass
