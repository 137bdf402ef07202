"""Parameters of tests that are there only where a package is."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

__all__ = ["optional"]


def optional(transport: str) -> Any:
    """A transport's name, skipped where ucxx would be needed and is missing; it is not imported."""
    missing = "ucx" in transport and find_spec("ucxx") is None
    return pytest.param(
        transport, marks=pytest.mark.skipif(missing, reason="ucxx is not installed")
    )
