"""Operations that are prepared once: persistent ones, repeated short ones, fused ones."""

from __future__ import annotations

import gc
import inspect
import pickle
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import ringcoll
from ringcoll import LocalGroup, run_threads
from ringcoll.errors import ArgumentError, GroupBrokenError, MismatchError
from ringcoll.runtime.reduction import Reduction, resolve
from tests.cases.calls import Case
from tests.cases.effort import effort
from tests.cases.strategies import cases
from tests.programs.threads import Planned, run_case


@pytest.mark.slow
@effort(300)
@given(st.sampled_from([1, 2, 3, 5]).flatmap(lambda k: st.tuples(cases(k), st.just(k))))
def test_a_persistent_operation_does_what_the_function_does(drawn: tuple[Case, int]):
    run_case(*drawn, Planned())


def test_a_persistent_operation_sees_what_is_in_the_tensors_when_it_runs():
    def main(group: LocalGroup) -> list[list[float]]:
        rank = group.rank()
        source, target = torch.zeros(2), torch.zeros(3, 2)
        narrow = torch.zeros(4, dtype=torch.bfloat16)
        gather = ringcoll.all_gather_single.plan(target, source, group)
        average = ringcoll.all_reduce.plan(narrow, "avg", group, True)
        found = []
        for step in range(4):
            source.fill_(10 * step + rank)
            narrow.fill_(step + rank)
            gather()
            work = average()
            assert work is not None
            work.wait()
            found.append([*target[:, 0].tolist(), *narrow[:1].tolist()])
        return found

    wanted = [[10.0 * s, 10.0 * s + 1, 10.0 * s + 2, s + 1.0] for s in range(4)]
    assert run_threads(main, 3) == [wanted] * 3


def test_ranks_with_other_persistent_operations_are_told():
    def main(group: LocalGroup) -> str:
        numel = 3 if group.rank() else 4
        operation = ringcoll.all_reduce.plan(torch.zeros(numel), group=group)
        with pytest.raises(MismatchError) as caught:
            operation()
        with pytest.raises(GroupBrokenError):
            operation()
        return str(caught.value)

    for text in run_threads(main, 2, timeout_s=20):
        assert "3 elements" in text
        assert "4 elements" in text


def test_bad_arguments_are_refused_when_the_operation_is_made():
    def main(group: LocalGroup) -> None:
        with pytest.raises(ArgumentError, match="not a tensor"):
            ringcoll.all_reduce.plan(3, group=group)  # type: ignore[arg-type]
        sparse = torch.eye(3).to_sparse()
        with pytest.raises(ArgumentError, match="cannot be prepared"):
            ringcoll.all_reduce.plan(sparse, group=group)
        # The sparse one was refused before anything was sent.
        tensor = torch.ones(2)
        ringcoll.all_reduce(tensor, group=group)
        assert tensor.tolist() == [2, 2]

    run_threads(main, 2)


def test_the_functions_are_functions():
    """To be looked up by name, pickled and asked for their signature, as torch's are."""
    assert pickle.loads(pickle.dumps(ringcoll.all_reduce)) is ringcoll.all_reduce
    assert inspect.isfunction(ringcoll.all_reduce)
    assert [*inspect.signature(ringcoll.all_reduce).parameters][:4] == [
        *("tensor", "op", "group", "async_op")
    ]
    assert "bitwise the same" in str(ringcoll.all_reduce.__doc__)


# --- tensors like others --------------------------------------------------------------------


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 2, 6, 8192, 8193, 20_000]),
            st.sampled_from(["sum", "max", "avg"]),
            st.booleans(),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_repeated_calls_do_not_meet_each_other(calls: list[tuple[int, str, bool]]):
    """Several in flight, of the same and of other kinds, each on its own tensor."""

    def main(group: LocalGroup) -> None:
        rank, running = group.rank(), []
        for index, (numel, op, async_op) in enumerate(calls):
            tensor = torch.arange(float(numel)) * (rank + 1) + 7 * index
            work = ringcoll.all_reduce(tensor, op, group, async_op)
            running.append((work, tensor))
        for (work, tensor), (index, (numel, op, _)) in zip(running, enumerate(calls), strict=True):
            if work is not None:
                work.wait()
            ranks = torch.stack([torch.arange(float(numel)) * k + 7 * index for k in (1, 2, 3)])
            wanted = {"sum": ranks.sum(0), "max": ranks.amax(0), "avg": ranks.sum(0) / 3}[op]
            assert torch.equal(tensor, wanted)

    run_threads(main, 3)


@pytest.mark.slow
@pytest.mark.parametrize("numel", [3, 30_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_call_keeps_nothing_of_the_users(numel: int, dtype: torch.dtype):
    def main(group: LocalGroup) -> bool:
        for _ in range(2):
            tensor = torch.ones(numel, dtype=dtype)
            ringcoll.all_reduce(tensor, group=group)
        alive = weakref.ref(tensor)
        del tensor
        gc.collect()
        return alive() is None

    assert run_threads(main, 2) == [True, True]


def test_long_tensors_at_one_address():
    """Of one kind, of other kinds, and of others after the first has gone."""

    def main(group: LocalGroup) -> None:
        rank, size = group.rank(), 30_000
        memory = torch.empty(8 * size, dtype=torch.uint8)
        ones = torch.arange(1.0, size + 1)
        for turn in range(3):
            floats = memory[: 4 * size].view(torch.float32)
            floats.copy_(ones * (rank + 1) + turn)
            ringcoll.all_reduce(floats, group=group)
            assert torch.equal(floats, 3 * ones + 2 * turn)
            numbers = memory.view(torch.int64)
            numbers.fill_(rank + turn)
            ringcoll.all_reduce(numbers, group=group)
            assert set(numbers.tolist()) == {1 + 2 * turn}
            leaf = memory[: 4 * size].view(torch.float32).view(-1, 2).requires_grad_()
            with torch.no_grad():
                leaf.fill_(rank)
                ringcoll.all_reduce(leaf, "max", group)
            assert set(leaf.flatten().tolist()) == {1.0}

    run_threads(main, 2)


@pytest.mark.parametrize("async_op", [False, True])
def test_short_calls_on_every_kind_of_tensor(async_op: bool):
    def main(group: LocalGroup) -> list[Any]:
        def reduced(tensor: Tensor) -> Any:
            with torch.no_grad():
                work = ringcoll.all_reduce(tensor, group=group, async_op=async_op)
            if work is not None:
                work.wait()
            return tensor.detach().resolve_conj().tolist()

        found: list[Any] = []
        for _ in range(2):  # the second time it is known
            found += [
                reduced(torch.ones(2, requires_grad=True)),
                reduced(torch.tensor(3.0)),
                reduced(torch.ones(2, 3).t()),
                reduced(torch.tensor([1 + 2j]).conj()),
                reduced(torch.ones(0)),
                reduced(torch.ones(4)[1:3]),
            ]
        return found

    wanted = [[2, 2], 6.0, [[2, 2]] * 3, [2 - 4j], [], [2, 2]]
    assert run_threads(main, 2) == [wanted * 2] * 2


@pytest.mark.parametrize("wrong", [{"segment_bytes": [4]}, {"timeout": -1.0}])
def test_bad_arguments_of_short_calls_are_refused(wrong: dict[str, Any]):
    def main(group: LocalGroup) -> None:
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            ringcoll.all_reduce(torch.ones(2), group=group, **wrong)

    run_threads(main, 1)


def test_a_new_algorithm_is_not_mistaken_for_the_old_one():
    def main(group: LocalGroup) -> None:
        tensor = torch.ones(2)
        for algorithm in ("ring", "tree", "ring"):
            ringcoll.all_reduce(tensor, group=group, algorithm=algorithm)
        with pytest.raises(ringcoll.errors.UnknownAlgorithmError):
            ringcoll.all_reduce(tensor, group=group, algorithm="rong")
        assert tensor.tolist() == [8, 8]

    run_threads(main, 2)


# --- fused ones -----------------------------------------------------------------------


def test_short_tensors_are_reduced_together():
    sizes = [3, 0, 5, 9000, 1, 1, 1, 7]  # 9000 is not short, 0 nothing at all

    def main(group: LocalGroup) -> int:
        before = group.communicator.num_issued
        tensors = [torch.arange(float(n)) * (group.rank() + 1) + n for n in sizes]
        tensors += [torch.full((2, 3), group.rank()).t(), torch.full((4,), 2, dtype=torch.int64)]
        ringcoll.all_reduce_coalesced(tensors, group=group)
        for tensor, n in zip(tensors, sizes, strict=False):
            assert torch.equal(tensor, torch.arange(float(n)) * 3 + 2 * n)
        assert tensors[-2].tolist() == [[1, 1]] * 3
        assert tensors[-1].tolist() == [4] * 4
        return group.communicator.num_issued - before

    # 3 | 0 | 5 | 9000 | 1 1 1 7 | the last two, of integers
    assert run_threads(main, 2) == [6, 6]


def test_the_fused_ones_are_bounded():
    def main(group: LocalGroup) -> int:
        before = group.communicator.num_issued
        tensors = [torch.ones(8 << 10) for _ in range(64)]  # 32 KiB each, 2 MiB in all
        ringcoll.all_reduce_coalesced(tensors, group=group)
        assert all(bool((tensor == 2).all()) for tensor in tensors)
        return group.communicator.num_issued - before

    assert run_threads(main, 2) == [2, 2]


def test_a_tensor_whose_elements_share_memory_is_refused_among_others():
    def main(group: LocalGroup) -> None:
        tensors = [torch.ones(2), torch.ones(1).expand(3)]
        with pytest.raises(ArgumentError, match="share memory"):
            ringcoll.all_reduce_coalesced(tensors, group=group)
        assert tensors[0].tolist() == [1, 1]

    run_threads(main, 2)


# --- modes of torch -------------------------------------------------------------------


@pytest.mark.parametrize("numel", [3, 30_000])
@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wire_dtype", [None, torch.float16])
def test_in_inference_mode_and_after(
    numel: int, async_op: bool, dtype: torch.dtype, wire_dtype: torch.dtype | None
):
    """What is kept from calls in the mode is used outside of it, and the other way round."""

    def main(group: LocalGroup) -> None:
        def reduced(tensor: Tensor) -> None:
            work = ringcoll.all_reduce(
                tensor, group=group, async_op=async_op, wire_dtype=wire_dtype
            )
            if work is not None:
                work.wait()
            assert set(tensor.tolist()) == {1.0}

        for inside in (True, False, True):
            with torch.inference_mode(inside):
                tensor = torch.full((numel,), float(group.rank()), dtype=dtype)
                reduced(tensor)
        # Made in the mode, used outside of it.
        reduced(tensor.fill_(group.rank()) if not tensor.is_inference() else tensor.clone() * 0.5)
        whole = torch.zeros(2 * numel, dtype=dtype)
        ringcoll.all_gather_single(whole, tensor, group)
        assert set(whole.tolist()) == {1.0}

    run_threads(main, 2)


def test_the_default_device_does_not_matter(tmp_path):
    def main(group: LocalGroup) -> list[float]:
        short, long, one = torch.ones(3), torch.ones(30_000), torch.ones(2)
        with torch.device("meta"), ringcoll.trace(tmp_path / "trace.json", group):
            for tensor in (short, long):
                ringcoll.all_reduce(tensor, group=group)
                ringcoll.all_reduce.plan(tensor, group=group)()
            ringcoll.all_reduce_coalesced([one, one.clone()], group=group)
        return [float(short[0]), float(long[-1]), float(one[1])]

    assert run_threads(main, 2) == [[4.0, 4.0, 2.0]] * 2


# --- threads of torch -----------------------------------------------------------------


@pytest.mark.parametrize("numel", [0, 1, 32_704, 32_705, 100_000])
@pytest.mark.parametrize("op", ["sum", "product", "max", "avg"])
def test_reducing_in_pieces_gives_the_same(numel: int, op: str):
    reduction = resolve(op, torch.float32)
    left, right = torch.randn(numel), torch.randn(numel)
    whole, parts = torch.empty(numel), left.clone()
    reduction.combine(left, right, out=whole)
    reduction.in_pieces().combine(parts, right, out=parts)  # in place, too
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("threads, in_pieces", [(1, False), (2, True)])
def test_ranks_that_share_cores_do_not_use_threads(
    threads: int, in_pieces: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("ringcoll.runtime.group.communicator.cores", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    asked: list[str] = []
    original = Reduction.in_pieces

    def noting(self: Reduction) -> Reduction:
        asked.append(str(self.operator))
        return original(self)

    monkeypatch.setattr(Reduction, "in_pieces", noting)

    def main(group: LocalGroup) -> float:
        tensor = torch.full((50_000,), float(group.rank()))
        ringcoll.all_reduce(tensor, group=group)
        return float(tensor.sum())

    assert run_threads(main, 2) == [50_000.0] * 2
    assert bool(asked) == in_pieces
