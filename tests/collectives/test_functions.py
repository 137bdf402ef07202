"""The public functions, on ranks that are threads."""

from __future__ import annotations

import inspect
import itertools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import ringcoll
from ringcoll import LocalGroup, UserOp, run_threads
from ringcoll.errors import (
    ArgumentError,
    CollectiveTimeoutError,
    GroupBrokenError,
    PeerLostError,
    RingcollError,
)
from ringcoll.runtime.collectives import arguments
from ringcoll.runtime.group import Communicator
from ringcoll.runtime.operation import Plan
from ringcoll.runtime.transport import Hub
from ringcoll.schedules import contract
from ringcoll.schedules.algorithms import algorithms
from ringcoll.schedules.cost import segment_bytes_of
from ringcoll.tools.testing import inputs as data
from ringcoll.tools.testing import mismatch
from tests.cases.algorithms import EVERY, name_of, worlds_of
from tests.cases.calls import (
    STYLES,
    USER_OPS,
    Case,
    affine,
    expected,
)
from tests.cases.effort import effort
from tests.cases.reference import reduced
from tests.cases.strategies import cases
from tests.programs.threads import run_case

COLLECTIVES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "barrier",
    "scan",
    "exscan",
)


@pytest.mark.slow
@effort(400)
@given(st.sampled_from([1, 2, 3, 4, 5, 7]).flatmap(lambda k: st.tuples(cases(k), st.just(k))))
def test_every_function(drawn: tuple[Case, int]):
    run_case(*drawn)


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("form", ["list", "single"])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_every_function_on_every_kind_of_tensor(collective: str, form: str, style: str):
    for dtype in (torch.int64, torch.complex64, torch.bfloat16):
        for in_place in (False, True) if collective != "all_to_all" else (False,):
            numel = 1 if style == "scalar" else 6
            case = Case(collective, form=form, style=style, dtype=dtype, lengths=(numel,))
            run_case(Case(**{**vars(case), "in_place": in_place}), 3)


@pytest.mark.slow
@pytest.mark.parametrize("entry", EVERY, ids=name_of)
def test_every_algorithm_by_name(entry: Any):
    for world_size in worlds_of(entry, 1, 2, 5):
        root = world_size - 1 if contract(entry.collective).rooted else 0
        run_case(
            Case(entry.collective, entry.name, lengths=(world_size + 1,), root=root), world_size
        )


# --- names, arguments, defaults -------------------------------------------------------


NAMES = [*COLLECTIVES[:-2], "all_gather_single", "reduce_scatter_single", "all_to_all_single"]
RECENT = torch.__version__ >= "2.13"  # before, some names and last arguments were not there


@pytest.mark.parametrize("name", [name for name in NAMES if RECENT or hasattr(dist, name)])
def test_arguments_are_those_of_torch(name: str):
    ours = list(inspect.signature(getattr(ringcoll, name)).parameters.values())
    theirs = list(inspect.signature(getattr(dist, name)).parameters.values())
    positional = [p for p in ours if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    if not RECENT:
        positional = positional[: len(theirs)]
    assert [p.name for p in positional] == [p.name for p in theirs]
    assert [p.default for p in positional] == [p.default for p in theirs]
    assert any(p.name == "algorithm" for p in ours if p not in positional)


def test_older_names():
    def main(group: LocalGroup) -> tuple[list[int], list[int]]:
        gathered, part = torch.zeros(4, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
        own = torch.tensor([group.rank(), 7])
        ringcoll.all_gather_into_tensor(gathered, own, group)
        ringcoll.reduce_scatter_tensor(part, gathered, group=group)
        return gathered.tolist(), part.tolist()

    assert run_threads(main, 2) == [([0, 7, 1, 7], [0, 14]), ([0, 7, 1, 7], [2, 14])]


def test_tree_and_auto_are_names_of_algorithms():
    for name in ("ring", "tree", "double_tree", "auto"):
        run_case(Case("all_reduce", name), 4)


# --- asynchronous ---------------------------------------------------------------------


def test_work_says_what_it_has_done():
    def main(group: LocalGroup) -> None:
        tensor = torch.full((3,), group.rank() + 1)
        work = ringcoll.all_reduce(tensor, group=group, async_op=True)
        assert isinstance(work, ringcoll.Work)
        assert isinstance(work, dist.Work)
        assert work.wait() is True
        assert work.wait() is True, "waiting again is harmless"
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert [item.tolist() for item in work.result()] == [[6, 6, 6]]
        assert work.result()[0].data_ptr() == tensor.data_ptr()
        (value,) = work.get_future().wait()
        assert value.data_ptr() == tensor.data_ptr()

    run_threads(main, 3)


def test_many_in_flight_complete_in_the_order_they_were_issued():
    def main(group: LocalGroup) -> None:
        tensors = [torch.tensor([index, group.rank()]) for index in range(40)]
        works = [ringcoll.all_reduce(t, group=group, async_op=True) for t in tensors]
        last = torch.tensor([group.rank()])
        # A blocking one waits for its turn.
        ringcoll.broadcast(last, group=group, group_src=2)
        assert last.item() == 2
        assert all(work is not None and work.is_completed() for work in works)
        for work in reversed(works):
            assert work is not None
            work.wait()
        assert [t.tolist() for t in tensors] == [[3 * index, 3] for index in range(40)]

    run_threads(main, 3)


def test_inputs_are_read_when_the_operation_runs_and_outputs_are_there_after_wait():
    def main(group: LocalGroup) -> None:
        first, out = torch.tensor([group.rank() + 1.0]), torch.zeros(2)
        ringcoll.all_reduce(first, group=group, async_op=True)
        # Chained: the second works on the result of the first.
        work = ringcoll.all_gather_single(out, first, group, async_op=True)
        assert work is not None
        work.wait()
        assert out.tolist() == [3.0, 3.0]

    run_threads(main, 2)


def test_callbacks_of_futures_may_block_in_other_collectives():
    """Each waits for the future of the next, so none may hold up the operations."""
    depth = 5

    def main(group: LocalGroup) -> None:
        def add_up(level: int) -> torch.futures.Future[Any]:
            work = ringcoll.all_reduce(torch.tensor([10**level]), group=group, async_op=True)
            assert work is not None

            def callback(future: torch.futures.Future[Any]) -> int:
                blocking = torch.tensor([10**level])
                ringcoll.all_reduce(blocking, group=group)
                assert torch.equal(blocking, future.value()[0])
                deeper = add_up(level + 1).wait() if level < depth else 0
                return int(blocking.item() + deeper)

            return work.get_future().then(callback)

        assert add_up(1).wait() == 222220
        names = [thread.name for thread in threading.enumerate()]
        assert names.count(f"ringcoll-{group.rank()}") <= depth + 2

    run_threads(main, 2)


@pytest.mark.slow
def test_many_operations_at_once_complete_in_order():
    count = 10_000

    def main(group: LocalGroup) -> None:
        done = list[Any]()
        tensors = [torch.tensor([group.rank() + index]) for index in range(count)]
        works = []

        def note(index: int, future: object) -> None:
            done.append(index)

        for index, tensor in enumerate(tensors):
            work = ringcoll.all_reduce(tensor, group=group, async_op=True)
            assert work is not None
            works.append(work)
            if index % 10 == 0:
                work.get_future().add_done_callback(partial(note, index))

        works[-1].wait()
        assert all(work.is_success() for work in works)
        assert [tensor.item() for tensor in tensors] == [2 * index + 1 for index in range(count)]
        ringcoll.barrier(group)
        while len(done) < count // 10:
            time.sleep(0.01)
        assert sorted(done) == list(range(0, count, 10))
        names = [thread.name for thread in threading.enumerate()]
        assert names.count(f"ringcoll-{group.rank()}") < 20

    run_threads(main, 2)


def test_a_future_may_be_asked_for_late():
    def main(group: LocalGroup) -> None:
        work = ringcoll.barrier(group, async_op=True)
        assert work is not None
        work.wait()
        assert work.get_future() is work.get_future()
        work.get_future().wait()

    run_threads(main, 2)


def test_waiting_has_a_limit_of_its_own():
    def main(group: LocalGroup) -> None:
        tensor = torch.tensor([1])
        if group.rank() == 1:
            time.sleep(0.3)
        work = ringcoll.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        if group.rank() == 0:
            with pytest.raises(CollectiveTimeoutError, match="all_reduce"):
                work.wait(timedelta(milliseconds=50))
            assert not work.is_success()
        work.wait(timedelta(seconds=20))
        assert tensor.item() == 2

    run_threads(main, 2)


def test_a_failure_is_raised_by_wait_and_by_the_future():
    both_are_begun = threading.Barrier(3)  # two ranks, and the operator of rank 0

    def main(group: LocalGroup) -> str:
        def broken(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            if group.rank() == 0:
                both_are_begun.wait(60)
                raise ArithmeticError("no sums today")
            return left + right

        tensor, op = torch.tensor([1]), UserOp(broken, commutative=True)
        work = ringcoll.all_reduce(tensor, op, group, async_op=True, algorithm="direct")
        later = ringcoll.barrier(group, async_op=True)
        both_are_begun.wait(60)
        assert work is not None
        assert later is not None
        future = work.get_future()
        wanted = ArithmeticError if group.rank() == 0 else RingcollError
        if group.rank() == 0:
            with pytest.raises(wanted, match="no sums today"):
                work.wait()
            assert isinstance(work.exception(), wanted)
            assert not work.is_success()
            with pytest.raises(RuntimeError, match="no sums today"):
                future.wait()
        with pytest.raises(RingcollError):
            later.wait()
        with pytest.raises(GroupBrokenError, match="earlier failure"):
            ringcoll.barrier(group)
        return "done"

    assert run_threads(main, 2) == ["done", "done"]


# --- operators of the user's own ------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "reduce_scatter"])
@pytest.mark.parametrize("op", ["user_affine", "user_skewed", "user_sum"])
@pytest.mark.parametrize("numel", [5, 9000])
def test_auto_finds_an_algorithm_that_keeps_the_order(
    op: str, collective: str, world_size: int, numel: int
):
    root = world_size - 1 if collective == "reduce" else 0
    case = Case(collective, op=op, lengths=(numel,), root=root)
    run_case(case, world_size)


@pytest.mark.parametrize(
    "name",
    ["ring", "bidirectional_ring", "tree", "double_tree", "recursive_doubling", "rabenseifner"],
)
def test_an_operator_that_is_not_associative_runs_on_direct_only(name: str):
    def main(group: LocalGroup) -> None:
        tensor = torch.arange(5) + group.rank()
        before = tensor.tolist()
        with pytest.raises(ArgumentError, match="not associative") as caught:
            ringcoll.all_reduce(tensor, USER_OPS["user_skewed"], group, algorithm=name)
        assert "direct" in str(caught.value)
        assert tensor.tolist() == before
        ringcoll.barrier(group)

    run_threads(main, 4)


def test_an_operator_that_is_not_commutative_is_refused_by_the_ring():
    def main(group: LocalGroup) -> None:
        tensor = torch.arange(5) + group.rank()
        for name in ("ring", "bidirectional_ring"):
            with pytest.raises(ArgumentError, match="not declared commutative") as caught:
                ringcoll.all_reduce(tensor, USER_OPS["user_affine"], group, algorithm=name)
            # It says where one can go; and there one can.
            names = str(caught.value.expected).split(", ")
            assert "recursive_doubling" in names
            assert "ring" not in names
            for other in names:
                copy = tensor.clone()
                ringcoll.all_reduce(copy, USER_OPS["user_affine"], group, algorithm=other)
                answer = reduced(
                    "user", [torch.arange(5) + rank for rank in range(4)], function=affine
                )
                assert not mismatch(copy, answer, other)

    run_threads(main, 4)


def test_a_plain_function_is_not_taken_to_be_commutative():
    def main(group: LocalGroup) -> None:
        tensor = torch.arange(5) + group.rank()
        with pytest.raises(ArgumentError, match="not declared commutative"):
            ringcoll.all_reduce(tensor, affine, group, algorithm="ring")
        ringcoll.all_reduce(tensor, affine, group)
        answer = reduced("user", [torch.arange(5) + rank for rank in range(3)], function=affine)
        assert not mismatch(tensor, answer)

    run_threads(main, 3)


def test_factors_of_premul_sum():
    """A number or a tensor of one element, from here or from torch; ranks may differ."""
    makers: list[Callable[[float], object]] = [
        ringcoll.premul_sum,
        lambda factor: ringcoll.premul_sum(torch.tensor(factor)),
        lambda factor: ringcoll.premul_sum(torch.tensor([factor], dtype=torch.float64)),
        dist._make_nccl_premul_sum,
        lambda factor: dist._make_nccl_premul_sum(torch.tensor(factor)),
    ]

    def main(group: LocalGroup) -> list[list[float]]:
        found = []
        for maker in makers:
            for dtype in (torch.float32, torch.float16, torch.complex64):
                tensor = torch.tensor([1, 10], dtype=dtype)
                ringcoll.all_reduce(tensor, maker(2.0 + group.rank()), group)
                assert tensor.dtype is dtype
                found.append(tensor.real.tolist())
        return found

    # 2 x + 3 x + 4 x
    assert run_threads(main, 3) == [[[9.0, 90.0]] * 15] * 3


# --- precision ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, *data.FLOAT8])
def test_averages_of_large_numbers_do_not_overflow(dtype: torch.dtype):
    most = torch.finfo(dtype).max

    def main(group: LocalGroup) -> None:
        for entry in algorithms("all_reduce", group.size()):
            tensor = torch.full((3,), most).to(dtype)
            ringcoll.all_reduce(tensor, dist.ReduceOp.AVG, group, algorithm=entry.name)
            assert tensor.to(torch.float64).tolist() == [most] * 3, entry.name

    for world_size in (8, 9):
        run_threads(main, world_size)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wire_dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_wire_dtype(dtype: torch.dtype, wire_dtype: torch.dtype):
    """Within the bound of the wire dtype, and the owner of a chunk rounds like the others."""
    ops = itertools.cycle(["sum", "avg", "sum", "max"])  # sums are what can be rounded wrongly
    for entry, op in zip(algorithms("all_reduce"), ops, strict=False):
        case = Case(
            "all_reduce", entry.name, op=op, dtype=dtype, wire_dtype=wire_dtype, kind="rough"
        )
        for world_size in worlds_of(entry, 4):
            run_case(case, world_size)


def test_sums_are_made_in_float32_whatever_is_sent():
    """`direct` sends inputs and results only, so that nothing else is rounded."""
    count, numel = 8, 1000
    inputs = torch.rand(count, numel, generator=torch.Generator().manual_seed(1))
    exact = inputs.to(torch.bfloat16).to(torch.float64).sum(0)

    def main(group: LocalGroup) -> torch.Tensor:
        tensor = inputs[group.rank()].clone()
        ringcoll.all_reduce(tensor, group=group, algorithm="direct", wire_dtype=torch.bfloat16)
        return tensor

    for result in run_threads(main, count):
        assert torch.equal(result, result.to(torch.bfloat16).to(torch.float32))
        # Half a unit in the last of bfloat16's 8 places, and the error of the sum itself.
        assert ((result - exact).abs() <= exact * (2.0**-8 + 2.0**-20)).all()


def test_wire_dtype_is_what_travels(monkeypatch: pytest.MonkeyPatch):
    seen: set[torch.dtype] = set()
    post = Hub.post

    def spy(self: Hub, rank: int, receives: Any, sends: Any) -> Any:
        seen.update(message.tensor.dtype for message in [*receives, *sends])
        return post(self, rank, receives, sends)

    monkeypatch.setattr(Hub, "post", spy)
    for dtype, wire_dtype, wanted in (
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, None, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, None, torch.float32),
    ):
        seen.clear()
        case = Case("all_reduce", "ring", dtype=dtype, wire_dtype=wire_dtype, kind="rough")
        run_case(case, 2)
        assert seen - {torch.uint8} == {wanted}  # apart from the tokens with which ranks meet


# --- memory ---------------------------------------------------------------------------


def test_tensors_of_many_dimensions_in_any_order_of_memory():
    def main(group: LocalGroup) -> None:
        whole = torch.arange(24.0).view(2, 3, 4) + group.rank()
        tensor = whole.permute(2, 0, 1)
        ringcoll.all_reduce(tensor, group=group, algorithm="ring")
        assert torch.equal(whole, 2 * torch.arange(24.0).view(2, 3, 4) + 1)
        out = torch.zeros(2, 3, 4)[:, ::2, ::3]
        ringcoll.all_gather_single(out, tensor[:2, :1, :2] * 0 + group.rank(), group)
        assert out.reshape(-1).tolist() == [0.0] * 4 + [1.0] * 4

    run_threads(main, 2)


@pytest.mark.parametrize("how", ["conj", "neg"])
def test_input_and_output_that_read_the_same_memory_in_two_ways(how: str):
    def main(group: LocalGroup) -> None:
        memory = torch.tensor([1 + 2j, 3 - 4j]) * (group.rank() + 1)
        view = memory.conj() if how == "conj" else torch._neg_view(memory)
        wanted = sum((view.clone() / (group.rank() + 1)) * (rank + 1) for rank in range(2))
        ringcoll.all_reduce(view, group=group, out=memory, algorithm="ring")
        assert torch.equal(memory, torch.as_tensor(wanted))

    run_threads(main, 2)


def test_results_carry_no_gradient():
    def main(group: LocalGroup) -> None:
        leaf = torch.ones(3, requires_grad=True)
        ringcoll.all_reduce(leaf, group=group)
        assert leaf.requires_grad
        assert leaf.is_leaf
        assert leaf.grad_fn is None
        assert leaf.tolist() == [2.0] * 3
        ringcoll.all_reduce((leaf * 2).detach(), group=group)

    run_threads(main, 2)


OVERLAPS: dict[str, Callable[[LocalGroup], object]] = {
    "an expanded tensor": lambda group: ringcoll.all_reduce(torch.zeros(1).expand(5), group=group),
    "an expanded output": lambda group: ringcoll.all_reduce(
        torch.zeros(5), group=group, out=torch.zeros(1).expand(5)
    ),
    "outputs that are one tensor": lambda group: ringcoll.all_gather(
        [torch.zeros(3)] * 2, torch.zeros(3), group
    ),
    "an output that overlaps the input in part": lambda group: ringcoll.all_reduce(
        (base := torch.zeros(6))[:5], group=group, out=base[1:]
    ),
    "an input in the wrong place of the output": lambda group: ringcoll.all_gather_single(
        base := torch.zeros(4), base[2:] if group.rank() == 0 else base[:2], group
    ),
    "an output in the wrong place of the input": lambda group: ringcoll.reduce_scatter_single(
        (base := torch.zeros(4))[1:3], base, group=group
    ),
    "an output that is two inputs": lambda group: ringcoll.reduce_scatter(
        base := torch.zeros(3), [base, base], group=group
    ),
    "all-to-all in place": lambda group: ringcoll.all_to_all_single(
        base := torch.zeros(4), base, group=group
    ),
    "outputs that overlap, with strides": lambda group: ringcoll.all_gather(
        [(base := torch.zeros(3, 2))[:, 0], base[:, 0]], torch.zeros(3), group
    ),
    "rows of a window that slides": lambda group: ringcoll.all_reduce(
        torch.zeros(4).as_strided((3, 2), (1, 1)), group=group
    ),
}


@pytest.mark.parametrize("what", OVERLAPS)
def test_outputs_that_overlap_are_refused(what: str):
    def main(group: LocalGroup) -> None:
        with pytest.raises(ArgumentError, match=r"overlap|share memory"):
            OVERLAPS[what](group)
        ringcoll.barrier(group)

    run_threads(main, 2, timeout_s=5)


def test_inputs_may_overlap():
    def main(group: LocalGroup) -> None:
        one = torch.arange(3) + group.rank()
        out = torch.zeros(3, dtype=torch.int64)
        ringcoll.reduce_scatter(out, [one, one], group=group)
        assert out.tolist() == [1, 3, 5]
        ringcoll.all_reduce(torch.ones(1).expand(4), group=group, out=torch.zeros(4))

    run_threads(main, 2)


@pytest.mark.slow
def test_memory_of_the_users_tensors_is_not_kept():
    """A cached plan holds offsets, never views."""
    import gc
    import weakref

    def main(group: LocalGroup) -> None:
        tensor = torch.ones(1000)
        alive = weakref.ref(tensor.untyped_storage())
        ringcoll.all_reduce(tensor, group=group)
        del tensor
        gc.collect()
        assert alive() is None

    run_threads(main, 2)


# --- pieces ---------------------------------------------------------------------------


def test_all_to_all_single_cuts_rows():
    def main(group: LocalGroup) -> list[list[int]]:
        rank = group.rank()
        # Rank 0 sends 1 row to itself and 2 to rank 1; rank 1 sends 3 and 0.
        source = torch.arange(6).view(3, 2) + 100 * rank
        out = torch.full(([4, 2][rank], 2), -1)
        ringcoll.all_to_all_single(
            out, source, [[1, 3], [2, 0]][rank], [[1, 2], [3, 0]][rank], group
        )
        return out.tolist()

    assert run_threads(main, 2) == [
        [[0, 1], [100, 101], [102, 103], [104, 105]],
        [[2, 3], [4, 5]],
    ]


def test_no_split_sizes_and_empty_ones_mean_equal_pieces():
    def main(group: LocalGroup) -> None:
        none: list[int] = []
        for sizes in (None, none):
            out = torch.zeros(4, dtype=torch.int64)
            ringcoll.all_to_all_single(
                out, torch.arange(4) + 10 * group.rank(), sizes, sizes, group
            )
            assert out.tolist() == [[0, 1, 10, 11], [2, 3, 12, 13]][group.rank()]

    run_threads(main, 2)


# --- segments -------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("segment_bytes", [1, 8, 24, 1 << 20])
@pytest.mark.parametrize(
    "collective", [c for c in COLLECTIVES if c not in ("barrier", "all_to_all")]
)
def test_segments(collective: str, segment_bytes: int):
    for entry in algorithms(collective):
        case = Case(collective, entry.name, lengths=(23,), segment_bytes=segment_bytes)
        for world_size in worlds_of(entry, 3):
            run_case(case, world_size)


def test_tensors_of_a_device_are_cut_into_segments_of_its_size(monkeypatch: pytest.MonkeyPatch):
    def num_segments(**options: Any) -> list[int]:
        def main(group: LocalGroup) -> int:
            tensor = torch.zeros(4 << 20)
            call = ringcoll.all_reduce.plan(tensor, group=group, **options)
            assert isinstance(call.operation.plan, Plan)
            return call.operation.plan.segments

        return run_threads(main, 2)

    assert num_segments(algorithm="double_tree") == [8, 8]  # 16 MiB in two chunks
    asked: list[tuple[str, str]] = []

    def of_cuda(collective: str, algorithm: Any, device: str) -> int | None:
        asked.append((algorithm, device))
        return segment_bytes_of(collective, algorithm, "cuda")

    monkeypatch.setattr(arguments, "segment_bytes_of", of_cuda)
    assert num_segments(algorithm="double_tree") == [2, 2]
    assert num_segments(algorithm="ring") == [1, 1]
    assert num_segments(algorithm="double_tree", segment_bytes=2 << 20) == [4, 4]
    assert {*asked} == {("double_tree", "cpu"), ("ring", "cpu")}


# --- several groups, and ranks that fail ----------------------------------------------


def local_groups(world_size: int, timeout_s: float = 20.0) -> list[LocalGroup]:
    hub, store = Hub(world_size), dist.HashStore()
    return [
        LocalGroup(Communicator(transport, dist.PrefixStore("group", store), timeout_s))
        for transport in hub.transports()
    ]


def test_operations_on_several_groups_in_any_order():
    """Asynchronous ones on three groups, issued in another order on every rank."""
    others = [local_groups(3), local_groups(3)]

    def main(group: LocalGroup) -> None:
        rank = group.rank()
        groups = [group, *(other[rank] for other in others)]
        tensors = [[torch.tensor([100 * g + n + rank]) for n in range(10)] for g in range(3)]
        works = []
        for g in range(3):
            chosen = (g + rank) % 3
            works += [
                ringcoll.all_reduce(t, group=groups[chosen], async_op=True) for t in tensors[chosen]
            ]
        for work in works:
            assert work is not None
            work.wait()
        assert [[t.item() for t in row] for row in tensors] == [
            [3 * (100 * g + n) + 3 for n in range(10)] for g in range(3)
        ]

    run_threads(main, 3)
    for other in others:
        for member in other:
            member.communicator.close()


def test_a_rank_that_fails_wakes_the_others():
    def main(group: LocalGroup) -> None:
        if group.rank() == 1:
            raise KeyError("mine")
        with pytest.raises(PeerLostError):
            ringcoll.barrier(group)

    begin = time.monotonic()
    with pytest.raises(KeyError, match="mine"):
        run_threads(main, 3)
    assert time.monotonic() - begin < 5


def test_a_rank_that_does_not_come_is_named():
    over = threading.Barrier(3)  # who returns has left, which is another error

    def main(group: LocalGroup) -> str:
        if group.rank() == 1:
            over.wait(30)
            return ""
        with pytest.raises(CollectiveTimeoutError) as caught:
            ringcoll.all_reduce(torch.ones(3), group=group, algorithm="direct", timeout=0.5)
        assert caught.value.peer == 1
        over.wait(30)
        return str(caught.value)

    texts = run_threads(main, 3)
    for rank in (0, 2):
        for part in ("rank 1", "first time", "all_reduce", "call 1 of the group", "0.5 s"):
            assert part in texts[rank], texts[rank]


def test_a_group_of_one():
    for collective in COLLECTIVES:
        for form in ("list", "single"):
            ops = (
                ("sum", "premul_sum")
                if contract(collective).is_prefix
                else ("sum", "avg", "premul_sum")
            )
            for op in ops:
                case = Case(collective, form=form, op=op, dtype=torch.float32, kind="rough")
                run_case(case, 1)
    assert expected(Case("all_reduce", lengths=(2,)), 0, 1)[0].value.numel() == 2
