"""Run a plan on tensors over a transport.

The executor is a generator: it yields each message that has to be waited for, and
is resumed when that message is there. So one and the same code runs on real
processes, where the driver blocks (`drive`), and with all ranks in one thread,
where a scheduler decides which rank goes on (`ringcoll.transport.local`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from ringcoll.plan import Combine, Move, Plan, Post, Wait
from ringcoll.reduction import Reduction
from ringcoll.transport.base import Handle, Message, Transport

__all__ = ["Waiting", "bind", "execute"]


class Waiting(NamedTuple):
    """A message that has to be waited for: its handle, and what it is."""

    handle: Handle
    wait: Wait


def bind(
    plan: Plan, inputs: Sequence[Tensor], outputs: Sequence[Tensor], workspace: Tensor
) -> list[Tensor]:
    """Make the views that a plan's instructions work on.

    Parameters
    ----------
    plan
        The plan.
    inputs, outputs
        The flat parts of the input and the output, all of one dtype.
    workspace
        At least ``plan.workspace_numel`` elements of that dtype.
    """
    work = (workspace,)
    parts = (inputs, outputs, work, work, work)
    views = []
    for space, part, offset, numel in plan.regions:
        whole = parts[space][part]
        views.append(whole if numel == whole.numel() else whole.narrow(0, offset, numel))
    return views


def execute(
    plan: Plan,
    views: Sequence[Tensor],
    transport: Transport,
    tag: int,
    *,
    reduction: Reduction | None = None,
    tag_by_length: bool = False,
) -> Iterator[Waiting]:
    """Run a plan; yields what has to be waited for.

    Parameters
    ----------
    plan, views
        The plan, and its views as `bind` made them.
    transport
        Where messages go.
    tag
        Tag of all messages of this operation.
    reduction
        What ``(+)`` means; ``None`` where nothing is reduced.
    tag_by_length
        Whether the length of a message is mixed into its tag, for collectives in
        which only the two ends of a message know it.
    """
    handles: list[Handle] = []
    world_size = transport.world_size
    combine = reduction.combine if reduction is not None else None
    finish = reduction.finish if reduction is not None else None
    for instruction in plan.instructions:
        if isinstance(instruction, Wait):
            yield Waiting(handles[instruction.message], instruction)
        elif isinstance(instruction, Post):
            receives, sends = instruction
            handles += transport.post(
                [_message(item, views, tag, tag_by_length) for item in receives],
                [_message(item, views, tag, tag_by_length) for item in sends],
            )
        elif isinstance(instruction, Combine):
            into, left, right, final = instruction
            assert combine is not None
            combine(views[left], views[right], out=views[into])
            if final and finish is not None:
                finish(views[into], world_size)
        elif isinstance(instruction, Move):
            into, source = instruction
            views[into].copy_(views[source])
        elif finish is not None:
            finish(views[instruction.into], world_size)


def _message(
    item: tuple[int, int, int], views: Sequence[Tensor], tag: int, tag_by_length: bool
) -> Message:
    peer, view, numel = item
    if tag_by_length:
        # Knuth's multiplicative hash spreads lengths over the 31 bits of a tag.
        tag = (tag ^ (numel * 2654435761)) & 0x7FFFFFFF
    return Message(peer, views[view], tag)
