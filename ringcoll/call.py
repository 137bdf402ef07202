"""From the arguments of a public function to a `Call` that a communicator can run.

All checks that one rank can make by itself are made here, before anything is sent.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ringcoll import select, stage
from ringcoll.algorithms import find, generation
from ringcoll.choice.table import Table
from ringcoll.communicator import Call, Communicator, Decision, Keeper
from ringcoll.contracts import contract
from ringcoll.errors import ArgumentError
from ringcoll.groups import as_group, communicator
from ringcoll.plan import compile_plan
from ringcoll.reduction import TORCH, Engine, Operator, Reduction, gpu, resolve
from ringcoll.regions import Layout
from ringcoll.schedule import Schedule
from ringcoll.streams import has_streams
from ringcoll.work import Work

__all__ = [
    "AlgorithmChoice",
    "Builder",
    "Timeout",
    "seconds",
    "side_by_side",
    "together",
]

_CPU = torch.device("cpu")

AlgorithmChoice = str | Schedule
Timeout = timedelta | float | None


def seconds(timeout: Any, member: Communicator) -> float:
    """A time limit in seconds; by default the group's.

    Raises
    ------
    ArgumentError
        It is none.
    """
    if timeout is None:
        return member.timeout_s
    limit = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not isinstance(limit, int | float) or not limit > 0:
        raise ArgumentError(
            "must be positive", rank=member.rank, argument="timeout", expected="> 0 s", got=timeout
        )
    return float(limit)


def side_by_side(group: Any, **lists: Any) -> list[tuple[Any, ...]]:
    """What belongs together of the lists that a coalesced call was given, by argument.

    Raises
    ------
    ArgumentError
        One is no list, or empty, or they differ in length.
    """
    rank = as_group(group).rank()
    found: list[list[Any]] = []
    for argument, given in lists.items():
        try:
            found.append(list(given))
        except TypeError:
            raise ArgumentError(
                "not a list", rank=rank, argument=argument, expected="a list", got=type(given)
            ) from None
        length = len(found[0])
        if not length or len(found[-1]) != length:
            raise ArgumentError(
                "has the wrong length",
                rank=rank,
                argument=argument,
                expected=length or "at least 1",
                got=len(found[-1]),
            )
    return list(zip(*found, strict=True))


def together(builders: Sequence[Builder]) -> Builder:
    """Make one operation of several calls, of which there are some.

    Raises
    ------
    ArgumentError
        Their tensors are on several devices.
    """
    first, *following = builders
    for one in following:
        if one.device != first.device:
            raise ArgumentError(
                "all tensors of a call must be on one device",
                rank=first.rank,
                argument="tensors",
                expected=first.device,
                got=one.device,
            )
    call = first.call
    first.following = following
    call.following, call.num_calls = [one.call for one in following], len(builders)
    call.results = [tensor for builder in builders for tensor in builder.call.results]
    return first


def _kind(tensor: Tensor) -> object:
    """What a tensor is that is not dense."""
    if tensor.is_nested:
        return "a nested tensor"
    return tensor.dtype if tensor.is_quantized else tensor.layout


class Builder:
    """Checks the arguments of one call, and makes a `Call` of them."""

    def __init__(
        self,
        collective: str,
        group: Any,
        tensors: Sequence[Any],  # what users give, as yet unchecked
        async_op: bool,
        algorithm: AlgorithmChoice,
        segment_bytes: Any,
        timeout: Timeout,
    ) -> None:
        self.collective, self.algorithm, self.segment_bytes = collective, algorithm, segment_bytes
        self.async_op = async_op
        own = as_group(group)
        self.rank, self.world_size = own.rank(), own.size()
        self._check_tensors(tensors)
        first = tensors[0]
        self._first, self.device, self.dtype = first, first.device, first.dtype
        self.root = 0
        self.following: Sequence[Builder] | None = ()  # nothing that can be said in advance
        self.reduction: Reduction | None = None
        self.engine: Engine = TORCH
        if segment_bytes is not None and (not isinstance(segment_bytes, int) or segment_bytes < 1):
            raise self._refuse("must be positive", "segment_bytes", "an int > 0", segment_bytes)
        if not isinstance(algorithm, str | Schedule):
            raise self._refuse("not an algorithm", "algorithm", "a name or a Schedule", algorithm)
        # It ties the group to the tensors' device, so they have been looked at before.
        self.communicator: Communicator = communicator(group, self.device)
        self.timeout_s = seconds(timeout, self.communicator)

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root."""
        return self.rank == self.root

    def _refuse(self, message: str, argument: str, expected: object, got: object) -> ArgumentError:
        return ArgumentError(message, rank=self.rank, argument=argument, expected=expected, got=got)

    def _check_tensors(self, tensors: Sequence[Any]) -> None:
        if not tensors:
            raise self._refuse("must not be empty", "tensor", "at least one tensor", "none")
        first = tensors[0]
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                raise self._refuse("not a tensor", "tensor", "a torch.Tensor", type(tensor))
            if not stage.is_dense(tensor):
                raise self._refuse("must be dense", "tensor", "a strided tensor", _kind(tensor))
            if tensor.is_meta:
                raise self._refuse("has no data", "tensor", "memory", tensor.device)
            if tensor is first:
                continue
            if tensor.dtype is not first.dtype:
                raise self._refuse(
                    "all tensors of a call must have one dtype", "tensor", first.dtype, tensor.dtype
                )
            if tensor.device != first.device:
                raise self._refuse(
                    "all tensors of a call must be on one device",
                    "tensor",
                    first.device,
                    tensor.device,
                )

    def like(self, tensor: Tensor, other: Tensor, argument: str) -> None:
        """Check that two tensors have the same shape."""
        if tensor.shape != other.shape:
            raise self._refuse(
                "has another shape", argument, tuple(other.shape), tuple(tensor.shape)
            )

    def same_numel(self, tensor: Tensor, numel: int, argument: str) -> None:
        """Check the number of elements of a tensor."""
        if tensor.numel() != numel:
            raise self._refuse("has the wrong number of elements", argument, numel, tensor.numel())

    def one_a_rank(self, tensors: object, argument: str) -> None:
        """Check that there is one tensor for each rank."""
        if not isinstance(tensors, list | tuple) or len(tensors) != self.world_size:
            got = len(tensors) if isinstance(tensors, list | tuple) else type(tensors)
            raise self._refuse(
                "must hold one tensor for each rank", argument, f"{self.world_size} tensors", got
            )

    def list_at_root(self, tensors: list[Tensor], like: Tensor, argument: str) -> None:
        """Check a list that only the root gives."""
        if not self.is_root:
            if tensors:
                raise self._refuse(
                    f"only rank {self.root} gives it", argument, "None", f"{len(tensors)} tensors"
                )
            return
        self.one_a_rank(tensors, argument)
        for tensor in tensors:
            self.same_numel(tensor, like.numel(), argument)

    def split(self, tensor: Tensor, sizes: list[int] | None, side: str) -> list[int]:
        """Elements of each rank's piece of a tensor."""
        argument = f"{side}_split_sizes"
        try:
            sizes = [] if sizes is None else [index(size) for size in sizes]
        except TypeError:
            raise self._refuse("not a list of sizes", argument, "a list of int", sizes) from None
        rows = tensor.shape[0] if tensor.dim() else 1
        if not sizes:
            if rows % self.world_size:
                raise self._refuse(
                    "does not divide evenly among the ranks",
                    side,
                    f"a multiple of {self.world_size} rows",
                    rows,
                )
            sizes = [rows // self.world_size] * self.world_size
        if len(sizes) != self.world_size or min(sizes) < 0:
            raise self._refuse(
                "must hold one size for each rank", argument, f"{self.world_size} sizes", sizes
            )
        if sum(sizes) != rows:
            raise self._refuse("must add up to the rows", argument, rows, sum(sizes))
        row = tensor.numel() // rows if rows else 0
        return [size * row for size in sizes]

    def reduces(self, op: object, wire_dtype: torch.dtype | None) -> None:
        """Bind the operator, and choose what reduces."""
        self.reduction = resolve(op, self.dtype, wire_dtype=wire_dtype, rank=self.rank)
        factor = self.reduction.operator.factor
        if isinstance(factor, Tensor) and factor.device not in (self.device, _CPU):
            raise self._refuse(
                "the factor of PREMUL_SUM must be with the tensors, or on the CPU",
                "op",
                self.device,
                factor.device,
            )
        if self.device.type == "cuda" and self.collective != "barrier":
            self.engine = gpu.engine(select.reduction(), self.device)

    def vector(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """The call is on one vector."""
        numel = (inputs or outputs)[0].numel()
        self._finish(inputs, outputs, ((0, numel),))

    def blocks(
        self,
        inputs: list[Tensor],
        outputs: list[Tensor],
        lengths: list[int],
        *,
        split_input: bool = False,
        split_output: bool = False,
    ) -> None:
        """The call is on one block a rank, of lengths that all ranks know."""
        numbered = tuple(enumerate(lengths))
        self._finish(inputs, outputs, numbered, split_input, split_output)

    def exchange(
        self,
        inputs: list[Tensor],
        outputs: list[Tensor],
        outgoing: list[int],
        incoming: list[int],
        *,
        split: bool,
    ) -> None:
        """The call is on one block a pair of ranks; a rank knows its own only."""
        world_size = self.world_size
        if incoming[self.rank] != outgoing[self.rank]:
            raise self._refuse(
                "what this rank sends to itself has two lengths",
                "output",
                outgoing[self.rank],
                incoming[self.rank],
            )
        equal = len({*outgoing, *incoming}) == 1
        if equal and self.algorithm not in ("auto", "pairwise"):
            lengths = dict.fromkeys(range(world_size * world_size), outgoing[0])
        else:
            lengths = {self.rank * world_size + dst: n for dst, n in enumerate(outgoing)}
            lengths |= {src * world_size + self.rank: n for src, n in enumerate(incoming)}
        self._finish(inputs, outputs, tuple(lengths.items()), split, split)

    def _finish(
        self,
        inputs: list[Tensor],
        outputs: list[Tensor],
        lengths: tuple[tuple[int, int], ...],
        split_input: bool = False,
        split_output: bool = False,
    ) -> None:
        reduction, member = self.reduction, self.communicator
        question = _Question(
            self.collective,
            self.algorithm,
            self.rank,
            self.world_size,
            self.root,
            lengths,
            self.dtype,
            self.dtype if reduction is None else reduction.work_dtype,
            self.dtype if reduction is None else reduction.wire_dtype,
            None if reduction is None else reduction.operator,
            self.segment_bytes,
            split_input,
            split_output,
            not member.transport.ordered,
            generation(),
        )
        blocks = _blocks(question)
        io = self._stage = stage.Stage(self.rank, inputs, outputs, reduction, self.engine)
        in_place = io.shared_memory(blocks.inputs, blocks.outputs, blocks.lengths)
        # An algorithm that was asked for may not fit, and that is told at once.
        decided = _decide(question, in_place) if self.algorithm != "auto" else None

        def decide() -> Decision:
            if decided is not None and not _needs_hosts(question):
                return decided
            return _choose(question, in_place, member.table, member.transport.hosts)

        self.call = Call(
            name=self.collective,
            decide=decide,
            device=self.device,
            reduction=reduction,
            open=io.open,
            timeout_s=self.timeout_s,
            results=outputs,
            lengths=None if blocks.common else blocks.lengths,
            engine=self.engine,
            tensors=self._used(io) if has_streams(self.device) else (),
        )

    def _used(self, io: stage.Stage) -> list[Tensor]:
        """The user's tensors."""
        factor = None if self.reduction is None else self.reduction.operator.factor
        given = [factor] if isinstance(factor, Tensor) and has_streams(factor.device) else []
        return [*io.tensors, *given]

    def run(self) -> Work | None:
        """Run the call."""
        return self.communicator.run(self.call, async_op=self.async_op)

    def keep(self) -> None:
        """Let the call keep what it is bound to, to be run again and again.

        Raises
        ------
        ArgumentError
            What it does depends on what the tensors hold.
        """
        if self.following is None:
            raise self._refuse("cannot be prepared", "tensor", "a dense tensor", "a sparse one")
        self.call.keeper = Keeper(self._stage.forget)
        self._stage.keep()
        for builder in self.following:
            builder.keep()

    @property
    def is_plain(self) -> bool:
        """Whether the call works on the tensors' own memory, without a copy."""
        return self._stage.is_plain

    def fused(self, tensors: Sequence[Tensor]) -> None:
        """Let the one vector of the call stand for several tensors, laid end to end."""
        self.call.open = stage.packed(self.call.open, self._first, tensors)
        self.call.results = list(tensors)
        self.call.tensors = [*self.call.tensors, *tensors] if self.call.tensors else ()


class _Question(NamedTuple):
    """All that the decision how to run a call depends on."""

    collective: str
    algorithm: AlgorithmChoice
    rank: int
    world_size: int
    root: int
    lengths: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    work_dtype: torch.dtype
    wire_dtype: torch.dtype
    operator: Operator | None
    segment_bytes: int | None
    split_input: bool
    split_output: bool
    posts_early: bool
    generation: int
    hosts: tuple[int, ...] | None = None
    """Of all ranks, for an algorithm that needs them: known when the ranks have met."""


class _Blocks(NamedTuple):
    """Which blocks a rank has, and their lengths."""

    inputs: Sequence[int]
    outputs: Sequence[int]
    lengths: dict[int, int]
    common: bool
    """Whether all ranks know all lengths."""


@lru_cache(maxsize=1024)
def _blocks(question: _Question) -> _Blocks:
    rules = contract(question.collective)
    rank, world_size, root = question.rank, question.world_size, question.root
    inputs, outputs = rules.inputs(rank, world_size, root), rules.outputs(rank, world_size, root)
    return _Blocks(inputs, outputs, dict(question.lengths), rules.common_lengths)


@lru_cache(maxsize=1024)
def _choose(
    question: _Question, in_place: bool, table: Table | None, hosts: tuple[int, ...]
) -> Decision:
    """Decide, now that the ranks have met: what ``auto`` stands for, and who is on which host."""
    collective = question.collective
    if question.algorithm == "auto":
        blocks = _blocks(question)
        counted = blocks.inputs if collective == "all_to_all" else blocks.lengths
        nbytes = sum(blocks.lengths[block] for block in counted) * question.wire_dtype.itemsize
        choice = select.choose(collective, nbytes, question.world_size, question.operator, table)
        question = question._replace(
            algorithm=choice.algorithm,
            segment_bytes=question.segment_bytes or choice.segment_bytes,
        )
    if _needs_hosts(question):
        question = question._replace(hosts=hosts)
    return _decide(question, in_place)


def _needs_hosts(question: _Question) -> bool:
    name = question.algorithm
    return isinstance(name, str) and find(question.collective, name).needs_hosts


@lru_cache(maxsize=1024)
def _decide(question: _Question, in_place: bool) -> Decision:
    """Check the schedule, and compile it; the same on every rank."""
    collective, algorithm, rank, world_size, root, lengths, *_ = question
    rules, operator = contract(collective), question.operator
    dtype, wire_dtype = question.work_dtype, question.wire_dtype
    length = dict(lengths)
    equal = len(set(length.values())) == 1
    schedule = select.checked_schedule(
        collective, algorithm, world_size, root, operator, rank, question.hosts
    )
    if not equal and not rules.common_lengths and schedule.algorithm != "pairwise":
        raise ArgumentError(
            f"{schedule.algorithm} {collective} needs blocks of equal length",
            rank=rank,
            argument="algorithm",
            expected="pairwise, or auto",
            got=schedule.algorithm,
        )
    segments = 1
    if rules.common_lengths:
        per_block = rules.chunks_per_block(schedule.num_chunks, world_size)
        longest = -(-max(length.values()) // per_block)
        segments = select.segment_count(
            schedule, longest * wire_dtype.itemsize, question.segment_bytes, longest
        )
        told = "+".join(map(str, length.values()))
        told = f"{max(length.values())} x {len(length)}" if equal and len(length) > 1 else told
    else:
        told = "its own number of"
    words = [str(operator)] if operator is not None else []
    words += [str(question.dtype).removeprefix("torch."), f"{told} elements"]
    words += [f"root {root}"] if rules.rooted else []
    if wire_dtype is not question.dtype:
        words += [f"sent as {wire_dtype}".replace("torch.", "")]
    if dtype is not wire_dtype:
        words += [f"computed in {dtype}".replace("torch.", "")]
    words += [f"algorithm {schedule.algorithm}"]
    words += [f"{segments} segments"] if segments > 1 else []
    description = f"{collective}({', '.join(words)})"
    layout = Layout(lengths, question.split_input, question.split_output, in_place)
    return Decision(
        plan=compile_plan(schedule, rank, layout, segments, posts_early=question.posts_early),
        dtype=dtype,
        description=description,
        signature=zlib.crc32(description.encode()),
    )
