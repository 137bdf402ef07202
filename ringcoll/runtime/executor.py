"""Bind a plan's instructions to memory and to a transport, and run them.

A program is a flat list: messages to start, messages to wait for, local work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ringcoll.reduction import TORCH, Engine, Reduction
from ringcoll.runtime.plan import Combine, Plan, Post, Wait
from ringcoll.runtime.regions import ALIGNMENT, Region
from ringcoll.transport.base import Handle, Message, Transport

__all__ = ["Instruction", "Posting", "Watch", "bind", "drive"]

_LEAST_S = 0.001  # a wait whose time is up still looks whether the message is there


class Posting(NamedTuple):
    """Messages that are ready: ``post``, called with the operation's tag, starts them."""

    post: Callable[[int], list[Handle]]
    receives: list[Message]
    sends: list[Message]


Instruction = Wait | Posting | Callable[[], object]
"""An instruction that is bound to memory: wait, start messages, or local work."""


class Watch(Protocol):
    """Gets the message that is being waited for."""

    wait: Wait | None


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
) -> list[Instruction]:
    """Bind each of a plan's instructions to memory.

    Parameters
    ----------
    inputs, outputs
        Flat tensors of the input and of the output, all of the work dtype.
    workspace
        Working memory: at least ``plan.workspace_numel`` elements of the work dtype.
    reduction
        Meaning of ``(+)``; ``None`` if the plan reduces nothing.
    tag_by_length
        Whether the length of a message is mixed into its tag, for collectives in
        which only the two ends of a message know the length.
    """
    work = (workspace,)
    regions = plan.regions
    views: dict[int, Tensor] = {}
    narrow = work
    wire = workspace.dtype if reduction is None else reduction.wire_dtype
    if wire is not workspace.dtype:
        # They are widened when they are reduced, and on the way come as they are.
        narrow = (torch.empty(plan.arriving_numel, dtype=wire, device=workspace.device),)
    spaces = (inputs, outputs, work, work, work, narrow)

    def view(number: int) -> Tensor:
        known = views.get(number)
        if known is None:
            space, part, offset, numel = regions[number]
            whole = spaces[space][part]
            known = whole if numel == whole.numel() else whole[offset : offset + numel]
            views[number] = known
        return known

    def message(item: tuple[int, int, int]) -> Message:
        peer, number, numel = item
        # Knuth's multiplicative hash spreads lengths over the 31 bits of a tag.
        salt = (numel * 2654435761) & 0x7FFFFFFF if tag_by_length else 0
        return Message(peer, view(number), salt)

    program: list[Instruction] = []
    thin: dict[int, Tensor] = {}  # totals that are sent next, in the wire dtype
    for index, instruction in enumerate(plan.instructions):
        if isinstance(instruction, Wait):
            program.append(instruction)
        elif isinstance(instruction, Post):
            receives, sends = instruction
            arriving, leaving = [*map(message, receives)], [*map(message, sends)]
            leaving = [
                send._replace(tensor=thin.get(number, send.tensor))
                for send, (_, number, _) in zip(leaving, sends, strict=True)
            ]
            thin.clear()
            program.append(Posting(transport.bind(arriving, leaving), arriving, leaving))
        elif isinstance(instruction, Combine):
            sources = [*map(view, instruction.sources)]
            assert reduction is not None
            finished = transport.world_size if instruction.final else None
            rounded = None
            if narrow is not work and index in plan.departing:
                rounded = _thin(regions[instruction.into], wire, workspace.device)
                thin[instruction.into] = rounded
            program.append(
                engine.bind(reduction, [view(instruction.into)], sources, finished, rounded)
            )
        else:
            program.append(partial(view(instruction.into).copy_, view(instruction.source)))
    return program


def _thin(region: Region, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for a total in the wire dtype, aligned as the total itself."""
    skipped = region.offset % ALIGNMENT
    return torch.empty(skipped + region.numel, dtype=dtype, device=device)[skipped:]


def drive(
    program: Sequence[Instruction],
    tag: int,
    wait: Callable[[Handle, float], None],
    deadline: float,
    watch: Watch,
) -> None:
    """Run a program to its end.

    ``tag``, of 31 bits, is mixed into the tags of all messages; ``wait`` is `Transport.wait`;
    ``deadline`` counts as ``time.monotonic``.
    """
    handles: list[Handle] = []
    now = time.monotonic
    for item in program:
        if isinstance(item, Wait):
            watch.wait = item
            wait(handles[item.message], max(deadline - now(), _LEAST_S))
        elif isinstance(item, Posting):
            handles += item.post(tag)
        else:
            item()
