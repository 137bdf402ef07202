"""Which tensors have memory, and the tensor that stands behind another one."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from ringcoll.errors import ArgumentError
from ringcoll.runtime.tensors import extent, has_memory, is_dense, with_memory
from tests.fakes.without_memory import WITHOUT, Wrapper, pending


def test_what_is_dense() -> None:
    assert is_dense(torch.ones(3))
    assert is_dense(torch.ones(3, 4).t())
    assert not is_dense(torch.ones(3).to_sparse())
    with warnings.catch_warnings(action="ignore"):  # one is a prototype, one is deprecated
        assert not is_dense(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
        assert not is_dense(torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.qint8))


def test_the_extent_of_strided_tensors() -> None:
    memory = torch.zeros(64)
    assert extent(memory.as_strided((2, 3), (12, 2))) == 4 * (12 + 4 + 1)
    assert extent(memory.as_strided((5,), (0,))) == 4
    assert extent(memory.as_strided((), ())) == 4
    assert extent(memory.as_strided((3, 0), (1, 1))) == 0
    assert extent(memory.double()[::7]) == 8 * 64


def test_a_storage_that_is_freed_or_shortened_and_comes_back() -> None:
    memory = torch.zeros(64)
    views = memory[60:], memory[::9], memory[:0], memory[64:]
    assert all(map(has_memory, (memory, *views)))
    memory.untyped_storage().resize_(4 * 64 - 1)
    assert [*map(has_memory, (memory, *views))] == [False, False, False, True, True]
    memory.untyped_storage().resize_(4 * 61)
    assert has_memory(memory[60:61])
    assert has_memory(memory[:60:9])
    memory.untyped_storage().resize_(0)
    assert [*map(has_memory, views)] == [False, False, True, True]
    memory.untyped_storage().resize_(4 * 64)
    assert all(map(has_memory, (memory, *views)))


class Named(Tensor):
    pass


@pytest.mark.parametrize("kind", [Named, Parameter])
def test_a_class_with_memory_is_used_as_it_is(kind: type[Tensor]) -> None:
    tensor = torch.ones(3).as_subclass(kind) if kind is Named else Parameter(torch.ones(3))
    assert with_memory(tensor) is tensor


def test_a_wrapper_hands_out_its_tensor() -> None:
    inner = torch.arange(6.0).view(2, 3).t().requires_grad_()
    assert with_memory(Wrapper(inner)) is inner
    assert with_memory(Wrapper(Wrapper(inner))) is inner


def test_a_pending_tensor_is_waited_for() -> None:
    assert with_memory(pending(torch.arange(3.0))).tolist() == [0.0, 1.0, 2.0]
    view = pending(torch.arange(3.0))[1:]
    assert with_memory(view).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("says", WITHOUT)
def test_what_has_no_memory_is_refused(says: str) -> None:
    tensor = WITHOUT[says](torch.arange(4.0))
    with pytest.raises(ArgumentError, match=says) as caught:
        with_memory(tensor, 3, "out")
    assert (caught.value.rank, caught.value.argument) == (3, "out")
    assert with_memory(torch.ones(1)).tolist() == [1.0]


def test_threads_do_not_see_the_tensors_of_others() -> None:
    inner = [torch.full((2,), float(number)) for number in range(8)]
    wrong: list[int] = []

    def look(number: int) -> None:
        behind = [with_memory(Wrapper(inner[number])) for _ in range(50)]
        wrong.extend(number for tensor in behind if tensor is not inner[number])

    threads = [threading.Thread(target=look, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
