"""The bits of a result are known before the call: they follow from the proof's order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ringcoll
from ringcoll import LocalGroup, run_threads
from ringcoll.errors import ArgumentError, ScheduleError
from ringcoll.runtime.reduction import predicted_result, reduce_in_order
from ringcoll.schedules import Order, Program, Schedule, Step, inp, out, recv_reduce, send, verify
from ringcoll.schedules.algorithms import Algorithm, algorithms, on_hosts, schedule_of

ALL_REDUCES = list(algorithms("all_reduce"))
DTYPES = (torch.float32, torch.bfloat16)


def lengths(world_size: int) -> tuple[int, ...]:
    return (1, world_size - 1, world_size + 1, 41)


def inputs_of(world_size: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
    """At each element two ranks nearly cancel, and the others are far smaller.

    A small number that meets a large one is lost, wholly or in part; where, depends on the order.
    """
    random = torch.Generator().manual_seed(1000 * world_size + numel)
    small = torch.randn(world_size, numel, generator=random)
    small *= 2.0 ** torch.randint(-10, 10, (world_size, numel), generator=random)
    for element in range(numel):
        first, second = torch.randperm(world_size, generator=random)[:2].tolist()
        large = float(small[:, element].abs().max()) * 2.0**22
        small[first, element], small[second, element] = large, -large
    return list(small.to(dtype))


def other_orders(order: Order) -> list[Order]:
    """Sums from left to right that begin with each pair of ranks."""
    ranks = sorted(item for item in order if isinstance(item, int))
    found: list[Order] = []
    for first in ranks:
        for second in ranks[first + 1 :]:
            rest = [rank for rank in ranks if rank not in (first, second)]
            pluses = [item for rank in rest for item in (rank, "+")]
            found.append((first, second, "+", *pluses))
    return [other for other in found if other != order]


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def check_case(
    schedule: Schedule, inputs: Sequence[Tensor], results: Sequence[Tensor], what: object
) -> None:
    """Each rank has the predicted bits, and another order would give others."""
    proof = verify(schedule)
    predicted = predicted_result(proof, inputs)
    for rank, result in enumerate(results):
        assert result.dtype == inputs[0].dtype
        assert bits(result) == bits(predicted), (what, rank)
    others = [reduce_in_order(order, inputs) for order in other_orders(proof.order(0))]
    assert any(bits(other) != bits(predicted) for other in others), f"{what} shows nothing"


def schedule_for(entry: Algorithm, world_size: int) -> Schedule:
    return entry.schedule(world_size, hosts=on_hosts(world_size))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [3, 5, 8])
@pytest.mark.parametrize("entry", ALL_REDUCES, ids=lambda entry: entry.name)
def test_the_bits_of_every_all_reduce_are_predicted(entry: Algorithm, world_size: int) -> None:
    if entry.restriction(world_size):
        pytest.skip("not for so many ranks")
    schedule = schedule_for(entry, world_size)
    cases = [
        (inputs_of(world_size, numel, dtype), segment_bytes)
        for numel in lengths(world_size)
        for dtype in DTYPES
        for segment_bytes in ((None,) if numel < 41 else (None, 16))
    ]

    def main(group: LocalGroup) -> list[Tensor]:
        results = []
        for inputs, segment_bytes in cases:
            tensor = inputs[group.rank()].clone()
            ringcoll.all_reduce(
                tensor,
                group=group,
                algorithm=schedule if entry.needs_hosts else entry.name,
                segment_bytes=segment_bytes,
            )
            results.append(tensor)
        return results

    by_case = zip(*run_threads(main, world_size), strict=True)
    for (inputs, segment_bytes), results in zip(cases, by_case, strict=True):
        what = (inputs[0].dtype, inputs[0].numel(), segment_bytes)
        check_case(schedule, inputs, results, what)


def test_bfloat16_is_added_up_in_float32() -> None:
    inputs = inputs_of(5, 61, torch.bfloat16)
    order = verify(schedule_of("all_reduce", "ring", 5)).order(0)
    wide = reduce_in_order(order, [tensor.float() for tensor in inputs])
    assert bits(reduce_in_order(order, inputs)) == bits(wide.bfloat16())
    narrow = inputs[1] + inputs[2] + inputs[3] + inputs[4] + inputs[0]
    assert bits(narrow) != bits(wide.bfloat16())


def all_reduced(numel: int, dtype: torch.dtype, names: Sequence[str]) -> list[Tensor]:
    """The result of each algorithm on this rank of a pool."""
    results = []
    for name in names:
        tensor = inputs_of(dist.get_world_size(), numel, dtype)[dist.get_rank()]
        ringcoll.all_reduce(tensor, algorithm=name, segment_bytes=32)
        results.append(tensor)
    return results


@pytest.mark.processes
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_are_predicted_on_processes(pool, dtype: torch.dtype) -> None:
    names = [e.name for e in ALL_REDUCES if not (e.needs_hosts or e.restriction(3))]
    results = pool(3, transport="gloo").run(all_reduced, 61, dtype, names)
    inputs = inputs_of(3, 61, dtype)
    for name, by_rank in zip(names, zip(*results, strict=True), strict=True):
        check_case(schedule_of("all_reduce", name, 3), inputs, by_rank, name)


@pytest.mark.parametrize("op", ["avg", "product", "max"])
def test_other_operators(op: str) -> None:
    inputs = inputs_of(5, 13, torch.bfloat16)

    def main(group: LocalGroup) -> Tensor:
        tensor = inputs[group.rank()].clone()
        ringcoll.all_reduce(tensor, op, group, algorithm="ring")
        return tensor

    predicted = predicted_result(verify(schedule_of("all_reduce", "ring", 5)), inputs, op=op)
    for result in run_threads(main, 5):
        assert bits(result) == bits(predicted)


def test_a_reduce_scatter_and_a_reduce() -> None:
    inputs = inputs_of(4, 24, torch.float32)

    def main(group: LocalGroup) -> tuple[Tensor, Tensor]:
        block, vector = torch.empty(6), inputs[group.rank()].clone()
        ringcoll.reduce_scatter_tensor(block, vector, group=group, algorithm="ring")
        ringcoll.reduce(vector, 2, group=group, algorithm="binomial_tree")
        return block, vector

    results = run_threads(main, 4)
    blocks = predicted_result(verify(schedule_of("reduce_scatter", "ring", 4)), inputs)
    vector = predicted_result(verify(schedule_of("reduce", "binomial_tree", 4, 2)), inputs)
    for rank, (block, _) in enumerate(results):
        assert bits(block) == bits(blocks[6 * rank : 6 * rank + 6])
    assert bits(results[2][1]) == bits(vector)


def test_inputs_are_converted_and_survive() -> None:
    order: Order = (2, 0, "+", 1, "+")
    inputs = [tensor.reshape(2, 3) for tensor in inputs_of(3, 6, torch.float64)]
    before = [tensor.clone() for tensor in inputs]
    narrow = [tensor.float() for tensor in inputs]
    result = reduce_in_order(order, inputs, dtype=torch.float32)
    assert (result.dtype, result.shape) == (torch.float32, (2, 3))
    assert bits(result) == bits((narrow[2] + narrow[0]) + narrow[1])
    assert bits(reduce_in_order((0,), inputs[:1], op="avg")) == bits(before[0])
    for tensor, old in zip(inputs, before, strict=True):
        assert bits(tensor) == bits(old)


@pytest.mark.parametrize(
    "order", [(), (0, 1, "+"), (0, 1, 2, "+"), (0, "+", 1, 2, "+"), (0, 1, "+", 1, "+"), (0, 1, 2)]
)
def test_what_is_no_order(order: Order) -> None:
    with pytest.raises(ArgumentError, match="not an order of reduction"):
        reduce_in_order(order, [torch.ones(2)] * 3)


@pytest.mark.parametrize(
    "inputs, message",
    [
        ([], "each rank needs an input"),
        ([torch.ones(2)] * 2, "each rank needs an input"),
        ([1.0, 2.0, 3.0], "each rank needs an input"),
        ([torch.ones(2), torch.ones(2), torch.ones(3)], "the inputs are not alike"),
        ([torch.ones(2), torch.ones(2), torch.ones(2).double()], "the inputs are not alike"),
    ],
)
def test_inputs_that_fit_no_call(inputs: list[Tensor], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        predicted_result(verify(schedule_of("all_reduce", "ring", 3)), inputs)


def test_collectives_and_lengths_without_a_prediction() -> None:
    inputs = [torch.ones(7)] * 3
    with pytest.raises(ScheduleError, match="broadcast reduces no data"):
        predicted_result(verify(schedule_of("broadcast", "tree", 3)), inputs)
    with pytest.raises(ScheduleError, match="expected a multiple of 3"):
        predicted_result(verify(schedule_of("reduce_scatter", "ring", 3)), inputs)
    with pytest.raises(ArgumentError, match="not defined for"):
        reduce_in_order((0, 1, "+"), inputs[:2], op="band")


def test_ranks_that_do_not_agree_have_no_prediction() -> None:
    def swapped(rank: int) -> Program:
        yield Step(
            send(1 - rank, inp(0)),
            recv_reduce(1 - rank, out(0), inp(0), received_left=True, final=True),
        )

    proof = verify(Schedule("all_reduce", "swapped", 2, 1, 0, swapped))
    with pytest.raises(ArgumentError, match="reduce in different orders"):
        predicted_result(proof, [torch.ones(2)] * 2)
