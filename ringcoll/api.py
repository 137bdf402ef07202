"""The collectives, with the names, arguments and results of ``torch.distributed``.

Every function has torch's positional arguments, and beyond them keyword-only ones:

``algorithm``
    Name of a registered algorithm (`ringcoll.algorithms`), a `Schedule`, or
    ``"auto"``.
``segment_bytes``
    Size of the pieces in which chunks are pipelined; by default only the
    algorithms made for it are.
``wire_dtype``
    Dtype in which data are sent and partial results rounded; by default that of
    the tensors, but float32 for arithmetic on 16-bit and 8-bit floats.
``timeout``
    Time limit of the operation; by default the group's.

All arguments are checked before anything is sent. Errors are `ArgumentError` and
`ScheduleError` for a bad call, `MismatchError` if ranks disagree, `PeerLostError` if
one dies and `CollectiveTimeoutError` if one does not come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll import select, stage
from ringcoll.algorithms import generation
from ringcoll.communicator import Call, Communicator
from ringcoll.contracts import contract
from ringcoll.errors import ArgumentError
from ringcoll.groups import communicator, group_rank
from ringcoll.plan import Layout, Plan, compile_plan
from ringcoll.reduction import Operator, Reduction, resolve
from ringcoll.schedule import Schedule
from ringcoll.work import Work

__all__ = [
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
]

_SUM = dist.ReduceOp.SUM
_Algorithm = str | Schedule
_Timeout = timedelta | float | None


def all_reduce(
    tensor: Tensor,
    op: object = _SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: _Algorithm = "auto",
    segment_bytes: int | None = None,
    wire_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    timeout: _Timeout = None,
) -> Work | None:
    """Reduce a tensor over all ranks; every rank gets the result, bitwise the same.

    Parameters
    ----------
    tensor
        Any shape; same number of elements and dtype on all ranks. Overwritten with
        the result, unless ``out`` is given.
    op
        Reduction operator; see `ringcoll.reduction.as_operator`.
    group
        The group to work in; ``None`` for the default group.
    async_op
        Whether to return a work at once.
    algorithm, segment_bytes, wire_dtype, timeout
        See the module.
    out
        Tensor of the same shape and dtype for the result; ``tensor`` then survives.

    Returns
    -------
    Work or None
        The work, if ``async_op``.

    Examples
    --------
    >>> import torch, ringcoll
    >>> def rank_main(group):
    ...     tensor = torch.arange(3.0) + group.rank()
    ...     ringcoll.all_reduce(tensor, group=group, algorithm="tree")
    ...     return tensor.tolist()
    >>> ringcoll.run_threads(rank_main, 2)
    [[1.0, 3.0, 5.0], [1.0, 3.0, 5.0]]
    """
    result = tensor if out is None else out
    call = _Builder("all_reduce", group, [tensor, result], algorithm, segment_bytes, timeout)
    call.like(result, tensor, "out")
    call.reduces(op, wire_dtype)
    call.vector([tensor], [result])
    return call.run(async_op)


def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: object = _SUM,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    algorithm: _Algorithm = "auto",
    segment_bytes: int | None = None,
    wire_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    timeout: _Timeout = None,
) -> Work | None:
    """Reduce a tensor over all ranks onto one of them; the others' tensors stay as they are.

    Parameters
    ----------
    tensor
        Any shape; same number of elements and dtype on all ranks. Overwritten with
        the result on the destination, unless ``out`` is given there.
    dst, group_dst
        The destination, as a global rank or as a rank of the group: one of the two.
    op, group, async_op, out
        As for `all_reduce`.
    algorithm, segment_bytes, wire_dtype, timeout
        See the module.
    """
    result = tensor if out is None else out
    call = _Builder("reduce", group, [tensor, result], algorithm, segment_bytes, timeout)
    call.root = group_rank(group, dst, group_dst, "dst")
    call.like(result, tensor, "out")
    call.reduces(op, wire_dtype)
    call.vector([tensor], [result] if call.is_root else [])
    return call.run(async_op)


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    algorithm: _Algorithm = "auto",
    segment_bytes: int | None = None,
    timeout: _Timeout = None,
) -> Work | None:
    """Send one rank's tensor to all.

    Parameters
    ----------
    tensor
        Any shape; same number of elements and dtype on all ranks. Sent by the
        source, overwritten on the others.
    src, group_src
        The source, as a global rank or as a rank of the group: one of the two.
    group, async_op
        As for `all_reduce`.
    algorithm, segment_bytes, timeout
        See the module.
    """
    call = _Builder("broadcast", group, [tensor], algorithm, segment_bytes, timeout)
    call.root = group_rank(group, src, group_src, "src")
    call.vector([tensor] if call.is_root else [], [tensor])
    return call.run(async_op)


def all_gather(
    tensor_list: list[Tensor],
    tensor: Tensor,
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: _Algorithm = "auto",
    segment_bytes: int | None = None,
    timeout: _Timeout = None,
) -> Work | None:
    """Gather every rank's tensor into a list on all ranks.

    Parameters
    ----------
    tensor_list
        One tensor a rank, for the results; they may differ in size, but each must be
        as large as that rank's tensor.
    tensor
        This rank's tensor.
    group, async_op
        As for `all_reduce`.
    algorithm, segment_bytes, timeout
        See the module.
    """
    call = _Builder(
        "all_gather", group, [tensor, *_listed(tensor_list)], algorithm, segment_bytes, timeout
    )
    call.one_a_rank(tensor_list, "tensor_list")
    call.same_numel(tensor, tensor_list[call.rank].numel(), "tensor")
    call.blocks([tensor], tensor_list, [item.numel() for item in tensor_list], split_output=True)
    return call.run(async_op)


def all_gather_single(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: _Algorithm = "auto",
    segment_bytes: int | None = None,
    timeout: _Timeout = None,
) -> Work | None:
    """Gather every rank's tensor, one after the other, into one tensor on all ranks.

    Parameters
    ----------
    output_tensor
        world_size times as many elements as the input. The input may be this rank's
        part of it.
    input_tensor
        Same number of elements on all ranks.
    group, async_op
        As for `all_reduce`.
    algorithm, segment_bytes, timeout
        See the module.
    """
    tensors = [output_tensor, input_tensor]
    call = _Builder("all_gather", group, tensors, algorithm, segment_bytes, timeout)
    call.same_numel(output_tensor, call.world_size * input_tensor.numel(), "output_tensor")
    call.blocks([input_tensor], [output_tensor], [input_tensor.numel()] * call.world_size)
    return call.run(async_op)


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    algorithm: _Algorithm = "auto",
    segment_bytes: int | None = None,
    timeout: _Timeout = None,
) -> Work | None:
    """Gather every rank's tensor into a list on one rank.

    Parameters
    ----------
    tensor
        Same number of elements and dtype on all ranks.
    gather_list
        On the destination one tensor a rank, for the results; ``None`` elsewhere.
    dst, group_dst
        The destination, as a global rank or as a rank of the group; global rank 0 by default.
    group, async_op
        As for `all_reduce`.
    algorithm, segment_bytes, timeout
        See the module.
    """
    results = _listed(gather_list)
    call = _Builder("gather", group, [tensor, *results], algorithm, segment_bytes, timeout)
    dst = 0 if dst is None and group_dst is None else dst
    call.root = group_rank(group, dst, group_dst, "dst")
    call.list_at_root(results, tensor, "gather_list")
    call.blocks([tensor], results, [tensor.numel()] * call.world_size, split_output=True)
    return call.run(async_op)


def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    algorithm: _Algorithm = "auto",
    segment_bytes: int | None = None,
    timeout: _Timeout = None,
) -> Work | None:
    """Send each rank its tensor of a list that one rank has.

    Parameters
    ----------
    tensor
        For the result; same number of elements and dtype on all ranks.
    scatter_list
        On the source one tensor a rank; ``None`` elsewhere.
    src, group_src
        The source, as a global rank or as a rank of the group; global rank 0 by default.
    group, async_op
        As for `all_reduce`.
    algorithm, segment_bytes, timeout
        See the module.
    """
    sources = _listed(scatter_list)
    call = _Builder("scatter", group, [tensor, *sources], algorithm, segment_bytes, timeout)
    src = 0 if src is None and group_src is None else src
    call.root = group_rank(group, src, group_src, "src")
    call.list_at_root(sources, tensor, "scatter_list")
    call.blocks(sources, [tensor], [tensor.numel()] * call.world_size, split_input=True)
    return call.run(async_op)


def reduce_scatter(
    output: Tensor,
    input_list: list[Tensor],
    op: object = _SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: _Algorithm = "auto",
    segment_bytes: int | None = None,
    wire_dtype: torch.dtype | None = None,
    timeout: _Timeout = None,
) -> Work | None:
    """Reduce a list of tensors over all ranks; rank r gets tensor r of the result.

    Parameters
    ----------
    output
        For the result; as large as tensor r of the lists.
    input_list
        One tensor a rank; they may differ in size, but tensor r has the same size on
        all ranks.
    op, group, async_op
        As for `all_reduce`.
    algorithm, segment_bytes, wire_dtype, timeout
        See the module.
    """
    tensors = [output, *_listed(input_list)]
    call = _Builder("reduce_scatter", group, tensors, algorithm, segment_bytes, timeout)
    call.one_a_rank(input_list, "input_list")
    call.same_numel(output, input_list[call.rank].numel(), "output")
    call.reduces(op, wire_dtype)
    call.blocks(input_list, [output], [item.numel() for item in input_list], split_input=True)
    return call.run(async_op)


def reduce_scatter_single(
    output: Tensor,
    input: Tensor,  # noqa: A002  # torch's name
    op: object = _SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: _Algorithm = "auto",
    segment_bytes: int | None = None,
    wire_dtype: torch.dtype | None = None,
    timeout: _Timeout = None,
) -> Work | None:
    """Reduce a tensor over all ranks; rank r gets the r-th part of the result.

    Parameters
    ----------
    output
        For the result. It may be this rank's part of the input.
    input
        world_size times as many elements as the output; same size on all ranks.
    op, group, async_op
        As for `all_reduce`.
    algorithm, segment_bytes, wire_dtype, timeout
        See the module.
    """
    call = _Builder("reduce_scatter", group, [output, input], algorithm, segment_bytes, timeout)
    call.same_numel(input, call.world_size * output.numel(), "input")
    call.reduces(op, wire_dtype)
    call.blocks([input], [output], [output.numel()] * call.world_size)
    return call.run(async_op)


def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: _Algorithm = "auto",
    timeout: _Timeout = None,
) -> Work | None:
    """Send tensor j of the input list to rank j, and receive one from each rank.

    Parameters
    ----------
    output_tensor_list
        One tensor a rank, for what comes from it.
    input_tensor_list
        One tensor a rank, for what goes to it; as large as the receiver expects.
    group, async_op
        As for `all_reduce`.
    algorithm, timeout
        See the module. All algorithms but ``"pairwise"`` need blocks of equal size.
    """
    outputs, inputs = _listed(output_tensor_list), _listed(input_tensor_list)
    call = _Builder("all_to_all", group, [*outputs, *inputs], algorithm, None, timeout)
    call.one_a_rank(outputs, "output_tensor_list")
    call.one_a_rank(inputs, "input_tensor_list")
    call.exchange(
        inputs,
        outputs,
        [item.numel() for item in inputs],
        [item.numel() for item in outputs],
        split=True,
    )
    return call.run(async_op)


def all_to_all_single(
    output: Tensor,
    input: Tensor,  # noqa: A002  # torch's name
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: _Algorithm = "auto",
    timeout: _Timeout = None,
) -> Work | None:
    """Cut a tensor in pieces, send piece j to rank j, and join what comes from each rank.

    Parameters
    ----------
    output, input
        For the result, and what is sent.
    output_split_sizes, input_split_sizes
        Sizes of the pieces along the first dimension; equal pieces by default.
    group, async_op
        As for `all_reduce`.
    algorithm, timeout
        See `all_to_all`.
    """
    call = _Builder("all_to_all", group, [output, input], algorithm, None, timeout)
    incoming = call.split(output, output_split_sizes, "output")
    outgoing = call.split(input, input_split_sizes, "input")
    call.exchange([input], [output], outgoing, incoming, split=False)
    return call.run(async_op)


def barrier(
    group: Any = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: _Timeout = None,
    *,
    algorithm: _Algorithm = "auto",
) -> Work | None:
    """Wait until all ranks have come.

    Parameters
    ----------
    group, async_op
        As for `all_reduce`.
    device_ids
        Accepted for compatibility: the first one names a CUDA device to use.
    algorithm, timeout
        See the module.
    """
    device = torch.device("cuda", device_ids[0]) if device_ids else torch.device("cpu")
    token = torch.ones(1, dtype=torch.uint8, device=device)
    call = _Builder("barrier", group, [token], algorithm, None, timeout)
    call.reduces("bor", None)
    call.vector([token], [token])
    return call.run(async_op)


def all_gather_into_tensor(*args: Any, **kwargs: Any) -> Work | None:
    """The older name of `all_gather_single`."""
    return all_gather_single(*args, **kwargs)


def reduce_scatter_tensor(*args: Any, **kwargs: Any) -> Work | None:
    """The older name of `reduce_scatter_single`."""
    return reduce_scatter_single(*args, **kwargs)


def _listed(tensors: object) -> list[Tensor]:
    """A list of tensors as given; anything else is complained about by `_Builder`."""
    if tensors is None:
        return []
    return list(tensors) if isinstance(tensors, list | tuple) else [tensors]  # type: ignore[list-item]


class _Builder:
    """Checks the arguments of one call, and makes a `Call` of them."""

    def __init__(
        self,
        collective: str,
        group: Any,
        tensors: Sequence[Any],  # what users give, as yet unchecked
        algorithm: _Algorithm,
        segment_bytes: Any,
        timeout: _Timeout,
    ) -> None:
        first = tensors[0]
        device = first.device if isinstance(first, Tensor) else torch.device("cpu")
        self.collective, self.algorithm, self.segment_bytes = collective, algorithm, segment_bytes
        self.communicator: Communicator = communicator(group, device)
        self.rank, self.world_size = self.communicator.rank, self.communicator.world_size
        self._check_tensors(tensors)
        self.device, self.dtype = first.device, first.dtype
        self.root = 0
        self.reduction: Reduction | None = None
        self.timeout_s = self._seconds(timeout)
        if segment_bytes is not None and (not isinstance(segment_bytes, int) or segment_bytes < 1):
            raise self._refuse("must be positive", "segment_bytes", "an int > 0", segment_bytes)
        if not isinstance(algorithm, str | Schedule):
            raise self._refuse("not an algorithm", "algorithm", "a name or a Schedule", algorithm)

    @property
    def is_root(self) -> bool:
        return self.rank == self.root

    def _refuse(self, message: str, argument: str, expected: object, got: object) -> ArgumentError:
        return ArgumentError(message, rank=self.rank, argument=argument, expected=expected, got=got)

    def _seconds(self, timeout: Any) -> float:
        if timeout is None:
            return self.communicator.timeout_s
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        if not isinstance(seconds, int | float) or not seconds > 0:
            raise self._refuse("must be positive", "timeout", "> 0 s", timeout)
        return float(seconds)

    def _check_tensors(self, tensors: Sequence[Any]) -> None:
        first = tensors[0]
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                raise self._refuse("not a tensor", "tensor", "a torch.Tensor", type(tensor))
            if tensor.layout is not torch.strided or tensor.is_quantized:
                kind = tensor.dtype if tensor.is_quantized else tensor.layout
                raise self._refuse("must be dense", "tensor", "a strided tensor", kind)
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
        rows = tensor.shape[0] if tensor.dim() else 1
        if sizes is None or len(sizes) == 0:
            if rows % self.world_size:
                raise self._refuse(
                    "does not divide evenly among the ranks",
                    side,
                    f"a multiple of {self.world_size} rows",
                    rows,
                )
            sizes = [rows // self.world_size] * self.world_size
        argument = f"{side}_split_sizes"
        if len(sizes) != self.world_size or min(sizes) < 0:
            raise self._refuse(
                "must hold one size for each rank", argument, f"{self.world_size} sizes", sizes
            )
        if sum(sizes) != rows:
            raise self._refuse("must add up to the rows", argument, rows, sum(sizes))
        row = tensor.numel() // rows if rows else 0
        return [size * row for size in sizes]

    def reduces(self, op: object, wire_dtype: torch.dtype | None) -> None:
        """Bind the operator."""
        self.reduction = resolve(op, self.dtype, wire_dtype=wire_dtype, rank=self.rank)

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
        reduction = self.reduction
        decision = _decide(
            _Question(
                self.collective,
                self.algorithm,
                self.rank,
                self.world_size,
                self.root,
                lengths,
                self.dtype,
                self.dtype if reduction is None else reduction.work_dtype,
                None if reduction is None else reduction.operator,
                self.segment_bytes,
                split_input,
                split_output,
                not self.communicator.transport.ordered,
                generation(),
            )
        )
        io = stage.Stage(self.rank, inputs, outputs, reduction)
        in_place = io.shared_memory(decision.inputs, decision.outputs, decision.lengths)
        self.call = Call(
            plan=decision.plan(in_place),
            dtype=decision.dtype,
            device=self.device,
            reduction=reduction,
            description=decision.description,
            open=io.open,
            timeout_s=self.timeout_s,
            results=outputs,
            lengths=None if decision.common_lengths else decision.lengths,
        )

    def run(self, async_op: bool) -> Work | None:
        """Run the call."""
        return self.communicator.run(self.call, async_op=async_op)


class _Question(NamedTuple):
    """All that the decision how to run a call depends on."""

    collective: str
    algorithm: _Algorithm
    rank: int
    world_size: int
    root: int
    lengths: tuple[tuple[int, int], ...]
    dtype: torch.dtype
    work_dtype: torch.dtype
    operator: Operator | None
    segment_bytes: int | None
    split_input: bool
    split_output: bool
    posts_early: bool
    generation: int


@dataclass(frozen=True)
class _Decision:
    """How to run a call."""

    question: _Question
    schedule: Schedule
    segments: int
    dtype: torch.dtype
    description: str
    inputs: Sequence[int]
    outputs: Sequence[int]
    lengths: dict[int, int]
    common_lengths: bool
    plans: dict[bool, Plan] = field(default_factory=dict)

    def plan(self, in_place: bool) -> Plan:
        """The compiled plan; made when first needed."""
        plan = self.plans.get(in_place)
        if plan is None:
            asked = self.question
            layout = Layout(asked.lengths, asked.split_input, asked.split_output, in_place)
            plan = compile_plan(
                self.schedule, asked.rank, layout, self.segments, posts_early=asked.posts_early
            )
            self.plans[in_place] = plan
        return plan


@lru_cache(maxsize=1024)
def _decide(question: _Question) -> _Decision:
    """Choose and check the schedule and the segments; the same on every rank."""
    collective, algorithm, rank, world_size, root, lengths, *_ = question
    rules, dtype, operator = contract(collective), question.work_dtype, question.operator
    inputs = rules.inputs(rank, world_size, root)
    length = dict(lengths)
    equal = len(set(length.values())) == 1
    if algorithm == "auto":
        blocks = inputs if collective == "all_to_all" else length
        nbytes = sum(length[block] for block in blocks) * dtype.itemsize
        algorithm = select.choose(collective, nbytes, operator)
    schedule = select.checked_schedule(collective, algorithm, world_size, root, operator, rank)
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
            schedule, longest * dtype.itemsize, question.segment_bytes, longest
        )
        told = "+".join(map(str, length.values()))
        told = f"{max(length.values())} x {len(length)}" if equal and len(length) > 1 else told
    else:
        told = "its own number of"
    words = [str(operator)] if operator is not None else []
    words += [str(question.dtype).removeprefix("torch."), f"{told} elements"]
    words += [f"root {root}"] if rules.rooted else []
    words += [f"sent as {dtype}".replace("torch.", "")] if dtype is not question.dtype else []
    words += [f"algorithm {schedule.algorithm}"]
    words += [f"{segments} segments"] if segments > 1 else []
    return _Decision(
        question=question,
        schedule=schedule,
        segments=segments,
        dtype=dtype,
        description=f"{collective}({', '.join(words)})",
        inputs=inputs,
        outputs=rules.outputs(rank, world_size, root),
        lengths=length,
        common_lengths=rules.common_lengths,
    )
