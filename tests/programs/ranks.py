"""Functions that run on the ranks of a pool of processes."""

from __future__ import annotations

import gc
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ringcoll
from ringcoll.runtime.watch import lives
from ringcoll.tools.testing import COMPLEX, Expected, mismatch
from tests.cases.calls import Case, Prepared, expected, fingerprint, prepare, verdict

__all__ = [
    "AS_GIVEN",
    "GROUPS",
    "NCCL_DTYPES",
    "Outcome",
    "accepted_by_gloo",
    "accepted_by_nccl",
    "fresh_group",
    "join",
    "run_batch",
]

# By world size: the members of each group, in the order of their ranks in it.
GROUPS: dict[int, dict[str, tuple[int, ...]]] = {
    1: {"world": (0,)},
    2: {"world": (0, 1), "backwards": (1, 0), "one": (1,)},
    3: {"world": (0, 1, 2), "ends": (0, 2), "mixed": (2, 0, 1)},
    4: {"world": (0, 1, 2, 3), "evens": (0, 2), "odds": (1, 3), "mixed": (3, 0, 2)},
}

AS_GIVEN: dict[str, Any] = {"sort_ranks": False}

_groups: dict[str, Any] = {}
_fresh: deque[Any] = deque()  # groups that `fresh_group` has made
_MOST_FRESH = 8

Outcome = tuple[list[str], str] | None
"""What is wrong, and a hash of the outputs; ``None`` where a rank is not a member."""


def join(transport: str | None, cuda_transport: str | None = None) -> None:
    """Make the groups, which use transports; called once on every rank of a pool."""
    if transport is not None:  # otherwise the default, which a test may override
        os.environ["RINGCOLL_TRANSPORT"] = transport
    if cuda_transport is not None:
        os.environ["RINGCOLL_CUDA_TRANSPORT"] = cuda_transport
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    for name, members in GROUPS.get(dist.get_world_size(), {}).items():
        _groups[name] = None if name == "world" else dist.new_group(list(members), **AS_GIVEN)
        if dist.get_rank() in members:
            over_gloo(_groups[name])


def over_gloo(group: Any) -> Any:
    """Let a group of torch's gloo use gloo, too, unless a test or the environment says else."""
    if dist.get_backend(group) == "gloo":
        ringcoll.use(group, transport="gloo")
    return group


def fresh_group(timeout_s: float = 60.0, members: Sequence[int] | None = None) -> Any:
    """A new group, of all ranks unless members are given; ends old ones that this function made.

    A group of gloo has threads that wake a hundred times a second, used or not: those of a hundred
    groups on five ranks take a core, which the tests beside them miss.
    """
    ranks = list(range(dist.get_world_size()) if members is None else members)
    group = dist.new_group(ranks, timeout=_seconds(timeout_s))
    if dist.get_rank() not in ranks:
        return group
    _fresh.append(group)
    if len(_fresh) > _MOST_FRESH:
        ringcoll.close(_fresh[0])
        dist.destroy_process_group(_fresh.popleft())
        gc.collect()  # errors that were caught refer to the group
    return over_gloo(group)


def _seconds(seconds: float) -> Any:
    from datetime import timedelta

    return timedelta(seconds=seconds)


def position(name: str) -> int | None:
    """The rank of this process in a group."""
    members = GROUPS[dist.get_world_size()][name]
    return members.index(dist.get_rank()) if dist.get_rank() in members else None


def accepted_by_gloo(case: Case, world_size: int) -> bool:
    """Whether torch's own collective over gloo takes a case, and is known to be right.

    Found by trying (torch 2.13.0): no float8, int16, uint16 and wider unsigned; AVG of
    floats only; PRODUCT, MIN, MAX of complex numbers, and their gather, are refused;
    uneven lists are refused; strided tensors are reduced wrongly; sums in bfloat16 are
    faulty; bool is reduced as if it were a number.
    """
    reduces = case.collective in ("all_reduce", "reduce", "reduce_scatter")
    if case.collective in ("scan", "exscan"):
        return False  # torch has none
    plain = {torch.float64, torch.float32, torch.float16, *COMPLEX}
    plain |= {torch.int8, torch.int32, torch.int64, torch.uint8}
    if case.style not in ("flat", "offset") or case.wire_dtype is not None:
        return False
    if len(set(case.lengths)) > 1 and not (
        case.collective == "all_to_all" and case.form == "single"
    ):
        return False
    if case.collective == "barrier":
        return True
    if not reduces:
        plain |= {torch.bfloat16, torch.bool}
        return case.dtype in plain and not (case.collective == "gather" and case.dtype.is_complex)
    if case.dtype is torch.float16 and case.kind != "exact":
        return False  # it adds in float16
    if case.op == "avg" and not (case.dtype.is_floating_point or case.dtype.is_complex):
        return False
    if case.dtype.is_complex and case.op not in ("sum", "avg"):
        return False
    return case.dtype in plain and case.op != "premul_sum" and "user" not in case.op


# bool and complex numbers it takes as others.
NCCL_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.uint8,
)


def accepted_by_nccl(case: Case) -> bool:
    """Whether torch's own collective over NCCL takes a case, and has to give the same.

    What is uneven, or empty, it moves in other ways. For AVG it multiplies by 1 / k. As the factor
    of PREMUL_SUM of bfloat16, torch gives it a float32.
    """
    if case.collective == "barrier":
        return True
    if case.style not in ("flat", "offset") or case.wire_dtype is not None:
        return False
    if len(set(case.lengths)) > 1 or not case.lengths[0] or case.dtype not in NCCL_DTYPES:
        return False
    if case.collective not in ("all_reduce", "reduce", "reduce_scatter"):
        return True
    if case.op == "avg":
        return case.dtype.is_floating_point and case.kind == "rough"
    if case.op == "premul_sum":
        return case.dtype.is_floating_point and case.dtype is not torch.bfloat16
    return case.op in ("sum", "product", "min", "max")


def _as_nccl_rounds(case: Case) -> Case:
    """NCCL adds 16-bit floats in 16 bits, as the library does with such a wire dtype."""
    narrow = case.device == "cuda" and case.dtype.is_floating_point and case.dtype.itemsize == 2
    return replace(case, wire_dtype=case.dtype) if narrow else case


def _accepted(case: Case, world_size: int) -> bool:
    return accepted_by_nccl(case) if case.device == "cuda" else accepted_by_gloo(case, world_size)


def _against_native(case: Case, ours: Any, group: Any, rank: int, world_size: int) -> list[str]:
    """Run torch's own collective, and compare."""
    theirs = prepare(case, rank, world_size, native=True)
    work = theirs.start(dist, group)
    if work is not None:
        work.wait()
    answers = expected(case, rank, world_size)
    natives = expected(_as_nccl_rounds(case), rank, world_size)
    wrong = []
    for index, (mine, native, answer, other) in enumerate(
        zip(ours.outputs, theirs.outputs, answers, natives, strict=True)
    ):
        allowed = Expected(native)
        if answer.bound is not None:  # each is within its bound of the exact result
            assert other.bound is not None
            wide = torch.complex128 if native.is_complex() else torch.float64
            allowed = Expected(native.reshape(-1).to(wide).cpu(), answer.bound + other.bound)
        wrong.append(mismatch(mine, allowed, f"rank {rank}, output {index}, against torch"))
    return [item for item in wrong if item]


def run_batch(batch: Sequence[tuple[str, Case]], native: bool) -> list[Outcome]:
    """Make the calls one after the other, with asynchronous ones in flight, then check all."""
    calls: list[tuple[Prepared, Any, int, int] | None] = []
    for name, case in batch:
        rank = position(name)
        if rank is None:
            calls.append(None)
            continue
        world_size = len(GROUPS[dist.get_world_size()][name])
        prepared = prepare(case, rank, world_size)
        calls.append((prepared, prepared.start(ringcoll, _groups[name]), rank, world_size))
    outcomes: list[Outcome] = []
    for call, (name, case) in zip(calls, batch, strict=True):
        if call is None:
            outcomes.append(None)
            continue
        prepared, work, rank, world_size = call
        if work is not None:
            work.wait()
        wrong = verdict(prepared, rank, world_size)
        if native and _accepted(case, world_size):
            wrong += _against_native(case, prepared, _groups[name], rank, world_size)
        outcomes.append((wrong, fingerprint(prepared)))
    return outcomes


# --- groups ---------------------------------------------------------------------------


def roots_of_a_group() -> dict[str, Any]:
    """In the group of global ranks 3, 0, 2: the root by either name, and a wrong one."""
    group, last = _groups["mixed"], GROUPS[4]["mixed"].index(2)
    found: dict[str, Any] = {}
    if position("mixed") is None:
        try:
            ringcoll.barrier(group)
        except ringcoll.errors.ArgumentError as error:
            return {"not a member": str(error)}
        return {}
    own = torch.tensor([dist.get_rank()])
    roots: dict[str, dict[str, Any]] = {
        "global": {"src": 2},
        "group": {"group_src": last},
        "first": {"src": 3},
    }
    for what, root in roots.items():
        tensor = own.clone()
        ringcoll.broadcast(tensor, group=group, **root)
        found[what] = tensor.item()
    total = own.clone()
    ringcoll.reduce(total, 0, group=group)
    found["reduce to 0"] = total.item()
    gathered = [torch.zeros_like(own) for _ in range(3)] if dist.get_rank() == 2 else None
    ringcoll.gather(own, gathered, group=group, group_dst=last)
    found["gather"] = [item.item() for item in gathered or ()]
    roots = {"outside": {"src": 1}, "beyond": {"group_src": 3}}
    for what, root in roots.items():
        try:
            ringcoll.broadcast(own, group=group, **root)
        except ringcoll.errors.ArgumentError as error:
            found[what] = str(error)
    ringcoll.barrier(group)
    return found


def threads_with_groups_of_their_own(rounds: int) -> list[Any]:
    """Three groups, made and used by three threads that start in another order on each rank."""
    groups = [fresh_group() for _ in range(3)]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    wrong: list[Any] = []

    def main(index: int) -> None:
        try:
            for number in range(rounds):
                tensor = torch.tensor([100 * index + number + rank])
                ringcoll.all_reduce(tensor, group=groups[index], algorithm="ring")
                wanted = world_size * (100 * index + number) + sum(range(world_size))
                if tensor.item() != wanted:
                    wrong.append((index, number, tensor.item(), wanted))
        except Exception:  # noqa: BLE001  # looked at by the test
            wrong.append(traceback.format_exc())

    threads = []
    for turn in range(3):
        thread = threading.Thread(target=main, args=((turn + rank) % 3,))
        thread.start()
        threads.append(thread)
        time.sleep(0.1)  # so that the orders differ indeed
    for thread in threads:
        thread.join(40)
    return [*wrong, *(thread.name for thread in threads if thread.is_alive())]


def several_groups_in_flight(count: int) -> list[Any]:
    """Asynchronous operations on three groups, issued in another order on each rank."""
    groups = [fresh_group() for _ in range(3)]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensors = [[torch.full((50,), 100 * g + n + rank) for n in range(count)] for g in range(3)]
    works = []
    for turn in range(3):
        g = (turn + rank) % 3
        works += [ringcoll.all_reduce(t, group=groups[g], async_op=True) for t in tensors[g]]
    for work in works:
        assert work is not None
        work.wait()
    wanted = [
        [world_size * (100 * g + n) + sum(range(world_size)) for n in range(count)]
        for g in range(3)
    ]
    found = [[set(t.tolist()) for t in row] for row in tensors]
    return [] if found == [[{n} for n in row] for row in wanted] else [found, wanted]


def own_messages_beside_collectives(count: int) -> list[Any]:
    """The user's isend and irecv, on the same group and with tag 0, while collectives run."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ahead, behind = (rank + 1) % world_size, (rank - 1) % world_size
    received = [torch.full((30,), -1) for _ in range(count)]
    sums = [torch.full((30,), n + rank) for n in range(count)]
    pending = []
    for n in range(count):
        pending.append(dist.irecv(received[n], behind))
        pending.append(ringcoll.all_reduce(sums[n], async_op=True))
        pending.append(dist.isend(torch.full((30,), 1000 * rank + n), ahead))
        if n % 5 == 4:
            ringcoll.barrier()
    for work in pending:
        assert work is not None
        work.wait()
    wrong: list[Any] = []
    for n in range(count):
        if set(received[n].tolist()) != {1000 * behind + n}:
            wrong.append(("received", n, received[n].tolist()[:3]))
        if set(sums[n].tolist()) != {world_size * n + sum(range(world_size))}:
            wrong.append(("sum", n, sums[n].tolist()[:3]))
    return wrong


def threads_of_a_group_that_is_destroyed() -> list[int]:
    """How many threads of the library there are: before a group is used, with it, after it."""

    def count() -> int:
        return sum(thread.name.startswith("ringcoll") for thread in threading.enumerate())

    gc.collect()
    group = over_gloo(dist.new_group())
    found = [count()]
    work = ringcoll.barrier(group, async_op=True)
    assert work is not None
    work.wait()
    found.append(count())
    dist.barrier()
    dist.destroy_process_group(group)
    del group, work
    gc.collect()
    found.append(count())
    return found


def threads_of_broken_groups(times: int) -> list[int]:
    """Threads of this process after each of some groups on which the ranks have disagreed."""

    def disagree() -> None:
        group = dist.new_group()
        try:
            if dist.get_rank():
                ringcoll.barrier(group)
            else:
                ringcoll.all_reduce(torch.ones(3), group=group)
        except ringcoll.errors.RingcollError:
            pass
        dist.barrier()
        ringcoll.close(group)
        dist.destroy_process_group(group)

    found = []
    for _ in range(times):
        disagree()
        gc.collect()
        found.append(len(list(Path("/proc/self/task").iterdir())))
    return found


def close_and_use_again(times: int) -> list[int]:
    """Release what the library holds for a group, and use it again."""
    group, found = fresh_group(), []
    for number in range(times):
        tensor = torch.tensor([number + dist.get_rank()])
        ringcoll.all_reduce(tensor, group=group)
        found.append(int(tensor.item()))
        dist.barrier(group)
        ringcoll.close(group)
    return found


# --- nothing native -------------------------------------------------------------------

_FUNCTIONS = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "_all_gather_base",
    "_reduce_scatter_base",
)
_METHODS = (
    "_allgather_base",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
)


class NativeCalledError(Exception):
    """A native collective was called."""


def _native(name: str) -> Callable[..., Any]:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise NativeCalledError(name)

    return refuse


def replace_native() -> Callable[[], None]:
    """Replace every native collective by a function that raises; returns what undoes it."""
    undo: list[tuple[Any, str, Any]] = []
    classes = [dist.ProcessGroup, dist.ProcessGroupGloo, dist.ProcessGroupGloo.__mro__[1]]
    owners: list[tuple[Any, tuple[str, ...]]] = [
        (dist, _FUNCTIONS),
        (dist.distributed_c10d, _FUNCTIONS),
    ]
    owners += [(owner, _METHODS) for owner in classes]
    for owner, names in owners:
        for name in names:
            if name in vars(owner):
                undo.append((owner, name, vars(owner)[name]))
                setattr(owner, name, _native(name))
    for space in (torch.ops.c10d, torch.ops._c10d_functional):
        for name in _operations(space.name):
            undo.append((space, name, getattr(space, name)))
            setattr(space, name, _native(name))

    def restore() -> None:
        for owner, name, value in undo:
            setattr(owner, name, value)

    return restore


def _operations(space: str) -> set[str]:
    """The collectives among torch's operators of a namespace."""
    found = {
        schema.name.removeprefix(f"{space}::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith(f"{space}::")
    }
    return {name for name in found if not name.startswith(("send", "recv", "wait", "isend"))}


def native_collectives_that_still_work() -> list[str]:
    """Call every one that was replaced; returns those that did not raise."""
    tensor = torch.zeros(1)
    group: Any = dist.group.WORLD
    calls: dict[str, Callable[[], Any]] = {
        "dist.all_reduce": lambda: dist.all_reduce(tensor),
        "dist.broadcast": lambda: dist.broadcast(tensor, 0),
        "dist.barrier": dist.barrier,
        "c10d.all_reduce": lambda: dist.distributed_c10d.all_reduce(tensor),
        "ProcessGroup.allreduce": lambda: group.allreduce([tensor]),
        "ProcessGroup.barrier": group.barrier,
        "ProcessGroupGloo.allreduce": lambda: group._get_backend(torch.device("cpu")).allreduce(
            [tensor]
        ),
        "torch.ops.c10d.allreduce_": lambda: torch.ops.c10d.allreduce_([tensor], None),
        "functional": lambda: torch.ops._c10d_functional.all_reduce(tensor, "sum", "0"),
    }
    working = []
    for name, call in calls.items():
        try:
            call()
        except NativeCalledError:
            continue
        working.append(name)
    return working


def without_native(batch: Sequence[tuple[str, Case]]) -> tuple[list[str], list[Outcome], int]:
    """Run a batch where no native collective can be called.

    Returns
    -------
    tuple
        Native collectives that could be called all the same, the outcomes, and how many
        collectives the native groups have counted meanwhile.
    """
    groups = [dist.group.WORLD, *(group for group in _groups.values() if _is_member(group))]
    # torch counts the tries of its connections, too, of a rank that waits for a second and more.
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    gloo: Any = dist.ProcessGroupGloo
    receive, tries = gloo.recv, list[int]()

    def noting(group: Any, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        if tag == lives._TRY_TAG and any(group is each for each in backends):
            tries.append(peer)
        return receive(group, tensors, peer, tag)

    gloo.recv = noting
    before = [group._get_sequence_number_for_group() for group in groups]
    # The library's own group is made where nothing native is left, too.
    _groups["new"] = dist.new_group(list(range(dist.get_world_size())))
    GROUPS[dist.get_world_size()]["new"] = tuple(range(dist.get_world_size()))
    restore = replace_native()
    try:
        working = native_collectives_that_still_work()
        outcomes = run_batch(batch, native=False)
    finally:
        restore()
        gloo.recv = receive
        del GROUPS[dist.get_world_size()]["new"]
    after = [group._get_sequence_number_for_group() for group in groups]
    return working, outcomes, sum(after) - sum(before) - len(tries)


def _is_member(group: Any) -> bool:
    return isinstance(group, dist.ProcessGroup)
