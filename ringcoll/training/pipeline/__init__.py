"""Pipeline parallel: schedules as data, and what runs them.

============  ====================================================================
`schedule`    the schedule of a pipeline as data; pure: no torch
`orders`      GPipe, 1F1B, interleaved 1F1B and zero-bubble; pure
`check`       what is read from a schedule: a proof, a drawing; pure
`runner`      runs a schedule on which the ranks agree
`mailbox`     the messages that a schedule asks for
============  ====================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringcoll.training.pipeline.runner import Pipeline, PipelineReport

__all__ = ["Pipeline", "PipelineReport"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ringcoll.training.pipeline import runner  # not before: schedules need no torch

    return getattr(runner, name)
