"""One table of costs and rules for all ranks: when they meet, and when they have become slow.

Problem: the best algorithm depends on a few numbers that differ between machines, and on how many
ranks share a core. They can be measured (`ringcoll.group.message_costs`), but every rank would get
other numbers, and ranks that choose differently do not match. So rank 0 decides, and publishes the
decision in the group's store (`agree`):

1. Rank 0 publishes the table, if it is known (from a file of ``ringcoll tune``, or because this
   user has measured on this machine for as many ranks in the last hours), says that all ranks
   measure now, or what is wrong.
2. If all ranks measure, rank 0 publishes the table of *its* measurements.

A group that refits notices that its operations have become slow, measures its network anew, and
fits its algorithms to it (`Refits`, `refit`). Every rank looks at the same operations: the first
look is at the eighth, and in each of them rank 0 sends a byte to all others, which says how many
operations later the next look is, about a tenth of a second, or that all measure now. Rank 0
compares the operation that takes the most time with its first runs. Where the median of its last
ones is clearly longer, the ranks probe (`ringcoll.group.message_costs`); rank 0 fits, proves and
publishes; and all go on with the new table at this very operation. If no link has changed, what is
slow is something else: nothing is swapped, and the times become the usual ones.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ringcoll.cost import FORCED, MEASURED, Fitted, Table, built_in
from ringcoll.errors import (
    ArgumentError,
    CollectiveTimeoutError,
    RingcollError,
    RulesError,
    ScheduleError,
    TooLargeError,
    TransportError,
    TuningFileError,
)
from ringcoll.group.message_costs import CPU, measure, probe
from ringcoll.machine import (
    answered,
    appears,
    as_json,
    cores,
    read_json,
    settings,
    tuning,
)
from ringcoll.schedule import contract
from ringcoll.transport import Handle, Message, Transport, costs_of, names

_log = logging.getLogger("ringcoll")
_TOKEN_TAG, _LOOK_TAG = 0x7E57C058, 0x7E57C05A  # of 31 bits; nothing else is under way meanwhile
_FIRST_LOOK = 8
_LATER = 255  # operations at most; a byte
_LOOK_S = 0.1
_MOST_KINDS = 256  # of operations
_LEAST_S = 1e-3  # shorter operations do not count
_FIRST_RUNS, _LAST_RUNS = 5, 7
_LEAST_NBYTES = 1 << 16
_MOST_FIT_S = 10.0  # of rank 0, for which the others wait
_SLOW = 1.5  # times as long as usual
BUDGET_S = 1.5

# What this process measured as rank 0.
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
            token = torch.zeros(1, dtype=torch.uint8, device="cpu")
            peers = range(1, self.world_size)
            sends = [Message(peer, token, _TOKEN_TAG) for peer in peers]
            for handle, peer in zip(self.transport.post([], sends), peers, strict=True):
                self._wait(handle, peer)

    def hear(self, key: str, parse: Callable[[Any], Any] = lambda value: value) -> Any:
        """Wait for a note of rank 0, and read it."""
        if not self.transport.ordered:
            token = torch.zeros(1, dtype=torch.uint8, device="cpu")
            (handle,) = self.transport.post([Message(0, token, _TOKEN_TAG)], [])
            self._wait(handle, 0)
        elif not appears(self.store, [key], self._deadline):
            raise self._late(0)
        return read_json(self.store, key, parse)

    def _wait(self, handle: Handle, peer: int) -> None:
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
    refits: bool = False,
) -> Table:
    """Agree on the table of costs and rules of a group; every rank has to call it.

    Rank 0 takes the costs from the first of these that it has: the file of ``ringcoll tune``; an
    earlier measurement for the same transport, numbers of ranks and hosts, and type of device, by
    this process, or in the user's cache (`ringcoll.machine.tuning.remember`); a measurement now, by
    all ranks. Rank 0's ``RINGCOLL_ALGORITHM``, ``fit`` and ``refits`` count for all ranks, and all
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
        rules = settings.forced_rules(forced)
        fitted = tuning.fit_for(fit, tuple(transport.hosts))
    except RingcollError as error:
        is_of_rules = isinstance(error, RulesError | ScheduleError)
        notes.tell("decision", _Decision(str(error), is_of_rules))
        raise
    complete = partial(replace, forced=rules, fit=fitted, refits=refits)
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
    """The table in a text."""
    return replace(Table.from_json(as_json("table", text)), announces=announces)


def _follow(transport: Transport, notes: Notes, device: torch.device) -> Table:
    """Follow the decision of rank 0."""
    error, is_of_rules, hosts, forced, text = notes.hear("decision", _Decision._make)
    if error:
        raise (RulesError if is_of_rules else TuningFileError)(f"rank 0: {error}")
    own = settings.forced_text()
    if own == forced:
        settings.forced_rules(own)  # which registers what is in its files
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


class Refits:
    """When the ranks of a group look, and what rank 0 has seen since the last fit."""

    def __init__(self) -> None:
        self.next_look, self._at = _FIRST_LOOK, 0
        self.begin()

    def begin(self) -> None:
        """Forget all runs of operations."""
        self._first: dict[Any, list[float]] = {}
        self._last: dict[Any, deque[float]] = {}
        self._looked, self._later = time.monotonic(), _FIRST_LOOK

    def note(self, request: Any, seconds: float) -> None:
        """Note a run of an operation."""
        if seconds < _LEAST_S:
            return
        if len(self._first) >= _MOST_KINDS and request not in self._first:
            self.begin()
        first = self._first.setdefault(request, [])
        if len(first) < _FIRST_RUNS:
            first.append(seconds)
        else:
            self._last.setdefault(request, deque(maxlen=_LAST_RUNS)).append(seconds)

    @property
    def ratio(self) -> float:
        """Median of the longest operation's last runs by that of the first; 1 if they are few."""
        request = max(self._last, key=lambda each: sum(self._last[each]), default=None)
        if request is None or len(self._last[request]) < _LAST_RUNS:
            return 1.0
        return median(self._last[request]) / median(self._first[request])

    def look(self, transport: Transport, number: int, limit_s: float) -> bool:
        """Agree whether all measure now; every rank calls it, at the same operation."""
        word = torch.zeros(1, dtype=torch.uint8, device="cpu")
        if transport.rank:
            messages: tuple[list[Message], list[Message]] = [Message(0, word, _LOOK_TAG)], []
        else:
            each_s = (time.monotonic() - self._looked) / max(1, number - self._at)
            # A single short operation may lie between two looks, and says little of the next.
            most = min(_LATER, 2 * self._later)
            self._later = min(most, max(1, round(_LOOK_S / max(each_s, 1e-9))))
            word[0] = 0 if self.ratio > _SLOW else self._later
            others = range(1, transport.world_size)
            messages = [], [Message(peer, word, _LOOK_TAG) for peer in others]
        for handle in transport.post(*messages):
            transport.wait(handle, limit_s)
        later = int(word)
        self.next_look = number + max(1, later)
        self._looked, self._at = time.monotonic(), number
        return later == 0


def refit(
    transport: Transport,
    store: dist.Store,
    table: Table,
    uses: Iterable[tuple[str, int]],
    *,
    limit_s: float,
    budget_s: float,
    by_itself: bool = False,
) -> Table:
    """Measure the network, fit to it, and return the table with the fit; every rank calls it.

    No messages are under way on the transport, and nobody else uses the store. ``uses`` are
    collectives and bytes to fit; those of rank 0 count. The measurement is to take ``budget_s``.
    ``by_itself``: nobody has asked for it. Then the table stays as it is where no link has become
    slower, and short data have no fit of their own.
    """
    notes = Notes(transport, store, limit_s)
    costs = table.parameters.of_rank
    measured = replace(probe(transport, budget_s, limit_s), rank_costs=costs)
    if transport.rank:
        hear = partial(notes.hear, "fit")
        values = hear() if transport.shares_process else answered(store, limit_s, hear)
    else:
        values = None
        try:
            patience_s = min(limit_s / 2, _MOST_FIT_S) if by_itself else limit_s / 2
            fitted = _fitted(measured, table.fit, uses, by_itself, patience_s)
            values = fitted and fitted.to_json()
        except RingcollError as error:
            _log.warning("not fitted: %s", error)
        notes.tell("fit", values)
    # Rank 0 reads what it has written, too, which registers the schedules.
    return table if values is None else replace(table, fit=Fitted.from_json(values))


def _fitted(
    measured: Any,
    before: Fitted | None,
    uses: Iterable[tuple[str, int]],
    by_itself: bool,
    patience_s: float,
) -> Fitted | None:
    """The algorithms for the network as it is now; the other ranks wait for them."""
    from ringcoll.search import fit, slower_links
    from ringcoll.simulation import topology_from_text, topology_of

    topology, known = topology_of(measured), None
    if before:
        with suppress(ArgumentError):  # it was fitted to a network that a text cannot say
            known = topology_from_text(before.graph)
    slower = slower_links(known, topology) if known else ()
    for words in slower:
        _log.warning("a link has become slower: %s", words)
    if by_itself and known and not slower:
        _log.warning("no link has become slower: the algorithms stay as they are")
        return None
    sizes: dict[str, set[int]] = {}
    for collective, nbytes in uses:
        is_used = nbytes >= _LEAST_NBYTES if by_itself else nbytes > 0
        if is_used and not contract(collective).at_least_once:
            sizes.setdefault(collective, set()).add(nbytes)
    date, end = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic() + patience_s

    def advance(name: str) -> None:
        if time.monotonic() > end:
            raise TooLargeError(f"it takes longer than {patience_s:.3g} s", most=0)

    fitted = None
    for collective, asked in sizes.items():
        ordered = sorted(asked)
        few = {ordered[0], ordered[len(ordered) // 2], ordered[-1]}
        try:
            best = fit(collective, topology, sizes=[*few], exact=False, advance=advance)
        except RingcollError as error:
            _log.warning("%s is not fitted: %s", collective, error)
            continue
        fitted = best.fitted(date, fitted)
        _log.info("fitted anew: %s", "; ".join(fitted.reasons))
    return fitted
