"""`ranks`: its arguments, comparisons of what ranks return, late threads and ranks that die."""

from __future__ import annotations

import math
import operator
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ringcoll.errors import ArgumentError
from ringcoll.runtime.launch import RankError, pickled
from ringcoll.tools.testing import ranks
from ringcoll.tools.testing.on_ranks import _difference
from ringcoll.tools.testing.pool import Source, _load


@dataclass
class Run:
    """A result that holds a tensor."""

    tensor: torch.Tensor
    loss: float = 0.0
    seconds: float = field(default=0.0, compare=False)


class State:
    """An object without an ``==`` of its own."""

    def __init__(self, tensor: torch.Tensor, name: str = "state") -> None:
        self.name, self.tensor = name, tensor


NAN = math.nan


@pytest.mark.parametrize(
    "value, first",
    [
        (Run(torch.arange(8.0)[:4]), Run(torch.arange(4.0), seconds=2.0)),
        (Run(torch.tensor([NAN]), -NAN), Run(torch.tensor([-NAN]), NAN)),
        (State(torch.arange(8.0)[:4]), State(torch.arange(4.0).requires_grad_())),
        ([State(torch.arange(4.0)[::2])], [State(torch.tensor([0.0, 2.0]))]),
        (torch.tensor([1, 2, 3]).to_sparse(), torch.tensor([1, 2, 3]).to_sparse()),
        (-NAN, NAN),
        (np.float32(-NAN), np.float32(NAN)),
        (complex(-NAN, 0), complex(NAN, 0)),
        ({"a": {1, 2}, "b": None}, {"b": None, "a": {2, 1}}),
        (object(), object()),
    ],
)
def test_the_same(value: Any, first: Any) -> None:
    assert not _difference(value, first)
    assert not _difference(first, value)


@pytest.mark.parametrize(
    "value, first, words",
    [
        (Run(torch.arange(4.0)), Run(torch.arange(5.0)), "shape"),
        (Run(torch.ones(2)), Run(torch.zeros(2)), "tensor is wrong in 2 of 2"),
        (Run(torch.ones(2), NAN), Run(torch.ones(2)), "nan, expected 0.0"),
        (State(torch.ones(2)), State(torch.zeros(2)), "tensor is wrong in 2 of 2"),
        (State(torch.ones(2), "a"), State(torch.ones(2), "b"), "'a', expected 'b'"),
        (ValueError("a"), ValueError("b"), "'a', expected 'b'"),
        (partial(abs, 1), partial(abs, 2), "1, expected 2"),
        (State, Run, "State.*expected.*Run"),
        (test_the_same, pytest.raises, "test_the_same.*expected.*raises"),
        (Run(torch.ones(2)), State(torch.ones(2)), "Run.*expected.*State"),
        (torch.ones(2), [1.0, 1.0], "tensor"),
        (torch.ones(2).to_sparse(), torch.eye(2)[0].to_sparse(), "wrong in 1 of 2"),
        ([1.0, 1.0], np.ones(2), "array"),
    ],
)
def test_not_the_same(value: Any, first: Any, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(_difference(value, first))


# torch 2.13 makes none of its integers of 1 to 7 bits, and pickles none.
DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not re.search(r"\bu?int[1-7]$|qu?int", str(dtype))
    },
    key=str,
)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_travel_and_are_compared(dtype: torch.dtype) -> None:
    data = torch.arange(1, 97, dtype=torch.uint8) % 2
    tensor = data.view(dtype)[1:]
    copy = pickle.loads(pickled([tensor, tensor[:0]]))
    assert [each.dtype for each in copy] == [dtype, dtype]
    assert copy[0].contiguous().view(torch.uint8).tolist() == data[dtype.itemsize :].tolist()
    assert copy[1].shape == (0,)
    assert not _difference(copy[0], tensor)
    other = (1 - data).view(dtype)[1:]
    assert re.match(r"tensor (is wrong in \d+ of|of .* has other bits)", _difference(other, tensor))


def size() -> int:
    dist.barrier()
    return dist.get_world_size()


@pytest.mark.processes
@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("backend", ["ringcoll", "gloo"])
def test_numbers(backend: str, threads: bool) -> None:
    two: Any = np.int64(2)
    assert ranks(two, backend=backend, threads=threads, timeout_s=math.inf).run(size) == [2, 2]


@pytest.mark.parametrize("wrong", [1.5, 2.0, True, math.inf, np.bool_(True)])
def test_no_numbers(wrong: Any) -> None:
    with pytest.raises(ArgumentError, match=r"world_size.*positive whole number"):
        ranks(wrong)


@pytest.mark.processes
@pytest.mark.parametrize("threads", [False, True])
def test_an_argument_that_cannot_be_copied_is_named(threads: bool) -> None:
    lock = threading.Lock()
    text = "cannot be sent to the ranks: cannot pickle '_thread.lock' object"
    with pytest.raises(ArgumentError, match=f"'1': a fixture or argument {text}"):
        ranks(2, threads=threads).run(print, "no lock", lock)
    with pytest.raises(ArgumentError, match=f"'file': a fixture or argument {text}"):
        ranks(2, threads=threads).run(print, lambda: 0, file=lock, end="")


@pytest.mark.processes
def test_an_object_that_is_called_may_hold_tensors() -> None:
    tensor = torch.tensor([1, 2]).to(torch.float8_e4m3fn)
    values = ranks(2).run(partial(torch.add, torch.tensor([1.0, 1.0]), alpha=2), tensor.float())
    assert [value.tolist() for value in values] == [[3.0, 5.0]] * 2
    assert ranks(2).run(partial(torch.numel, tensor)) == [2, 2]


def make_lock() -> object:
    return threading.Lock()


@pytest.mark.processes
@pytest.mark.parametrize("threads", [False, True])
def test_a_value_that_cannot_be_copied(threads: bool) -> None:
    with pytest.raises(TypeError, match=r"value that the test returns cannot be sent: .*lock"):
        ranks(2, threads=threads).run(make_lock)


def ends_late() -> None:
    if dist.get_rank() == 1:
        time.sleep(5)


@pytest.mark.slow
def test_a_late_thread_leaves_the_group_of_the_program_alone() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(TimeoutError, match=r"ranks \[1\] were not done"):
            ranks(2, threads=True, timeout_s=1).run(ends_late)
        (late,) = (thread for thread in threading.enumerate() if thread.name == "rank-1")
        late.join(30)
        assert not late.is_alive()
        assert dist.get_world_size() == 1
        dist.barrier()
    finally:
        dist.destroy_process_group()


DIES = """
import multiprocessing, os
if multiprocessing.current_process().name == "rank-1":
    os._exit(3)
def test():
    pass
"""


@pytest.mark.processes
def test_a_rank_that_dies_at_the_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module_that_ends_a_rank.py").write_text(DIES)
    monkeypatch.syspath_prepend(tmp_path)
    test = import_module("module_that_ends_a_rank").test
    with pytest.raises(RankError, match=r"rank 1 raised ProcessDied: .* exit code 3"):
        ranks(2).run(test)
    assert ranks(2).run(operator.add, 1, 2) == [3, 3]


NOTEBOOK = """
import sys
from ringcoll.errors import ArgumentError
from ringcoll.tools.testing import ranks

class Adds:
    def __call__(self, number):
        return number + 1

print(ranks(2).run(Adds(), 1))
sys.modules["cloudpickle"] = None
try:
    ranks(2).run(Adds(), 1)
except ArgumentError as error:
    print(error)
"""


@pytest.mark.processes
def test_functions_of_a_notebook_cell_run_on_ranks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    values, message = done.stdout.splitlines()
    assert values == "[2, 2]"
    assert "put it into a module, or install cloudpickle" in message
    assert "got __main__.Adds" in message


def test_a_module_of_a_package_is_loaded_with_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may import from beside itself, and its assertions show their values."""
    folder = tmp_path / "a_package_of_tests"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "beside.py").write_text("VALUE = 3\n")
    file = folder / "test_module.py"
    file.write_text("from .beside import VALUE\ndef check(n):\n    assert n == VALUE\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "a_package_of_tests.test_module"
    module = _load(Source(name, str(file), None, True))
    try:
        with pytest.raises(AssertionError, match="assert 4 == 3"):
            module.check(4)
        assert _load(Source(name, str(file), None, True)) is module, "once"
        (other := tmp_path / "test_module.py").write_text("VALUE = 5\n")
        assert _load(Source(name, str(other), None, True)).VALUE == 5, "another file of that name"
        other.write_text("raise LookupError\n")
        del sys.modules[name]
        with pytest.raises(LookupError):
            _load(Source(name, str(other), None, True))
        assert name not in sys.modules
    finally:
        for loaded in ("", ".beside", ".test_module"):
            sys.modules.pop("a_package_of_tests" + loaded, None)
