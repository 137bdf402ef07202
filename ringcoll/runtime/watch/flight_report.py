"""Records of processes, merged over a group's ranks, in words.

`ringcoll.runtime.watch.flight_recorder` keeps them.

Records of one group have the same token. Ranks are listed from the most to the least suspicious:
those that cannot be asked; then by the operation that they have come to, the ranks that have come
least far first, and of these the ranks that are in no operation; then by how many wait for them.
In words, operations are counted from 1.

A process answers the processes of its user on a Unix socket, on Linux only. The socket has a name
without a file, which ends with the process. The name holds the process's number and its name space
of process ids, as containers may share a network. A process that asks sends nothing, and the answer
is one text. The kernel tells both ends which user the other end is, so that neither believes a
socket or a process of another user.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ringcoll.errors import ArgumentError, GroupBrokenError
from ringcoll.runtime.machine import process_state
from ringcoll.runtime.process import start_thread

SENDS = "sends and receives"
"""The transport's name in a record of the user's own messages in a group."""
FOREIGN = "belongs to another user"
"""Why `ask` does not believe a process."""

_SLOW_S = 5.0  # for a process that asks, and then does not read
_PAUSE_S = 1.0  # after a failure of the kernel, such as too many open files
_CREDENTIALS = 12  # bytes: numbers of the process, its user and its group
_STATES = {
    "R": "running",
    "S": "asleep",
    "D": "waiting for a device",
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
}
_LARGEST_WORLD = 1 << 16
_MISSING = "has left no record"

Record = dict[str, Any]
Members = Mapping[int, tuple[Record, Record]]  # by rank: records of the process and of the group

_CALL = {"number": int, "call": str, "complete": bool}
_RUNNING = {"number": int, "call": str, "meets": bool, "step": (int, None), "peer": (int, None),
            "is_receive": bool, "chunks": [int]}  # fmt: skip
_GROUP = {"group": str, "transport": str, "rank": int, "world_size": int, "ranks": [int],
          "operations": [_CALL],
          "running": (_RUNNING, None), "queued": [_CALL], "failure": (str, None), "pids": {"": int},
          "elsewhere": [int]}  # fmt: skip
_RECORD = {"version": int, "host": str, "pid": int, "command": str, "threads": {"": str},
           "groups": [_GROUP]}  # fmt: skip


def _fits(value: Any, shape: Any) -> bool:
    """Whether JSON has a shape: a type, a list of a shape, alternatives, or an object's fields.

    ``{"": shape}`` is an object with any fields of that shape.
    """
    match shape:
        case list([each]):
            return type(value) is list and all(_fits(item, each) for item in value)
        case tuple():
            return any(_fits(value, each) for each in shape)
        case {"": each}:
            return type(value) is dict and all(_fits(item, each) for item in value.values())
        case dict():
            is_whole = type(value) is dict and shape.keys() == value.keys()
            return is_whole and all(_fits(value[name], each) for name, each in shape.items())
    return value is None if shape is None else type(value) is shape


def read_record(text: str) -> Record:
    """Read the record of a process; `ArgumentError` if the text is something else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if _fits(value, _RECORD) and value["version"] == 1:
        groups = value["groups"]
        if all(0 <= group["rank"] < group["world_size"] <= _LARGEST_WORLD for group in groups):
            return dict(value)
    raise ArgumentError("not the record of a process", "record", "version 1", text[:80])


def related(records: Iterable[Record], pids: Collection[int]) -> tuple[list[Record], set[int]]:
    """The records of processes, and of all that share groups with them; and all that they name."""
    records, named = list(records), set(pids)
    while True:
        groups = [
            group
            for record in records
            for group in record["groups"]
            if record["pid"] in named or named.intersection(group["pids"].values())
        ]
        tokens = {group["group"] for group in groups}
        more = {pid for group in groups for pid in group["pids"].values()}
        for record in records:
            if any(group["group"] in tokens for group in record["groups"]):
                more.add(record["pid"])
        if more <= named:
            return [record for record in records if record["pid"] in named], named
        named |= more


def report(records: Sequence[Record], silent: Mapping[int, str] | None = None) -> list[str]:
    """Say in lines what the ranks of each group do, the most suspicious first.

    ``silent`` says why processes of which there is no record did not answer.
    """
    groups: dict[str, dict[int, tuple[Record, Record]]] = defaultdict(dict)
    for record in records:
        for group in record["groups"]:
            named = _named(group)
            groups[group["group"]][named["rank"]] = record, named
    states = {name: _state(members) for name, members in groups.items()}
    names = sorted(groups, key=states.__getitem__, reverse=True)
    # Every group may have messages of the user's own: they are told if somebody waits for one.
    has_sends = {
        name: any(group["transport"] == SENDS for _, group in members.values())
        for name, members in groups.items()
    }
    names = [name for name in names if any(states[name]) or not has_sends[name]] or names
    numbers = {name: number for number, name in enumerate(names, 1)}
    is_quiet = not any(map(any, states.values()))
    lines = []
    for name, number in numbers.items():
        group = next(iter(groups[name].values()))[1]
        busy, broken = states[name]
        state = f"{busy or 'none'} in an operation{f', broken for {broken}' * bool(broken)}"
        is_whole = group["ranks"] == [*range(group["world_size"])]
        ranks = f"ranks {', '.join(map(str, group['ranks']))}"
        ranks = f"{group['world_size']} ranks" if is_whole else ranks
        where = f"{ranks} over {group['transport']}"
        lines.append(f"group {number}, {where}: {state}")
        if is_quiet or busy or broken:
            merged = _merged(groups[name], records, silent or {}, numbers)
            lines += [f"  {text}" for text in merged]
    return lines


def _named(group: Record) -> Record:
    """A rank's end of a group, with the ranks of the program where they are known."""
    running, pids = group["running"], group["pids"]
    if len(group["ranks"]) != group["world_size"]:
        return group | {"ranks": [*range(group["world_size"])]}
    known = dict(enumerate(group["ranks"]))
    return group | {
        "rank": known[group["rank"]],
        "running": running and running | {"peer": known.get(running["peer"])},
        "pids": {str(rank): pids[str(i)] for i, rank in known.items() if str(i) in pids},
        "elsewhere": [known.get(rank) for rank in group["elsewhere"]],
    }


def _state(members: Members) -> tuple[int, int]:
    """How many ranks are in an operation of a group, and for how many it is broken."""
    broken = sum(group["failure"] is not None for _, group in members.values())
    busy = [group for _, group in members.values() if group["running"] and group["failure"] is None]
    return len(busy), broken


def _merged(
    members: Members,
    records: Sequence[Record],
    silent: Mapping[int, str],
    numbers: Mapping[str, int],
) -> list[str]:
    waiting = defaultdict(list)
    for rank, (_, group) in sorted(members.items()):
        if group["running"] and group["failure"] is None:
            waiting[group["running"]["peer"]].append(rank)
    lines = []
    for rank in next(iter(members.values()))[1]["ranks"]:
        is_running = False
        if rank in members:
            record, group = members[rank]
            position, is_running = _position(group), group["running"] is not None
            text = f"rank {rank} (pid {record['pid']}) {doing(group)}"
            text += _code(record, rank, group, numbers)
        else:
            position, text = _absent(rank, members, records, silent)
        if waiting[rank]:
            text += f"; {_ranks(waiting[rank])} for it"
        lines.append((position, is_running, -len(waiting[rank]), rank, text))
    return [*_disagreement(members), *(text for *_, text in sorted(lines))]


def _position(group: Record) -> float:
    """The operation that a rank is in, or comes to next: a whole number, of any length."""
    if group["running"]:
        return cast("float", group["running"]["number"])
    return cast("float", group["operations"][-1]["number"] + 1) if group["operations"] else 0


def doing(group: Record) -> str:
    """The state of a rank in a group, in words."""
    running, queued = group["running"], group["queued"]
    if group["failure"] is not None:
        return f"is in a broken group: {group['failure']}"
    if running is None:
        done = group["operations"][-1:]
        text = "is not in any operation, "
        text += f"after {_short(done[0])}" if done else "and has made none"
    else:
        text = f"is in {_short(running)}{_waits(running)}"
    if queued:
        text += f", {len(queued)} more queued, up to #{queued[-1]['number'] + 1}"
    return text


def _short(operation: Record) -> str:
    return f"{operation['call'].partition('(')[0]} #{operation['number'] + 1}"


def _waits(running: Record) -> str:
    chunks, peer = running["chunks"], running["peer"]
    is_own = running["step"] is None and running["is_receive"]  # a message of the user's own
    if peer is None and not is_own:
        return ", waits until all ranks have come" if running["meets"] else ", waits for no rank"
    data = f"chunk{'s' * (len(chunks) > 1)} {', '.join(map(str, chunks))}" if chunks else "data"
    waits = f"waits for {data} of {'any rank' if peer is None else f'rank {peer}'}"
    if not running["is_receive"]:
        waits = f"waits until rank {peer} takes {data}"
    step = "" if running["step"] is None else f" step {running['step']}"
    return f"{step}, {waits}"


def _code(record: Record, rank: int, group: Record, numbers: Mapping[str, int]) -> str:
    """Where the user's code is; ranks that are threads have the names of `run_threads`."""
    threads = record["threads"]
    place = threads.get(f"rank-{rank}") or threads.get("MainThread") or "an unknown place"
    if group["failure"] is None:
        if group["running"]:
            return f"; at {place}"
        for other in record["groups"]:
            if other["running"] and other["failure"] is None:
                return f", but in group {numbers[other['group']]} (at {place})"
    return f" (in user code, {place})"


def _absent(
    rank: int, members: Members, records: Sequence[Record], silent: Mapping[int, str]
) -> tuple[float, str]:
    groups = [group for _, group in members.values()]
    pid = next((pids for group in groups if (pids := group["pids"].get(str(rank)))), None)
    if pid is None:
        if any(rank in group["elsewhere"] for group in groups):
            return float("inf"), f"rank {rank} is on another host"
        return -1.0, f"rank {rank} has not come to the group"
    other = next((record for record in records if record["pid"] == pid), None)
    if other is None:
        return -1.0, f"rank {rank} (pid {pid}) {silent.get(pid, _MISSING)}"
    place = other["threads"].get("MainThread", "an unknown place")
    return -1.0, f"rank {rank} (pid {pid}) has closed the group (in user code, {place})"


def _ranks(ranks: Sequence[int]) -> str:
    return f"{', '.join(f'rank {rank}' for rank in ranks)} {'wait' if len(ranks) > 1 else 'waits'}"


def _disagreement(members: Members) -> list[str]:
    """The first operation that two ranks have called differently, if there is one."""
    calls: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, (_, group) in sorted(members.items()):
        for operation in (*group["operations"], *group["queued"]):
            calls[operation["number"]][operation["call"]].append(rank)
    for number, by_call in sorted(calls.items()):
        names = {call.partition("(")[0] for call in by_call}
        in_full = [call for call in by_call if "(" in call]  # others are not resolved yet
        if len(names) > 1 or len(in_full) > 1:
            who = ", ".join(
                f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} called {call}"
                for call, ranks in by_call.items()
            )
            return [f"the ranks disagree on #{number + 1}: {who}"]
    return []


def _prefix() -> str:
    """The beginning of the names of all processes that see each other's numbers."""
    return f"ringcoll-{Path('/proc/self/ns/pid').stat().st_ino}-"


def _other_end(connection: socket.socket) -> tuple[int, int]:
    numbers = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS)
    pid, user, _ = memoryview(numbers).cast("i")
    return pid, user


class Answering:
    """A thread that answers with the text that ``answer`` returns, until `end`.

    Raises ``OSError`` if the system has no such sockets, or another user has taken the name;
    `GroupBrokenError` if the program ends.
    """

    def __init__(self, answer: Callable[[], str]) -> None:
        if sys.platform != "linux":
            raise OSError("only Linux has sockets with names and without files")
        self._answer = answer
        self._socket = socket.socket(socket.AF_UNIX)
        self._has_ended = False
        try:
            self._socket.bind(f"\0{_prefix()}{os.getpid()}")
            self._socket.listen()
            self._thread = start_thread(self._serve, "ringcoll-answers")
        except (OSError, GroupBrokenError):
            self._socket.close()
            raise

    def end(self) -> None:
        """End the thread, and give up the name."""
        self._has_ended = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._socket.close()
        if self._thread is not threading.current_thread():
            self._thread.join(_PAUSE_S)  # the name is free when the thread does not sleep on it

    def leave_to_parent(self) -> None:
        """Let go of the socket in a process that was forked off; its parent goes on to answer."""
        self._has_ended = True
        self._socket.close()

    def _serve(self) -> None:
        while not self._has_ended:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if not self._has_ended:
                    time.sleep(_PAUSE_S)
                continue
            with connection, contextlib.suppress(OSError):
                if _other_end(connection)[1] == os.geteuid():
                    connection.settimeout(_SLOW_S)
                    connection.sendall(self._text().encode(errors="replace"))

    def _text(self) -> str:
        try:
            return self._answer()
        except Exception as error:  # noqa: BLE001  # the asking process gets it
            return f"{type(error).__name__}: {error}"


def answering() -> list[int]:
    """The processes that answer, of all users; `ask` finds out which are this user's."""
    try:
        names = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace")
        pids = re.findall(rf" @{re.escape(_prefix())}(\d{{1,9}})$", names, re.MULTILINE)
    except OSError:
        return []
    return sorted(set(map(int, pids)))


def ask(pids: Iterable[int], limit_s: float) -> tuple[dict[int, str], dict[int, str]]:
    """Ask processes, all at once; their answers, and the reasons of those that did not answer."""
    deadline = time.monotonic() + limit_s
    answers: dict[int, str] = {}
    silent: dict[int, str] = {}
    with contextlib.ExitStack() as stack:
        asked: dict[int, socket.socket] = {}
        for pid in pids:
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.settimeout(limit_s)
            try:
                connection.connect(f"\0{_prefix()}{pid}")
            except OSError:
                silent[pid] = in_words(pid)  # without groups, if it has not ended
                continue
            if _other_end(connection) == (pid, os.geteuid()):
                asked[pid] = connection
            else:
                silent[pid] = FOREIGN
        for pid, connection in asked.items():
            answer = bytearray()
            try:
                while True:
                    connection.settimeout(max(deadline - time.monotonic(), 0.001))
                    if not (piece := connection.recv(1 << 16)):
                        break
                    answer += piece
                answers[pid] = answer.decode(errors="replace")
            except OSError:
                silent[pid] = f"does not answer within {limit_s:g} s: it {in_words(pid)}"
    return answers, silent


def in_words(pid: int) -> str:
    """The state of a process that does not answer."""
    try:
        state = process_state(pid).state
    except OSError:
        return "has ended"
    return f"is {_STATES[state]}" if state in _STATES else "has ended"
