"""From the tensors of a call to flat ones and back: what is copied, and what may share memory."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from ringcoll import premul_sum
from ringcoll.errors import ArgumentError
from ringcoll.runtime.operation.stage import Flat, Stage, fusible
from ringcoll.runtime.reduction import Reduction, resolve
from ringcoll.runtime.tensors import check_apart, is_plain, share_blocks

SUM = resolve("sum", torch.float32)
WIDE = resolve("sum", torch.bfloat16)
SCALED = resolve(premul_sum(2.0), torch.float32)
OF_BOOLS = resolve("max", torch.bool)


def stage(*tensors: Tensor, outputs: Any = ((1,),), **more: Any) -> Stage:
    """A stage of one input, tensor 0, and one output, tensor 1, unless said otherwise."""
    values: dict[str, Any] = {
        "inputs": ((0,),),
        "outputs": outputs,
        "plain": tuple(map(is_plain, tensors)),
        "numels": tuple(tensor.numel() for tensor in tensors),
        "nbytes": sum(tensor.nbytes for tensor in tensors),
        "dtype": tensors[0].dtype,
        "one_copy": False,
        "written": tuple(number for numbers in outputs for number in numbers),
        "counted": (),
        "reduction": None,
    }
    return Stage(**(values | more))


def load(flat: Flat, *tensors: Tensor) -> None:
    for function, number in flat.loads:
        function(tensors[number])


def store(flat: Flat, *tensors: Tensor) -> None:
    for function, number in flat.stores:
        function(tensors[number])


def places(tensors: list[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


# --- which tensors are flat already --------------------------------------------------------


def test_what_is_plain() -> None:
    values = torch.ones(3, dtype=torch.complex64)
    assert is_plain(values)
    assert not is_plain(values.conj())
    assert not is_plain(values.imag)  # its elements are apart
    negative = values.conj().imag[:1]
    assert negative.is_contiguous()
    assert negative.is_neg()
    assert not is_plain(negative)
    assert not is_plain(torch.ones(2, 3).t())


@pytest.mark.parametrize("reduction", [None, SUM, OF_BOOLS], ids=["moved", "sum", "max"])
def test_a_schedule_runs_on_plain_tensors_themselves(reduction: Reduction | None) -> None:
    dtype = torch.float32 if reduction is None else reduction.dtype
    source = torch.arange(6).remainder(2).to(dtype)
    result = torch.zeros(2, 3, dtype=dtype)
    own = stage(source, result, reduction=reduction)
    assert own.is_direct
    assert not own.converts
    flat = own.bind([source, result], is_own=False)
    assert places(flat.inputs) == [source.data_ptr()]
    assert places(flat.outputs) == [result.data_ptr()]
    assert [tensor.shape for tensor in (*flat.inputs, *flat.outputs)] == [(6,)] * 2
    work = dtype if reduction is None else reduction.work_dtype
    assert {tensor.dtype for tensor in (*flat.inputs, *flat.outputs)} == {work}
    assert not flat.loads
    assert not flat.stores
    flat.outputs[0].copy_(flat.inputs[0])
    assert torch.equal(result.view(-1), source)


def test_views_neither_keep_a_tensor_nor_have_its_gradient() -> None:
    source, result = torch.ones(3, requires_grad=True), torch.zeros(0)
    flat = stage(source, result).bind([source, result], is_own=False)
    assert not flat.inputs[0].requires_grad
    assert flat.outputs[0].numel() == 0
    storage = weakref.ref(source.untyped_storage())
    del source
    assert storage() is None
    with torch.inference_mode():
        inner = torch.ones(3)
    assert not stage(inner, result).bind([inner, result], is_own=False).inputs[0].is_inference()


@pytest.mark.parametrize(
    "change",
    [
        {"plain": (False, True)},
        {"plain": (True, False)},
        {"reduction": WIDE},
        {"reduction": SCALED},
        {"inputs": ((0, 1),)},
        {"outputs": ((0, 1),)},
    ],
    ids=["strided input", "strided output", "converted", "scaled", "two inputs", "two outputs"],
)
def test_what_is_not_direct(change: dict[str, Any]) -> None:
    assert not stage(torch.ones(3), torch.ones(3), **change).is_direct
    assert stage(torch.ones(3), torch.ones(3)).is_direct


# --- what is copied --------------------------------------------------------------------------


def test_memory_of_its_own_serves_other_tensors() -> None:
    first, second = (torch.arange(3.0) + start for start in (1, 5))
    result, other = torch.zeros(3), torch.zeros(3)
    flat = stage(first, result, reduction=SUM).bind([first, result], is_own=True)
    assert not {first.data_ptr(), result.data_ptr()} & {*places(flat.inputs), *places(flat.outputs)}
    assert flat.inputs[0].data_ptr() != flat.outputs[0].data_ptr()
    for source, target in ((first, result), (second, other)):
        load(flat, source, target)
        assert torch.equal(flat.inputs[0], source)
        flat.outputs[0].copy_(flat.inputs[0] * 2)
        store(flat, source, target)
        assert torch.equal(target, source * 2)
    assert torch.equal(result, first * 2)


@pytest.mark.parametrize("reduction", [None, SUM], ids=["moved", "sum"])
def test_strided_tensors_are_copied_in_logical_order(reduction: Reduction | None) -> None:
    source, result = torch.arange(6.0).view(2, 3).t(), torch.zeros(2, 3).t()
    flat = stage(source, result, reduction=reduction).bind([source, result], is_own=False)
    load(flat, source, result)
    assert flat.inputs[0].tolist() == [0, 3, 1, 4, 2, 5]
    flat.outputs[0].copy_(flat.inputs[0])
    store(flat, source, result)
    assert torch.equal(result, source)


def test_conjugates_are_resolved() -> None:
    source = torch.complex(torch.arange(3.0), torch.arange(3.0) + 1).conj()
    result = torch.zeros(3, dtype=torch.complex64)
    reduction = resolve("sum", torch.complex64)
    for own in (stage(source, result, reduction=reduction), stage(source, result)):
        flat = own.bind([source, result], is_own=False)
        load(flat, source, result)
        flat.outputs[0].copy_(flat.inputs[0])
        store(flat, source, result)
        assert torch.equal(result, source.resolve_conj())
        result.zero_()


def test_bits_are_moved_as_they_are() -> None:
    """NaNs keep their payloads where nothing is computed."""
    bits = torch.tensor([0x7FC12345, 0x7F812345], dtype=torch.int32)
    source, result = bits.view(torch.float32), torch.zeros(2)
    flat = stage(source, result).bind([source, result], is_own=True)
    load(flat, source)
    flat.outputs[0].copy_(flat.inputs[0])
    store(flat, source, result)
    assert torch.equal(result.view(torch.int32), bits)


@pytest.mark.parametrize("is_own", [False, True])
def test_other_dtypes_are_computed_in(is_own: bool) -> None:
    source, result = torch.arange(3).bfloat16(), torch.zeros(3).bfloat16()
    own = stage(source, result, reduction=WIDE)
    assert own.converts
    flat = own.bind([source, result], is_own=is_own)
    assert {tensor.dtype for tensor in (*flat.inputs, *flat.outputs)} == {torch.float32}
    load(flat, source, result)
    flat.outputs[0].copy_(flat.inputs[0] + 1)
    store(flat, source, result)
    assert result.tolist() == [1, 2, 3]
    assert source.tolist() == [0, 1, 2]


@pytest.mark.parametrize("is_own", [False, True])
def test_inputs_are_scaled_in_memory_of_their_own(is_own: bool) -> None:
    source, result = torch.arange(3.0), torch.zeros(3)
    own = stage(source, result, reduction=SCALED)
    assert own.scales
    assert not stage(source, result, reduction=SUM).scales
    flat = own.bind([source, result], is_own=is_own)
    load(flat, source, result)
    assert flat.inputs[0].tolist() == [0, 2, 4]
    assert source.tolist() == [0, 1, 2]
    assert (flat.outputs[0].data_ptr() == result.data_ptr()) is not is_own


def test_short_tensors_are_laid_end_to_end() -> None:
    tensors = [torch.arange(3.0), torch.arange(4.0).view(2, 2).t() + 10, torch.arange(1.0) + 20]
    numbers = ((0, 1, 2),)
    own = stage(*tensors, inputs=numbers, outputs=numbers, one_copy=True, reduction=SUM)
    flat = own.bind(tensors, is_own=False)
    assert flat.inputs[0] is flat.outputs[0]
    load(flat, *tensors)
    assert flat.inputs[0].tolist() == [0, 1, 2, 10, 12, 11, 13, 20]
    flat.inputs[0].neg_()
    store(flat, *tensors)
    assert [tensor.tolist() for tensor in tensors] == [[0, -1, -2], [[-10, -12], [-11, -13]], [-20]]


@pytest.mark.parametrize("is_plain_one", [True, False])
@pytest.mark.parametrize("is_own", [True, False])
def test_one_copy_serves_as_input_and_output(is_plain_one: bool, is_own: bool) -> None:
    tensor = torch.arange(6.0).view(2, 3) if is_plain_one else torch.arange(6.0).view(3, 2).t()
    before = tensor.clone()
    own = stage(tensor, outputs=((0,),), one_copy=True, reduction=SUM)
    flat = own.bind([tensor], is_own=is_own)
    is_in_place = is_plain_one and not is_own
    assert (flat.inputs[0].data_ptr() == tensor.data_ptr()) is is_in_place
    assert flat.inputs[0] is flat.outputs[0]
    assert len(flat.loads) == len(flat.stores) == (0 if is_in_place else 1)
    load(flat, tensor)
    flat.inputs[0].neg_()
    store(flat, tensor)
    assert torch.equal(tensor, -before)


def test_several_blocks() -> None:
    """A list form: some of the blocks are in place, others are copied."""
    tensors = [torch.zeros(2), torch.zeros(2, 1).t(), torch.zeros(4)[::2], torch.zeros(2)]
    own = stage(*tensors, inputs=((0,), (2,)), outputs=((1,), (3,)))
    flat = own.bind(tensors, is_own=False)
    assert [number for _, number in flat.loads] == [2]
    assert [number for _, number in flat.stores] == []
    assert places(flat.outputs) == [tensors[1].data_ptr(), tensors[3].data_ptr()]


# --- tensors that share memory -------------------------------------------------------------


def shares(
    inputs: list[Tensor],
    outputs: list[Tensor],
    input_blocks: list[int],
    output_blocks: list[int],
    numel: int = 4,
) -> bool:
    lengths = dict.fromkeys({*input_blocks, *output_blocks}, numel)
    return share_blocks(inputs, outputs, input_blocks, output_blocks, lengths, rank=3)


MEMORY = torch.zeros(12)
A, B, C = MEMORY[:4], MEMORY[4:8], MEMORY[8:]
ACROSS = MEMORY[2:6]
EMPTY = MEMORY[1:1]

SHARED: dict[str, tuple[tuple[Any, ...], bool]] = {
    "nothing": (([A], [B], [0], [0]), False),
    "a block in its own place": (([B], [MEMORY], [1], [0, 1, 2]), True),
    "the first block": (([A], [MEMORY], [0], [0, 1, 2]), True),
    "the last block": (([C], [MEMORY], [2], [0, 1, 2]), True),
    "a block of many inputs": (([MEMORY], [B], [0, 1, 2], [1]), True),
    "all blocks, one by one": (([A, B], [A, B], [0, 1], [0, 1]), True),
    "one of two": (([A, B], [C, B], [0, 1], [0, 1]), True),
    "inputs only": (([A, A, ACROSS], [C], [0, 1, 2], [3]), False),
    "neighbours": (([B], [A, C], [0], [0, 1]), False),
    "nothing, of no elements": (([EMPTY], [A], [0], [0]), False),
    "strided tensors, which are copied": (([MEMORY[::3]], [MEMORY], [0], [0]), False),
    "blocks without elements": (([A], [MEMORY], [0], [0, 1, 2], 0), False),
}


@pytest.mark.parametrize("name", SHARED)
def test_what_may_share_memory(name: str) -> None:
    arguments, expected = SHARED[name]
    assert shares(*arguments) is expected


@pytest.mark.parametrize(
    "arguments",
    [
        ([B], [MEMORY], [0], [0, 1, 2]),
        ([ACROSS], [MEMORY], [1], [0, 1, 2]),
        ([MEMORY], [ACROSS], [0, 1, 2], [1]),
        ([C], [A, A], [0], [0, 1]),
        ([C], [A, ACROSS], [0], [0, 1]),
        ([A], [ACROSS], [0], [0]),
        ([ACROSS], [A], [0], [0]),
        ([A, A], [A], [0, 1], [1]),
        ([A, A], [A], [0, 1], [0]),
        ([MEMORY[:2], A], [A], [0, 1], [1], 4),
        ([A], [A, A], [0], [0, 1]),
        ([MEMORY[:8]], [A], [0], [0], 8),
        ([A, MEMORY], [C], [0, 1], [2]),
    ],
)
def test_what_may_not(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ArgumentError, match="output overlaps an input or another") as caught:
        shares(*arguments)
    assert caught.value.rank == 3
    assert caught.value.argument == "output"


@pytest.mark.parametrize(
    "outputs",
    [
        [torch.zeros(1).expand(3)],
        [torch.zeros(3, 1).expand(3, 2)],
        [torch.zeros(6).as_strided((2, 3), (1, 1))],
        [torch.zeros(9).as_strided((2, 2, 2), (4, 2, 2))],
        [MEMORY[::2], MEMORY[2::3]],
        [MEMORY[3:9].view(2, 3).t(), A],
        [MEMORY[:8:2], MEMORY[6:]],
    ],
)
def test_elements_of_outputs_that_share_memory(outputs: list[Tensor]) -> None:
    with pytest.raises(ArgumentError, match="elements of the outputs share memory") as caught:
        check_apart(outputs, rank=3)
    assert caught.value.rank == 3


@pytest.mark.parametrize(
    "outputs",
    [
        [],
        [A, B],
        [torch.zeros(2, 3).t()],
        [MEMORY[::2], MEMORY[1::2]],
        [MEMORY[4:].view(2, 4).t(), A],
        [MEMORY[:4].view(2, 2).t(), B],
        [MEMORY[:8:2], MEMORY[7:]],
        [torch.zeros(6).as_strided((2, 2), (3, 2))],
        [torch.zeros(1).expand(1, 1), torch.zeros(4)[::2]],
        [torch.zeros(3)[:0].as_strided((0, 2), (0, 0)), torch.zeros(4)[::2]],
        [torch.zeros(3).as_strided((1, 3), (0, 1))[:, ::2]],
    ],
)
def test_elements_of_outputs_that_do_not(outputs: list[Tensor]) -> None:
    check_apart(outputs, rank=0)


# --- what is laid end to end -------------------------------------------------------------------

FEW, MANY = (32 << 10) // 4, (1 << 20) // (32 << 10)  # elements of the longest; of so many tensors


def lengths(runs: list[list[Any]]) -> list[int]:
    return [len(run) for run in runs]


def test_short_neighbours_of_one_dtype_are_joined() -> None:
    short, longer = torch.zeros(FEW), torch.zeros(FEW + 1)
    runs = fusible([short, short, longer, short, longer, longer, short, short])
    assert lengths(runs) == [2, 1, 1, 1, 1, 2]
    assert [tensor for run in runs for tensor in run][2] is longer
    assert lengths(fusible([short, short.double()[:4], short.double()[:4], short])) == [1, 2, 1]
    assert lengths(fusible([short, short.to("meta"), short.to("meta")])) == [1, 2]
    assert fusible([]) == []


def test_empty_and_sparse_tensors_stand_alone() -> None:
    short = torch.zeros(4)
    assert lengths(fusible([short[:0], short[:0], short, short])) == [1, 1, 2]
    sparse = torch.eye(2).to_sparse()
    assert lengths(fusible([short, sparse, sparse, short])) == [1, 1, 1, 1]
    assert lengths(fusible([short, "no tensor", short])) == [1, 1, 1]
    assert lengths(fusible([torch.zeros(1), torch.zeros(1)])) == [2]


def test_no_more_than_a_mib_is_joined() -> None:
    assert lengths(fusible([torch.zeros(FEW)] * (2 * MANY + 1))) == [MANY, MANY, 1]
    # One that is long ends a run, and what follows counts from the start.
    longer = torch.zeros(FEW + 1)
    assert lengths(fusible([torch.zeros(FEW)] * 5 + [longer] + [torch.zeros(FEW)] * MANY)) == [
        5,
        1,
        MANY,
    ]
