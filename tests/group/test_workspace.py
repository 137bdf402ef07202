"""The working memory of a group: how long it is, when it is replaced, and who is numbers."""

from __future__ import annotations

import pytest
import torch

from ringcoll.runtime.group.queue import Workspace

CPU, META = torch.device("cpu"), torch.device("meta")


def test_memory_is_replaced_only_where_more_is_needed() -> None:
    numbers: list[int] = []  # of tensors that there are, when somebody is told
    memory = Workspace(lambda: numbers.append(len(memory.tensors)))
    first = memory.take(10, torch.float32, CPU)
    assert first.dtype is torch.float32
    assert first.numel() == 64 // 4
    assert len(numbers) == 1
    for numel, dtype in ((10, torch.float32), (16, torch.float32), (64, torch.uint8)):
        again = memory.take(numel, dtype, CPU)
        assert again.dtype is dtype
        assert again.data_ptr() == first.data_ptr()
        assert len(numbers) == 1
    more = memory.take(17, torch.float32, CPU)
    assert more.numel() == 128 // 4
    # That was told before the memory was replaced: there was none then, as all views were to go.
    assert numbers == [0, 0]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64, torch.complex128])
@pytest.mark.parametrize("numel", [1, 3, 63, 64, 65])
def test_memory_fits_every_dtype(numel: int, dtype: torch.dtype) -> None:
    memory = Workspace(lambda: None)
    assert memory.take(numel, dtype, CPU).numel() >= numel
    for other in (torch.int8, torch.float32, torch.complex128):
        assert memory.take(1, other, CPU).dtype is other
    assert memory.tensors[CPU].numel() % 64 == 0
    assert memory.tensors[CPU].numel() < numel * dtype.itemsize + 64


def test_a_device_has_memory_of_its_own() -> None:
    memory = Workspace(lambda: None)
    assert memory.take(3, torch.float32, META).device == META
    assert memory.take(3, torch.float32, CPU).device == CPU


def test_memory_is_let_go() -> None:
    numbers: list[int] = []
    memory = Workspace(lambda: numbers.append(1))
    memory.take(3, torch.float32, CPU)
    memory.clear()
    assert not memory.tensors
    assert len(numbers) == 2
