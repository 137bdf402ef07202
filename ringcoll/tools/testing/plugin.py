"""Hooks of pytest: `ranks` get ready before a test's time counts, and end with pytest."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


full_trace = False
"""Whether tracebacks of ranks have frames of this library."""


def pytest_configure(config: pytest.Config) -> None:
    """Note what tracebacks show."""
    global full_trace  # noqa: PLW0603  # pytest has one configuration
    full_trace = config.getoption("fulltrace")


def pytest_runtest_call(item: pytest.Item) -> None:
    """Start the processes of a test, outside of the deadlines of hypothesis."""
    on_ranks: Any = getattr(getattr(item, "function", None), "ringcoll_ranks", None)
    if on_ranks is not None:
        on_ranks[0].warm(on_ranks[1])


def pytest_unconfigure() -> None:
    """End the processes, and the threads."""
    if (module := sys.modules.get("ringcoll.tools.testing.on_ranks")) is not None:
        module.end_threads()
    if (module := sys.modules.get("ringcoll.tools.testing.pool")) is not None:
        module.POOL.close()
