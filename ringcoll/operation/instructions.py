"""The instructions of a plan; views of memory and messages are named by numbers."""

from __future__ import annotations

from typing import NamedTuple


class Post(NamedTuple):
    """Post receives and sends: (peer, view, numel), numbered on from the last post.

    ``is_exchange``: every rank of the schedule sends one and the same message to all others.
    """

    receives: tuple[tuple[int, int, int], ...]
    sends: tuple[tuple[int, int, int], ...]
    is_exchange: bool = False


class Wait(NamedTuple):
    """Wait for the message with this number."""

    message: int
    peer: int
    step: int
    is_receive: bool


class Move(NamedTuple):
    """Copy one view to another."""

    into: int
    source: int


class Combine(NamedTuple):
    """Reduce views from left to right, and finish the total where ``final`` is set.

    ``into`` is one of the first two sources, or overlaps none.
    """

    into: int
    sources: tuple[int, ...]
    final: bool


Instruction = Post | Wait | Move | Combine
