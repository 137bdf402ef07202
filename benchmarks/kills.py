"""What the ranks that are left report when one is killed, at random moments.

Ranks run random collectives, of a few bytes and of megabytes, blocking and asynchronous. At a random
moment, from the group's making on, one of them is killed. Each of the others has to raise one of
ringcoll's errors that names the dead rank, and to end by itself.

With ``--hosts 2`` ranks are on random ones of two hosts, at least one on each: name spaces of this machine
that share neither network nor memory, which takes root and ``ip``.

Wanted: of 1,000 kills over all transports of one host, all survivors do so within 2 seconds; between hosts,
within 5 seconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for tests.fakes
# torch looks up the name of a connection that fails; a name server that loses the question takes 5 seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

import torch
import torch.distributed as dist
from common import (
    LOOPBACK,
    Processes,
    Table,
    environment,
    introduce,
    meeting_place,
    parser,
    shared_memory,
    write,
)

import ringcoll
from ringcoll.errors import RingcollError
from ringcoll.runtime import TRANSPORT_VARIABLES, serve_store
from tests.fakes.hosts import SWITCH, Hosts, Place

TRANSPORTS = ("shared", "ucx", "gloo")
_LIMIT_S = 60.0  # of an operation, so that no time limit helps
_WANTED_S, _WANTED_BETWEEN_HOSTS_S = 2.0, 5.0
_PATIENCE_S = 40.0  # for survivors, until they are ended
_MOST_S = 0.5  # from the beginning to the kill
_SIZES = (1, 1000, 30_000, 3_000_000)  # elements


@dataclass(frozen=True)
class Case:
    """A group, and its end: ``seed`` decides on all else; ``where`` are the hosts of its ranks, if several."""

    transport: str
    world_size: int
    victim: int
    store_dies: bool
    delay_s: float
    seed: int
    where: tuple[int, ...] = ()

    @property
    def wanted_s(self) -> float:
        """Within which survivors have to name the dead."""
        return _WANTED_BETWEEN_HOSTS_S if self.where else _WANTED_S


@dataclass(frozen=True)
class Told:
    """What a survivor tells: the class and text of its error, when, and the rank that it blames."""

    kind: str
    text: str
    is_typed: bool
    at_s: float
    peer: int | None = None


def case_of(
    number: int, seed: int, transports: tuple[str, ...] = TRANSPORTS, num_hosts: int = 1
) -> Case:
    """A random case; transports take turns."""
    choose = random.Random(seed * 1_000_003 + number)
    world_size = choose.choice((2, 3, 4, 5))
    victim = choose.randrange(world_size)
    where = [rank % num_hosts for rank in range(world_size)] if num_hosts > 1 else []
    choose.shuffle(where)
    return Case(
        transports[number % len(transports)],
        world_size,
        victim,
        store_dies=victim == 0 and choose.random() < 0.5,
        delay_s=choose.random() ** 2 * _MOST_S,
        seed=choose.randrange(1 << 30),
        where=tuple(where),
    )


def operations(choose: random.Random) -> Callable[[], object]:
    """A random operation, the same on all ranks."""
    x = torch.ones(choose.choice(_SIZES))
    k, rank = dist.get_world_size(), dist.get_rank()
    root, later = choose.randrange(k), choose.random() < 0.3
    name = choose.choice(
        ("all_reduce", "all_reduce", "broadcast", "all_gather", "reduce", "barrier")
    )
    match name:
        case "all_reduce":
            run = lambda: ringcoll.all_reduce(x, async_op=later)  # noqa: E731
        case "broadcast":
            run = lambda: ringcoll.broadcast(x, root, async_op=later)  # noqa: E731
        case "reduce":
            run = lambda: ringcoll.reduce(x, root, async_op=later)  # noqa: E731
        case "all_gather":
            every = [torch.empty_like(x) for _ in range(k)]
            run = lambda: ringcoll.all_gather(every, x + rank, async_op=later)  # noqa: E731
        case _:
            run = lambda: ringcoll.barrier(async_op=later)  # noqa: E731
    return run


def on_rank(case: Case, rank: int, port: int, places: Sequence[Place], parent: Connection) -> None:
    """Be a rank: say when the group is made, work until an error comes, tell it."""
    if places:
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        places[rank].enter()
    os.environ[TRANSPORT_VARIABLES["cpu"]] = case.transport
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(_PATIENCE_S * 0.75)  # where it hangs, if it does
    limit = timedelta(seconds=_LIMIT_S)
    meeting, own = (SWITCH, places[0].address) if places else (LOOPBACK, LOOPBACK)
    store = meeting_place(rank, meeting, port, limit, at_rank_0=own if case.store_dies else "")
    dist.init_process_group(
        "ringcoll", store=store, rank=rank, world_size=case.world_size, timeout=limit
    )
    parent.send(os.getpid())
    parent.recv()
    choose = random.Random(case.seed)
    begin = time.monotonic()
    try:
        while time.monotonic() - begin < _PATIENCE_S:
            works = [operations(choose)() for _ in range(choose.choice((1, 1, 3)))]
            for work in works:
                if work is not None:
                    work.wait()
        parent.send(Told("nothing", "", False, time.monotonic()))
    except Exception as error:  # noqa: BLE001  # whatever it is, it is told
        typed = isinstance(error, RingcollError)
        peer = getattr(error, "peer", None)
        parent.send(Told(type(error).__name__, str(error), typed, time.monotonic(), peer))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def judge(case: Case, told: Told | None, exit_code: int | None, killed_s: float) -> str:
    """What became of a survivor, in a word."""
    if told is None:
        return "hangs" if exit_code is None else f"ends with {exit_code}"
    if not told.is_typed:
        return "error of another kind"
    if told.peer != case.victim or f"rank {case.victim}" not in told.text:
        return "does not name the dead"
    if told.at_s - killed_s > case.wanted_s:
        return "late"
    if exit_code != 0:
        return "does not end" if exit_code is None else f"ends with {exit_code} after its error"
    return "right"


def run(case: Case, hosts: Hosts | None = None) -> list[tuple[str, float | None, Told | None]]:
    """Run a case: a judgement for each survivor, its seconds, and what it told."""
    places = [] if hosts is None else [hosts.place(host) for host in case.where]
    store = serve_store() if hosts is None else hosts.store()
    with Processes(__name__) as processes:
        ranks, ends = zip(
            *(
                processes.start(on_rank, case, rank, store.port, places)
                for rank in range(case.world_size)
            ),
            strict=True,
        )
        for end in ends:
            if not end.poll(_PATIENCE_S):
                raise TimeoutError(f"a rank of {case} did not begin")
            end.recv()
        for end in ends:
            end.send("go")
        time.sleep(case.delay_s)
        ranks[case.victim].kill()
        killed_s = time.monotonic()
        waiting = {end: rank for rank, end in enumerate(ends) if rank != case.victim}
        told: dict[int, Told] = {}
        while waiting and (left_s := killed_s + _PATIENCE_S - time.monotonic()) > 0:
            for end in wait([*waiting], left_s):
                rank = waiting.pop(end)  # type: ignore[call-overload]
                with contextlib.suppress(EOFError):
                    told[rank] = ends[rank].recv()
        found = []
        for rank in set(range(case.world_size)) - {case.victim}:
            ranks[rank].join(_PATIENCE_S / 4)
            word = judge(case, told.get(rank), ranks[rank].exitcode, killed_s)
            seconds = told[rank].at_s - killed_s if rank in told else None
            found.append((word, seconds, told.get(rank)))
        return found


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--kills", type=int, default=1000)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--transports", default=",".join(TRANSPORTS))
    arguments.add_argument("--hosts", type=int, default=1)
    arguments.add_argument("--first", type=int, default=0, help="number of the first case")
    options = arguments.parse_args()
    transports = tuple(options.transports.split(","))
    facts = environment(5, options.transports)
    introduce(facts)
    before = shared_memory()
    words: dict[str, Counter[str]] = {name: Counter() for name in transports}
    times: dict[str, list[float]] = {name: [] for name in transports}
    # A rank enters its host without a fork: process ids are those of the machine.
    apart = ("net", "ipc", "mount", "uts")
    several = Hosts(options.hosts, apart=apart) if options.hosts > 1 else None
    with several or contextlib.nullcontext():
        for number in range(options.first, options.first + options.kills):
            case = case_of(number, options.seed, transports, options.hosts)
            for word, seconds, told in run(case, several):
                words[case.transport][word] += 1
                if seconds is not None:
                    times[case.transport].append(seconds)
                if word != "right":
                    print(f"{number}: {word}: {case}: {seconds} {told}", flush=True)
    left = shared_memory() - before
    kinds = sorted(set().union(*words.values()) - {"right"})
    table = Table(
        {"transport": "text", "survivors": "count", "right": "count"}
        | dict.fromkeys(kinds, "count")
        | {"median": "seconds", "slowest": "seconds"},
        [
            (
                name,
                words[name].total(),
                words[name]["right"],
                *(words[name][kind] for kind in kinds),
                median(times[name]) if times[name] else None,
                max(times[name], default=None),
            )
            for name in transports
        ],
        f"What became of the survivors of {options.kills} kills on {options.hosts} host(s); "
        f"{len(left)} files or segments left over.",
    )
    table.show()
    write(options.json, __doc__, facts, [table])


if __name__ == "__main__":
    main()
