"""Bind a plan's instructions to memory and to a transport, and run them.

A program is a flat list: messages to start, messages to wait for, local work.

On a GPU a plan's local work is done once on a little memory before its first message, so that all
its kernels are loaded (`rehearse`). Problem: CUDA loads a kernel when it is first launched, and may
wait for all kernels on the GPU before it does. Messages of NCCL are kernels that wait for a peer.
Say this rank has sent the first message of a plan, and loads the plan's next kernel: the host waits
until a peer has taken the message. The peer may load a kernel, too, and wait for a message of
another group, which this rank sends after it. So both wait for ever. Cost: a launch for each
instruction, once an operation, and some hundred elements a region.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from types import SimpleNamespace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ringcoll.runtime.operation.instructions import ALIGNMENT, Combine, Post, Region, Wait
from ringcoll.runtime.operation.plan import Plan
from ringcoll.runtime.reduction import TORCH, Engine, Reduction
from ringcoll.runtime.transport import (
    AroundTransport,
    Exchange,
    Handle,
    Interpreted,
    LocalWork,
    Message,
    Start,
    Transport,
)

_PIECE = 1 << 20  # bytes of a lent message that are read and reduced at a time
_LEAST_S = 0.001  # a wait whose time is up still looks whether the message is there
# Elements of a region in a rehearsal: kernels do not depend on the length, but on the alignment.
_MOST = 256
_ROOM = _MOST + ALIGNMENT


class Posting(NamedTuple):
    """Messages that are ready: ``post``, called with the operation's tag, starts them."""

    post: Callable[[int], list[Handle]]
    receives: list[Message]
    sends: list[Message]


class Reading(NamedTuple):
    """Local work on lent messages: ``run`` gets their handles."""

    messages: Sequence[int]
    run: Callable[[Sequence[Handle]], object]


BoundInstruction = Wait | Posting | Reading | Callable[[], object]
"""An instruction that is bound to memory: wait, start messages, or local work."""


class Program(NamedTuple):
    """The items of a bound program, and what runs them all, if the transport does."""

    items: Sequence[BoundInstruction]
    interpreted: Interpreted | None = None


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
) -> Program:
    """Bind each of a plan's instructions to memory."""
    own = next((tensor for tensor in (*outputs, *inputs) if tensor.numel()), workspace)
    workspace = workspace[_apart(own, workspace) :] if plan.workspace_numel else workspace
    work = (workspace,)
    regions = plan.regions
    views: dict[int, Tensor] = {}
    narrow = work
    wire = workspace.dtype if reduction is None else reduction.wire_dtype
    if wire is not workspace.dtype:
        # They are widened when they are reduced, and on the way come as they are.
        narrow = (_like(workspace, plan.arriving_numel, wire),)
    spaces = (inputs, outputs, work, work, work, narrow)

    def view(number: int) -> Tensor:
        if number not in views:
            space, index, offset, numel = regions[number]
            whole = spaces[space][index]
            views[number] = whole if numel == whole.numel() else whole[offset : offset + numel]
        return views[number]

    def message(item: tuple[int, int, int]) -> Message:
        peer, number, numel = item
        # Two ends that expect other lengths do not match: no message is cut short, or written past
        # an end. Knuth's multiplicative hash spreads lengths over the 31 bits of a tag.
        return Message(peer, view(number), (numel * 2654435761) & 0x7FFFFFFF)

    by_exchange = _by_exchange(plan, transport, workspace.dtype)
    exchanged = {post for post, _ in by_exchange.values()}
    exchanges: dict[int, Exchange] = {}  # by the indices of posts
    lent = {} if reduction is None else _lent(plan, transport, reduction, by_exchange)
    borrowed = {number for sources in lent.values() for number in sources.values()}
    num_messages = 0
    program: list[BoundInstruction] = []
    works: dict[int, LocalWork] = {}  # what items of the program do
    thin: dict[int, Tensor] = {}  # totals that are sent next, in the wire dtype
    for index, instruction in enumerate(plan.instructions):
        if isinstance(instruction, Wait):
            program.append(instruction)
        elif isinstance(instruction, Post):
            receives, sends, _ = instruction
            arriving = [
                message(item)._replace(lent=number in borrowed)
                for number, item in enumerate(receives, num_messages)
            ]
            leaving = [
                send._replace(tensor=thin.get(number, send.tensor))
                for send, (_, number, _) in zip(map(message, sends), sends, strict=True)
            ]
            thin.clear()
            num_messages += len(arriving) + len(leaving)
            if index in exchanged:
                exchange = transport.bind_exchange(arriving, leaving[0].tensor, leaving[0].tag)
                exchanges[index] = exchange
                program.append(Posting(exchange, arriving, leaving))
            else:
                program.append(Posting(transport.bind(arriving, leaving), arriving, leaving))
        elif isinstance(instruction, Combine):
            sources, into = [*map(view, instruction.sources)], view(instruction.into)
            assert reduction is not None
            finished = transport.world_size if instruction.final else None
            rounded = None
            if narrow is not work and index in plan.departing:
                rounded = thin[instruction.into] = _like(into, into.numel(), wire)
            run = partial(engine.bind, reduction, [into], world_size=finished, narrow=rounded)
            if rounded is None and engine is TORCH:
                about = into, sources, reduction, transport.world_size, lent.get(index, {})
                if described := _describe(instruction, *about):
                    works[len(program)] = described
            if index not in lent:
                program.append(run(sources))
                continue
            positions, numbers = zip(*lent[index].items(), strict=True)
            if numbers[0] in by_exchange:
                exchange = exchanges[by_exchange[numbers[0]][0]]
                at_places = []
                for place in range(2):
                    for position, number in lent[index].items():
                        sources[position] = exchange.view(by_exchange[number][1], place)
                    at_places.append(run([*sources]))
                program.append(partial(_at_place, exchange, at_places))
            else:
                bind = partial(engine.bind, reduction)
                borrower = _Borrower(
                    transport, positions, bind, into, sources, finished=finished, rounded=rounded
                )
                program.append(Reading(numbers, borrower))
        else:
            into, source = view(instruction.into), view(instruction.source)
            works[len(program)] = LocalWork(into, [source])
            program.append(partial(into.copy_, source))
    return Program(program, transport.interpret(program, works))


def _describe(
    combine: Combine,
    into: Tensor,
    sources: Sequence[Tensor],
    reduction: Reduction,
    world_size: int,
    lent: Mapping[int, int],
) -> LocalWork | None:
    """What a reduction does, if its operator and a division say all of it."""
    finishes = combine.final and reduction.finish is not None
    is_average = reduction.operator.name == "avg" and reduction.wire_dtype is reduction.work_dtype
    if reduction.operator.user is not None or reduction.combine_all is not None:
        return None
    if finishes and not is_average:
        return None
    divisor = world_size if finishes else 0
    return LocalWork(into, [*sources], reduction.operator.name, lent, divisor)


def _at_place(exchange: Exchange, steps: Sequence[Callable[[], object]]) -> None:
    """Reduce what has come, where the last run of an exchange has brought it."""
    steps[exchange.place]()


def _by_exchange(
    plan: Plan, transport: Transport, dtype: torch.dtype
) -> dict[int, tuple[int, int]]:
    """By message that comes by an exchange: the index of its post, and its position there."""
    arrivals: dict[int, tuple[int, int]] = {}
    number, most = 0, transport.exchanges_to // dtype.itemsize
    for index, item in enumerate(plan.instructions if most else ()):
        if isinstance(item, Post):
            both = *item.receives, *item.sends
            if item.is_exchange and max(numel for _, _, numel in both) <= most:
                arrivals |= {number + place: (index, place) for place in range(len(item.receives))}
            number += len(both)
    return arrivals


def _lent(
    plan: Plan, transport: Transport, reduction: Reduction, by_exchange: Container[int]
) -> dict[int, dict[int, int]]:
    """Those of `Plan.lent` that are long or come by an exchange, and can be reduced in pieces."""
    if transport.lends_from == math.inf or reduction.operator.user is not None:
        return {}  # nobody knows what the user's function does to a piece
    if reduction.combine_all is not None:
        return {}  # a piece that is read is added before the next is there
    lent = {}
    for index, sources in plan.lent.items():
        combine = plan.instructions[index]
        assert isinstance(combine, Combine)
        nbytes = plan.regions[combine.into].numel * reduction.wire_dtype.itemsize
        ways = {message in by_exchange for message in sources.values()}
        if ways == {True} or (ways == {False} and nbytes >= transport.lends_from):
            lent[index] = sources
    return lent


_of_thread = threading.local()


def _scratch(place: int, dtype: torch.dtype) -> Tensor:
    """Memory of this thread for a piece of a lent message, in place 0 or 1, for all operations."""
    pieces: Tensor | None = getattr(_of_thread, "pieces", None)
    if pieces is None:
        with torch.inference_mode(False):  # later operations may be outside of that mode
            pieces = _of_thread.pieces = torch.empty(2, _PIECE, dtype=torch.uint8, device="cpu")
    return pieces[place].view(dtype)


@dataclass(slots=True)
class _Borrower:
    """A reduction of sources of which some are lent messages, in pieces that stay in a cache."""

    transport: Transport
    positions: Sequence[int]  # of lent sources, whose own memory is not used
    bind: Callable[..., Callable[[], object]]  # to memory; the reduction is known
    into: Tensor
    sources: Sequence[Tensor]
    finished: int | None
    rounded: Tensor | None

    def __call__(self, handles: Sequence[Handle]) -> None:
        """Reduce; the handles are those of the lent sources."""
        transport, numel = self.transport, self.into.numel()
        remote: dict[int, Handle] = {}
        sources = [*self.sources]
        for position, handle in zip(self.positions, handles, strict=True):
            near = transport.view(handle, sources[position].dtype)
            if near is None:
                remote[position] = handle
            else:
                sources[position] = near
        step = _PIECE // self.into.itemsize
        if numel <= step and not remote:
            self.bind([self.into], sources, self.finished, self.rounded)()
        else:
            for start in range(0, numel, step):
                piece = slice(start, min(start + step, numel))
                self._reduce(piece, [source[piece] for source in sources], remote)
        for handle in handles:
            transport.release(handle)

    def _reduce(self, piece: slice, sources: list[Tensor], remote: dict[int, Handle]) -> None:
        """Reduce a piece; what is remote is added as soon as it is read, while it is in cache."""
        into = self.into[piece]
        chain: list[Tensor] = []  # to be added up
        for position, source in enumerate(sources):
            if position not in remote:
                chain.append(source)
                continue
            if len(chain) > 1:
                self.bind([into], chain, None)()
                chain = [into]
            copy = _scratch(len(chain), source.dtype)[: into.numel()]
            self.transport.read(remote[position], piece.start, copy)
            chain.append(copy)
        rounded = None if self.rounded is None else self.rounded[piece]
        self.bind([into], chain, self.finished, rounded)()


def _like(tensor: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """Memory of another dtype that is aligned as a tensor, in elements."""
    memory = torch.empty(numel + ALIGNMENT, dtype=dtype, device=tensor.device)
    return memory[_apart(tensor, memory) :][:numel]


def _apart(tensor: Tensor, memory: Tensor) -> int:
    """How many elements of memory to leave out, so that the rest is aligned as a tensor."""
    begin, start = (each.data_ptr() // each.itemsize for each in (tensor, memory))
    return (begin - start) % ALIGNMENT


def interpreted(
    program: Program, deadline: float, watch: Watch, handles: list[Handle]
) -> Iterable[BoundInstruction]:
    """Run what the transport interprets of a program that has begun; return what is left.

    ``handles`` get those of the messages that were begun. Raises as `Transport.wait`; after a
    `NotYetError`, the next call goes on.
    """
    assert program.interpreted is not None
    rest = program.interpreted.go_on(deadline, watch)
    if rest is None:
        return ()
    handles += rest[1]
    return islice(program.items, rest[0], None)


def run(
    program: Program,
    tag: int,
    wait: Callable[[Handle, float], None],
    deadline: float,
    watch: Watch,
) -> None:
    """Run a program to its end, by its transport as far as that interprets it; see `drive`."""
    handles: list[Handle] = []
    items: Iterable[BoundInstruction] = program.items
    if program.interpreted is not None:
        program.interpreted.begin(tag)
        items = interpreted(program, deadline, watch, handles)
    drive(items, tag, wait, deadline, watch, handles)


def drive(
    program: Iterable[BoundInstruction],
    tag: int,
    wait: Callable[[Handle, float], None],
    deadline: float,
    watch: Watch,
    handles: list[Handle] | None = None,
) -> list[Handle]:
    """Run a program to its end; return the handles of its messages.

    ``tag``, of 31 bits, is mixed into the tags of all messages; ``wait`` is `Transport.wait`;
    ``deadline`` counts as ``time.monotonic``; ``handles`` are those of the part that has been run.
    """
    handles = [] if handles is None else handles
    now = time.monotonic
    for item in program:
        if isinstance(item, Wait):
            handle = handles[item.message]
            if handle is not None:  # most sends of short messages are over at once
                watch.wait = item
                wait(handle, max(deadline - now(), _LEAST_S))
        elif isinstance(item, Posting):
            handles += item.post(tag)
        elif isinstance(item, Reading):
            item.run([handles[number] for number in item.messages])
        else:
            item()
    return handles


class Silent(AroundTransport):
    """Sends nothing, and receives nothing."""

    def bind(self, receives: Sequence[Message], sends: Sequence[Message]) -> Start:
        """Make nothing ready."""
        num_messages = len(receives) + len(sends)
        return lambda mixed: [None] * num_messages

    def wait(self, handle: Handle, timeout_s: float) -> None:
        """Wait for nothing."""


def rehearse(
    plan: Plan,
    silent: Transport,
    dtype: torch.dtype,
    result_dtype: torch.dtype,
    device: torch.device,
    reduction: Reduction | None,
    engine: Engine,
) -> None:
    """Do a plan's local work on zeros."""
    starts = count(0, _ROOM)
    regions = tuple(
        Region(space, 0, start + offset % ALIGNMENT, min(numel, _MOST))
        for start, (space, _, offset, numel) in zip(starts, plan.regions, strict=False)
    )
    numel = len(regions) * _ROOM
    inputs, outputs = (torch.zeros(numel, dtype=dtype, device=device) for _ in range(2))
    workspace = torch.zeros(numel + ALIGNMENT, dtype=dtype, device=device)
    small = replace(plan, regions=regions, arriving_numel=numel, workspace_numel=numel)
    memory = [inputs], [outputs], workspace
    program = bind(small, *memory, silent, reduction=reduction, engine=engine)
    drive(program.items, 0, silent.wait, math.inf, SimpleNamespace(wait=None))
    results = outputs.view(result_dtype) if reduction is None else reduction.decode(outputs)
    torch.empty(numel, 2, dtype=results.dtype, device=device)[:, 0].copy_(results)  # with a stride
