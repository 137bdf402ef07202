"""One table of costs and rules for all ranks, when they meet.

Problem: the best algorithm depends on a few numbers that differ between machines, and on how many
ranks share a core. They can be measured (`ringcoll.runtime.group.message_costs`), but every rank
would get other numbers, and ranks that choose differently do not match. So rank 0 decides, and
publishes the decision in the group's store (`agree`):

1. Rank 0 publishes the table, if it is known (from a file of ``ringcoll tune``, or because this
   user has measured on this machine for as many ranks in the last hours), says that all ranks
   measure now, or what is wrong.
2. If all ranks measure, rank 0 publishes the table of *its* measurements.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ringcoll.errors import (
    CollectiveTimeoutError,
    RingcollError,
    RulesError,
    ScheduleError,
    TransportError,
    TuningFileError,
)
from ringcoll.runtime.group.message_costs import CPU, measure
from ringcoll.runtime.machine import cores, settings
from ringcoll.runtime.rendezvous import parse_json, read_json, wait_for_keys
from ringcoll.runtime.transport import Message, Transport, costs_of, names
from ringcoll.runtime.user_files import forced_rules, tuning
from ringcoll.schedules.cost import FORCED, MEASURED, Table, built_in

_log = logging.getLogger("ringcoll")
_TOKEN_TAG = 0x7E57C058  # of 31 bits; nothing else is under way meanwhile

# Tables that this process has measured as rank 0.
_measured: dict[tuple[str, int, int, str], Table] = {}


class _Decision(NamedTuple):
    """The decision of rank 0: an error, or what all ranks do."""

    error: str = ""
    is_of_rules: bool = False
    hosts: int = 1
    forced: str = ""
    table: str | None = None


class Notes:
    """Notes between the ranks of a group: the text goes through the store.

    A message says that a note is in the store, because a transport knows when a peer is lost.
    On a transport without tags the ranks look into the store.
    """

    def __init__(self, transport: Transport, store: dist.Store, timeout_s: float) -> None:
        self.transport, self.store, self.timeout_s = transport, store, timeout_s
        self.rank, self.world_size = transport.rank, transport.world_size
        self._deadline = time.monotonic() + timeout_s

    @property
    def left_s(self) -> float:
        """Seconds until the time limit."""
        return max(self._deadline - time.monotonic(), 0.001)

    def tell(self, key: str, value: Any) -> None:
        """Write a note of rank 0 for all other ranks."""
        self.store.set(key, json.dumps(value))
        if not self.transport.ordered:
            self._exchange_tokens(range(1, self.world_size), are_sent=True)

    def hear(self, key: str, parse: Callable[[Any], Any] = lambda value: value) -> Any:
        """Wait for a note of rank 0, and read it."""
        if not self.transport.ordered:
            self._exchange_tokens([0], are_sent=False)
        elif not wait_for_keys(self.store, [key], self._deadline):
            raise self._late(0)
        return read_json(self.store, key, parse)

    def _exchange_tokens(self, peers: Sequence[int], *, are_sent: bool) -> None:
        token = torch.zeros(1, dtype=torch.uint8, device="cpu")
        tokens = [Message(peer, token, _TOKEN_TAG) for peer in peers]
        handles = self.transport.post(*(([], tokens) if are_sent else (tokens, [])))
        for handle, peer in zip(handles, peers, strict=True):
            try:
                self.transport.wait(handle, self.left_s)
            except CollectiveTimeoutError as error:
                raise self._late(peer) from error

    def _late(self, peer: int) -> CollectiveTimeoutError:
        waited = f"rank {self.rank} waited {self.timeout_s:g} s for rank {peer}"
        return CollectiveTimeoutError(f"{waited} to agree on a choice of algorithms", peer=peer)


def agree(
    transport: Transport,
    store: dist.Store,
    timeout_s: float,
    *,
    measurable: bool | None = None,
    device: torch.device | None = None,
    fit: str | None = None,
) -> Table:
    """Agree on the table of costs and rules of a group; every rank has to call it.

    Rank 0 takes the costs from the first of these that it has: the file of ``ringcoll tune``; an
    earlier measurement for the same transport, numbers of ranks and hosts, and type of device, by
    this process, or in the user's cache (`ringcoll.runtime.user_files.tuning`); a measurement
    now, by all ranks. Rank 0's ``RINGCOLL_ALGORITHM`` and ``fit`` count for all ranks, and all
    raise the error if rank 0's variables name rules or a file that cannot be used.

    No messages are under way on the transport, and nobody else uses the store. ``measurable``:
    whether costs may be measured, by default on transports with tags and without checksums.
    """
    settings.log_as_asked()
    rank, world_size = transport.rank, transport.world_size
    device = CPU if device is None else device
    kind = device.type
    if measurable is None:
        is_plain = not (transport.ordered or transport.verifies)
        measurable = is_plain and transport.name in names(kind)
    notes = Notes(transport, store, timeout_s)
    if rank:
        return _follow(transport, notes, device)
    hosts = len(set(transport.hosts))
    where = transport.name, world_size, hosts, kind
    try:
        table = tuning.known_table(*where, _measured.get(where))
        forced = settings.forced_text()
        rules = forced_rules(forced)
        fitted = tuning.fit_for(fit, tuple(transport.hosts))
    except RingcollError as error:
        is_of_rules = isinstance(error, RulesError | ScheduleError)
        notes.tell("decision", _Decision(str(error), is_of_rules))
        raise
    complete = partial(replace, forced=rules, fit=fitted)
    link = costs_of(transport.name)
    usual = built_in(transport.name, link, world_size, hosts=hosts, cores=cores(), device=kind)
    if table is None and not (measurable and world_size > 1):
        table = usual
    text = None if table is None else complete(table).dumps()
    notes.tell("decision", _Decision(hosts=hosts, forced=forced, table=text))
    if text is None:
        costs = measure(transport, notes.left_s, hosts=hosts, cores=cores(), device=device)
        table = _measured[where] = replace(usual, parameters=costs, source=MEASURED)
        tuning.remember(settings.measured_file(), table)
        text = complete(table).dumps()
        notes.tell("table", text)
    return _table(text, announces=True)


@lru_cache(maxsize=64)  # groups with equal tables have one, so that a choice is made once
def _table(text: str, *, announces: bool) -> Table:
    return replace(Table.from_json(parse_json("table", text)), announces=announces)


def _follow(transport: Transport, notes: Notes, device: torch.device) -> Table:
    error, is_of_rules, hosts, forced, text = notes.hear("decision", _Decision._make)
    if error:
        raise (RulesError if is_of_rules else TuningFileError)(f"rank 0: {error}")
    own = settings.forced_text()
    if own == forced:
        forced_rules(own)  # which registers what is in its files
    else:
        line = "rank %d: %s is %r here and %r on rank 0, which counts for all"
        _log.warning(line, notes.rank, FORCED, own, forced)
    if text is None:
        measure(transport, notes.left_s, hosts=hosts, device=device)
        text = notes.hear("table")
    try:
        return _table(text, announces=False)
    except (TuningFileError, TypeError) as error:
        raise TransportError(f"rank {notes.rank} cannot read rank 0's table: {error}") from error
