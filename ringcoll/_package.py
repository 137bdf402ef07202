"""What all parts of the package share: its version, and doors that are read when they are used."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import lazy_loader

# The package's metadata, files and messages between ranks name it.
__version__ = "0.1.0"


def late_door(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package whose ``__init__.pyi`` lists its names.

    The list is read when the first name is used. `lazy_loader` reads it when the package is
    imported, in a millisecond or two, which `import ringcoll` would pay for those on its way.
    """

    @cache
    def door() -> Any:
        return lazy_loader.attach_stub(package, file)

    def attribute(name: str) -> Any:
        named, _, every = door()
        return every if name == "__all__" else named(name)

    return attribute, lambda: list(door()[2])
