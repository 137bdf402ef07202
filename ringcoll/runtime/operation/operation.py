"""Operations: all decisions and bindings of a call, so that it can run with other tensors.

::

    Request --compile--> Operation --resolve--> plan, tags --bind--> program --drive--> result
    (arguments)          (once a group)         (ranks met)  (memory)

- A `Request` holds all that the decision how to run a call depends on, and no tensor.
- An `Operation` is compiled from a request when the group sees such a call for the first time. The
  meaning of ``"auto"`` is known when the ranks have met, so `resolve` compiles the plan at the
  operation's first turn.
- A `Binding` is an operation bound to memory: functions that copy tensors in, the program, and
  functions that copy results out. CPU tensors are bound by their addresses, because training has
  its tensors at the same places again and again. Short tensors at a new place go through memory
  that the operation owns, so that a single binding serves all of them.
"""

from __future__ import annotations

import logging
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from ringcoll.errors import ArgumentError
from ringcoll.runtime.operation.executor import Program, Silent, bind, rehearse
from ringcoll.runtime.operation.instructions import Layout, Wait
from ringcoll.runtime.operation.plan import Plan, compile_plan
from ringcoll.runtime.operation.stage import Load, Stage
from ringcoll.runtime.reduction import SERIAL_NUMEL
from ringcoll.runtime.transport import Handle, NarrowTransport, Quick, Transport, has_streams
from ringcoll.schedules import Contract, OperandOrder, Schedule
from ringcoll.schedules.algorithms import Algorithm, find, passes_on_blocks, proved_schedule
from ringcoll.schedules.cost import Choice, Rule, Table, choose, segment_count, under_rules

_log = logging.getLogger("ringcoll")

_SHORT_NBYTES = 32 << 10  # to copy so much takes as long as to bind an instruction or two
_MOST_BINDINGS = 128  # addresses that an operation remembers
# By tracemalloc, on 1 to 8 ranks; of an instruction, in rings of 512 segments on 2 ranks.
_OBJECTS_NBYTES, _PEER_NBYTES, _INSTRUCTION_NBYTES = 5 << 10, 1 << 10, 288
_TIMES = 3  # that tensors are at a place before their binding is kept
_MOST_ROUNDS = 2  # in which all bindings might be used before a binding that is not used goes


class Request(NamedTuple):
    """All that the decision how to run a call depends on; it holds no tensor.

    ``entry`` is what ``algorithm`` names; ``None`` for ``"auto"``. ``lengths`` are (block, numel)
    of every block that this rank knows; ``packed`` are the numels of the tensors that are laid end
    to end, if the vector is made of several; ``order`` is the order of operands that the operator
    needs; ``operator_code`` says what a user's operator computes; ``rules`` are those of the call,
    for the algorithm ``"auto"``; ``usual_segment_bytes`` are those of a pipelined algorithm if the
    call does not say them.
    """

    contract: Contract
    algorithm: str | Schedule
    entry: Algorithm | Schedule | None
    rank: int
    world_size: int
    root: int
    lengths: tuple[tuple[int, int], ...]
    packed: tuple[int, ...]
    dtype: torch.dtype
    work_dtype: torch.dtype
    wire_dtype: torch.dtype
    operator: str
    order: OperandOrder
    segment_bytes: int | None
    split_input: bool
    split_output: bool
    in_place: bool
    posts_early: bool
    operator_code: str = ""
    rules: tuple[Rule, ...] = ()
    usual_segment_bytes: int | None = None

    @property
    def collective(self) -> str:
        """Name of the collective."""
        return self.contract.collective

    @property
    def nbytes(self) -> int:
        """Bytes of the whole data: the vector, or all blocks of one rank."""
        lengths, rules = dict(self.lengths), self.contract
        counted = (
            lengths if rules.common_lengths else rules.inputs(self.rank, self.world_size, self.root)
        )
        return sum(lengths[block] for block in counted) * self.wire_dtype.itemsize


class Resolved(NamedTuple):
    """The way in which an operation runs.

    ``description`` is the call in words. It names all that ranks must agree on, so the ranks
    compare it, and its hash, the ``signature``, is a component of every tag.
    """

    plan: Plan
    description: str
    signature: int


def resolve(request: Request, table: Table | None, hosts: tuple[int, ...] | None) -> Resolved:
    """Choose the algorithm if the request leaves it open, check its schedule, compile the plan.

    ``table`` is ``None`` only if the request names the algorithm; ``hosts``, the host number of
    every rank, is ``None`` before the ranks have met.
    """
    rules, collective, world_size = request.contract, request.collective, request.world_size
    entry = request.entry
    if entry is None:
        assert table is not None
        table = under_rules(table, request.rules)
        asked = collective, request.nbytes, world_size, table, request.order
        choice = choose(*asked, explained=False)
        log_once(choice)
        entry = find(collective, choice.algorithm)
        request = request._replace(segment_bytes=request.segment_bytes or choice.segment_bytes)
    rank, root = request.rank, request.root
    schedule = proved_schedule(
        collective,
        entry,
        world_size,
        root,
        hosts,
        order=request.order,
        operator=request.operator,
        rank=rank,
    )
    numels = [numel for _, numel in request.lengths]
    is_equal = len(set(numels)) == 1
    if not (is_equal or rules.common_lengths) and needs_equal_blocks(entry):
        message = f"{schedule.algorithm} {collective} needs blocks of equal length"
        raise ArgumentError(message, "algorithm", "auto", schedule.algorithm, rank)
    segments, lengths = 1, "its own number of"
    if rules.common_lengths:
        longest = -(-max(numels) // rules.chunks_per_block(schedule.num_chunks, world_size))
        slice_bytes = 0 if table is None else table.parameters.slice_bytes
        wanted = request.segment_bytes, longest, request.usual_segment_bytes, slice_bytes
        segments = segment_count(schedule, longest * request.wire_dtype.itemsize, *wanted)
        is_product = is_equal and len(numels) > 1 and not request.packed
        lengths = "+".join(map(str, request.packed or numels))
        lengths = f"{numels[0]} x {len(numels)}" if is_product else lengths
    dtype, wire_dtype, work_dtype = request.dtype, request.wire_dtype, request.work_dtype
    words = [
        f"{request.operator} {request.operator_code}".rstrip(),
        f"{dtype}, {lengths} elements",
        f"root {root}" if rules.rooted else "",
        f"sent as {wire_dtype}" if wire_dtype is not dtype else "",
        f"computed in {work_dtype}" if work_dtype is not wire_dtype else "",
        f"algorithm {schedule.algorithm}{_version(entry, schedule)}",
        f"{segments} segments" if segments > 1 else "",
    ]
    description = f"{collective}({', '.join(filter(None, words))})".replace("torch.", "")
    layout = Layout(request.lengths, request.split_input, request.split_output, request.in_place)
    plan = compile_plan(schedule, rank, layout, segments, posts_early=request.posts_early)
    return Resolved(plan, description, zlib.crc32(description.encode()))


def _version(entry: Algorithm | Schedule, schedule: Schedule) -> str:
    """Which program an algorithm of the user's is: files of one name may differ between ranks."""
    is_known = isinstance(entry, Algorithm) and entry.built_in
    return "" if is_known else f" {_fingerprint(schedule):08x}"


@lru_cache(maxsize=256)
def _fingerprint(schedule: Schedule) -> int:
    """A number that is the same for schedules of the same steps, on all ranks."""
    code = zlib.crc32(f"{schedule.num_chunks} {schedule.num_slots}".encode())
    for rank in range(schedule.world_size):
        for step in schedule.steps(rank):
            code = zlib.crc32(repr(step).encode(), code)
        code = zlib.crc32(b"|", code)
    return code


def log_once(choice: Choice) -> None:
    """Write a choice to the log, once."""
    _log_line(logging.INFO if choice.table.announces else logging.DEBUG, str(choice))


@lru_cache(maxsize=4096)
def _log_line(level: int, line: str) -> None:
    _log.log(level, "%s", line)


def needs_equal_blocks(entry: Algorithm | Schedule) -> bool:
    """Whether an algorithm moves blocks whose length a rank knows only if all are equal."""
    return passes_on_blocks(entry) if isinstance(entry, Schedule) else entry.equal_blocks


@dataclass(slots=True)
class Binding:
    """An operation that is bound to memory and to a transport.

    ``loads`` copy tensors in before the program runs, ``stores`` copy results out; ``wait`` is
    `Transport.wait`, ``is_over`` is `Transport.is_over`; ``last_run`` is the number of the last run
    with this binding; ``quick`` makes whole calls with it, as long as ``valid`` holds 1, and
    counts them behind it: other memory may take the place of what it is bound to.
    """

    loads: Sequence[Load]
    program: Program
    stores: Sequence[Load]
    wait: Callable[[Handle, float], None]
    is_over: Callable[[Handle], bool]
    last_run: int = 0
    quick: Quick | None = None
    valid: array[int] = field(default_factory=lambda: array("q", [1, 0]))
    num_quick: int = 0  # of the whole calls, as they were counted last

    def was_quick(self) -> bool:
        """Whether whole calls were made since this was asked."""
        before, self.num_quick = self.num_quick, self.valid[1]
        return self.num_quick > before

    def waits(self, handles: Sequence[Handle]) -> list[tuple[Wait, Callable[[], bool]]]:
        """The waits of a run, in order, each with a function: whether its message is over."""
        return [
            (item, partial(self.is_over, handles[item.message]))
            for item in self.program.items
            if isinstance(item, Wait)
        ]


@dataclass(slots=True, eq=False)
class Words:
    """An operation in words: what is remembered of it when it is over.

    ``lengths`` are the elements of each block, if only its two ends know its length: blocks are
    numbered source * world_size + destination. It is ``None`` if the description has all lengths;
    the description is ``None`` until the operation is resolved. ``request`` is that of an
    operation, and explains why the operation ran so.
    """

    name: str
    description: str | None
    lengths: dict[int, int] | None = None
    request: Request | None = None


class Operation:
    """A call that can run with any tensors of the same kind."""

    def __init__(
        self,
        request: Request,
        stage: Stage,
        device: torch.device,
        *,
        results: Sequence[int],  # numbers of the tensors that hold the result
        inference: bool,  # results are inference tensors, which only inference mode may write
        may_alias: bool,  # short tensors may be used at their own places: blocks share no memory
        is_short: bool,  # see the function `is_short`
        prepared: bool,  # it belongs to a single call (`plan()`), and keeps all its bindings
        file: str = "",  # from which the algorithm was read
    ) -> None:
        self.file = file
        self.request, self.stage, self.device, self.results = request, stage, device, results
        self.written = stage.written
        self.inference, self.has_streams = inference, has_streams(device)
        self.name = request.collective
        self.is_short = is_short
        self._prepared, self._keeps = prepared, stage.is_direct and not self.has_streams
        lengths = None if request.contract.common_lengths else dict(request.lengths)
        self.words = Words(request.collective, None, lengths, request)
        self.plan: Plan | None = None
        self.signature = 0
        self.nbytes_sent = 0  # in one run
        self._may_alias = may_alias and stage.is_direct
        self.bindings: dict[tuple[int, ...], Binding] = {}
        self._seen: dict[tuple[int, ...], int] = {}  # how often tensors were at a place
        self._num_runs = 0
        self._lane_key: object = None
        self._is_rehearsed = False

    @property
    def description(self) -> str | None:
        """The call in words, which name all that ranks must agree on; ``None`` before `resolve`."""
        return self.words.description

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps: its objects and plan, as measured, and memory of short tensors."""
        objects = _OBJECTS_NBYTES + _PEER_NBYTES * self.request.world_size
        if self.plan is not None:
            objects += _INSTRUCTION_NBYTES * len(self.plan.instructions)
        return objects + (self.stage.nbytes if self.is_short else 0)

    def check(self, *, sliced: bool) -> None:
        """Refuse a named algorithm that does not fit, before the ranks meet.

        Where long messages may be cut into slices (``sliced``), the plan is made when the ranks
        have met.
        """
        resolved = resolve(self.request, None, None)
        entry = self.request.entry
        is_known = isinstance(entry, Schedule) or (entry is not None and not entry.needs_hosts)
        if is_known and not sliced:
            self._take(resolved)

    def resolve(self, table: Table, hosts: tuple[int, ...]) -> None:
        """Decide how to run the operation; see the function `resolve`."""
        self._take(resolve(self.request, table, hosts))

    def _take(self, resolved: Resolved) -> None:
        self.plan, self.words.description, self.signature = resolved
        self.nbytes_sent = resolved.plan.sent_numel * self.request.wire_dtype.itemsize

    def memory_of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of a call, and the factor of its inputs if that is a tensor on a GPU."""
        reduction = self.stage.reduction
        factor = None if reduction is None else reduction.operator.factor
        if isinstance(factor, Tensor) and has_streams(factor.device):
            return [*tensors, factor]
        return [*tensors]

    def forget(self) -> None:
        """Let go of all bindings."""
        self._keep_only({})

    def move(self, lane_key: object) -> None:
        """Let go of all bindings if the next run is on another stream."""
        if self._lane_key != lane_key:
            self._lane_key = lane_key
            self._keep_only({})

    def binding(
        self,
        tensors: Sequence[Tensor],
        transport: Transport,
        workspace: Callable[[int, torch.dtype, torch.device], Tensor],
        is_crowded: bool,
    ) -> Binding:
        """Bind the operation to memory, or fetch an earlier binding.

        ``workspace(numel, dtype, device)`` gives working memory. If ranks share cores
        (``is_crowded``), torch must not use threads.
        """
        places = tuple(map(Tensor.data_ptr, tensors))
        self._num_runs = run = self._num_runs + 1
        binding = self.bindings.get(places)
        if binding is None:
            seen = self._seen
            if len(seen) >= _MOST_BINDINGS and places not in seen:
                seen.clear()
            seen[places] = times = seen.get(places, 0) + 1
            is_known = times > _TIMES  # tensors come there again and again
            is_own = self.is_short and not (self._may_alias and is_known)
            if is_own:
                places = ()
                binding = self.bindings.get(places)
            if binding is None:
                keeps = is_own or self._prepared or (self._keeps and is_known)
                if keeps:
                    self._make_room()
                with torch.inference_mode(False):  # later calls may be outside of that mode
                    binding = self._bind(tensors, transport, workspace, is_crowded, is_own=is_own)
                if keeps:
                    self.bindings[places] = binding
        binding.last_run = run
        return binding

    def _make_room(self) -> None:
        """Let go of bindings that are not used any more, before another one is made.

        A new binding has to take the memory of an old one. If it took the place of the last tensor,
        the next tensor would move, and the heap would grow by a tensor a binding.
        """
        oldest = self._num_runs - _MOST_ROUNDS * (len(self.bindings) + 1)
        kept = {
            places: binding
            for places, binding in self.bindings.items()
            if self._prepared or binding.last_run >= oldest or binding.was_quick()
        }
        self._keep_only({} if len(kept) >= _MOST_BINDINGS else kept)

    def _keep_only(self, kept: dict[tuple[int, ...], Binding]) -> None:
        before, self.bindings = self.bindings, kept
        for places, binding in before.items():
            if places not in kept:
                binding.valid[0] = 0

    def _bind(
        self,
        tensors: Sequence[Tensor],
        transport: Transport,
        workspace: Callable[[int, torch.dtype, torch.device], Tensor],
        is_crowded: bool,
        *,
        is_own: bool,
    ) -> Binding:
        plan, request = self.plan, self.request
        engine, reduction = self.stage.engine, self.stage.reduction
        assert plan is not None
        is_long = sum(self.stage.numels) > SERIAL_NUMEL
        if reduction is not None and is_crowded and is_long and self.device.type == "cpu":
            reduction = reduction.in_pieces()
        around: Callable[[Transport], Transport] = lambda transport: transport  # noqa: E731
        if reduction is not None and reduction.wire_dtype is not request.work_dtype:
            around = partial(NarrowTransport, wire_dtype=reduction.wire_dtype, engine=engine)
        # The user's function is called for results only.
        is_users = reduction is not None and reduction.operator.user is not None
        if not (transport.waits_on_host or self._is_rehearsed or is_users):
            kinds = request.work_dtype, request.dtype, self.device
            rehearse(plan, around(Silent(transport)), *kinds, reduction, engine)
            self._is_rehearsed = True
        transport = around(transport)
        flat = self.stage.bind(tensors, is_own=is_own)
        own = workspace(plan.workspace_numel, request.work_dtype, self.device)
        memory = flat.inputs, flat.outputs, own
        program = bind(plan, *memory, transport, reduction=reduction, engine=engine)
        return Binding(flat.loads, program, flat.stores, transport.wait, transport.is_over)


class Turn:
    """A function that runs in its turn among the group's operations; errors show its name."""

    has_streams = inference = False
    bindings = ((),)
    plan = True  # nothing has to be resolved
    signature = nbytes_sent = 0
    results: Sequence[int] = ()
    written: Sequence[int] = ()

    def __init__(self, name: str, function: Callable[[], object]) -> None:
        self.name, self._function = name, function
        self.description: str | None = name
        self.words = Words(name, name)
        self.device = torch.device("cpu")

    def binding(self, tensors: Sequence[Tensor], transport: Transport, *memory: object) -> Binding:
        """A program that calls the function."""
        return Binding((), Program([self._function]), (), transport.wait, transport.is_over)


def is_short(nbytes: int, device: torch.device) -> bool:
    """Whether the tensors of a call pass through memory of the operation's own."""
    return nbytes <= _SHORT_NBYTES and not has_streams(device)
