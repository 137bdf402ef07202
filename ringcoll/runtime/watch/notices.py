"""Notices: a rank tells the other ranks, and the user, that something takes too long or fails.

`Notices` are keys of the group's store, which ranks write only then:

=================  ==========================================================================
key                value
=================  ==========================================================================
``state/RANK``     the rank's last operations, and what it waits for; as JSON
``verdict``        the reason why the group is broken, of the first rank that fails; as JSON
``broken/RANK``    number of ranks that have lost their connection to the rank
``left/RANK``      number of the last operation of a rank that has closed the group, or -1
=================  ==========================================================================

A value that cannot be read counts as missing. A store that is gone is asked no more, as torch logs
each try at length; a store whose host is stopped is asked again when it has answered.

`announce` tells the user of a failure at once. A program may look at an asynchronous operation late
or never, and torch's ``DistributedDataParallel`` raises the error with other words around it.
``torchrun`` ends all processes within 0.1 s of the death of one, so that even an error that is
raised at once is not printed. `monitored_barrier` names the ranks that do not come to it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from ringcoll.errors import (
    CollectiveTimeoutError,
    CorruptMessageError,
    PeerLostError,
    RingcollError,
    TransportError,
)
from ringcoll.runtime.machine import error_file
from ringcoll.runtime.rendezvous import poll_store, read_json, read_text, wait_for_keys

LEFT = "left/{}"
"""Key of the number of the last operation of a rank that has closed the group."""
_LOOK_S = 0.5  # for an answer, if one may look again
_MOST_S = 5.0  # for an answer on which an error depends
_FEW = 8  # ranks that are listed
FAILURES: dict[str, type[TransportError]] = {
    "timeout": CollectiveTimeoutError,
    "corrupt": CorruptMessageError,
    "transport": TransportError,
    "lost": PeerLostError,
}
"""Kinds of failures in a verdict. A plain `TransportError` is nobody's death: the ranks could not
be connected."""

_log = logging.getLogger("ringcoll")
Answer = TypeVar("Answer")


def kind_of(error: RingcollError) -> str:
    """The kind of a failure, as a verdict has it."""
    kinds: dict[type, str] = {error_type: kind for kind, error_type in FAILURES.items()}
    return kinds.get(type(error), "lost")


def patience_s(limit_s: float) -> float:
    """Seconds for which a store's answer is waited for, beside an operation's time limit."""
    return min(_MOST_S, limit_s / 4)


class Names:
    """How a group and its ranks are called in what a user reads.

    Ranks are those of the program. A group that torch does not know, without ``members``, has its
    own; so has the default group, as they are the same.
    """

    def __init__(self, members: Sequence[int] = (), name: str = "") -> None:
        self.members = [*members]
        listed, more = ", ".join(map(str, members[:_FEW])), len(members) - _FEW
        ranks = f" of ranks {listed}{f' and {more} more' * (more > 0)}" if members else ""
        self.group = f"the group{f' {name}' * bool(name)}{ranks}"

    def of(self, rank: int | None) -> str:
        """The name of a rank of the group; `None` for a rank that is not known."""
        if rank is None:
            return "a rank"
        return f"rank {self.members[rank] if self.members else rank}"

    def translated(self, text: str) -> str:
        """The words of a transport, which knows the group's own ranks only."""
        names = {f"rank {rank}": f"rank {member}" for rank, member in enumerate(self.members)}
        return re.sub(r"\brank \d+\b", lambda match: names.get(match[0], match[0]), text)


class Notices:
    """The keys of a group's store, as a rank reads and writes them; nobody else uses the store.

    ``patience_s`` is the time limit of an answer of the store, in seconds. Without an answer a
    value is ``None``, like a value that nobody has written.
    """

    def __init__(self, store: dist.Store, rank: int) -> None:
        self.store, self.rank, self.patience_s = store, rank, _LOOK_S
        self.is_gone = self.is_silent = False  # the store
        self.names_of: Callable[[], Names] = Names  # torch knows a group after its making

    @property
    def names(self) -> Names:
        """How the group and its ranks are called."""
        return self.names_of()

    def verdict(self) -> dict[str, Any] | None:
        """Why the group is broken; ``None`` as long as no rank says so."""
        return self._read("verdict", _verdict)

    def tell_verdict(self, verdict: dict[str, Any]) -> None:
        """Say why the group is broken, unless another rank has said it before."""
        self._ask(lambda: self.store.compare_set("verdict", "", json.dumps(verdict)))

    def tell_broken(self, peer: int) -> None:
        """Say that this rank's connection to a peer is broken; which is the cause is not known."""
        self._ask(lambda: self.store.add(f"broken/{peer}", 1))

    def broken(self, peer: int) -> int:
        """Number of ranks that have said that their connection to a rank is broken."""
        return self._ask(lambda: self.store.add(f"broken/{peer}", 0)) or 0

    def state(self, peer: int) -> dict[str, Any] | None:
        """The notice of a rank about its operations."""
        return self._read(f"state/{peer}", _state)

    def tell_state(
        self,
        calls: dict[int, Any],
        waits: tuple[int, int] | None,
        barrier: tuple[int, int, str] | None = None,
    ) -> None:
        """Tell this rank's last calls, and the operation and rank that it waits for.

        A rank that waits for all ranks names itself. ``barrier`` is the number of monitored
        barriers, of the calls before the barrier that the rank is in, and its site.
        """
        state = json.dumps({"calls": calls, "waits": waits, "barrier": barrier})
        self._ask(lambda: self.store.set(f"state/{self.rank}", state))

    def last_of(self, peer: int) -> int | None:
        """Number of the last operation of a rank that has closed the group, otherwise ``None``."""
        key, store = LEFT.format(peer), self.store
        return self._ask(lambda: int(read_text(store, key)) if store.check([key]) else None)

    def leave(self, last: int) -> None:
        """Tell that this rank has closed the group, after an operation; -1 if there was none."""
        self._ask(lambda: self.store.set(LEFT.format(self.rank), str(last)))

    def _read(self, key: str, parse: Callable[[Any], dict[str, Any]]) -> dict[str, Any] | None:
        store = self.store
        return self._ask(lambda: read_json(store, key, parse) if store.check([key]) else None)

    def _ask(self, ask: Callable[[], Answer]) -> Answer | None:
        self.is_silent = False
        if not self.is_gone:
            try:
                return poll_store(self.store, self.patience_s, ask)
            except dist.DistNetworkError:
                self.is_gone = True
            except TimeoutError:
                self.is_silent = True
            except (RuntimeError, ValueError):  # about to be closed, or not of a rank
                pass
        return None


def _verdict(notice: Any) -> dict[str, Any]:
    kind = notice["kind"]
    if kind != "mismatch":
        peer = None if notice["peer"] is None else int(notice["peer"])
        return {"kind": FAILURES[kind] and kind, "peer": peer, "text": str(notice["text"])}
    calls = {int(rank): (str(call), str(place)) for rank, call, place in notice["calls"]}
    (first, _), (second, _) = calls.values()
    if first == second:
        raise ValueError("the calls are the same")
    rows = [[rank, *call] for rank, call in calls.items()]
    return {"kind": kind, "calls": rows, "number": int(notice["number"])}


def _state(notice: Any) -> dict[str, Any]:
    calls = {}
    for number, (call, lengths, site) in dict(notice["calls"]).items():
        numels = {int(block): int(numel) for block, numel in dict(lengths or {}).items()}
        calls[int(number)] = str(call), numels, str(site)
    waits, barrier = notice["waits"], notice["barrier"]
    if waits is not None:
        awaited, peer = waits
        waits = int(awaited), int(peer)
    if barrier is not None:
        place, before, site = barrier
        barrier = int(place), int(before), str(site)
    return {"calls": calls, "waits": waits, "barrier": barrier}


def announce(text: str, *, is_raised: bool) -> None:
    """Tell the failure that has broken a group in one line, as an error of the log ``ringcoll``.

    A failure that ``is_raised`` in the thread that made the call needs no line, except under
    ``torchrun``, whose error file gets the line, too, if it is empty.
    """
    file = error_file()
    if is_raised and file is None:
        return
    line = " ".join(text.split())
    say(line, logging.ERROR)
    if file is not None:
        _write(file, line)


def say(line: str, level: int = logging.WARNING) -> None:
    """Write a line to the log, which Python writes to stderr unless the program configures it."""
    _log.log(level, "%s%s", "" if _log.hasHandlers() else "ringcoll: ", line)


def _write(file: Path, line: str) -> None:
    """Write an error file as ``ErrorHandler`` of ``torch.distributed.elastic`` does.

    ``torchrun`` fails on a file that is not whole, and may end this process at any moment; so the
    file gets its name when it is written.
    """
    # The summary of torchrun shows the first.
    extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
    content = json.dumps({"message": {"message": line, "extraInfo": extra}})
    with (
        contextlib.suppress(OSError),
        tempfile.NamedTemporaryFile("w", dir=file.parent, encoding="utf-8") as draft,
    ):
        draft.write(content)
        draft.flush()
        os.link(draft.name, file)  # not over another file


def monitored_barrier(
    store: dist.Store,
    rank: int,
    world_size: int,
    number: int,
    timeout_s: float,
    wait_all_ranks: bool,
    given_up: Callable[[], bool] = lambda: False,
) -> None:
    """Wait until all ranks have come, or name the missing ranks.

    Rank 0 looks for the keys of all ranks, and publishes the result; it names all missing ranks if
    ``wait_all_ranks``, otherwise the first. ``number``, that of the barrier, is the same on all
    ranks. ``given_up`` says whether the wait is in vain, and raises `PeerLostError` then.
    """

    def appear(key: str, deadline: float) -> bool:
        has_come = wait_for_keys(store, [key], deadline, given_up)
        if not has_come and given_up():
            raise PeerLostError(f"rank {rank} gave up monitored_barrier")
        return has_come

    keys = [f"{number}/{peer}" for peer in range(world_size)]
    limit = f"{1000 * timeout_s:g} ms"
    store.set(keys[rank], "")
    deadline = time.monotonic() + timeout_s
    if rank:
        # Rank 0 may come as late as the time limit allows, and then waits as long for others.
        if not appear(keys[0], deadline):
            raise CollectiveTimeoutError(
                f"rank {rank}: rank 0 failed to pass monitored_barrier in {limit}", peer=0
            )
        if not appear(f"{number}/over", deadline + timeout_s + patience_s(timeout_s)):
            raise CollectiveTimeoutError(
                f"rank {rank}: rank 0 was lost in monitored_barrier", peer=0
            )
        if failure := read_text(store, f"{number}/over"):
            raise CollectiveTimeoutError(  # in gloo's words, which programs look for
                f"Rank {rank} successfully reached monitoredBarrier, but received errors while "
                f"waiting for send/recv from rank 0: {failure}"
            )
        return
    missing = []
    for peer in range(1, world_size):
        if not appear(keys[peer], deadline):
            missing.append(peer)
            if not wait_all_ranks:
                break
    failure = (
        f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} failed to pass "
        f"monitoredBarrier in {limit}, Rank 0 timed out in monitoredBarrier"
    )
    store.set(f"{number}/over", failure if missing else "")
    if missing:
        raise CollectiveTimeoutError(failure, peer=missing[0])
    for end in ("over", *range(world_size)):
        store.delete_key(f"{number - 1}/{end}")  # all ranks have left the barrier before
