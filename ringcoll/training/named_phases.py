"""Phases of a training program, named for `ringcoll.trace`."""

from ringcoll.tracing import phase, waiting

__all__ = ["phase", "waiting"]
