"""Schedules as data, and their proof.

=============  ==========================================================
`steps`        operations, steps, programs as they are written
`contracts`    the promise of each collective; the orders of operands
`counting`     the one counter of rounds, messages and data
`drawing`      the step-by-rank grid
`laboratory`   what is asked of the laboratory, which is not known here
`verifier`     the proof that a schedule keeps its contract
`schedule`     what the other rooms read: all facts of the steps filled in; the text form,
               NCCL's words, and the order of reduction: as a sum, and by element
`compose`      programs made of programs: in parallel, renumbered, in place; an all-reduce in
               two parts, between which others can combine
=============  ==========================================================
"""

from functools import cache
from typing import Any

import lazy_loader


@cache
def _door() -> Any:
    """What ``__init__.pyi`` lists; `import ringcoll` comes by here, and reads no list."""
    return lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    named, _, every = _door()
    return every if name == "__all__" else named(name)


def __dir__() -> list[str]:
    return list(_door()[2])
