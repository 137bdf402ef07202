"""The way of a call: Python frames before the first message, one look-up, what the key holds."""

from __future__ import annotations

import gc
import inspect
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import ringcoll
from ringcoll import LocalGroup, run_threads
from ringcoll.errors import ArgumentError, ScheduleError, UnknownAlgorithmError
from ringcoll.runtime.collectives import OwnGroup
from ringcoll.runtime.collectives.calls import Deferred, together
from ringcoll.runtime.group import communicator
from ringcoll.runtime.operation import operation
from ringcoll.schedules import Program, Step, inp, out, recv, reduce, send, tmp
from ringcoll.schedules.algorithms import register, schedule_of, unregister

K = 2
MOST_FRAMES = 10


def calls(group: Any, numel: int) -> dict[str, Callable[[], object]]:
    """Every public function on tensors of so many elements."""
    one, whole = torch.ones(numel), torch.ones(K * numel)
    other = torch.ones(K * numel)
    first, second = [torch.ones(numel) for _ in range(K)], [torch.ones(numel) for _ in range(K)]
    is_root = group.rank() == 0
    return {
        "all_reduce": lambda: ringcoll.all_reduce(one, group=group),
        "reduce": lambda: ringcoll.reduce(one, group_dst=0, group=group),
        "broadcast": lambda: ringcoll.broadcast(one, group_src=0, group=group),
        "all_gather": lambda: ringcoll.all_gather(first, one, group),
        "all_gather_single": lambda: ringcoll.all_gather_single(whole, one, group),
        "gather": lambda: ringcoll.gather(one, first if is_root else None, group=group),
        "scatter": lambda: ringcoll.scatter(one, first if is_root else None, group=group),
        "reduce_scatter": lambda: ringcoll.reduce_scatter(one, first, group=group),
        "reduce_scatter_single": lambda: ringcoll.reduce_scatter_single(one, whole, group=group),
        "all_to_all": lambda: ringcoll.all_to_all(first, second, group),
        "all_to_all_single": lambda: ringcoll.all_to_all_single(whole, other, group=group),
        "barrier": lambda: ringcoll.barrier(group),
    }


def frames_before(call: Callable[[], object], posts: set[Any]) -> int:
    """Python functions that are entered before a message is posted, the lambda left out."""
    entered: list[str] = []
    is_posted: list[bool] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and not is_posted:
            if frame.f_code in posts:
                is_posted.append(True)
            else:
                entered.append(frame.f_code.co_qualname)

    gc.disable()  # what it finalizes is not on the way of the call
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    assert is_posted, entered
    return len(entered) - 1


@pytest.mark.parametrize("numel", [1, 1 << 16])
def test_at_most_ten_frames_before_the_first_message(numel: int) -> None:
    def main(group: LocalGroup) -> dict[str, int]:
        transport = group.communicator.transport
        bound = transport.bind([], [])
        counted = {}
        for name, call in calls(group, numel).items():
            for _ in range(4):
                call()  # seen so often that it is kept
            # The call after a rest wakes the monitor, and a busy machine makes rests.
            counted[name] = min(frames_before(call, {bound.__code__}) for _ in range(3))
        return counted

    for counted in run_threads(main, K):
        assert {name: n for name, n in counted.items() if n > MOST_FRAMES} == {}


def test_a_call_that_was_seen_before_is_one_look_up() -> None:
    class Counting(dict[Any, Any]):
        looked_up = 0

        def get(self, key: Any, default: Any = None) -> Any:
            Counting.looked_up += 1
            return super().get(key, default)

    def main(group: LocalGroup) -> int:
        ringcoll.all_reduce(torch.ones(3), group=group)
        group.communicator.operations = Counting(group.communicator.operations)
        before = len(group.communicator.operations)
        for value in range(5):
            tensor = torch.full((3,), float(value))
            ringcoll.all_reduce(tensor, group=group)
            assert tensor.tolist() == [value] * 3
        assert len(group.communicator.operations) == before
        return Counting.looked_up

    assert run_threads(main, 1) == [5]


def test_the_key_tells_calls_apart() -> None:
    """Whatever decides is in the key: a call never gets another call's operation."""

    def main(group: LocalGroup) -> None:
        member = group.communicator
        base = torch.ones(2, 3)
        variants: list[Callable[[], object]] = [
            lambda: ringcoll.all_reduce(base.clone(), group=group),
            lambda: ringcoll.all_reduce(base.clone(), "max", group),
            lambda: ringcoll.all_reduce(base.clone().t(), group=group),
            lambda: ringcoll.all_reduce(base.double(), group=group),
            lambda: ringcoll.all_reduce(base.clone(), group=group, algorithm="ring"),
            lambda: ringcoll.all_reduce(base.clone(), group=group, segment_bytes=4),
            lambda: ringcoll.all_reduce(base.clone(), group=group, out=torch.ones(2, 3)),
            lambda: ringcoll.all_reduce(base.bfloat16(), group=group),
            lambda: ringcoll.all_reduce(base.bfloat16(), group=group, wire_dtype=torch.bfloat16),
            lambda: ringcoll.all_reduce(base.clone(), ringcoll.premul_sum(2.0), group),
            lambda: ringcoll.all_reduce(base.clone(), ringcoll.premul_sum(3.0), group),
        ]
        for number, variant in enumerate(variants):
            before = len(member.operations)
            variant()
            assert len(member.operations) == before + 1, number
            variant()
            assert len(member.operations) == before + 1, number

    run_threads(main, 2)


def test_strides_are_told_apart() -> None:
    """Tensors of one shape that lie in memory in several ways; none of them is contiguous."""

    def main(group: LocalGroup) -> None:
        member = group.communicator
        places = [
            lambda memory: memory.as_strided((2, 3), (1, 2)),
            lambda memory: memory.as_strided((2, 3), (12, 2)),
            lambda memory: memory.as_strided((2, 3), (3, 6)),
            lambda memory: memory.as_strided((2, 3), (12, 2), 1),
        ]
        new = [1, 1, 1, 0]  # operations; where a tensor begins does not matter
        for place, num_new in zip(places, new, strict=True):
            before = len(member.operations)
            for _ in range(2):
                memory = torch.arange(24.0) * (group.rank() + 1)
                expected = torch.arange(24.0) * (group.rank() + 1)
                place(expected).copy_(place(torch.arange(24.0)) * 3)
                ringcoll.all_reduce(place(memory), group=group)
                assert torch.equal(memory, expected)
                assert len(member.operations) == before + num_new

    run_threads(main, 2)


def test_tensors_may_come_to_need_gradients_while_an_operation_waits() -> None:
    def main(group: LocalGroup) -> list[float]:
        planned, later = torch.ones(6)[::2], torch.ones(3)  # strided: results are copied back
        operation = ringcoll.all_reduce.plan(planned, group=group)
        planned.requires_grad_()
        operation()
        assert planned.requires_grad
        pieces = [torch.zeros(3, requires_grad=True), torch.zeros(3)]
        ringcoll.all_gather(pieces, torch.full((3,), group.rank() + 1.0), group)
        work = ringcoll.all_reduce(later, group=group, async_op=True)
        later.requires_grad_()
        assert work is not None
        work.wait()
        return [planned[0].item(), later[0].item(), *(piece[0].item() for piece in pieces)]

    assert run_threads(main, 2) == [[2.0, 2.0, 1.0, 2.0]] * 2


def test_a_group_that_defers_is_not_prepared_unless_that_is_asked() -> None:
    def main(group: LocalGroup) -> None:
        deferred = Deferred(group)
        assert Deferred.of(deferred) is deferred
        assert Deferred.of(group).group is group
        assert not deferred.prepared
        before = len(group.communicator.operations)
        call = ringcoll.all_reduce(torch.ones(5), group=deferred)
        assert len(group.communicator.operations) == before + 1  # kept, as of any call
        assert call is not None
        assert call is not None
        again: Any = ringcoll.all_reduce(torch.ones(5), group=deferred)
        assert again.operation is call.operation  # type: ignore[attr-defined]
        prepared = [ringcoll.all_reduce.plan(torch.ones(5), group=group) for _ in range(2)]
        own = {id(each.operation) for each in (again, *prepared)}
        assert len(own) == 3, "it keeps what it is bound to"
        kept = {id(each) for each in group.communicator.operations.values()}
        assert not kept & {id(each.operation) for each in prepared}
        assert len(group.communicator.operations) == before + 1
        for each in (call, again, *prepared):
            each()

    run_threads(main, 1)


def test_in_place_calls_at_other_addresses_are_one_operation() -> None:
    def main(group: LocalGroup) -> None:
        kept = group.communicator.operations
        own = slice(2 * group.rank(), 2 * group.rank() + 2)
        memories = [torch.zeros(64) for _ in range(5)]
        for number, memory in enumerate(memories):
            memory[own] = group.rank() + 1.0
            ringcoll.all_gather_single(memory[:4], memory[own], group)
            assert memory[:5].tolist() == [1.0, 1.0, 2.0, 2.0, 0.0]
            if number == 0:
                before = len(kept)
            assert len(kept) == before

    run_threads(main, 2)


def test_what_overlaps_in_its_last_element_is_refused_on_every_call() -> None:
    def main(group: LocalGroup) -> None:
        for begin, overlaps in ((5, False), (4, True), (4, True), (5, False)):
            memory = torch.zeros(32)
            outputs = [memory[:5:2], memory[begin : begin + 5 : 2]]  # 0, 2, 4 and so on
            if overlaps:
                with pytest.raises(ArgumentError, match="memory"):
                    ringcoll.all_gather(outputs, torch.full((3,), group.rank() + 1.0), group)
            else:
                ringcoll.all_gather(outputs, torch.full((3,), group.rank() + 1.0), group)
                assert [*map(torch.Tensor.tolist, outputs)] == [[1.0] * 3, [2.0] * 3]

    run_threads(main, 2)


class Retrying(OwnGroup):
    """A group that runs calls in its own way."""

    retries = True

    def __init__(self) -> None:
        self.asked: list[bool] = []

    def rank(self) -> int:
        return 5

    def retried(self, make: Callable[[OwnGroup], Any], async_op: bool) -> None:
        self.asked.append(async_op)


def test_a_group_that_retries_gets_the_call_and_cannot_be_prepared() -> None:
    group = Retrying()
    for async_op in (False, True):
        ringcoll.all_reduce(torch.ones(3), group=group, async_op=async_op)
    assert group.asked == [False, True]
    with pytest.raises(ArgumentError, match="cannot be prepared or joined") as caught:
        ringcoll.all_reduce.plan(torch.ones(3), group=group)
    assert "rank 5" in str(caught.value)


def test_calls_of_several_devices_are_not_joined() -> None:
    def call(device: str) -> Any:
        return SimpleNamespace(
            operation=SimpleNamespace(device=torch.device(device)),
            member=SimpleNamespace(rank=0),
            tensors=[device],
            following=(),
            num_parts=1,
            results=[device],
        )

    with pytest.raises(ArgumentError, match="must be on one device") as caught:
        together(Deferred(None), [call("cpu"), call("cpu"), call("meta")])
    assert "meta" in str(caught.value)
    first, second = call("cpu"), call("cpu")
    joined: Any = together(Deferred(None), [first, second])
    assert joined is first
    assert first.following == [(second.operation, second.tensors)]
    assert (first.num_parts, first.results) == (2, ["cpu", "cpu"])


def test_factors_of_torchs_own_operators_are_told_apart() -> None:
    """Objects of `ReduceOp` with other factors are equal to each other, as torch has it."""

    def main(group: LocalGroup) -> list[float]:
        totals = []
        for factor in (2.0, 3.0, 2.0):
            op = dist._make_nccl_premul_sum(factor)
            tensor = torch.ones(3)
            ringcoll.all_reduce(tensor, op, group)
            totals.append(tensor[0].item())
        return totals

    assert run_threads(main, 2) == [[4.0, 6.0, 4.0]] * 2


SIZES: dict[str, Callable[[list[int]], Any]] = {
    "tensor": torch.tensor,
    "list of tensors": lambda sizes: [*map(torch.tensor, sizes)],
    "tuple of tensors": lambda sizes: (*map(torch.tensor, sizes),),
    "array": np.array,
    "list of numbers of numpy": lambda sizes: [*map(np.int64, sizes)],
    "list": list,
    "list of a class of its own": type("Sizes", (list,), {"__hash__": lambda self: 7}),
}


def refill(sizes: Any, values: list[int]) -> None:
    """Change split sizes, or the tensors among them, in place; a tuple of numbers cannot be."""
    for place, value in enumerate(values):
        if isinstance(sizes[place], torch.Tensor):
            sizes[place].fill_(value)
        else:
            sizes[place] = value


@pytest.mark.parametrize("make", SIZES.values(), ids=SIZES)
def test_split_sizes_count_as_they_are_when_the_call_is_made(make: Callable[..., Any]) -> None:
    """They are the same objects in each call, filled anew."""

    def main(group: LocalGroup) -> None:
        rank = group.rank()
        sent, received = make([1, 1]), make([1, 1])
        plans = []
        for first in (1, 3, 0, 3):
            # Of four rows each, rank 0 sends so many to itself, and rank 1 the others to rank 0.
            to_0 = [first, 4 - first]
            refill(sent, [to_0[rank], 4 - to_0[rank]])
            refill(received, to_0 if rank == 0 else to_0[::-1])
            rows = torch.arange(4.0) + 10 * rank
            parts = [torch.arange(4.0) + 10 * peer for peer in range(2)]
            parts = [
                part[:end] if rank == 0 else part[end:]
                for part, end in zip(parts, to_0, strict=True)
            ]
            expected, output = torch.cat(parts), torch.full((4,), -1.0)
            ringcoll.all_to_all_single(output, rows, received, sent, group)
            assert torch.equal(output, expected)
            planned = torch.full((4,), -1.0)
            plan = ringcoll.all_to_all_single.plan(planned, rows, received, sent, group)
            plans.append((plan, planned, expected))
        for plan, planned, expected in plans:
            plan()
            assert torch.equal(planned, expected)

    run_threads(main, 2)


def test_what_may_change_is_not_kept_in_a_key() -> None:
    """A root, for instance, in a tensor that is filled anew."""

    def main(group: LocalGroup) -> list[float]:
        found, root = [], torch.tensor(0)
        for src in (0, 1):
            root.fill_(src)
            tensor = torch.full((2,), float(group.rank()))
            with suppress(ArgumentError):  # a root need not be accepted as a tensor
                ringcoll.broadcast(tensor, group_src=root, group=group)  # type: ignore[arg-type]
                found.append(tensor[0].item())
        return found

    assert run_threads(main, 2) in ([[0.0, 1.0]] * 2, [[], []])


@pytest.mark.parametrize("make", [ringcoll.premul_sum, dist._make_nccl_premul_sum])
def test_a_factor_counts_as_it_is_when_the_call_is_made(make: Any) -> None:
    def main(group: LocalGroup) -> list[float]:
        factor = torch.tensor(2.0)
        op, found = make(factor), []
        for value in (2.0, 3.0, -0.0, 0.0, math.nan, math.nan):
            factor.fill_(value)
            tensor = torch.ones(3)
            call: Any = ringcoll.all_reduce(tensor, op, Deferred(group))
            factor.fill_(7.0)
            call()
            found.append(tensor[0].item())
            num_kept = len(group.communicator.operations)
        assert num_kept == 5, "NaN is a value, too"
        return found

    for found in run_threads(main, 2):
        assert found[:2] == [4.0, 6.0]
        assert [math.copysign(1.0, zero) for zero in found[2:4]] == [-1.0, 1.0]
        assert all(map(math.isnan, found[4:]))


def test_factors_of_numpy_are_numbers() -> None:
    def main(group: LocalGroup) -> list[float]:
        found = []
        for factor in (np.float32(0.5), np.int64(2), np.array([3.0])):
            tensor = torch.ones(3)
            ringcoll.all_reduce(tensor, ringcoll.premul_sum(factor), group)  # type: ignore[arg-type]
            found.append(tensor[0].item())
        return found

    assert run_threads(main, 2) == [[1.0, 4.0, 6.0]] * 2


class Weighted:
    """An operator that is equal to all others of its class, and that can be changed."""

    def __init__(self, weight: float) -> None:
        self.weight = weight
        self.op = "an attribute that torch's operators have, too"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Weighted)

    def __hash__(self) -> int:
        return 1

    def __call__(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.weight * (left + right)


class Unhashable(Weighted):
    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("kind", [Weighted, Unhashable])
@pytest.mark.parametrize("make", [lambda fn: fn, ringcoll.UserOp], ids=["function", "UserOp"])
def test_operators_of_the_user_count_by_what_they_compute(kind: Any, make: Any) -> None:
    def main(group: LocalGroup) -> list[float]:
        found, changed = [], kind(1.0)
        for weight in (1.0, 2.0):
            for fn in (kind(weight), changed):
                changed.weight = weight
                tensor = torch.ones(3)
                ringcoll.all_reduce(tensor, make(fn), group)
                found.append(tensor[0].item())
        return found

    assert run_threads(main, 2) == [[2.0, 2.0, 4.0, 4.0]] * 2


def test_a_schedule_file_that_is_written_anew_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    both = threading.Barrier(2)

    def main(group: LocalGroup) -> list[str]:
        found = []
        for name in ("ring", "recursive_doubling", "ring"):
            if group.rank() == 0:
                path.write_text(schedule_of("all_reduce", name, 2).to_text(), encoding="utf-8")
                os.utime(path, ns=(1, 1))
            both.wait()
            for _ in range(2):
                tensor = torch.arange(4.0) + group.rank()
                call: Any = ringcoll.all_reduce(tensor, group=Deferred(group), algorithm=str(path))
                call()
                assert tensor.tolist() == [1.0, 3.0, 5.0, 7.0]
                found.append(call.operation.request.algorithm.algorithm)
            both.wait()
        both.wait()
        path.unlink(missing_ok=True)
        with pytest.raises(ScheduleError, match="cannot be read"):
            ringcoll.all_reduce(torch.ones(4), group=group, algorithm=str(path))
        return found

    names = ["ring", "ring", "recursive_doubling", "recursive_doubling", "ring", "ring"]
    assert run_threads(main, 2) == [names] * 2


def test_what_overlaps_is_refused_on_every_call() -> None:
    def main(group: LocalGroup) -> None:
        memory = torch.zeros(8)
        ringcoll.all_gather_single(memory[:4], memory[4:6], group)
        for _ in range(2):
            with pytest.raises(ArgumentError, match="overlaps"):
                ringcoll.all_gather_single(memory[:4], memory[3:5], group)
        ringcoll.all_gather_single(memory[:4], memory[4:6], group)

    run_threads(main, 2)


@pytest.fixture
def star() -> Any:
    def again(program: Callable[..., Program]) -> None:
        register("all_reduce", "star", slots=lambda k: k)(program)

    yield again
    with suppress(UnknownAlgorithmError):
        unregister("all_reduce", "star")


def test_an_algorithm_that_is_taken_away_is_not_used_again(star: Any) -> None:
    def steps(rank: int, world_size: int) -> Program:
        if rank:
            yield Step(send(0, inp(0)))
            yield Step()
            yield Step(recv(0, out(0)))
        else:
            others = range(1, world_size)
            yield Step(*(recv(peer, tmp(peer, 0)) for peer in others))
            yield Step(reduce(out(0), inp(0), *(tmp(peer, 0) for peer in others), final=True))
            yield Step(*(send(peer, out(0)) for peer in others))

    star(steps)

    def main(group: LocalGroup) -> list[float]:
        totals = []
        for _ in range(2):
            tensor = torch.full((3,), group.rank() + 1.0)
            ringcoll.all_reduce(tensor, group=group, algorithm="star")
            totals.append(tensor[0].item())
        ringcoll.barrier(group)
        if group.rank() == 0:
            unregister("all_reduce", "star")
        ringcoll.barrier(group)
        with pytest.raises(UnknownAlgorithmError):
            ringcoll.all_reduce(torch.ones(3), group=group, algorithm="star")
        ringcoll.barrier(group)
        if group.rank() == 0:
            star(steps)
        ringcoll.barrier(group)
        tensor = torch.full((3,), group.rank() + 1.0)
        ringcoll.all_reduce(tensor, group=group, algorithm="star")
        return [*totals, tensor[0].item()]

    assert run_threads(main, 2, timeout_s=10) == [[3.0, 3.0, 3.0]] * 2


def test_public_functions_say_what_they_return() -> None:
    for name in ("all_reduce", "all_gather", "barrier", "reduce_scatter_single_coalesced"):
        assert inspect.signature(getattr(ringcoll, name)).return_annotation == "Work | None"


def test_another_threads_asynchronous_call_returns_while_a_blocking_one_waits() -> None:
    """Rank 1 comes only when rank 0's second thread has got its work."""
    is_issued = threading.Event()

    def main(group: LocalGroup) -> None:
        first, second = torch.ones(3), torch.ones(3)
        ringcoll.barrier(group)
        if group.rank() == 1:
            assert is_issued.wait(20)
            ringcoll.all_reduce(first, group=group)
            ringcoll.all_reduce(second, group=group)
            return
        member = group.communicator
        thread = threading.Thread(target=lambda: ringcoll.all_reduce(first, group=group))
        thread.start()
        while member.num_issued < 2:
            time.sleep(0.001)
        work = ringcoll.all_reduce(second, group=group, async_op=True)
        is_issued.set()
        assert work is not None
        work.wait()
        thread.join()
        assert first.tolist() == second.tolist() == [2.0] * 3

    run_threads(main, 2, timeout_s=40)


def test_what_a_group_remembers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicator, "_MOST_REMEMBERED", 0)
    monkeypatch.setattr(operation, "_MOST_BINDINGS", 2)

    def main(group: LocalGroup) -> None:
        kept = group.communicator.operations
        for numel in (3, 30_000):
            tensors = [torch.ones(numel) for _ in range(5)]
            for tensor in (*tensors, *tensors):
                ringcoll.all_reduce(tensor, group=group)
        for each in kept.values():
            assert len(each.bindings) <= 2
            assert len(each._seen) <= 2
        for numel in range(1, 9):
            ringcoll.all_reduce(torch.ones(numel), group=group)
        assert len(kept) == 1
        ringcoll.barrier(group)
        hub: Any = group.communicator.transport
        assert len(hub.hub._sends) + len(hub.hub._receives) <= 1, (
            "nothing waits but for the barrier"
        )

    run_threads(main, 2)


def test_what_looks_like_a_call_that_was_seen_before() -> None:
    """The same number of elements in another shape, negative views, subclasses of tensors."""

    class Own(torch.Tensor):
        pass

    def main(group: LocalGroup) -> list[float]:
        ringcoll.all_reduce(torch.ones(3), group=group)
        ringcoll.all_reduce(torch.ones(30_000), "max", group)  # not short, which are copied
        negative = torch._neg_view(torch.full((30_000,), group.rank() + 1.0))
        ringcoll.all_reduce(negative, "max", group)
        ringcoll.all_reduce(torch.ones(3), group=group, out=torch.ones(3))
        with pytest.raises(ArgumentError, match="another shape"):
            ringcoll.all_reduce(torch.ones(3), group=group, out=torch.ones(1, 3))
        num_known = len(group.communicator.operations)
        own = torch.ones(5).as_subclass(Own)
        ringcoll.all_reduce(own, group=group)
        assert len(group.communicator.operations) == num_known  # its facts may be its own
        return [*negative.unique().tolist(), *own.tolist()]

    assert run_threads(main, 2) == [[-1.0] + [2.0] * 5] * 2


def test_no_schedule_is_left_of_an_algorithm_that_is_taken_away(star: Any) -> None:
    def steps(rank: int, world_size: int) -> Program:
        yield Step(send(1 - rank, inp(0)), recv(1 - rank, tmp(1 - rank, 0)))
        yield Step(reduce(out(0), inp(0), tmp(1 - rank, 0)))

    star(steps)
    assert schedule_of("all_reduce", "star", 2).algorithm == "star"
    unregister("all_reduce", "star")
    with pytest.raises(UnknownAlgorithmError):
        schedule_of("all_reduce", "star", 2)


NEW_TENSORS = """
from pathlib import Path

import torch

import ringcoll


def memory():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def main(group):
    for number in range(420):
        tensor = torch.ones(700_000)
        ringcoll.all_reduce(tensor, group=group)
        if number == 20 and group.rank() == 0:
            before = memory()
    return memory() - before if group.rank() == 0 else 0


print(ringcoll.run_threads(main, 2)[0] >> 20)
"""


@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_what_is_kept_for_a_call_does_not_lie_in_the_way_of_new_tensors() -> None:
    """Tensors of 2.7 MiB, made anew for each call, on two ranks."""
    done = subprocess.run(
        [sys.executable, "-c", NEW_TENSORS], capture_output=True, text=True, timeout=100, check=True
    )
    # A binding at each new place left some 128 holes of the tensors' size on each rank: 600 MiB.
    assert int(done.stdout) < 200
