"""Whether strided tensors share memory, compared with the list of all their bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ringcoll
from ringcoll import LocalGroup, run_threads
from ringcoll.errors import ArgumentError
from ringcoll.runtime.tensors import check_apart, overlap
from ringcoll.runtime.tensors.overlap import TooIntricateError, share_memory

MEMORY = bytearray(4096)


@st.composite
def tensors(draw: Any) -> list[Tensor]:
    """Up to four tensors of one dtype, at any byte."""
    dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.float32]))
    kinds = draw(st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30)), max_size=3)))
    outputs = []
    for number in range(draw(st.integers(1, 4))):
        dims = kinds[number % len(kinds)] if kinds else []
        begin = draw(st.integers(0, 200)) * draw(st.sampled_from([1, dtype.itemsize]))
        count = (len(MEMORY) - begin) // dtype.itemsize
        whole = torch.frombuffer(MEMORY, dtype=dtype, offset=begin, count=count)
        outputs.append(whole.as_strided([size for size, _ in dims], [stride for _, stride in dims]))
    return outputs


def bytes_of(tensor: Tensor) -> list[int]:
    places = [tensor.data_ptr()]
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = [place + stride * tensor.itemsize * i for place in places for i in range(size)]
    return [place + byte for place in places for byte in range(tensor.itemsize)]


@settings(max_examples=150)
@given(tensors())
def test_it_is_what_a_list_of_all_bytes_says(outputs: list[Tensor]) -> None:
    listed = [byte for tensor in outputs for byte in bytes_of(tensor)]
    assert share_memory(outputs) == (len(set(listed)) < len(listed))


LARGE = torch.empty(16 << 20)  # 64 MiB, of which nothing is touched
APART: dict[str, Callable[[], list[Tensor]]] = {
    "columns": lambda: [*LARGE.view(-1, 4).unbind(-1)],
    "many columns": lambda: [*LARGE.view(-1, 1024).unbind(-1)],
    "columns in another order": lambda: [*LARGE.view(-1, 256).unbind(-1)][::-1],
    "some columns": lambda: [LARGE.view(-1, 64)[:, i] for i in (0, 1, 3, 7, 12, 20, 30, 44, 63)],
    "blocks of columns": lambda: [*LARGE.view(4096, 4096).split(1000, dim=1)],
    "columns of different lengths": lambda: [LARGE[0::2], LARGE[1 : 1 << 20 : 2]],
    "every other one": lambda: [LARGE[0::6], LARGE[2::6], LARGE[5::6]],
    "a transposed batch": lambda: [*LARGE.view(64, 512, 512).transpose(1, 2).unbind(1)],
    "strides that are not nested": lambda: [LARGE.as_strided((1000, 1000), (999, 1001))],
    "far apart and not nested": lambda: [LARGE.as_strided((2799, 2798), (2801, 2799))],
}
SHARED: dict[str, Callable[[], list[Tensor]]] = {
    "a column twice": lambda: [*LARGE.view(-1, 256).unbind(-1), LARGE.view(-1, 256)[:, 9]],
    "blocks that meet": lambda: [LARGE.view(4096, 4096)[:, :9], LARGE.view(4096, 4096)[-1:, 8:]],
    "windows": lambda: [LARGE.unfold(0, 3, 2)],
    "expanded": lambda: [LARGE[:1000].expand(1000, 1000)],
    "strides that are not nested": lambda: [LARGE.as_strided((1003, 1000), (999, 1002))],
    "in one place of millions": lambda: [LARGE[: 9 << 20 : 3], LARGE[(9 << 20) - 6 :: 1 << 20]],
}


@pytest.mark.parametrize("what", [*APART, *(f"{what}, shared" for what in SHARED)])
def test_large_tensors_take_no_time(what: str) -> None:
    name, shared, _ = what.partition(", shared")
    outputs = SHARED[name]() if shared else APART[name]()
    begin = time.thread_time()
    assert share_memory(outputs) == bool(shared)
    assert time.thread_time() - begin < 0.5  # to list the addresses took seconds


def test_dimensions_of_one_element_are_not_counted() -> None:
    """numpy has at most 64 dimensions, or 32."""
    ones = [1] * 70
    apart, shared = torch.zeros(6, 3).T, torch.zeros(9).as_strided((3, 2), (2, 4))
    for tensor, is_shared in ((apart, False), (shared, True)):
        strides = tensor.stride()
        long = tensor.as_strided((len(tensor), *ones, 2), (strides[0], *ones, strides[1]))
        assert share_memory([long]) is is_shared
    columns = torch.zeros(5, 4).reshape(5, *[1] * 63, 4).unbind(-1)
    assert columns[0].dim() == 64
    assert not share_memory(columns)


def test_what_strides_cannot_tell_in_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "_MOST_WORK", 1)
    memory = torch.zeros(1 << 16)
    intricate = [memory.as_strided((9, 9, 9), (7, 62, 503)), memory[3::5]]
    with pytest.raises(TooIntricateError):
        share_memory(intricate)
    with pytest.raises(ArgumentError, match="nobody can tell") as caught:
        check_apart(intricate, rank=2)
    assert "rank 2" in str(caught.value)


@pytest.mark.parametrize("function", ["all_gather", "all_to_all", "gather", "reduce_scatter"])
def test_columns_are_outputs_of_every_function(function: str) -> None:
    """In a matrix of 3 columns, for 3 ranks; the columns of another matrix are the inputs."""

    def main(group: LocalGroup) -> list[list[float]]:
        rank, result = group.rank(), torch.full((4, 3), -1.0)
        inputs = torch.arange(12.0).view(4, 3) + 100 * rank
        columns, given = [*result.unbind(-1)], [*inputs.unbind(-1)]
        if function == "all_gather":
            ringcoll.all_gather(columns, given[0], group)
        elif function == "gather":
            ringcoll.gather(given[0], columns if rank == 1 else None, group_dst=1, group=group)
        elif function == "all_to_all":
            ringcoll.all_to_all(columns, given, group)
        else:
            ringcoll.reduce_scatter(columns[rank], given, group=group)
        return result.tolist()

    base = torch.arange(12.0).view(4, 3)
    for rank, found in enumerate(run_threads(main, 3)):
        expected = torch.full((4, 3), -1.0)
        if function in ("all_gather", "gather"):
            if function == "all_gather" or rank == 1:
                expected = base[:, :1] + torch.tensor([0.0, 100.0, 200.0])
        elif function == "all_to_all":
            expected = base[:, rank : rank + 1] + torch.tensor([0.0, 100.0, 200.0])
        else:
            expected[:, rank] = 3 * base[:, rank] + 300
        assert found == expected.tolist()
