"""What goes wrong on ranks: disagreement, death, absence, errors of the user's own."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ringcoll
from ringcoll import UserOp
from ringcoll.runtime.launch import report
from ringcoll.runtime.transport import GlooTransport, Message
from ringcoll.schedules import Schedule, Step, inp, out, recv, reduce, send, tmp
from ringcoll.schedules.algorithms import register, registry, unregister
from ringcoll.schedules.algorithms.ring import ring_all_reduce
from tests.programs.ranks import fresh_group

__all__ = ["DISAGREEMENTS", "Caught", "disagree"]


@dataclass
class Caught:
    """What a rank met: the class of the error, its text and attributes, and what came after."""

    kind: str
    text: str
    peer: int | None
    mine: str
    theirs: str
    seconds: float
    delivered: list[float] = field(default_factory=list)
    next_kind: str = ""
    fresh_works: bool = False


def catch(call: Callable[[], Any]) -> Caught:
    """Make a call that is to fail."""
    begin = time.monotonic()
    try:
        call()
    except Exception as error:  # noqa: BLE001  # whatever it is, the test looks at it
        return Caught(
            type(error).__name__,
            str(error),
            getattr(error, "peer", None),
            getattr(error, "mine", ""),
            getattr(error, "theirs", ""),
            time.monotonic() - begin,
        )
    return Caught("", "", None, "", "", time.monotonic() - begin)


def works(group: Any) -> bool:
    """Whether a group gives right results."""
    tensor = torch.full((10,), dist.get_rank(group))
    ringcoll.all_reduce(tensor, group=group, algorithm="ring")
    size = dist.get_world_size(group)
    return set(tensor.tolist()) == {size * (size - 1) // 2}


# --- disagreement ---------------------------------------------------------------------

# A call on one rank: (outputs, what makes the call). ``odd`` on the rank that deviates.
_Made = tuple[list[Tensor], Callable[[], Any]]

_BLANK = -1.0


def _own(numel: int = 4) -> Tensor:
    """What a rank sends: one number, that no other rank has, nor any sum of them."""
    return torch.full((numel,), float(3 << 4 * dist.get_rank()))


def _blank(numel: int = 4) -> Tensor:
    return torch.full((numel,), _BLANK)


def _delivered(outputs: list[Tensor]) -> list[float]:
    """What is in the outputs that this rank did not put there."""
    found = {float(number) for output in outputs for number in output.tolist()}
    return sorted(found - {_BLANK, float(_own(1).item())})


def _all_reduce(odd: bool, group: Any, usual: dict[str, Any], other: dict[str, Any]) -> _Made:
    options = {"algorithm": "ring", **(other if odd else usual)}
    dtype = options.pop("dtype", torch.float32)
    tensor = _own(options.pop("numel", 8)).to(dtype)
    out = _blank(tensor.numel()).to(dtype)
    return [out], lambda: ringcoll.all_reduce(tensor, group=group, out=out, **options)


def _rooted(odd: bool, group: Any, name: str) -> _Made:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    root = 1 if odd else 0
    tensor, out = _own(), _blank()
    if name == "broadcast":
        tensor = tensor if rank == root else out
        return [tensor], lambda: ringcoll.broadcast(tensor, group=group, group_src=root)
    if name == "reduce":
        return [out], lambda: ringcoll.reduce(tensor, group=group, group_dst=root, out=out)
    if name == "gather":
        parts = [_blank() for _ in range(size)] if rank == root else None
        return parts or [], lambda: ringcoll.gather(tensor, parts, group=group, group_dst=root)
    sources = [_own() for _ in range(size)] if rank == root else None
    return [out], lambda: ringcoll.scatter(out, sources, group=group, group_src=root)


def _collective(odd: bool, group: Any) -> _Made:
    tensor, out = _own(), _blank(4 * dist.get_world_size(group) if odd else 4)
    if odd:
        return [out], lambda: ringcoll.all_gather_single(out, tensor, group)
    return [out], lambda: ringcoll.all_reduce(tensor, group=group, out=out)


def _order(odd: bool, group: Any) -> _Made:
    tensor, out = _own(), _blank()

    def both() -> None:
        calls = [
            lambda: ringcoll.all_reduce(tensor, group=group, out=out),
            lambda: ringcoll.barrier(group),
        ]
        for call in reversed(calls) if odd else calls:
            call()

    return [out], both


def _list(odd: bool, group: Any) -> _Made:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    outs = [_blank(4 + (odd and peer != rank)) for peer in range(size)]
    return outs, lambda: ringcoll.all_gather(outs, _own(), group)


def _exchange(odd: bool, group: Any, single: bool) -> _Made:
    """The rank that deviates expects more from the next one than that sends.

    Blocks that both ends agree on arrive; so only the other one is looked at.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    after = (rank + 1) % size
    incoming = [4 + (odd and peer == after) for peer in range(size)]
    out = _blank(sum(incoming))
    outs = list(out.split(incoming))
    disputed = [outs[after]] if odd else []
    if single:
        return disputed, lambda: ringcoll.all_to_all_single(
            out, _own(4 * size), incoming, [4] * size, group
        )
    return disputed, lambda: ringcoll.all_to_all(outs, [_own() for _ in range(size)], group)


def _asynchronous(odd: bool, group: Any) -> _Made:
    tensor, out = _own(8 + odd), _blank(8 + odd)

    def call() -> None:
        work = ringcoll.all_reduce(tensor, group=group, out=out, async_op=True)
        assert work is not None
        work.wait()

    return [out], call


def _later(odd: bool, group: Any) -> _Made:
    """After operations that agreed."""
    for _ in range(3):
        ringcoll.barrier(group)
    return _all_reduce(odd, group, {"numel": 8}, {"numel": 9})


def _skipped(odd: bool, group: Any) -> _Made:
    """One rank leaves out a call, and is one ahead from then on."""
    tensor, out = _own(), _blank()

    def calls() -> None:
        if not odd:
            ringcoll.barrier(group)
        ringcoll.all_reduce(tensor, group=group, out=out)

    return [out], calls


def _packed(odd: bool, group: Any) -> _Made:
    """Two tensors, which are laid end to end."""
    tensors = [_own(3), _own(5)] if odd else [_own(5), _own(3)]

    def call() -> None:
        ringcoll.all_reduce_coalesced(tensors, group=group, algorithm="ring")

    return [], call


def _version(is_older: bool) -> Callable[[int, int], Iterator[Step]]:
    """An all-reduce in which all send to all; the older version adds in the opposite order."""

    def program(rank: int, size: int) -> Iterator[Step]:
        peers = [peer for peer in range(size) if peer != rank]
        yield Step(*(send(peer, inp(0)) for peer in peers),
                   *(recv(peer, tmp(peer, 0)) for peer in peers))  # fmt: skip
        parts = [inp(0) if peer == rank else tmp(peer, 0) for peer in range(size)]
        yield Step(reduce(out(0), *(reversed(parts) if is_older else parts)))

    return program


def _two_versions(odd: bool, group: Any) -> _Made:
    """A program of the user's own, of which one rank has an older file."""
    size, program = dist.get_world_size(group), _version(odd)
    schedule = Schedule("all_reduce", "mine", size, 1, size, lambda rank: program(rank, size))
    return _all_reduce(odd, group, {"algorithm": schedule}, {"algorithm": schedule})


def _changed_ring(odd: bool, group: Any) -> _Made:
    """One rank has another program under the name, and with the face, of the library's ring."""
    outputs, call = _all_reduce(odd, group, {"algorithm": "ring"}, {"algorithm": "ring"})

    def calls() -> None:
        entries = dict(registry._REGISTRY)
        if odd:
            unregister("all_reduce", "ring")
            again = register("all_reduce", "ring", slots=lambda k: k)
            again(functools.wraps(ring_all_reduce)(_version(True)))
        try:
            call()
        finally:
            registry._REGISTRY.clear()
            registry._REGISTRY.update(entries)
            registry._changed()

    return outputs, calls


DISAGREEMENTS: dict[str, Callable[[bool, Any], _Made]] = {
    "length": lambda odd, group: _all_reduce(odd, group, {"numel": 8}, {"numel": 9}),
    "no length": lambda odd, group: _all_reduce(odd, group, {"numel": 8}, {"numel": 0}),
    "dtype": lambda odd, group: _all_reduce(odd, group, {}, {"dtype": torch.int32}),
    "operator": lambda odd, group: _all_reduce(odd, group, {"op": "sum"}, {"op": "max"}),
    "user operator": lambda odd, group: _all_reduce(
        odd,
        group,
        {"op": UserOp(torch.add, commutative=True, name="plus")},
        {"op": UserOp(torch.sub, commutative=True, name="minus")},
    ),
    "code of a user operator": lambda odd, group: _all_reduce(
        odd,
        group,
        {"op": UserOp(torch.add, commutative=True, name="add")},
        {"op": UserOp(torch.sub, commutative=True, name="add")},
    ),
    "lambdas": lambda odd, group: _all_reduce(
        odd,
        group,
        {"op": UserOp(lambda x, y: x + y, commutative=True)},
        {"op": UserOp(lambda x, y: x - y, commutative=True)},
    ),
    "algorithm": lambda odd, group: _all_reduce(odd, group, {}, {"algorithm": "tree"}),
    "segments": lambda odd, group: _all_reduce(odd, group, {}, {"segment_bytes": 4}),
    "wire dtype": lambda odd, group: _all_reduce(odd, group, {}, {"wire_dtype": torch.bfloat16}),
    "root of broadcast": lambda odd, group: _rooted(odd, group, "broadcast"),
    "root of reduce": lambda odd, group: _rooted(odd, group, "reduce"),
    "root of gather": lambda odd, group: _rooted(odd, group, "gather"),
    "root of scatter": lambda odd, group: _rooted(odd, group, "scatter"),
    "collective": _collective,
    "order of calls": _order,
    "number of calls": _skipped,
    "length in a list": _list,
    "lengths of all-to-all": lambda odd, group: _exchange(odd, group, single=False),
    "lengths of all-to-all, single": lambda odd, group: _exchange(odd, group, single=True),
    "lengths that add up to the same": _packed,
    "programs of one name": _two_versions,
    "changed program of the library": _changed_ring,
    "segment size": lambda odd, group: _all_reduce(
        odd, group, {"segment_bytes": 8}, {"segment_bytes": 16}
    ),
    "length, asynchronous": _asynchronous,
    "length, after other calls": _later,
}


def disagree(name: str, odd_rank: int) -> Caught:
    """Make a call that one rank makes differently, on a group of its own."""
    group = fresh_group(timeout_s=30.0)
    outputs, call = DISAGREEMENTS[name](dist.get_rank() == odd_rank, group)
    caught = catch(call)
    caught.delivered = _delivered(outputs)
    caught.next_kind = catch(lambda: ringcoll.barrier(group)).kind
    caught.fresh_works = works(fresh_group())
    return caught


def disagree_in_detail(transport: str, name: str) -> list[Caught]:
    """The same while each call is compared."""
    os.environ["RINGCOLL_DEBUG"] = "detail"
    try:
        return disagree_unseen(transport, name)
    finally:
        del os.environ["RINGCOLL_DEBUG"]


def disagree_unseen(transport: str, name: str) -> list[Caught]:
    """Make a call that needs no waiting, and on which ranks disagree; then one on which they agree."""
    group = fresh_group(timeout_s=20.0)
    ringcoll.use(group, transport=transport)
    ringcoll.barrier(group)
    _, call = DISAGREEMENTS[name](dist.get_rank() == 1, group)
    first, out = catch(call), _blank()
    agreed = catch(lambda: ringcoll.all_reduce(_own(), group=group, out=out, algorithm="ring"))
    agreed.delivered = _delivered([out])
    return [first, agreed]


def run_ahead(transport: str, times: int) -> Caught:
    """Rank 0 broadcasts again and again, which needs nobody; the others do something else."""
    group = fresh_group(timeout_s=20.0)
    ringcoll.use(group, transport=transport)
    ringcoll.barrier(group)
    tensor = _own()

    def calls() -> None:
        for _ in range(times if dist.get_rank() == 0 else 0):
            ringcoll.broadcast(tensor, group=group, group_src=0)
        ringcoll.all_reduce(tensor, group=group)

    return catch(calls)


def refused() -> list[Caught]:
    """Arguments that equal others of another type, and tensors that are not memory."""
    group = fresh_group()
    tensor = torch.ones(4096)
    usual: dict[str, Any] = {"algorithm": "ring", "segment_bytes": 4096}
    ringcoll.all_reduce(tensor, group=group, **usual)
    odd = usual | {"segment_bytes": 4096.0}

    def call(tensor: Tensor) -> Tensor:
        ringcoll.all_reduce(tensor, group=group)
        return tensor

    caught = [
        catch(lambda: ringcoll.all_reduce(tensor, group=group, **odd)),
        catch(lambda: torch.vmap(call)(torch.ones(2, 3))),
        catch(lambda: torch.func.grad(lambda x: call(x).sum())(torch.ones(3))),
    ]
    assert works(group)
    return caught


# --- death ----------------------------------------------------------------------------


def die_at(rank: int, posts: int, collective: str, algorithm: str) -> None:
    """One rank kills itself at its n-th post of messages; the others report what they met."""
    group = fresh_group(timeout_s=60.0)
    ringcoll.barrier(group)  # all are connected
    if dist.get_rank() == rank:
        bind, done = GlooTransport.bind, [0]

        def deadly(self: Any, receives: Sequence[Message], sends: Sequence[Message]) -> Any:
            post = bind(self, receives, sends)

            def deadly_post(mixed: int) -> Any:
                done[0] += 1
                if done[0] > posts:
                    os.kill(os.getpid(), signal.SIGKILL)
                return post(mixed)

            return deadly_post

        GlooTransport.bind = deadly  # type: ignore[method-assign]
    tensor = torch.ones(100_000)
    outs = [torch.zeros(100_000) for _ in range(dist.get_world_size())]

    def call() -> None:
        if collective == "all_reduce":
            ringcoll.all_reduce(tensor, group=group, algorithm=algorithm)
        else:
            ringcoll.all_gather(outs, tensor, group, algorithm=algorithm)

    caught = catch(call)
    caught.next_kind = catch(lambda: ringcoll.barrier(group)).kind
    report((dist.get_rank(), caught))


def die_before(rank: int) -> None:
    """One rank is dead before the others start the operation."""
    group = fresh_group(timeout_s=60.0)
    ringcoll.barrier(group)
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.0)
    caught = catch(lambda: ringcoll.all_reduce(torch.ones(10), group=group, algorithm="ring"))
    report((dist.get_rank(), caught))


def die_in_async(rank: int) -> None:
    """Operations are in flight, and more are queued, when a rank dies."""
    group = fresh_group(timeout_s=60.0)
    ringcoll.barrier(group)
    if dist.get_rank() == rank:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        time.sleep(10)
    works = [ringcoll.all_reduce(torch.ones(10), group=group, async_op=True) for _ in range(5)]
    for work in works:
        assert work is not None
        report((dist.get_rank(), catch(work.wait)))


def die_with_the_store(rank: int) -> None:
    """The rank that dies is the one that hosts the store, as under torchrun."""
    c10d = dist.distributed_c10d
    old, me, size = c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    limit = timedelta(seconds=60)
    if me == rank:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, timeout=limit)
        old.set("new port", str(store.port))
    else:
        port = int(old.get("new port"))
        store = dist.TCPStore("127.0.0.1", port, None, False, timeout=limit)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=me, world_size=size, timeout=limit)
    ringcoll.barrier()
    if me == rank:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    caught = catch(lambda: ringcoll.all_reduce(torch.ones(10), algorithm="ring"))
    report((me, caught))


# --- absence --------------------------------------------------------------------------


def stay_away(absent: int, algorithm: str, *, first: bool, async_op: bool) -> Caught | None:
    """One rank does not make the call that the others make."""
    group = fresh_group(timeout_s=2.0 if first else 30.0)
    if not first:
        ringcoll.barrier(group)
    caught = None
    if dist.get_rank() != absent:

        def call() -> None:
            work = ringcoll.all_reduce(
                torch.ones(10),
                group=group,
                algorithm=algorithm,
                timeout=None if first else 1.5,
                async_op=async_op,
            )
            if work is not None:
                work.wait()

        caught = catch(call)
        caught.next_kind = catch(lambda: ringcoll.barrier(group)).kind
    dist.barrier()  # of the default group, and native
    fresh = fresh_group()
    result = works(fresh)
    if caught is not None:
        caught.fresh_works = result
    return caught


def sleep_on(asleep: int) -> Caught | None:
    """One rank stops in the middle of an operation, alive, and wakes up later."""
    group = fresh_group(timeout_s=30.0)
    ringcoll.barrier(group)

    def slow(left: Tensor, right: Tensor) -> Tensor:
        if dist.get_rank() == asleep:
            time.sleep(1.5)
        return left + right

    op = UserOp(slow, commutative=True)
    return catch(
        lambda: ringcoll.all_reduce(
            torch.ones(10), op, group, algorithm="ring", timeout=timedelta(seconds=0.7)
        )
    )


# --- errors of the user's own ----------------------------------------------------------


def raise_in_operator(rank: int, algorithm: str) -> Caught:
    """The user's operator raises on one rank."""
    group = fresh_group(timeout_s=30.0)

    def broken(left: Tensor, right: Tensor) -> Tensor:
        if dist.get_rank() == rank:
            raise ArithmeticError("no sums on Sundays")
        return left + right

    op = UserOp(broken, commutative=True)
    tensor = torch.ones(10)
    caught = catch(lambda: ringcoll.all_reduce(tensor, op, group, algorithm=algorithm))
    caught.next_kind = catch(lambda: ringcoll.barrier(group)).kind
    caught.fresh_works = works(fresh_group())
    return caught


def bad_calls(names: Sequence[str]) -> list[tuple[Caught, int, bool]]:
    """Bad arguments on a group: what is raised, how often posted, whether the group works."""
    group = fresh_group(timeout_s=30.0)
    three, size = torch.ones(3), dist.get_world_size()
    calls: dict[str, Callable[[], Any]] = {
        "dtype of the operator": lambda: ringcoll.all_reduce(three, "bor", group),
        "device": lambda: ringcoll.all_reduce(torch.ones(3, device="meta"), group=group),
        "length of the list": lambda: ringcoll.all_gather([three], three, group),
        "root outside": lambda: ringcoll.broadcast(three, group=group, group_src=size),
        "global root outside": lambda: ringcoll.broadcast(three, size, group),
        "unknown algorithm": lambda: ringcoll.all_reduce(three, group=group, algorithm="rign"),
        "wrong schedule": lambda: ringcoll.all_gather(
            [three.clone() for _ in range(size)],
            three,
            group,
            algorithm=Schedule("all_gather", "lazy", size, size, 0, lambda rank: iter(())),
        ),
        "world size": lambda: ringcoll.all_gather(
            [three.clone() for _ in range(size)], three, group, algorithm="in fours"
        ),
        "no tensor": lambda: ringcoll.all_reduce(None, group=group),  # type: ignore[arg-type]
    }
    bind, counts = GlooTransport.bind, [0]

    def counting(self: Any, receives: Sequence[Message], sends: Sequence[Message]) -> Any:
        counts[0] += 1
        return bind(self, receives, sends)

    register(
        "all_gather",
        "in fours",
        chunks=lambda k: k,
        restriction=lambda k: "only multiples of four" if k % 4 else None,
    )(lambda rank, world_size: iter(()))
    found = []
    for name in names:
        counts[0] = 0
        GlooTransport.bind = counting  # type: ignore[method-assign]
        try:
            caught = catch(calls[name])
        finally:
            GlooTransport.bind = bind  # type: ignore[method-assign]
        found.append((caught, counts[0], works(group)))
    unregister("all_gather", "in fours")
    return found
