"""A text of any format that can be read, as a schedule."""

from __future__ import annotations

from ringcoll.formats.msccl import from_msccl
from ringcoll.formats.mscclpp import from_mscclpp
from ringcoll.schedule import Schedule


def schedule_in(text: str) -> Schedule:
    """Read a schedule: XML of MSCCL, JSON of MSCCL++, or a text of `Schedule.to_text`.

    Raises
    ------
    ScheduleError
        The text is malformed; the message names the line.
    """
    first = text.lstrip("\ufeff \t\r\n")[:1]
    if first == "<":
        return from_msccl(text)
    return from_mscclpp(text) if first == "{" else Schedule.from_text(text)
