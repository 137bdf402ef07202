"""What counts in a user's function: its name and its code."""

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

from ringcoll.runtime.reduction.user_code import version_of


def uses(value: Any) -> Callable[..., Any]:
    return lambda left, right=value: (left + right, value)


class Weighted:
    def __init__(self, weight: Any) -> None:
        self.weight = weight

    def __call__(self, left: Tensor, right: Tensor) -> Tensor:
        return left + right.mul(self.weight)

    def plain(self, left: Tensor, right: Tensor) -> Tensor:
        return left + right


class Partly:
    __call__ = functools.partial(torch.add, alpha=2)


class PartlyOther:
    __call__ = functools.partial(torch.sub, alpha=2)


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        return function(*arguments)

    return call


def below_itself() -> Callable[..., Any]:
    function = uses(1.0)
    function.__wrapped__ = function  # type: ignore[attr-defined]
    return function


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "code": (lambda x, y: x + y, lambda x, y: x - y),
    "constant": (lambda x, y: x + 2 * y, lambda x, y: x + 3 * y),
    "sign of zero": (lambda x, y: x + 0.0 * y, lambda x, y: x + -0.0 * y),
    "type of a number": (lambda x, y: x + 1, lambda x, y: x + 1.0),
    "operand": (lambda x, y: x, lambda x, y: y),
    "name of a function": (lambda x, y: x.fmax(y), lambda x, y: x.fmin(y)),
    "partial": (functools.partial(torch.add, 1), functools.partial(torch.sub, 1)),
    "functions of torch": (torch.add, torch.sub),
    "functions of numpy": (np.add, np.subtract),
    "method": (Weighted(1.0), Weighted(1.0).plain),
    "wrapped": (
        functools.wraps(torch.add)(lambda x, y: x * y),
        functools.wraps(torch.add)(lambda x, y: x / y),
    ),
    "below one decorator": (
        counted(lambda left, right: left + right),
        counted(lambda left, right: left - right),
    ),
    "below a cache": (functools.cache(lambda x: x), functools.cache(lambda x: -x)),
    "partial that an object calls": (Partly(), PartlyOther()),
    "inner function": (lambda x, y: lambda: x + y, lambda x, y: lambda: x - y),
    "module": (torch.nn.Linear(1, 1), torch.nn.Identity()),
}
SAME: dict[str, tuple[Any, Any]] = {
    "value": (uses(1.0), uses(2.0)),
    "argument of partial": (functools.partial(torch.add, 1), functools.partial(torch.add, 2)),
    "partial that an object calls": (Partly(), Partly()),
    "value below a decorator": (counted(uses(1.0)), counted(uses(2.0))),
    "below itself": (below_itself(), below_itself()),
    "attribute": (Weighted(1.0), Weighted(2.0)),
    "attribute of a method": (Weighted(1.0).plain, Weighted(2.0).plain),
}


@pytest.mark.parametrize("first, second", DIFFERENT.values(), ids=DIFFERENT)
def test_functions_that_differ(first: Any, second: Any) -> None:
    assert version_of(first) != version_of(second)
    assert version_of(first) == version_of(first)


@pytest.mark.parametrize("first, second", SAME.values(), ids=SAME)
def test_functions_that_do_not(first: Any, second: Any) -> None:
    assert version_of(first) == version_of(second)


@pytest.mark.processes
def test_processes_agree() -> None:
    """Whatever the order of their sets is, and wherever their objects lie."""
    program = (
        "import torch\n"
        "from ringcoll.runtime.reduction.user_code import version_of\n"
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
