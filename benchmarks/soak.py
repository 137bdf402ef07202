"""Ranks die and come for as long as it is told: whether all values are right, and nothing grows.

Processes on one host form a resilient group and run random collectives, whose results are known. Every
few seconds one of them is killed, and another one joins; each time a group is closed and another one made. One
process, the witness, is never killed: what it holds is counted in each tenth of the time, the first
of which is for what is made once. From five minutes on it is a fault if it holds more in the second half.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import Processes, Table, environment, introduce, parser, shared_memory, write

import ringcoll
from ringcoll.errors import GroupChangedError
from ringcoll.runtime import serve_store
from ringcoll.training import resilient

_LIMIT = timedelta(seconds=60)
_SIZES = (1, 300, 40_000, 700_000)
_ENTRY_S = 60.0
_STEADY_S = 300.0  # from which on what is held has to stay as it is
_MORE = 1.3, 4  # what may be held more: by a factor, as operations differ, and by a number


class WrongError(Exception):
    """A result is not what it has to be."""


class Counter:
    """A model of a single number, which goes to ranks that join."""

    def __init__(self) -> None:
        self.count = torch.zeros(1, dtype=torch.int64)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The number."""
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take the number."""
        self.count = state["count"]


def held() -> dict[str, int]:
    """What this process holds."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    targets = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            targets.append(str(entry.readlink()))
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "own memory": int(status["RssAnon"].split()[0]) << 10,
        "shared memory": int(status["RssShmem"].split()[0]) << 10,
        "descriptors": len(targets),
        "sockets": sum(target.startswith("socket") for target in targets),
        "threads": int(status["Threads"]),
        "shared mappings": sum(
            any(kind in line for kind in ("memfd", "/dev/shm", "SYSV")) for line in maps
        ),
    }


def growth(rows: list[tuple[Any, ...]]) -> list[str]:
    """What the witness held more of in the second half of its rows than in the first, in words."""
    steady, found = rows[1:], []
    half = len(steady) // 2
    for column, name in enumerate(held(), 3):
        before, after = (
            max(row[column] for row in part) for part in (steady[:half], steady[half:])
        )
        factor, more = _MORE
        if after > factor * before + more:
            found.append(f"{name} has grown from {before} to {after}")
    return found


def check(name: str, got: torch.Tensor, wanted: torch.Tensor | float) -> None:
    """Raise an error unless a result is right."""
    if not torch.equal(got, torch.full_like(got, wanted) if isinstance(wanted, float) else wanted):
        raise WrongError(f"{name}: got {got[:3].tolist()}, expected {wanted}")


def operate(group: resilient.ResilientGroup, choose: random.Random) -> None:
    """Run a random collective, the same on all ranks, and check its result."""
    numel, name = choose.choice(_SIZES), choose.choice(("sum", "sum", "avg", "max", "rows", "root"))
    root, x = choose.random(), torch.ones(numel)
    match name:
        case "sum":
            size = group.size()
            ringcoll.all_reduce(x, group=group)
            # A rank may be lost when all have the result.
            check(name, x, float(size if x[0] == size else group.size()))
        case "avg":
            works = [ringcoll.all_reduce(x, dist.ReduceOp.AVG, group, True) for _ in range(3)]
            for work in works:
                assert work is not None
                work.wait()
            check(name, x, 1.0)
        case "max":
            ringcoll.all_reduce(x.mul_(group.rank()), dist.ReduceOp.MAX, group)
            check(name, x.round() % 1, 0.0)
        case "rows":
            rank, size = group.rank(), group.size()
            rows = [torch.empty(numel) for _ in range(size)]
            ringcoll.all_gather(rows, x.mul_(rank), group)
            for peer, row in enumerate(rows):
                check(name, row, float(peer))
        case _:
            source = int(root * group.size())
            ringcoll.broadcast(x.mul_(group.rank() + 1), group=group, group_src=source)
            check(name, x, float(source + 1))


def on_rank(number: int, first: int, where: Any, transport: str, parent: Connection) -> None:
    """Be a rank: work until told to stop; tell what is held when asked."""
    torch.set_num_threads(1)
    if isinstance(where, int):
        store = dist.TCPStore("127.0.0.1", where, None, False, timeout=_LIMIT)
        dist.init_process_group(
            "ringcoll", store=store, rank=number, world_size=first, timeout=_LIMIT
        )
        group = resilient.start(transport=transport)
    else:
        group = resilient.join(where, timeout_s=_ENTRY_S, transport=transport)
    counter, ends = Counter(), threading.Event()
    asks: list[float] = []

    def listen() -> None:
        with contextlib.suppress(EOFError, ConnectionResetError):
            while parent.recv() != "end":
                asks.append(time.monotonic())
        ends.set()

    threading.Thread(target=listen, daemon=True).start()
    parent.send(("address", group.address))
    steps = 0
    try:
        while True:
            if group.admit():
                group.send_state(counter)  # type: ignore[arg-type]
            stop = torch.tensor([int(ends.is_set())])
            ringcoll.all_reduce(stop, dist.ReduceOp.MAX, group)
            if stop.item():
                break
            with contextlib.suppress(GroupChangedError):
                operate(group, random.Random(int(counter.count)))
            counter.count += 1
            steps += 1
            if asks:
                asks.clear()
                parent.send(("held", steps, len(group.changes), held()))
    except Exception as error:  # noqa: BLE001  # whatever it is, it is told
        parent.send(("error", f"{type(error).__name__}: {error}"))
    group.close()


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--minutes", type=float, default=60.0)
    arguments.add_argument("--ranks", type=int, default=3)
    arguments.add_argument("--transport", default="shared")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--every", type=float, default=4.0, help="seconds between two kills")
    options = arguments.parse_args()
    facts = environment(options.ranks, options.transport)
    introduce(facts)
    before = shared_memory()
    rows, faults, kills = soak(options)
    left = shared_memory() - before
    kinds = {"own memory": "bytes", "shared memory": "bytes"} | dict.fromkeys(
        ("descriptors", "sockets", "threads", "shared mappings"), "count"
    )
    table = Table(
        {"time": "seconds", "operations": "count", "changes": "count", **kinds},
        rows,
        f"What the witness held while {kills} ranks were killed and as many joined; "
        f"{len(faults)} faults, {len(left)} files or segments left over.",
    )
    table.show()
    for fault in faults:
        print(fault)
    write(options.json, __doc__, facts, [table])


def soak(options: Any) -> tuple[list[tuple[Any, ...]], list[str], int]:
    """Let ranks work, die and come; return what the witness held, faults, and the number of kills."""
    choose, outer = random.Random(options.seed), serve_store()
    ranks: dict[Connection, Any] = {}
    addresses: dict[Connection, str] = {}
    rows: list[tuple[Any, ...]] = []
    faults: list[str] = []
    killed: set[Connection] = set()
    begin = time.monotonic()
    seconds = 60 * options.minutes

    def start(number: int, where: Any) -> Connection:
        process, end = processes.start(on_rank, number, options.ranks, where, options.transport)
        ranks[end] = process
        return end

    def hear(seconds: float, is_enough: Callable[[], bool] = lambda: False) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not is_enough():
            for end in wait([end for end in ranks if end not in killed], left):
                assert isinstance(end, Connection)
                try:
                    kind, *told = end.recv()
                except (EOFError, ConnectionResetError):  # killed, maybe with a message unread
                    killed.add(end)
                    if not is_over:
                        faults.append("a process has ended by itself")
                    continue
                if kind == "address":
                    (addresses[end],) = told
                elif kind == "held":
                    steps, changes, things = told
                    rows.append((time.monotonic() - begin, steps, changes, *things.values()))
                else:
                    faults.append(str(told[0]))

    is_over = False
    num_kills = 0
    with Processes(__name__) as processes:
        first = [start(rank, outer.port) for rank in range(options.ranks)]
        while len(addresses) < len(first) and time.monotonic() - begin < _ENTRY_S:
            hear(0.1)
        begin = time.monotonic()
        witness = first[1]
        next_look = seconds / 10
        while not faults and time.monotonic() - begin < seconds:
            hear(options.every * (0.5 + choose.random()))
            living = [end for end in addresses if end not in killed]
            victims = [end for end in living if end is not witness]
            if len(living) == options.ranks and victims:
                victim = choose.choice(victims)
                killed.add(victim)
                ranks[victim].kill()
                ranks[victim].join()
                num_kills += 1
                start(num_kills, addresses[witness])
            if time.monotonic() - begin > next_look:
                next_look += seconds / 10
                witness.send("tell")
        hear(_ENTRY_S / 4, lambda: ranks.keys() - killed <= addresses.keys())
        witness.send("tell")
        hear(2.0)
        is_over = True
        for end in set(ranks) - killed:
            end.send("end")
        hear(10.0, lambda: ranks.keys() <= killed)
        faults += ["a process did not end" for _ in set(ranks) - killed]
    if seconds >= _STEADY_S and len(rows) > 4:
        faults += growth(rows)
    return rows, faults, num_kills


if __name__ == "__main__":
    main()
