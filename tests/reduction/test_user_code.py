"""What counts in a user's function: its code, and the values that the code uses."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ringcoll.reduction.user_code import version_of

WEIGHT = 2.0
calls = 0


def uses(value: Any) -> Callable[..., Any]:
    return lambda left, right: (left + right, value)


def has_default(value: Any) -> Callable[..., Any]:
    return lambda left, right=value, *, third=value: left + right + third


def weighted(left: Tensor, right: Tensor) -> Tensor:
    return left + WEIGHT * right


def counted(left: Tensor, right: Tensor) -> Tensor:
    global calls  # noqa: PLW0603  # as functions of users may
    calls += 1
    return left + right


def helped(left: Tensor, right: Tensor) -> Tensor:
    return weighted(left, right)


class Weighted:
    def __init__(self, weight: Any, rank: int = 0) -> None:
        self.weight, self.rank, self.calls = weight, rank, 0

    def _scaled(self, tensor: Tensor) -> Tensor:
        return tensor.mul(self.weight)

    def __call__(self, left: Tensor, right: Tensor) -> Tensor:
        self.calls += 1
        return left + self._scaled(right)

    def plain(self, left: Tensor, right: Tensor) -> Tensor:
        return left + right


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "code": (lambda x, y: x + y, lambda x, y: x - y),
    "constant": (lambda x, y: x + 2 * y, lambda x, y: x + 3 * y),
    "sign of zero": (uses(0.0), uses(-0.0)),
    "type of a number": (uses(1), uses(1.0)),
    "operand": (lambda x, y: x, lambda x, y: y),
    "name of a function": (lambda x, y: x.fmax(y), lambda x, y: x.fmin(y)),
    "closure": (uses(1.0), uses(2.0)),
    "closure of a closure": (uses(uses(1.0)), uses(uses(2.0))),
    "tuple": (uses((1, (2,))), uses((1, (3,)))),
    "tensor": (uses(torch.tensor(1.0)), uses(torch.tensor(2.0))),
    "array": (uses(np.array([1, 2])), uses(np.array([1, 3]))),
    "number of numpy": (uses(np.float32(1)), uses(np.float32(2))),
    "dtype": (uses(torch.float32), uses(torch.float64)),
    "default": (has_default(1.0), has_default(2.0)),
    "partial": (functools.partial(uses, 1), functools.partial(uses, 2)),
    "keyword of partial": (functools.partial(uses, value=1), functools.partial(uses, value=2)),
    "functions of torch": (torch.add, torch.sub),
    "attribute": (Weighted(1.0), Weighted(2.0)),
    "attribute of a method": (Weighted(1.0)._scaled, Weighted(2.0)._scaled),
    "method": (Weighted(1.0)._scaled, Weighted(1.0).plain),
    "wrapped": (
        functools.wraps(torch.add)(lambda x, y: x * y),
        functools.wraps(torch.add)(lambda x, y: x / y),
    ),
    "wrapped and not": (weighted, functools.wraps(weighted)(lambda x, y: x * y)),
    "inner function": (lambda x, y: lambda: x + y, lambda x, y: lambda: x - y),
    "modules": (uses(torch), uses(np)),
    "classes": (uses(int), uses(float)),
    "module": (torch.nn.Linear(1, 1), torch.nn.Identity()),
}
SAME: dict[str, tuple[Any, Any]] = {
    "closure": (uses(1.0), uses(1.0)),
    "not a number": (uses(float("nan")), uses(float("nan"))),
    "log": (uses(["one"]), uses(["two", "three"])),
    "device": (uses(torch.device("cpu")), uses(torch.device("cuda", 1))),
    "object": (uses(Weighted), uses(Weighted)),
    "group": (uses(object()), uses(object())),
    "attribute that is not used": (Weighted(1.0, rank=0), Weighted(1.0, rank=1)),
    "attribute of a plain method": (Weighted(1.0).plain, Weighted(2.0).plain),
    "long tensor": (uses(torch.zeros(1000)), uses(torch.ones(1000))),
}


@pytest.mark.parametrize("first, second", DIFFERENT.values(), ids=DIFFERENT)
def test_functions_that_differ(first: Any, second: Any) -> None:
    assert version_of(first) != version_of(second)
    assert version_of(first) == version_of(first)


@pytest.mark.parametrize("first, second", SAME.values(), ids=SAME)
def test_functions_that_do_not(first: Any, second: Any) -> None:
    assert version_of(first) == version_of(second)


def test_variables_of_the_module_count_when_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    before = version_of(weighted), version_of(helped), version_of(uses(1))
    monkeypatch.setitem(globals(), "WEIGHT", 3.0)
    after = version_of(weighted), version_of(helped), version_of(uses(1))
    assert [one == other for one, other in zip(before, after, strict=True)] == [False, False, True]


def test_counters_do_not_count() -> None:
    operator = Weighted(1.0)
    before = version_of(counted), version_of(operator)
    counted(torch.ones(1), torch.ones(1))
    operator(torch.ones(1), torch.ones(1))
    assert (version_of(counted), version_of(operator)) == before


def test_a_function_that_calls_itself() -> None:
    def again(left: Tensor, right: Tensor) -> Tensor:
        return again(left, right) if later else right

    assert version_of(again) == version_of(again)  # `later` has no value yet
    later = False
    assert not later


@pytest.mark.processes
def test_processes_agree() -> None:
    """Whatever the order of their sets is, and wherever their objects lie."""
    program = (
        "import torch\n"
        "from ringcoll.reduction.user_code import version_of\n"
        "print(version_of(lambda x, y: x if 'a' in {'a', 'b', 'c', 'd'} else torch.add(x, y)))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
