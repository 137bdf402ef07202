"""The code of a user's function, as a number that ranks compare.

Problem: two ranks may pass functions of one name that compute different results. What a function
computes is in its code, and in the values that the code uses:

- The bytecode with its constants is the same on all ranks that have one version of Python.
- Default arguments, variables of modules and of enclosing functions, arguments of
  `functools.partial` and attributes that a method reads count by their values if these are numbers,
  texts, dtypes, tuples or short tensors. Functions count by their own code, or by their names if
  they are torch's or Python's.
- A variable or an attribute that the code itself changes is a counter, and does not count.

Lists, dictionaries and objects count by their types only: functions write logs into lists, and an
object such as a group is different on each rank. Cost: some 10 us for a function seen before.
"""

from __future__ import annotations

import dis
import sys
import zlib
from contextlib import suppress
from functools import lru_cache, partial
from inspect import getattr_static
from math import prod
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_BY_VALUE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, np.generic)
_BY_NAME = {"torch", "numpy", *sys.stdlib_module_names}
_MOST_NUMEL = 256
_NAMES = ("__qualname__", "__name__")
_READS = ("LOAD_GLOBAL", "LOAD_DEREF", "LOAD_ATTR", "LOAD_METHOD")
_CHANGES = ("STORE_GLOBAL", "STORE_DEREF", "STORE_ATTR")


class _Facts(NamedTuple):
    """A code in words, and the names that it reads and does not change, in order."""

    words: str
    names: tuple[str, ...]


def version_of(function: object) -> str:
    """Eight digits that are the same for functions of the same code and values.

    Examples
    --------
    >>> def scaled(factor):
    ...     return lambda left, right: left + factor * right
    >>> [version_of(scaled(2)) == version_of(scaled(factor)) for factor in (2, 3)]
    [True, False]
    """
    return f"{zlib.crc32(_words(function, {}).encode()):08x}"


def _words(value: Any, seen: dict[int, object]) -> str:
    """A value in words; ``seen`` are the values that were met before, by their places."""
    kind = type(value)
    if isinstance(value, _BY_VALUE):
        return f"{kind.__name__} {value!r}"
    if id(value) in seen:
        return "as before"
    seen[id(value)] = value
    if isinstance(value, tuple):
        return f"({', '.join(_words(item, seen) for item in value)})"
    if isinstance(value, frozenset):  # its order differs between processes
        return f"{{{', '.join(sorted(_words(item, seen) for item in value))}}}"
    if isinstance(value, Tensor | np.ndarray):
        is_plain = (
            isinstance(value, Tensor)
            and kind is Tensor
            and value.is_cpu
            and value.layout is torch.strided
        )
        is_counted = (is_plain or kind is np.ndarray) and prod(value.shape) <= _MOST_NUMEL
        return f"{value.dtype} {tuple(value.shape)} {value.tolist() if is_counted else ''}"
    if isinstance(value, partial):
        return _words((value.func, value.args, *sorted(value.keywords.items())), seen)
    if isinstance(value, FunctionType):
        return _of_function(value, None, seen)
    if isinstance(value, MethodType):
        return _of_function(value.__func__, value.__self__, seen)
    if hasattr(value, "__qualname__") or isinstance(value, ModuleType):  # or a class, or in C
        return " ".join(str(getattr(value, name, "")) for name in ("__module__", *_NAMES))
    called = getattr(kind, "forward" if isinstance(value, torch.nn.Module) else "__call__", None)
    return f"{kind.__qualname__} {_of_function(called, value, seen)}"


def _of_function(function: Any, owner: object, seen: dict[int, object]) -> str:
    """A function, or a method of its owner, in words."""
    if not isinstance(function, FunctionType):
        return str(getattr(function, "__qualname__", ""))
    variables = function.__globals__
    if str(variables.get("__name__")).partition(".")[0] in _BY_NAME:
        return f"{function.__module__} {function.__qualname__}"
    facts = _facts(function.__code__)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    words = [facts.words, _words(function.__defaults__, seen)]
    words += [_words(tuple(sorted((function.__kwdefaults__ or {}).items())), seen)]
    for name in facts.names:
        if name in cells:
            with suppress(ValueError):  # it has no value yet
                words.append(_words(cells[name].cell_contents, seen))
        elif name in variables:
            words.append(_words(variables[name], seen))
        elif owner is not None:
            attribute = getattr_static(owner, name, None)
            is_method = isinstance(attribute, FunctionType)
            words.append(
                _of_function(attribute, owner, seen) if is_method else _words(attribute, seen)
            )
    return " ".join(words)


@lru_cache(maxsize=256)
def _facts(code: CodeType) -> _Facts:
    words, reads, changes = [code.co_code.hex(), " ".join(code.co_names)], set(), set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in _READS:
            reads.add(instruction.argval)
        elif instruction.opname in _CHANGES:
            changes.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            inner = _facts(constant)
            words.append(inner.words)
            reads.update(inner.names)
        else:
            words.append(_words(constant, {}))
    return _Facts(" ".join(words), tuple(sorted(reads - changes)))
