"""Bad arguments: a typed error on the rank that gives them, before anything is posted.

Every case is tried on all ranks of a group that is used afterwards, with a hub that
counts what is posted.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringcoll
from ringcoll import LocalGroup, UserOp, premul_sum, run_threads
from ringcoll.errors import (
    ArgumentError,
    RingcollError,
    ScheduleError,
    UnknownAlgorithmError,
    UnsupportedWorldSizeError,
    VerificationError,
)
from ringcoll.runtime.transport import Hub
from ringcoll.schedules import Program, Schedule, Step, copy, inp, out, recv, send
from ringcoll.schedules.algorithms import register, schedule_of, unregister
from ringcoll.tools.testing import inputs as data

Bad = Callable[[LocalGroup], object]

ONE, THREE = torch.ones(1), torch.ones(3)
TWO = [torch.ones(3), torch.ones(3)]


def all_reduce(tensor: Any, **options: Any) -> Bad:
    return lambda group: ringcoll.all_reduce(tensor, group=group, **options)


def dtype_case(op: str, dtype: torch.dtype) -> Bad:
    # Made here and not on the ranks: threads must not change the warning filters together.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some dtypes are experimental
        tensor = torch.ones(3).to(dtype)
    return all_reduce(tensor, op=op)


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still there
        return torch.quantize_per_tensor(THREE, 0.1, 0, torch.qint8)


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype
        return torch.nested.nested_tensor([ONE, THREE])


QUANTIZED, NESTED = quantized(), nested()
SPARSE = torch.eye(3).to_sparse()


def sparse_rows() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # in beta state
        return torch.eye(3).to_sparse_csr()


SPARSE_ROWS = sparse_rows()


ARGUMENTS: dict[str, Bad] = {
    # not tensors, or not such ones
    "a list for a tensor": all_reduce([1.0, 2.0]),
    "a number for a tensor": all_reduce(1.0),
    "nothing for a tensor": all_reduce(None),
    "no tensors at all": lambda group: ringcoll.all_to_all([], [], group),
    "a sparse tensor in rows": all_reduce(SPARSE_ROWS),
    "a sparse tensor": lambda group: ringcoll.broadcast(SPARSE, 0, group),
    "an operator that a sparse tensor does not have": all_reduce(SPARSE, op="max"),
    "an unknown operator for a sparse tensor": all_reduce(SPARSE, op="mean"),
    "an output for a sparse tensor": all_reduce(SPARSE, out=torch.zeros(3, 3)),
    "a wire dtype for a sparse tensor": all_reduce(SPARSE, wire_dtype=torch.bfloat16),
    "segments of a sparse tensor": all_reduce(SPARSE, segment_bytes=64),
    "a quantized tensor": lambda group: ringcoll.all_reduce(QUANTIZED, group=group),
    "a nested tensor": all_reduce(NESTED),
    "a nested tensor among others": lambda group: ringcoll.all_reduce_coalesced(
        [THREE, NESTED], group=group
    ),
    "a tensor without memory": all_reduce(torch.ones(3, device="meta")),
    "a number in the list": lambda group: ringcoll.all_gather([THREE, 1.0], THREE, group),  # type: ignore[list-item]
    "a tensor for a list": lambda group: ringcoll.all_gather(torch.ones(2, 3), THREE, group),  # type: ignore[arg-type]
    "nothing for a list": lambda group: ringcoll.reduce_scatter(THREE, None, group=group),  # type: ignore[arg-type]
    # lists
    "too short a list, all_gather": lambda group: ringcoll.all_gather([THREE], THREE, group),
    "too long a list, all_gather": lambda group: ringcoll.all_gather([THREE] * 3, THREE, group),
    "an empty list": lambda group: ringcoll.all_gather([], THREE, group),
    "too long a list, reduce_scatter": lambda group: ringcoll.reduce_scatter(
        THREE, [THREE] * 3, group=group
    ),
    "too short a list, all_to_all": lambda group: ringcoll.all_to_all([THREE], TWO, group),
    "too short a list, gather": lambda group: (
        ringcoll.gather(THREE, [THREE] if group.rank() == 0 else [], group_dst=0, group=group)
        if group.rank() == 0
        else all_reduce(None)(group)
    ),
    "no list at the root": lambda group: ringcoll.scatter(
        THREE, None, group_src=group.rank(), group=group
    ),
    "a list away from the root": lambda group: ringcoll.gather(
        THREE, TWO, group_dst=1 - group.rank(), group=group
    ),
    "nothing for a list, coalesced": lambda group: ringcoll.all_reduce_coalesced(None, group=group),  # type: ignore[arg-type]
    "an empty list, coalesced": lambda group: ringcoll.all_reduce_coalesced([], group=group),
    "fewer inputs than outputs": lambda group: ringcoll.all_gather_single_coalesced(
        [torch.ones(6)] * 2, [THREE], group
    ),
    "more inputs than outputs": lambda group: ringcoll.reduce_scatter_single_coalesced(
        [THREE], [torch.ones(6)] * 2, group=group
    ),
    "too short a list of lists": lambda group: ringcoll.all_gather_coalesced([TWO], TWO, group),
    "a short list among lists": lambda group: ringcoll.all_gather_coalesced(
        [TWO, [THREE]], TWO, group
    ),
    "nothing for lists": lambda group: ringcoll.all_gather_coalesced(None, TWO, group),  # type: ignore[arg-type]
    # lengths, dtypes
    "another dtype in the list": lambda group: ringcoll.all_gather(
        [THREE, THREE.double()], THREE, group
    ),
    "another dtype in the output": lambda group: ringcoll.all_gather_single(
        torch.zeros(6, dtype=torch.int32), THREE, group
    ),
    "another length in the list": lambda group: ringcoll.all_gather(
        [torch.ones(4), torch.ones(4)], THREE, group
    ),
    "an output that is too small": lambda group: ringcoll.all_gather_single(
        torch.zeros(5), THREE, group
    ),
    "an input that is too small": lambda group: ringcoll.reduce_scatter_single(
        THREE, torch.zeros(5), group=group
    ),
    "uneven blocks in gather": lambda group: ringcoll.gather(
        THREE, [THREE, ONE], group_dst=group.rank(), group=group
    ),
    "another shape of out": all_reduce(THREE, out=torch.zeros(4)),
    "another dtype of out": all_reduce(THREE, out=torch.zeros(3, dtype=torch.float64)),
    "splits that do not add up": lambda group: ringcoll.all_to_all_single(
        torch.zeros(3), torch.zeros(3), [1, 1], [1, 1], group
    ),
    "negative splits": lambda group: ringcoll.all_to_all_single(
        torch.zeros(3), torch.zeros(3), [4, -1], [4, -1], group
    ),
    "too many splits": lambda group: ringcoll.all_to_all_single(
        torch.zeros(3), torch.zeros(3), [1, 1, 1], [1, 1, 1], group
    ),
    "splits that are no numbers": lambda group: ringcoll.all_to_all_single(
        torch.zeros(3),
        torch.zeros(3),
        ["a", "b"],  # type: ignore[list-item]
        [1, 2],
        group,
    ),
    "a number for splits": lambda group: ringcoll.all_to_all_single(
        torch.zeros(3),
        torch.zeros(3),
        [1, 2],
        3,  # type: ignore[arg-type]
        group,
    ),
    "rows that do not divide": lambda group: ringcoll.all_to_all_single(
        torch.zeros(3), torch.zeros(3), group=group
    ),
    "two lengths for oneself": lambda group: ringcoll.all_to_all_single(
        torch.zeros(3),
        torch.zeros(3),
        [1, 2],
        [2, 1],
        group,
    ),
    # operators
    "no operator": all_reduce(THREE, op=None),
    "an unknown operator": all_reduce(THREE, op="mean"),
    "a number for an operator": all_reduce(THREE, op=3),
    "a class for an operator": all_reduce(THREE, op=int),
    "bits of floats": dtype_case("bor", torch.float32),
    "bits of complex numbers": dtype_case("bxor", torch.complex64),
    "the larger of complex numbers": dtype_case("max", torch.complex64),
    "the average of bools": dtype_case("avg", torch.bool),
    "scaling integers": all_reduce(torch.ones(3, dtype=torch.int32), op=premul_sum(2.0)),
    "scaling bools": all_reduce(torch.ones(3, dtype=torch.bool), op=premul_sum(2.0)),
    "several factors": all_reduce(THREE, op=premul_sum(torch.ones(3))),
    "a complex factor for real numbers": all_reduce(THREE, op=premul_sum(1j)),
    "a word for a factor": all_reduce(THREE, op=premul_sum("2")),  # type: ignore[arg-type]
    "scale factors as if they were numbers": dtype_case("sum", torch.float8_e8m0fnu),
    "halves of complex numbers": dtype_case("sum", torch.complex32),
    "PREMUL_SUM without a factor": all_reduce(THREE, op=dist.ReduceOp.PREMUL_SUM),
    # wire dtypes
    "integers on the wire for floats": all_reduce(THREE, wire_dtype=torch.int32),
    "floats on the wire for integers": all_reduce(
        torch.ones(3, dtype=torch.int32), wire_dtype=torch.float32
    ),
    "floats on the wire for complex numbers": all_reduce(
        torch.ones(3, dtype=torch.complex64), wire_dtype=torch.float32
    ),
    "a word for a wire dtype": all_reduce(THREE, wire_dtype="bfloat16"),
    # options
    "no segments": all_reduce(THREE, segment_bytes=0),
    "negative segments": all_reduce(THREE, segment_bytes=-1),
    "half a byte": all_reduce(THREE, segment_bytes=0.5),
    "no time": all_reduce(THREE, timeout=0),
    "negative time": all_reduce(THREE, timeout=timedelta(seconds=-1)),
    "a word for time": all_reduce(THREE, timeout="soon"),
    "time that is no number": all_reduce(THREE, timeout=float("nan")),
    "a number for an algorithm": all_reduce(THREE, algorithm=3),
    "a list for an algorithm": all_reduce(THREE, algorithm=["ring"]),
    "a barrier on a device that is not there": lambda group: ringcoll.barrier(
        group, device_ids=[torch.cuda.device_count()]
    ),
    "a barrier on a negative device": lambda group: ringcoll.barrier(group, device_ids=[-1]),
    "a word for a barrier's device": lambda group: ringcoll.barrier(group, device_ids=["a"]),  # type: ignore[list-item]
    "a number for a barrier's devices": lambda group: ringcoll.barrier(group, device_ids=0),  # type: ignore[arg-type]
    # roots
    "a root outside": lambda group: ringcoll.broadcast(THREE, group_src=2, group=group),
    "a negative root": lambda group: ringcoll.broadcast(THREE, group_src=-1, group=group),
    "half a root": lambda group: ringcoll.reduce(THREE, group_dst=0.5, group=group),  # type: ignore[arg-type]
    "two roots": lambda group: ringcoll.broadcast(THREE, 0, group, group_src=1),
    "no root, broadcast": lambda group: ringcoll.broadcast(THREE, group=group),
    "no root, reduce": lambda group: ringcoll.reduce(THREE, group=group),
    "a transport for threads": lambda group: ringcoll.use(group, transport="gloo"),
}

WITHOUT_A_RANK: dict[str, Bad] = {
    "a word for a group": lambda group: ringcoll.all_reduce(THREE, group="world"),
    "a group that one is not in": lambda group: ringcoll.all_reduce(
        THREE, group=dist.GroupMember.NON_GROUP_MEMBER
    ),
    "no group at all": lambda group: ringcoll.all_reduce(THREE),
    "a transport for a number": lambda group: ringcoll.use(3, transport="gloo"),
    "a transport for no group": lambda group: ringcoll.use(transport="gloo"),
    "closing a number": lambda group: ringcoll.close(3),
    "closing no group": lambda group: ringcoll.close(),
}


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every message."""
    counts: list[int] = []
    post = Hub.post

    def counting(self: Hub, rank: int, receives: Any, sends: Any) -> Any:
        counts.append(len(receives) + len(sends))
        return post(self, rank, receives, sends)

    monkeypatch.setattr(Hub, "post", counting)
    return counts


def refused(bad: Bad, posted: list[int], kind: type[RingcollError] = ArgumentError) -> list[str]:
    """Make a bad call on two ranks, then a good one; returns the messages."""
    ready: list[int] = []

    def main(group: LocalGroup) -> str:
        with pytest.raises(RingcollError) as caught:
            bad(group)
        assert isinstance(caught.value, kind), f"{type(caught.value)}: {caught.value}"
        ready.append(sum(posted))
        tensor = torch.tensor([group.rank() + 1])
        ringcoll.barrier(group)
        ringcoll.all_reduce(tensor, group=group)
        assert tensor.item() == 3, "the group works"
        return str(caught.value)

    messages = run_threads(main, 2, timeout_s=5)
    assert ready[0] == 0, "something was posted"
    return messages


@pytest.mark.parametrize("what", ARGUMENTS)
def test_bad_arguments_are_refused_before_anything_is_sent(what: str, posted: list[int]):
    for rank, message in enumerate(refused(ARGUMENTS[what], posted)):
        assert message.startswith(f"rank {rank}: argument '")


@pytest.mark.parametrize("what", WITHOUT_A_RANK)
def test_bad_groups_are_refused_before_anything_is_sent(what: str, posted: list[int]):
    for message in refused(WITHOUT_A_RANK[what], posted):
        assert message.startswith("argument 'group': ")


LONG = [torch.ones(3), torch.ones(3, dtype=torch.int64)]
OF_ANOTHER_DTYPE: dict[str, Bad] = {
    "all_reduce out": all_reduce(THREE, out=LONG[1]),
    "reduce out": lambda group: ringcoll.reduce(THREE, 0, group=group, out=LONG[1]),
    "all_gather tensor_list": lambda group: ringcoll.all_gather(LONG, THREE, group=group),
    "all_gather_single input_tensor": lambda group: ringcoll.all_gather_single(
        torch.ones(6), LONG[1], group=group
    ),
    "gather gather_list": lambda group: ringcoll.gather(THREE, LONG, 0, group=group),
    "scatter scatter_list": lambda group: ringcoll.scatter(THREE, LONG, 0, group=group),
    "reduce_scatter input_list": lambda group: ringcoll.reduce_scatter(THREE, LONG, group=group),
    "reduce_scatter_single input": lambda group: ringcoll.reduce_scatter_single(
        LONG[1], torch.ones(6), group=group
    ),
    "all_to_all input_tensor_list": lambda group: ringcoll.all_to_all(TWO, LONG, group=group),
    "all_to_all output_tensor_list": lambda group: ringcoll.all_to_all(LONG, TWO, group=group),
    "all_to_all_single input": lambda group: ringcoll.all_to_all_single(
        torch.ones(4), torch.ones(4, dtype=torch.int64), group=group
    ),
}


@pytest.mark.parametrize("name", OF_ANOTHER_DTYPE)
def test_the_argument_of_another_dtype_is_named(name: str, posted: list[int]) -> None:
    for rank, message in enumerate(refused(OF_ANOTHER_DTYPE[name], posted)):
        argument = name.split()[1]
        assert message.startswith(
            f"rank {rank}: argument '{argument}': all tensors of a call must have one dtype"
        )


@pytest.mark.parametrize("dtype", [torch.complex32, torch.float8_e8m0fnu], ids=str)
def test_what_is_wrong_with_a_dtype(dtype: torch.dtype, posted: list[int]):
    for message in refused(dtype_case("sum", dtype), posted):
        assert f"argument 'tensor': operator sum is not defined for {dtype}" in message
        assert "(expected one of torch.float64, " in message
        assert f", got {dtype})" in message


def dtypes() -> list[torch.dtype]:
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return sorted(found - set(SUPPORTED), key=str)


SUPPORTED = (*data.INTEGERS, *data.FLOATS, *data.COMPLEX, torch.bool)


@pytest.mark.filterwarnings("ignore")  # some dtypes are experimental or deprecated
@pytest.mark.parametrize("dtype", dtypes(), ids=str)
def test_other_dtypes_are_refused_or_reduced_as_they_should(dtype: torch.dtype):
    try:
        tensor = torch.empty(3, dtype=dtype)
    except (RuntimeError, NotImplementedError):
        pytest.skip(f"torch makes no {dtype}")

    # Each rank has its own.
    tensors = [tensor, torch.empty(3, dtype=dtype)]

    def main(group: LocalGroup) -> None:
        for op in ("sum", "max", "bor"):
            try:
                ringcoll.all_reduce(tensors[group.rank()], op, group)
            except ArgumentError:
                continue
            assert dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
        ringcoll.barrier(group)

    run_threads(main, 2, timeout_s=5)


def test_errors_are_also_the_builtin_ones():
    for kind in (ValueError, TypeError, RingcollError):
        with pytest.raises(kind):
            ringcoll.all_reduce(THREE, group="world")


def test_the_message_names_rank_argument_and_values(posted: list[int]):
    messages = refused(lambda group: ringcoll.all_gather([THREE], THREE, group), posted)
    for rank, message in enumerate(messages):
        for part in (f"rank {rank}", "'tensor_list'", "expected 2 tensors", "got 1"):
            assert part in message


# --- algorithms -----------------------------------------------------------------------


def test_an_unknown_algorithm_lists_the_known_ones(posted: list[int]):
    for message in refused(all_reduce(THREE, algorithm="rign"), posted, UnknownAlgorithmError):
        for name in ("'rign'", "ring", "tree", "double_tree", "direct", "recursive_doubling"):
            assert name in message


def test_an_algorithm_of_another_collective_is_unknown(posted: list[int]):
    refused(all_reduce(THREE, algorithm="bruck"), posted, UnknownAlgorithmError)


@pytest.fixture
def registered():
    """Registers programs for the time of a test."""
    names: list[tuple[str, str]] = []

    def add(collective: str, name: str, program: Callable[..., Program], **options: Any) -> None:
        register(collective, name, **options)(program)
        names.append((collective, name))

    yield add
    for collective, name in names:
        unregister(collective, name)


def exchange(rank: int, world_size: int) -> Program:
    """An all-gather on two ranks."""
    yield Step(copy(out(rank), inp(rank)), send(1 - rank, inp(rank)), recv(1 - rank, out(1 - rank)))


def test_an_unsupported_world_size_names_the_restriction(registered: Any, posted: list[int]):
    registered(
        "all_gather",
        "threes",
        exchange,
        chunks=lambda k: k,
        restriction=lambda k: "only multiples of three" if k % 3 else None,
    )
    messages = refused(
        lambda group: ringcoll.all_gather_single(torch.zeros(6), THREE, group, algorithm="threes"),
        posted,
        UnsupportedWorldSizeError,
    )
    for message in messages:
        assert "only multiples of three" in message
        assert "2 ranks" in message


def test_a_users_algorithm_runs(registered: Any):
    registered("all_gather", "exchange", exchange, chunks=lambda k: k)

    def main(group: LocalGroup) -> list[float]:
        gathered = torch.zeros(2)
        own = torch.tensor([float(group.rank())])
        ringcoll.all_gather_single(gathered, own, group, algorithm="exchange")
        return gathered.tolist()

    assert run_threads(main, 2) == [[0.0, 1.0]] * 2


def swapped(rank: int, world_size: int) -> Program:
    """Puts what comes in the wrong place."""
    yield Step(copy(out(1 - rank), inp(rank)), send(1 - rank, inp(rank)), recv(1 - rank, out(rank)))


def deaf(rank: int, world_size: int) -> Program:
    """Sends, and nobody listens."""
    yield Step(copy(out(rank), inp(rank)), send(1 - rank, inp(rank)))


def failing(rank: int, world_size: int) -> Program:
    """Is not even a program."""
    yield Step()
    raise ZeroDivisionError("a slip")


WRONG = {"swapped": swapped, "deaf": deaf, "failing": failing}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_algorithm_is_refused_by_the_verifier(
    name: str, registered: Any, posted: list[int]
):
    registered("all_gather", name, WRONG[name], chunks=lambda k: k)
    for given in (name, schedule_of("all_gather", name, 2)):
        messages = refused(
            lambda group, given=given: ringcoll.all_gather_single(  # type: ignore[misc]
                torch.zeros(6), THREE, group, algorithm=given
            ),
            posted,
            VerificationError,
        )
        posted.clear()
        for message in messages:
            assert "step" in message
            assert "rank" in message


def test_a_schedule_for_another_call_is_refused(posted: list[int]):
    for given in (schedule_of("all_reduce", "ring", 3), schedule_of("all_gather", "ring", 2)):
        refused(all_reduce(THREE, algorithm=given), posted)
        posted.clear()
    rooted = schedule_of("broadcast", "binomial_tree", 2, 1)
    refused(
        lambda group: ringcoll.broadcast(THREE, group_src=0, group=group, algorithm=rooted), posted
    )


def test_a_schedule_with_blocks_that_do_not_divide_is_refused(posted: list[int]):
    schedule = Schedule("all_gather", "odd", 2, 3, 0, lambda rank: iter(()))
    refused(
        lambda group: ringcoll.all_gather_single(torch.zeros(6), THREE, group, algorithm=schedule),
        posted,
        ScheduleError,
    )


def test_bruck_all_to_all_needs_equal_blocks(posted: list[int]):
    messages = refused(
        lambda group: ringcoll.all_to_all_single(
            torch.zeros(4 if group.rank() else 2),
            torch.zeros(3),
            [2, 2] if group.rank() else [1, 1],
            [1, 2],
            group,
            algorithm="bruck",
        ),
        posted,
    )
    assert all("equal length" in message for message in messages)


# --- failures of the user's own code ---------------------------------------------------

RESULTS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "of another shape": lambda x, y: torch.cat([x, y]),
    "of no tensor": lambda x, y: None,
}


@pytest.mark.parametrize("what", RESULTS)
def test_a_user_operator_that_returns_something_else_raises_on_all_ranks(what: str):
    def main(group: LocalGroup) -> str:
        with pytest.raises((RuntimeError, TypeError)) as caught:
            ringcoll.all_reduce(
                THREE.clone(), UserOp(RESULTS[what], commutative=True), group, algorithm="ring"
            )
        return type(caught.value).__name__

    assert len(run_threads(main, 2, timeout_s=5)) == 2
