"""Arguments of the public functions: the checks that one rank can make by itself.

Other rooms check operators (`ringcoll.runtime.reduction`), names of algorithms
(`ringcoll.schedules.algorithms`) and the overlap of memory (`ringcoll.runtime.tensors`).

The checks depend on the arguments, and on the kind of the tensors only: shape, dtype,
device, strides, places relative to each other. So calls of the same kind are checked once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from numbers import Integral
from operator import index
from typing import Any, TypedDict

import torch
from torch import Tensor

from ringcoll.errors import ArgumentError
from ringcoll.runtime.collectives.groups import as_group, communicator, group_rank
from ringcoll.runtime.group import Communicator
from ringcoll.runtime.machine import seconds_of, settings, whole
from ringcoll.runtime.operation import Operation, Request, Stage, is_short, needs_equal_blocks
from ringcoll.runtime.reduction import (
    MOVED,
    TORCH,
    Engine,
    Reduction,
    Reproducible,
    gpu,
    reproduced,
    resolve,
)
from ringcoll.runtime.tensors import check_apart, is_plain, share_blocks, with_memory
from ringcoll.runtime.user_files import as_algorithm, has_files, is_rules, rules_in
from ringcoll.schedules import OperandOrder, Schedule, contract
from ringcoll.schedules.algorithms import Algorithm, algorithms, find
from ringcoll.schedules.cost import AUTO, Rule, segment_bytes_of

_CPU = torch.device("cpu")

AlgorithmChoice = str | Schedule
Timeout = timedelta | float | None

Options = tuple[Any, ...]
"""Arguments of a call beside its tensors and its group."""
Compile = Callable[[Any, Sequence[Any], Options, bool], Operation]
"""Checks a call and compiles it: ``compile_(group, tensors, options, prepared)``."""


class MoveOptions(TypedDict, total=False):
    """Options of every function; `ringcoll.all_reduce` describes them."""

    algorithm: AlgorithmChoice
    segment_bytes: int | None
    timeout: Timeout


class ReduceOptions(MoveOptions, total=False):
    """Options of every function that reduces."""

    wire_dtype: torch.dtype | None
    reproducible: Reproducible


def seconds(timeout: Any, member: Communicator) -> float:
    """A positive time limit in seconds; the group's for ``None``."""
    return member.timeout_s if timeout is None else seconds_of(timeout, rank=member.rank)


def side_by_side(group: Any, **lists: Any) -> list[tuple[Any, ...]]:
    """Pair the items of the lists of a coalesced call: lists of one length that is not 0."""
    rank = as_group(group).rank()
    columns: list[list[Any]] = []
    for argument, items in lists.items():
        try:
            columns.append(list(items))
        except TypeError:
            raise ArgumentError("not a list", argument, "a list", type(items), rank) from None
        length = len(columns[0])
        if not length or len(columns[-1]) != length:
            expected = length or "at least 1"
            raise ArgumentError("has the wrong length", argument, expected, len(columns[-1]), rank)
    return list(zip(*columns, strict=True))


def check_dtype(dtype: torch.dtype, rank: int, argument: str = "tensor") -> None:
    """Refuse a dtype without arithmetic or copies in torch, such as uint4, or below a byte."""
    if dtype not in MOVED:
        message = "torch cannot copy tensors of this dtype; send a view(torch.uint8)"
        expected = "a dtype of integers or floats of at least 8 bits"
        raise ArgumentError(message, argument, expected, dtype, rank)


@cache
def _negates(dtype: torch.dtype) -> bool:
    """Whether torch can copy a negative view of a dtype."""
    try:
        torch.zeros(1, dtype=dtype, device="cpu").neg()
    except RuntimeError:
        return False
    return True


class Arguments:
    """The arguments of one call, checked; `operation` compiles them.

    Parameters
    ----------
    collective
        Name of the collective.
    group, tensors, algorithm, segment_bytes
        Arguments of the user, unchecked.
    wire_dtype, reproducible
        Further arguments of the user, unchecked, for `reduces`.
    names
        The arguments that the tensors are, for errors; further tensors are of the last one.

    Raises
    ------
    ArgumentError
        An argument is not acceptable.
    """

    def __init__(
        self,
        collective: str,
        group: Any,
        tensors: Sequence[Any],
        algorithm: Any = "auto",
        segment_bytes: Any = None,
        wire_dtype: torch.dtype | None = None,
        reproducible: Reproducible = False,
        *,
        names: Sequence[str] = ("tensor",),
    ) -> None:
        self._names, self.prepared = names, False
        self._wire_dtype, self._reproducible = wire_dtype, reproducible
        self.contract, self.segment_bytes = contract(collective), whole(segment_bytes)
        own = as_group(group)
        self._group, self.rank, self.world_size = own, own.rank(), own.size()
        self._check_tensors(tensors)
        self.tensors, self.device, self.dtype = tensors, tensors[0].device, tensors[0].dtype
        self.root = 0
        self.reduction: Reduction | None = None
        self.engine: Engine = TORCH
        if segment_bytes is not None and (
            not isinstance(segment_bytes, Integral) or segment_bytes < 1
        ):
            raise self._error("must be positive", "segment_bytes", "an int > 0", segment_bytes)
        if not isinstance(algorithm, str | Schedule):
            message = "not an algorithm"
            expected = "a name, a file, rules or a Schedule"
            raise self._error(message, "algorithm", expected, algorithm)
        self.algorithm = asked = as_algorithm(algorithm)
        self._file = "" if asked is algorithm else str(algorithm)
        self._rules: tuple[Rule, ...] = ()
        if isinstance(asked, str) and is_rules(asked):
            self._file = asked if has_files(asked) else ""
            self._rules, self.algorithm = rules_in(asked), AUTO
        self._entry: Algorithm | Schedule | None = None
        if isinstance(self.algorithm, Schedule):
            self._entry = self.algorithm
        elif self.algorithm != AUTO:
            self._entry = find(collective, self.algorithm)
        # This ties the group to the tensors' device, so it comes after the checks.
        self.member: Communicator = communicator(group, self.device)

    def rooted(self, rank: int | None, in_group: int | None, argument: str) -> bool:
        """Check the root; return whether this rank is the root."""
        self.root = group_rank(self._group, rank, in_group, argument)
        return self.rank == self.root

    def _error(self, message: str, argument: str, expected: object, got: object) -> ArgumentError:
        return ArgumentError(message, argument, expected, got, self.rank)

    def _check_tensors(self, tensors: Sequence[Any]) -> None:
        if not tensors:
            raise self._error("must not be empty", self._names[0], "at least one tensor", "none")
        first = tensors[0]
        check_dtype(first.dtype, self.rank, self._names[0])
        for number, tensor in enumerate(tensors):
            name = self._names[min(number, len(self._names) - 1)]
            if tensor.is_neg() and not _negates(tensor.dtype):
                raise self._error(
                    "torch cannot negate this dtype", name, "no negative view", tensor.dtype
                )
            if tensor is first:
                continue
            if tensor.dtype is not first.dtype:
                raise self._error(
                    "all tensors of a call must have one dtype", name, first.dtype, tensor.dtype
                )
            if tensor.device != first.device:
                raise self._error(
                    "all tensors of a call must be on one device", name, first.device, tensor.device
                )

    def like(self, tensor: Tensor, other: Tensor, argument: str) -> None:
        """Check that two tensors have the same shape."""
        if tensor.shape != other.shape:
            raise self._error(
                "has another shape", argument, tuple(other.shape), tuple(tensor.shape)
            )

    def same_numel(self, tensor: Tensor, numel: int, argument: str) -> None:
        """Check the number of elements of a tensor."""
        if tensor.numel() != numel:
            raise self._error("has the wrong number of elements", argument, numel, tensor.numel())

    def one_a_rank(self, tensors: Sequence[Tensor], list_type: type, argument: str) -> list[int]:
        """Check that a list, of that type, has one tensor for each rank; return their lengths."""
        is_list = issubclass(list_type, list | tuple)
        if not is_list or len(tensors) != self.world_size:
            got = len(tensors) if is_list else list_type
            message = "must hold one tensor for each rank"
            raise self._error(message, argument, f"{self.world_size} tensors", got)
        return [tensor.numel() for tensor in tensors]

    def list_at_root(self, list_type: type, argument: str) -> tuple[range, list[int]]:
        """Check the list behind the first tensor, which only the root gives.

        Returns the numbers of the list's tensors, and the length of each block.
        """
        first, *listed = self.tensors
        if self.rank == self.root:
            self.one_a_rank(listed, list_type, argument)
            for tensor in listed:
                self.same_numel(tensor, first.numel(), argument)
        elif listed:
            message = f"only rank {self.root} gives it"
            raise self._error(message, argument, "None", f"{len(listed)} tensors")
        return range(1, len(self.tensors)), [first.numel()] * self.world_size

    def split(self, tensor: Tensor, sizes: Any, side: str) -> list[int]:
        """Elements of each rank's piece of a tensor."""
        argument = f"{side}_split_sizes"
        try:
            sizes = [] if sizes is None else [index(size) for size in sizes]
        except (RuntimeError, TypeError):
            raise self._error("not a list of sizes", argument, "a list of int", sizes) from None
        rows = tensor.shape[0] if tensor.dim() else 1
        if not sizes:
            if rows % self.world_size:
                expected = f"a multiple of {self.world_size} rows"
                raise self._error("does not divide evenly among the ranks", side, expected, rows)
            sizes = [rows // self.world_size] * self.world_size
        if len(sizes) != self.world_size or min(sizes) < 0:
            message = "must hold one size for each rank"
            raise self._error(message, argument, f"{self.world_size} sizes", sizes)
        if sum(sizes) != rows:
            raise self._error("must add up to the rows", argument, rows, sum(sizes))
        row = tensor.numel() // rows if rows else 0
        return [size * row for size in sizes]

    def reduces(self, op: object) -> None:
        """Bind the operator to the dtype, and choose what reduces."""
        self.reduction = reproduced(
            resolve(op, self.dtype, wire_dtype=self._wire_dtype, rank=self.rank),
            self._reproducible,
            world_size=self.world_size,
            device=self.device,
            rank=self.rank,
        )
        order, rules, name = self.reduction.order, self.contract, self.reduction.operator.name
        has_order = self._entry or any(e.order >= order for e in algorithms(rules.collective))
        if not has_order or (rules.is_prefix and name == "avg"):
            message = f"there is no {rules.collective} for it in {order}"
            raise self._error(message, "op", "another operator", self.reduction.name)
        factor = self.reduction.operator.factor
        if isinstance(factor, Tensor) and factor.device not in (self.device, _CPU):
            message = "the factor of PREMUL_SUM must be with the tensors, or on the CPU"
            raise self._error(message, "op", self.device, factor.device)
        if self.device.type == "cuda" and not self.contract.at_least_once:
            self.engine = gpu.engine(settings.reduction(), self.device)

    def exchange_lengths(self, outgoing: list[int], incoming: list[int]) -> dict[int, int]:
        """(block, numel) of each ordered pair of ranks, as far as this rank knows them."""
        world_size, sent, received = self.world_size, outgoing[self.rank], incoming[self.rank]
        if sent != received:
            message = "what this rank sends to itself has two lengths"
            raise self._error(message, "output", sent, received)
        is_equal = len({*outgoing, *incoming}) == 1
        if is_equal and self._entry is not None and needs_equal_blocks(self._entry):
            return dict.fromkeys(range(world_size * world_size), outgoing[0])
        lengths = {self.rank * world_size + dst: numel for dst, numel in enumerate(outgoing)}
        return lengths | {src * world_size + self.rank: n for src, n in enumerate(incoming)}

    def _written(self, inputs: Sequence[int], outputs: tuple[int, ...]) -> tuple[int, ...]:
        """Numbers of the outputs that change: data may lie where this rank is to have them."""
        rules, ends = self.contract, (self.rank, self.world_size, self.root)
        if rules.reduces:
            return outputs

        def place(tensor: Tensor) -> tuple[object, ...]:
            form = tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg()
            return tensor.data_ptr(), tensor.numel(), is_plain(tensor) or form

        def places(numbers: Sequence[int], blocks: Sequence[int]) -> list[tuple[object, ...]]:
            is_split = len(numbers) == len(blocks)
            held = [(block,) for block in blocks] if is_split else [tuple(blocks)]
            return list(zip(held, [place(self.tensors[n]) for n in numbers], strict=True))

        before = {*places(inputs, rules.inputs(*ends))}
        after = zip(outputs, places(outputs, rules.outputs(*ends)), strict=True)
        return tuple(number for number, where in after if where not in before)

    def operation(
        self,
        inputs: Sequence[int],
        outputs: Sequence[int],
        lengths: Sequence[int] | dict[int, int],
        *,
        split_input: bool = False,
        split_output: bool = False,
        is_packed: bool = False,
        counts: bool = False,
    ) -> Operation:
        """Compile the call.

        Parameters
        ----------
        inputs, outputs
            Numbers of the tensors that are sent, and of the tensors that hold the result.
        lengths
            Elements of each block, or (block, numel) of the blocks that this rank knows.
        split_input, split_output
            Whether each block is a tensor of its own.
        is_packed
            Whether all tensors together, end to end, are the vector.
        counts
            Whether the versions of the results move, as those of torch's collective do.
        """
        tensors, reduction = self.tensors, self.reduction
        root, rank, world_size = self.root, self.rank, self.world_size
        known = lengths if isinstance(lengths, dict) else dict(enumerate(lengths))
        results = range(len(tensors)) if is_packed else outputs
        output_tensors = [tensors[number] for number in results]
        input_parts: tuple[tuple[int, ...], ...] = tuple((number,) for number in inputs)
        output_parts: tuple[tuple[int, ...], ...] = tuple((number,) for number in outputs)
        if is_packed:
            input_parts = output_parts = (tuple(results),)
        scales = reduction is not None and reduction.scale is not None
        is_same = input_parts == output_parts and len(input_parts) == 1
        one_copy = is_same and not scales
        written = self._written(inputs, tuple(results))
        for number in written:
            name = self._names[min(number, len(self._names) - 1)]
            with_memory(tensors[number], rank, name, is_written=True)
        stage = Stage(
            inputs=input_parts,
            outputs=output_parts,
            plain=tuple(map(is_plain, tensors)),
            numels=tuple(tensor.numel() for tensor in tensors),
            nbytes=sum(tensor.nbytes for tensor in tensors),
            dtype=self.dtype,
            one_copy=one_copy,
            written=written,
            counted=tuple(results) if counts else (),
            reduction=reduction,
            engine=self.engine,
        )
        check_apart(output_tensors, rank)
        rules, name, shares = self.contract, self.contract.collective, False
        if not is_same and not stage.converts:
            ends = rank, world_size, root
            blocks = rules.inputs(*ends), rules.outputs(*ends)
            input_tensors = [tensors[number] for number in inputs]
            shares = share_blocks(input_tensors, output_tensors, *blocks, known, rank)
        is_own = is_short(stage.nbytes, self.device) and not self.prepared
        request = Request(
            contract=rules,
            algorithm=self.algorithm,
            entry=self._entry,
            rank=rank,
            world_size=world_size,
            root=root,
            lengths=tuple(known.items()),
            packed=stage.numels if len(stage.numels) > 1 and is_packed else (),
            dtype=self.dtype,
            work_dtype=self.dtype if reduction is None else reduction.work_dtype,
            wire_dtype=self.dtype if reduction is None else reduction.wire_dtype,
            operator="" if reduction is None else reduction.name,
            operator_code="" if reduction is None else reduction.code,
            rules=self._rules,
            order=OperandOrder.ANY if reduction is None else reduction.order,
            segment_bytes=self.segment_bytes,
            usual_segment_bytes=segment_bytes_of(name, self.algorithm, self.device.type),
            split_input=split_input,
            split_output=split_output,
            in_place=one_copy or (shares and not scales and not is_own),
            posts_early=not self.member.transport.ordered,
        )
        operation = Operation(
            request,
            stage,
            self.device,
            results=results,
            inference=any(tensor.is_inference() for tensor in output_tensors),
            may_alias=not shares,
            is_short=is_own,
            prepared=self.prepared,
            file=self._file,
        )
        if self._entry is not None:
            operation.check(sliced=self.member.transport.slice_bytes is not None)
        return operation


def compiled(collective: str, *names: str) -> Callable[[Callable[..., Operation]], Compile]:
    """Make a function that compiles ``call(arguments, *options)`` one for `start`.

    ``names`` are those of the tensors, as for `Arguments`. The first options of a call are those of
    all functions of its kind: 1 of an all-to-all, 4 of a reduction, 2 of others.
    """

    def decorate(function: Callable[..., Operation]) -> Compile:
        def compile_(
            group: Any, tensors: Sequence[Any], options: Options, prepared: bool
        ) -> Operation:
            common = 1 if collective == "all_to_all" else 4 if contract(collective).reduces else 2
            call = Arguments(collective, group, tensors, *options[:common], names=names)
            call.prepared = prepared
            return function(call, *options[common:])

        return compile_

    return decorate
