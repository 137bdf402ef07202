"""Run a plan on tensors over a transport.

The executor is a generator: it yields each message that has to be waited for, and
is resumed when that message is there. So one and the same code runs on real
processes, where the driver blocks (`drive`), and with all ranks in one thread,
where a scheduler decides which rank goes on (`ringcoll.transport.local`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ringcoll.plan import Combine, Plan, Post, Wait
from ringcoll.reduction import TORCH, Engine, Reduction
from ringcoll.regions import ALIGNMENT, Region
from ringcoll.transport.base import Handle, Message, Transport

__all__ = ["Bound", "Waiting", "bind", "execute"]


class Waiting(NamedTuple):
    """A message that has to be waited for: its handle, and what it is."""

    handle: Handle
    wait: Wait


class Posting(NamedTuple):
    """Messages that are ready: ``post``, called with the operation's tag, starts them."""

    post: Callable[[int], list[Handle]]
    receives: list[Message]
    sends: list[Message]


Bound = Wait | Posting | Callable[[], object]
"""An instruction that is bound to memory: wait, start messages, or local work."""


def bind(
    plan: Plan,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    workspace: Tensor,
    transport: Transport,
    *,
    reduction: Reduction | None = None,
    engine: Engine = TORCH,
    tag_by_length: bool = False,
) -> Iterator[Bound]:
    """Bind each of a plan's instructions to memory, one after the other, as they are asked for.

    The first messages may thus be on their way before the last instruction is bound. Who
    wants to run them again keeps them in a list.

    Parameters
    ----------
    plan
        The plan.
    inputs, outputs
        The flat parts of the input and the output, all of one dtype.
    workspace
        At least ``plan.workspace_numel`` elements of that dtype.
    transport
        Where messages go.
    reduction
        What ``(+)`` means; ``None`` where nothing is reduced.
    engine
        What reduces.
    tag_by_length
        Whether the length of a message is mixed into its tag, for collectives in
        which only the two ends of a message know it.
    """
    work = (workspace,)
    regions = plan.regions
    views: dict[int, Tensor] = {}
    narrow = work
    wire = workspace.dtype if reduction is None else reduction.wire_dtype
    if wire is not workspace.dtype:
        # They are widened when they are reduced, and on the way come as they are.
        narrow = (torch.empty(plan.arriving_numel, dtype=wire, device=workspace.device),)
    parts = (inputs, outputs, work, work, work, narrow)

    def view(number: int) -> Tensor:
        found = views.get(number)
        if found is None:
            space, part, offset, numel = regions[number]
            whole = parts[space][part]
            found = whole if numel == whole.numel() else whole[offset : offset + numel]
            views[number] = found
        return found

    def message(item: tuple[int, int, int]) -> Message:
        peer, number, numel = item
        # Knuth's multiplicative hash spreads lengths over the 31 bits of a tag.
        salt = (numel * 2654435761) & 0x7FFFFFFF if tag_by_length else 0
        return Message(peer, view(number), salt)

    thin: dict[int, Tensor] = {}  # totals that are sent next, in the wire dtype
    for index, instruction in enumerate(plan.instructions):
        if isinstance(instruction, Wait):
            yield instruction
        elif isinstance(instruction, Post):
            receives, sends = instruction
            arriving, leaving = [*map(message, receives)], [*map(message, sends)]
            leaving = [
                one._replace(tensor=thin.get(number, one.tensor))
                for one, (_, number, _) in zip(leaving, sends, strict=True)
            ]
            thin.clear()
            yield Posting(transport.bind(arriving, leaving), arriving, leaving)
        elif isinstance(instruction, Combine):
            sources = [*map(view, instruction.sources)]
            assert reduction is not None
            finished = transport.world_size if instruction.final else None
            rounded = None
            if narrow is not work and index in plan.departing:
                rounded = _thin(regions[instruction.into], wire, workspace.device)
                thin[instruction.into] = rounded
            yield engine.bind(reduction, [view(instruction.into)], sources, finished, rounded)
        else:
            yield partial(view(instruction.into).copy_, view(instruction.source))


def _thin(region: Region, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for a total in the wire dtype, aligned as the total itself."""
    skipped = region.offset % ALIGNMENT
    return torch.empty(skipped + region.numel, dtype=dtype, device=device)[skipped:]


def execute(instructions: Iterable[Bound], tag: int) -> Iterator[Waiting]:
    """Run bound instructions; yields what has to be waited for.

    Parameters
    ----------
    instructions
        As `bind` made them.
    tag
        Tag of all messages of this operation, of 31 bits.
    """
    handles: list[Handle] = []
    for instruction in instructions:
        if isinstance(instruction, Wait):
            yield Waiting(handles[instruction.message], instruction)
        elif isinstance(instruction, Posting):
            handles += instruction.post(tag)
        else:
            instruction()
