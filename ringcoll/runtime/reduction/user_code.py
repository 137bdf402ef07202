"""The code of a user's function, as a number that ranks compare.

Two ranks may pass functions of one name that compute different results. The name, the bytecode and
its constants are the same on all ranks that have one minor version of Python. Values that the code
uses, such as variables and attributes, are not looked at: some differ between ranks, as they may.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import lru_cache, partial
from types import CodeType
from typing import Any

from torch import nn

_MOST_LAYERS = 64  # a function may be below itself


def version_of(function: Any) -> str:
    """Eight digits that are the same for functions of the same name and code.

    Examples
    --------
    >>> added, scaled = lambda left, right: left + right, lambda left, right: left + 2 * right
    >>> version_of(added) == version_of(scaled)
    False
    """
    words = []
    for layer in _layers(function):
        code = getattr(layer, "__code__", None)  # a function in C has none
        name = getattr(layer, "__qualname__", type(layer).__qualname__)
        words.append(f"{name} {'' if code is None else _words(code)}")
    return f"{zlib.crc32(' '.join(words).encode()):08x}"


def _layers(function: Any) -> Iterator[Any]:
    """A function, and what it calls as `functools.partial` or `functools.wraps` says."""
    for _ in range(_MOST_LAYERS):
        yield function
        if isinstance(function, partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif not hasattr(function, "__qualname__"):  # an object that is called
            called = "forward" if isinstance(function, nn.Module) else "__call__"
            function = getattr(type(function), called)
        else:
            return


@lru_cache(maxsize=256)
def _words(code: CodeType) -> str:
    """The bytecode, and the names and constants that it uses."""
    constants = [_constant(each) for each in code.co_consts]
    return " ".join([code.co_code.hex(), *code.co_names, *constants])


def _constant(value: object) -> str:
    if isinstance(value, CodeType):
        return _words(value)
    # The order of a set differs between processes.
    return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)
