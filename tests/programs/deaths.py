"""The conformance suite of faults, second half: ranks that die, stop, leave, or lack what they need.

Each `Ending` has processes of its own: some ranks come to an end in a phase of their work, and the others
have to say so. `run_ending` runs one, and `judge` says what became of each rank.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import ringcoll
from ringcoll import UserOp
from ringcoll.errors import RingcollError
from ringcoll.runtime.collectives import communicator
from ringcoll.runtime.collectives.groups import abort
from ringcoll.runtime.group import Communicator, agreement
from ringcoll.runtime.operation import operation
from ringcoll.runtime.watch import monitor
from tests.programs.disagreements import PROMPT_S, names_operation
from tests.programs.mortal import Ended, die, run_mortals

__all__ = ["ENDINGS", "Ending", "Told", "judge", "run_ending"]

_LIMIT_S = 60.0  # of an operation, so that no time limit helps
_STOPPED_S = 2.0  # of an operation that only the time limit ends
_CONTINUED_S = _STOPPED_S + PROMPT_S + 3.0  # for those that were stopped
_LONG = 3_000_000  # elements

Die = Callable[..., Any]
"""Ends the process of a victim; does nothing elsewhere."""


class Told(NamedTuple):
    """What a rank tells: class and text of its error, the rank that it blames, and when it came."""

    kind: str
    text: str
    is_typed: bool
    at_s: float
    peer: int | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """How ranks end.

    Parameters
    ----------
    name
        The row of the table.
    run
        What all ranks do: ``run(is_victim, store)``.
    victims
        The ranks that end.
    world_size
        Number of ranks.
    store_dies
        Whether rank 0 serves the store.
    ends
        What the others get: ``"lost"``, an error that names a victim; ``"limit"``, the same at the time
        limit; ``"nothing"``, no error.
    lives
        Whether the victims live on, and get an error, too.
    but
        Transports over which it cannot happen.
    named
        The ranks of which an error names one, if not a victim: a rank that cannot ask the store knows
        only who gave up before it.
    """

    name: str
    run: Callable[[bool, dist.Store], object]
    victims: tuple[int, ...] = (1,)
    world_size: int = 3
    store_dies: bool = False
    ends: str = "lost"
    lives: bool = False
    but: tuple[str, ...] = ()
    named: tuple[int, ...] = ()

    @property
    def limit_s(self) -> float:
        """Time limit of the operations, in seconds."""
        return _STOPPED_S if self.ends == "limit" else _LIMIT_S


# --- phases ---------------------------------------------------------------------------


def _end(*_: object, **__: object) -> Any:
    die(told=time.monotonic())


def _total(numel: int = 100, **options: Any) -> None:
    x = torch.ones(numel)
    ringcoll.all_reduce(x, **options)
    assert set(x.tolist()) == {dist.get_world_size()}, "a wrong value"


def _has_not_met() -> None:
    """Make the group as new: its ranks meet at the next operation, as on a group of another backend."""
    ringcoll.close()


def _before_meeting(is_victim: bool, store: dist.Store) -> None:
    _has_not_met()
    if is_victim:
        _end()
    _total()


def _meeting(is_victim: bool, store: dist.Store) -> None:
    _has_not_met()
    if is_victim:
        mock.patch.object(Communicator, "_meet", _end).start()
    _total()


def _connecting(is_victim: bool, store: dist.Store) -> None:
    """The victim has told its address, and waits for the others."""
    _has_not_met()
    if is_victim:
        threading.Timer(0.2, _end).start()
    else:
        time.sleep(0.5)
    _total()


def _tuning(is_victim: bool, store: dist.Store) -> None:
    _has_not_met()
    agreement._measured.clear()
    if is_victim:
        mock.patch.object(agreement, "measure", _end).start()
    _total()


def _idle(is_victim: bool, store: dist.Store) -> None:
    ringcoll.barrier()
    if is_victim:
        _end()
    time.sleep(0.5)
    _total()


def _at_once(is_victim: bool, store: dist.Store) -> None:
    ringcoll.barrier()
    if is_victim:
        _end()
    _total()


def _within(is_victim: bool, numel: int) -> None:
    ringcoll.barrier()
    add: Callable[[Tensor, Tensor], Tensor] = _end if is_victim else torch.add
    _total(numel, op=UserOp(add, commutative=True, name="add"), algorithm="ring")


def _between(is_victim: bool, store: dist.Store) -> None:
    for number in range(200):
        if is_victim and number == 100:
            _end()
        _total()


def _planning(is_victim: bool, store: dist.Store) -> None:
    ringcoll.barrier()
    if is_victim:
        mock.patch.object(operation, "compile_plan", _end).start()
    ringcoll.all_reduce.plan(torch.ones(100), algorithm="ring")()


def _queued(is_victim: bool, store: dist.Store) -> None:
    ringcoll.barrier()
    if is_victim:
        _end()
    works: list[Any] = [ringcoll.all_reduce(torch.ones(100), async_op=True) for _ in range(20)]
    for work in works:
        work.wait()


def _callback(is_victim: bool, store: dist.Store) -> None:
    work: Any = ringcoll.all_reduce(torch.ones(100), async_op=True)
    then = work.get_future().then(_end if is_victim else lambda future: future.value())
    then.wait()
    ringcoll.barrier()


def _destroying(is_victim: bool, store: dist.Store) -> None:
    _total()
    if is_victim:
        mock.patch.object(Communicator, "close", _end).start()
        dist.destroy_process_group()
    _total()


def _all_destroy(is_victim: bool, store: dist.Store) -> None:
    _total()
    if is_victim:
        mock.patch.object(Communicator, "close", _end).start()
    dist.destroy_process_group()


def _stopped(is_victim: bool, store: dist.Store) -> None:
    """The victim goes on when the others have met their errors."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store.set(f"pid {rank}", str(os.getpid()))
    pids = [int(store.get(f"pid {peer}")) for peer in range(size)]
    ringcoll.barrier()
    if is_victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank == size - 1:
        for pid in pids:
            threading.Timer(_CONTINUED_S, _continue, (pid,)).start()
    _total()
    _total()  # what the victim has missed, it hears in its next call


def _stopped_before_meeting(is_victim: bool, store: dist.Store) -> None:
    """The store answers nobody; the ranks have made their ends of the group, and have not met."""
    rank, size = dist.get_rank(), dist.get_world_size()
    _has_not_met()
    communicator(None, torch.device("cpu"))
    if is_victim:
        store.set("pid", str(os.getpid()))
        store.wait([f"ready {peer}" for peer in range(1, size)])
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        pid = int(store.get("pid"))
        store.set(f"ready {rank}", "")
        if rank == size - 1:
            threading.Timer(_CONTINUED_S, _continue, (pid,)).start()
        time.sleep(0.3)
    _total()


def _continue(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _closes(is_victim: bool, store: dist.Store) -> None:
    ringcoll.barrier()
    if is_victim:
        ringcoll.close()
    else:
        _total()


def _breaks(is_victim: bool, store: dist.Store) -> None:
    """The connections of one rank are closed below the library, or by `abort` where there are none.

    That rank, which cannot see that it is the cause, is the first to say what it has lost.
    """
    ringcoll.barrier()
    if is_victim:
        mock.patch.object(monitor, "_PATIENCE_S", monitor._PATIENCE_S / 2).start()
        time.sleep(0.2)
        over = communicator(None, torch.device("cpu")).transport.name
        if over != "gloo" or not _cut_connections(store):
            abort(dist.GroupMember.WORLD)
    _total()


def _cut_connections(store: dist.Store) -> int:
    """Shut down the connections of this process but those to the store."""
    count, to_store = 0, getattr(store, "port", None)
    for entry in tuple(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as end:
                if end.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                if to_store not in (end.getpeername()[1], end.getsockname()[1]):
                    end.shutdown(socket.SHUT_RDWR)
                    count += 1
    return count


def _without_files(is_victim: bool, store: dist.Store) -> None:
    """No file may grow on one rank, as on a full disk."""
    _has_not_met()
    if is_victim:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    _total()


def _without_descriptors(is_victim: bool, store: dist.Store) -> None:
    _has_not_met()
    if is_victim:
        used = len([*Path("/proc/self/fd").iterdir()])
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, most))
    _total()


def _without_memory(is_victim: bool, store: dist.Store) -> None:
    """One rank has no room for working memory."""
    ringcoll.barrier()
    x = torch.ones(4 * _LONG)
    if is_victim:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20), resource.RLIM_INFINITY))
    try:
        ringcoll.all_reduce(x, op="avg", algorithm="ring", wire_dtype=torch.bfloat16)
    finally:
        if is_victim:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)


ENDINGS: dict[str, Ending] = {
    ending.name: ending
    for ending in (
        Ending("killed before the ranks meet", _before_meeting),
        Ending("killed as the ranks meet", _meeting),
        Ending("killed as the ranks connect", _connecting),
        Ending("killed while costs are measured", _tuning),
        Ending("killed while the group is idle", _idle),
        Ending("killed in a short operation", lambda is_victim, _: _within(is_victim, 12)),
        Ending("killed in a long operation", lambda is_victim, _: _within(is_victim, _LONG)),
        Ending("killed between two operations", _between),
        Ending("killed in `plan()`", _planning),
        Ending("killed with operations queued", _queued),
        Ending("killed in a callback", _callback),
        Ending("killed in `destroy_process_group`", _destroying),
        Ending("killed as all destroy the group", _all_destroy, ends="nothing"),
        Ending("the store's host is killed before the ranks meet", _before_meeting, (0,),
               store_dies=True),
        Ending("the store's host is killed while idle", _idle, (0,), store_dies=True),
        Ending("the store's host is killed in a long operation",
               lambda is_victim, _: _within(is_victim, _LONG), (0,), store_dies=True),
        Ending("two are killed at once", _at_once, (1, 2), 4),
        Ending("two are killed, one hosts the store", _at_once, (0, 2), 4, store_dies=True),
        Ending("stopped (SIGSTOP)", _stopped, ends="limit", lives=True),
        Ending("the store's host is stopped", _stopped, (0,), store_dies=True, ends="limit",
               lives=True, named=(0, 1, 2)),
        Ending("the store's host is stopped before the ranks meet", _stopped_before_meeting, (0,),
               store_dies=True, ends="limit", lives=True),
        Ending("closes the group", _closes),
        Ending("its connections are closed", _breaks, lives=True),
        Ending("no file may grow (a full disk)", _without_files, lives=True,
               but=("gloo", "ucx")),
        Ending("no descriptors are left", _without_descriptors, lives=True),
        Ending("no memory is left", _without_memory, lives=True),
    )
}  # fmt: skip


# --- on a rank ------------------------------------------------------------------------


def _on_rank(store: dist.Store, rank: int, world_size: int, name: str, transport: str) -> Told:
    """Be a rank: do what the phase says, and tell what came of it."""
    ending = ENDINGS[name]
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit, options = timedelta(seconds=ending.limit_s), ringcoll.Options(transport=transport)
    dist.init_process_group(
        "ringcoll", store=store, rank=rank, world_size=world_size, timeout=limit,
        pg_options=options,
    )  # fmt: skip
    # What torch does before all have the group is torch's own.
    store.set(f"made {rank}", "")
    if rank in ending.victims:
        with contextlib.suppress(RuntimeError):  # another victim had the store
            store.wait([f"made {peer}" for peer in range(world_size)], limit)
    begin_s = time.monotonic()
    try:
        ending.run(rank in ending.victims, store)
        told = Told("", "", True, time.monotonic())
    except Exception as error:  # noqa: BLE001  # whatever it is, it is judged
        is_typed = isinstance(error, RingcollError)
        peer = getattr(error, "peer", None)
        told = Told(type(error).__name__, str(error), is_typed, time.monotonic(), peer)
    if ending.lives or ending.ends == "limit" or name == "closes the group":
        told = told._replace(at_s=told.at_s - begin_s)
    if dist.is_initialized():
        dist.destroy_process_group()
    return told


def run_ending(name: str, transport: str) -> list[Any]:
    """Run an ending on processes of its own; what each rank told, or that it has ended."""
    ending = ENDINGS[name]
    return run_mortals(_on_rank, ending.world_size, name, transport, store_dies=ending.store_dies)


# --- judgement ------------------------------------------------------------------------


def seconds_of(ending: Ending, told: list[Any]) -> dict[int, float]:
    """Seconds from the end of the victims to the error of each rank that met one."""
    ends = [item.told for item in told if isinstance(item, Ended) and item.told is not None]
    ended_s = max((at_s for at_s in ends if isinstance(at_s, float)), default=0.0)
    return {
        rank: item.at_s - ended_s
        for rank, item in enumerate(told)
        if isinstance(item, Told) and item.kind
    }


def judge(ending: Ending, told: list[Any]) -> str:
    """What became of an ending, in a word: ``"right"``, or what is wrong on some rank."""
    seconds = seconds_of(ending, told)
    words = [_judged(ending, rank, item, seconds.get(rank, 0.0)) for rank, item in enumerate(told)]
    return next((word for word in words if word != "right"), "right")


def _judged(ending: Ending, rank: int, item: Any, seconds: float) -> str:
    is_victim = rank in ending.victims
    if isinstance(item, Ended):
        if item.exit_code is None:
            return "hangs"
        is_killed = is_victim and not ending.lives and item.exit_code == -signal.SIGKILL
        return "right" if is_killed else "crashes"
    if not isinstance(item, Told):
        return "crashes"
    if is_victim and not ending.lives:
        return "right"  # it has closed the group, and goes on
    if not item.kind:
        return "right" if ending.ends == "nothing" else "silent"
    if ending.ends == "nothing":
        return "false alarm"
    if not item.is_typed:
        return "untyped"
    victims = ending.named or ending.victims
    # A plain error of the transport is nobody's death.
    blames = item.kind == "TransportError" or item.peer in victims
    names = blames and any(f"rank {victim}" in item.text for victim in victims)
    if not is_victim and not (names and names_operation(item.text)):
        return "unnamed"
    # The answer of a store whose host is stopped is waited for as a part of the limit only.
    allowed_s = PROMPT_S + (ending.limit_s if ending.ends == "limit" else 0.0)
    return "late" if not is_victim and seconds > allowed_s else "right"
