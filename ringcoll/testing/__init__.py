"""Tests of distributed code, without a cluster: a plugin of pytest.

Problem: a test of distributed code needs ranks. They have to be started, set up, compared and
ended, whatever the test does to them, and a failure has to show what went wrong on which rank.
`ranks` runs a test on processes of a pool that stays, or on threads; `given_collective` holds a
collective against its definition, by hypothesis. docs/testing.md shows both.

Pytest imports this room whenever it starts, so nothing heavy is imported before a test uses it.

=============  ==========================================================
`on_ranks`     `ranks`: a test, or a function, on ranks
`pool`         the processes, and what they are sent
`outcome`      what a rank answers, and which rank failed first
`collective`   `given_collective`: a collective against its definition
`answers`      what a reduction has to give, and what is wrong with it
`inputs`       inputs that differ by rank and by index
`plugin`       what pytest calls
=============  ==========================================================

May be imported from outside: ``__all__``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringcoll.testing.answers import Expected, bits, mismatch
    from ringcoll.testing.collective import given_collective
    from ringcoll.testing.inputs import values
    from ringcoll.testing.on_ranks import OnRanks, ranks

__all__ = ["Expected", "OnRanks", "bits", "given_collective", "mismatch", "ranks", "values"]

_HOME = {
    **dict.fromkeys(("Expected", "bits", "mismatch"), "answers"),
    **dict.fromkeys(("OnRanks", "ranks"), "on_ranks"),
    "given_collective": "collective",
    "values": "inputs",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
