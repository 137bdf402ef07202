"""Ranks of which some may die, and functions that go on without them."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ringcoll
from ringcoll.errors import PeerLostError, RingcollError
from ringcoll.runtime.group import Communicator
from ringcoll.runtime.rendezvous import serve_store
from ringcoll.training import BucketedDataParallel, resilient
from ringcoll.training.resilient import Membership
from ringcoll.training.resilient.succession import Member
from tests.fakes.hosts import SWITCH, Hosts, Place

_LIMIT = timedelta(seconds=30)
_PATIENCE_S = 60.0


class Ended(NamedTuple):
    """A process that has ended, and what it has told before."""

    exit_code: int | None
    told: Any = None


def _main(
    function: Callable[..., Any], rank: int, world_size: int, port: int, store_dies: bool,
    places: Sequence[Place], arguments: tuple[Any, ...], parent: Connection,
) -> None:  # fmt: skip
    meeting, first = (SWITCH, places[0].address) if places else ("127.0.0.1", "127.0.0.1")
    if places:
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        places[rank].enter()
    torch.set_num_threads(1)
    _parent.append(parent)
    faulthandler.dump_traceback_later(_PATIENCE_S / 2)
    store: dist.Store = dist.TCPStore(meeting, port, None, False, timeout=_LIMIT)
    if store_dies and rank < world_size:
        outer, store = store, serve_store(first) if rank == 0 else store
        if rank == 0:
            outer.set("port", str(store.port))  # type: ignore[attr-defined]
        else:
            own = int(outer.get("port"))
            store = dist.TCPStore(first, own, None, False, timeout=_LIMIT)
    try:
        # By value: multiprocessing would pass tensors by the memory of a process that ends.
        parent.send_bytes(pickle.dumps(function(store, rank, world_size, *arguments)))
    except BaseException as error:  # noqa: BLE001  # the test looks at it
        known = isinstance(error, RingcollError)
        parent.send_bytes(pickle.dumps(error if known else RuntimeError(traceback.format_exc())))


def run_mortals(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    newcomers: int = 0,
    store_dies: bool = False,
    hosts: Hosts | None = None,
    where: Sequence[int] = (),
) -> list[Any]:
    """Run ``function(store, rank, world_size, *arguments)`` on processes; newcomers have higher ranks.

    With ``hosts``, ``where`` has the host of each process; processes enter hosts without a fork, so that
    these have no process ids of their own.

    Returns what each has returned or raised, or that it has ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "ringcoll.training.backend.process_group", __name__])
    server = serve_store() if hosts is None else hosts.store()
    places = [] if hosts is None else [hosts.place(host) for host in where]
    ends: list[Connection] = []
    processes: list[Any] = []
    try:
        for rank in range(world_size + newcomers):
            own, theirs = context.Pipe()
            ends.append(own)
            meeting = (rank, world_size, server.port, store_dies, places)
            fixed = (function, *meeting, arguments, theirs)
            processes.append(context.Process(target=_main, args=fixed))
            processes[-1].start()
            theirs.close()
        found: list[Any] = [Ended(None)] * len(ends)
        left = {end: rank for rank, end in enumerate(ends)}
        deadline = time.monotonic() + _PATIENCE_S
        while left and time.monotonic() < deadline:
            for end in wait([*left], deadline - time.monotonic()):
                rank = left.pop(end)  # type: ignore[call-overload]
                try:
                    found[rank] = pickle.loads(ends[rank].recv_bytes())
                except EOFError:
                    processes[rank].join(10)
                    found[rank] = Ended(processes[rank].exitcode)
        for process in processes:
            process.join(20)
        return [
            item
            if isinstance(item, Ended) or process.exitcode == 0
            else Ended(process.exitcode, item)
            for item, process in zip(found, processes, strict=True)
        ]
    finally:
        for process in processes:
            process.kill()
            process.join()


_parent: list[Connection] = []


def die(*_: object, told: Any = None) -> None:
    """End this process as a crash would, after it has told something."""
    if told is not None:
        _parent[0].send_bytes(pickle.dumps(told))
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def started(
    store: dist.Store,
    rank: int,
    world_size: int,
    transport: str = "auto",
    limit_s: float = 30.0,
    *,
    verify_messages: bool = False,
) -> resilient.ResilientGroup:
    """A resilient group of the first ranks."""
    limit = timedelta(seconds=limit_s)
    dist.init_process_group(
        "ringcoll", store=store, rank=rank, world_size=world_size, timeout=limit
    )
    return resilient.start(transport=transport, verify_messages=verify_messages)


# --- training ---------------------------------------------------------------------------


def model_of() -> nn.Module:
    """A small model, the same at every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def batch(step: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """What a rank learns from in a step; it depends on who is there."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * size + rank)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return x, x[:, :3].sin()


class Learned(NamedTuple):
    """What a rank has seen: for each step its rank, the size, and the loss; and the parameters."""

    seen: dict[int, tuple[int, int, float]]
    final: list[float]
    changes: list[resilient.Change]


def train(
    store: dist.Store, rank: int, world_size: int, transport: str, kind: str,
    steps: int, deaths: dict[int, int], entries: dict[int, int],
) -> Learned:  # fmt: skip
    """Train; ``deaths`` and ``entries`` are ranks and the steps in which they die and come."""
    if rank < world_size:
        group = started(store, rank, world_size, transport)
        if rank == 0:
            store.set("address", group.address)
    else:
        while not store.check([f"step {entries[rank]}"]):
            time.sleep(0.002)
        group = resilient.join(store.get("address").decode(), timeout_s=30, transport=transport)
    model = model_of()
    if rank:
        with torch.no_grad():  # rank 0's count
            for param in model.parameters():
                param.add_(rank)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    wrapped: Any = model
    if kind == "ddp":
        wrapped = resilient.data_parallel(model, group)
    seen: dict[int, tuple[int, int, float]] = {}
    step = 0
    while step < steps:
        if group.admit():
            step = group.send_state(model, optimizer, step=step)
            if kind == "bucketed":
                wrapped = BucketedDataParallel(model, group)
        if rank == 0 and step in entries.values() and rank not in deaths:
            store.set(f"step {step}", "")
            time.sleep(0.3)
        own, size = group.rank(), group.size()
        x, y = batch(step, own, size)
        loss = nn.functional.mse_loss(wrapped(x), y)
        if deaths.get(rank) == step:
            die(told=Learned(seen, [], group.changes))  # with no part in this step's average
        loss.backward()
        if kind == "bucketed":
            wrapped.finish()
        elif kind == "by hand":
            for param in model.parameters():
                assert param.grad is not None
                ringcoll.all_reduce(param.grad, dist.ReduceOp.AVG, group)
        optimizer.step()
        optimizer.zero_grad()
        seen[step] = own, size, loss.item()
        step += 1
    final = torch.cat([param.detach().view(-1) for param in model.parameters()]).tolist()
    group.close()
    return Learned(seen, final, group.changes)


def expected(results: Sequence[Learned], steps: int) -> tuple[list[dict[int, float]], list[float]]:
    """Losses by step and rank, and parameters, of one process that learns what the ranks have learned."""
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses: list[dict[int, float]] = []
    for step in range(steps):
        # Of a step that was tried again, only the ranks that are left count, with their first batches.
        who = [result.seen[step][:2] for result in results if step in result.seen]
        optimizer.zero_grad()
        losses.append({})
        for rank, size in who:
            x, y = batch(step, rank, size)
            loss = nn.functional.mse_loss(model(x), y)
            (loss / len(who)).backward()
            losses[-1][rank] = loss.item()
        optimizer.step()
    return losses, torch.cat([param.detach().view(-1) for param in model.parameters()]).tolist()


def dies_before_its_first_call(
    store: dist.Store, rank: int, world_size: int, victim: int
) -> tuple[str, int | None, float]:
    """A rank of a group of torch's gloo dies before ringcoll is called; what the others are told, and when."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=_LIMIT)
    dist.barrier()
    if rank == victim:
        die()
    begin_s = time.monotonic()
    try:
        ringcoll.all_reduce(torch.ones(3))
    except RingcollError as error:
        return type(error).__name__, getattr(error, "peer", None), time.monotonic() - begin_s
    return "", None, 0.0


# --- one operation ----------------------------------------------------------------------


def value_of(rank: int, numel: int) -> Tensor:
    """A vector of integers that differs by rank and index."""
    return (torch.arange(numel) % 1000 + 1.0) * (rank + 1)


def operations(
    store: dist.Store, rank: int, world_size: int, transport: str, victims: list[int], numel: int
) -> dict[str, Any]:
    """Ranks die before the third of several operations; what each operation gives."""
    group = started(store, rank, world_size, transport)
    found: dict[str, Any] = {}
    for number in range(5):
        if number == 2 and rank in victims:
            die()
        x = value_of(rank, numel)
        out = torch.zeros(numel)
        if number % 2:
            ringcoll.all_reduce(x, group=group)
        else:
            work = ringcoll.all_reduce(x, dist.ReduceOp.SUM, group, True, out=out)
            assert work is not None
            assert ringcoll.all_reduce(x.clone(), dist.ReduceOp.MAX, group) is None, "in order"
            work.wait()
            x = out
        found[f"sum {number}"] = x
    found["size"] = group.rank(), group.size(), [change.lost for change in group.changes]
    group.close()
    return found


def rooted(store: dist.Store, rank: int, world_size: int, victim: int) -> dict[str, Any]:
    """A broadcast and an all-gather in which a rank dies."""
    group = started(store, rank, world_size)
    found: dict[str, Any] = {}
    ringcoll.barrier(group)
    if rank == victim:
        die()
    x = value_of(rank, 10)
    for name in ("first", "second"):
        try:
            ringcoll.broadcast(x, group=group, group_src=world_size - 2)
        except RingcollError as error:
            found[name] = type(error).__name__, str(error), x.clone()
        else:
            found[name] = x.clone()
    rows = [torch.zeros(10) for _ in range(group.size())]
    ringcoll.all_gather(rows, value_of(rank, 10), group)
    found["rows"] = rows
    group.close()
    return found


# --- deaths while the ranks agree ---------------------------------------------------------


def dies_agreeing(
    store: dist.Store, rank: int, world_size: int, first: int, second: int, moment: str
) -> Any:
    """A rank dies, and a second one in a moment of what follows."""
    # Where one dies while they form, the others wait for it until this limit.
    group = started(store, rank, world_size, limit_s=12.0)
    ringcoll.barrier(group)
    if rank == first:
        die()
    if rank == second:
        if moment == "coming":
            mock.patch.object(Membership, "change", side_effect=die).start()
        elif moment == "forming":
            mock.patch.object(Membership, "take", side_effect=die).start()
        else:
            _die_after(group._membership, int(moment))
    x = value_of(rank, 1000)
    ringcoll.all_reduce(x, group=group)
    y = torch.tensor([1.0])
    ringcoll.all_reduce(y, group=group)
    return x, float(y), group.rank(), group.size()


def _die_after(membership: Membership, answers: int) -> None:
    """Die after a leader has told so many members what it has decided."""
    tell = membership._tell

    def tell_some(members: Iterable[Member], limit_s: float = 2.0) -> None:
        members = [*members]
        if membership.view.epoch > 1 and members:
            tell(members[:answers], limit_s)
            die()
        tell(members, limit_s)

    membership._tell = tell_some  # type: ignore[method-assign]


def stopped(store: dist.Store, rank: int, world_size: int, victim: int) -> Any:
    """A rank stops; the others go on without it, and it finds that when it goes on."""
    group = started(store, rank, world_size, limit_s=2.0)
    pids = all_pids(store, rank, world_size)
    ringcoll.barrier(group)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGSTOP)
    x, begin_s = value_of(rank, 100), time.monotonic()
    ringcoll.all_reduce(x, group=group)
    found = x, group.size(), time.monotonic() - begin_s
    if group.rank() == 0:
        os.kill(pids[victim], signal.SIGCONT)
    time.sleep(1.0)
    return found


def all_pids(store: dist.Store, rank: int, world_size: int) -> list[int]:
    """The processes of all ranks."""
    store.set(f"pid {rank}", str(os.getpid()))
    return [int(store.get(f"pid {peer}")) for peer in range(world_size)]


def stopped_with_the_store(store: dist.Store, rank: int, world_size: int) -> Any:
    """Rank 0, which has the store, stops; what the others are told of two groups, and how long that takes."""
    limit = timedelta(seconds=2)
    dist.init_process_group(
        "ringcoll", store=store, rank=rank, world_size=world_size, timeout=limit
    )
    pids, other = all_pids(store, rank, world_size), dist.new_group(timeout=limit)
    ringcoll.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    time.sleep(0.2)
    begin_s, texts = time.monotonic(), list[tuple[str, str]]()
    for group in (other, None):
        try:
            ringcoll.all_reduce(torch.ones(10), group=group)
        except RingcollError as error:
            texts.append((type(error).__name__, str(error)))
    dist.destroy_process_group()
    seconds = time.monotonic() - begin_s
    if rank == 1:
        time.sleep(1.0)
        os.kill(pids[0], signal.SIGCONT)
    return texts, seconds


def sleeps(store: dist.Store, rank: int, world_size: int) -> Tensor:
    """Rank 1 dies; the last one sleeps before it agrees, until the others have finished and ended."""
    group = started(store, rank, world_size, limit_s=2.0)
    ringcoll.barrier(group)
    if rank == 1:
        die()
    if rank == world_size - 1:
        change = Membership.change

        def change_late(*arguments: Any) -> Any:
            time.sleep(5.0)
            return change(*arguments)

        mock.patch.object(Membership, "change", change_late).start()
    x = value_of(rank, 100)
    ringcoll.all_reduce(x, group=group)
    group.close()
    return x


def leaves(store: dist.Store, rank: int, world_size: int) -> Any:
    """One rank closes the group, one fails by an error of its own; the others go on."""
    group = started(store, rank, world_size)
    ringcoll.barrier(group)
    if rank == 1:
        group.close()
        with contextlib.suppress(RingcollError):
            ringcoll.barrier(group)
            return "a closed group goes on"
        return "left"
    x = value_of(rank, 100)
    ringcoll.all_reduce(x, group=group)
    first = x.clone(), group.size()

    me = [rank]  # what is in a list does not make the function another one

    def adds(left: Tensor, right: Tensor) -> Tensor:
        if me == [0]:
            raise LookupError("nothing here")
        return left + right

    try:
        user_op = ringcoll.UserOp(adds, commutative=True)
        ringcoll.all_reduce(value_of(rank, 100), user_op, group, algorithm="ring")
    except LookupError as error:
        return str(error)
    y = value_of(rank, 100)
    ringcoll.all_reduce(y, group=group)
    return first, y, group.size()


def corrupted(store: dist.Store, rank: int, world_size: int) -> tuple[bool, list[list[int]], int]:
    """Rank 1 sends some messages with a bit changed; whether all sums were right, and what changed.

    The last calls are not disturbed: a rank that has come through its last call leaves.
    """
    if rank == 1:
        os.environ["RINGCOLL_FAULTS"] = "seed=3,flip=0.03"
    group = started(store, rank, world_size, verify_messages=True)
    are_right = True
    for number in range(40):
        if number == 5:
            os.environ.pop("RINGCOLL_FAULTS", None)  # for the next connections
        x = value_of(rank, 1000) + number
        ringcoll.all_reduce(x, group=group)
        wanted = sum(value_of(peer, 1000) + number for peer in range(world_size))
        are_right = are_right and torch.equal(x, torch.as_tensor(wanted))
    group.close(drain_s=5.0)
    return are_right, [[*change.lost] for change in group.changes], group.size()


def late_failure(store: dist.Store, rank: int, world_size: int, name: str) -> Any:
    """The last rank is told of a failure when the others have come through an operation."""
    group = started(store, rank, world_size)
    ringcoll.barrier(group)
    x = value_of(rank, 1000)

    def call() -> None:
        if name == "barrier":
            ringcoll.barrier(group)
        else:
            ringcoll.all_reduce(x, group=group)

    if rank == world_size - 1:
        run = Communicator.run
        with mock.patch.object(Communicator, "run", autospec=True) as patched:

            def fail_after(member: Communicator, operation: Any, *rest: Any) -> Any:
                run(member, operation, *rest)
                if operation.name == "barrier":
                    patched.side_effect = run
                    time.sleep(0.5)
                    raise PeerLostError("told too late", peer=0)

            patched.side_effect = fail_after
            call()
    else:
        call()
    y = torch.ones(5)
    ringcoll.all_reduce(y, group=group)
    found = x, y, group.size(), [change.lost for change in group.changes]
    group.close()
    return found


def refused(store: dist.Store, rank: int, world_size: int) -> list[str]:
    """What a resilient group does not take."""
    group = started(store, rank, world_size)
    x = torch.ones(3)
    calls: list[Callable[[], object]] = [
        lambda: ringcoll.all_reduce.plan(x, group=group),
        lambda: ringcoll.all_reduce_coalesced([x, x.double()], group=group),
        lambda: ringcoll.all_reduce(x.to_sparse(), group=group),
        lambda: resilient.start(group),
        lambda: resilient.join("nowhere"),
        lambda: resilient.join("127.0.0.1:1", timeout_s=5.0),
        lambda: ringcoll.all_reduce(x, algorithm="pigeons", group=group),
    ]
    texts = []
    for call in calls:
        try:
            call()
        except RingcollError as error:
            texts.append(f"{type(error).__name__}: {error}")
        else:
            texts.append("taken")
    ringcoll.all_reduce(x, group=group)
    texts.append(str(x.tolist()))
    group.close()
    return texts
