"""The collectives, with the names, arguments and results of ``torch.distributed``.

Every function has torch's positional arguments, and beyond them keyword-only ones, which
`all_reduce` describes. ``function.plan(...)``, with the same arguments, returns a persistent
operation, which is checked, decided and bound to its tensors once, and can be called any number of
times (`ringcoll.runtime.collectives.calls.Collective.plan`).

All arguments are checked before anything is sent. Errors are `ArgumentError` and `ScheduleError`
for a bad call, `MismatchError` if ranks disagree, `PeerLostError` if a rank dies and
`CollectiveTimeoutError` if a rank does not come.
"""

from __future__ import annotations

from datetime import timedelta
from functools import cache, partial
from operator import index
from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.errors import ArgumentError
from ringcoll.runtime.collectives.arguments import (
    AlgorithmChoice,
    Arguments,
    MoveOptions,
    ReduceOptions,
    Timeout,
    compiled,
    seconds,
    side_by_side,
)
from ringcoll.runtime.collectives.calls import (
    Deferred,
    collective,
    operator,
    sparse_all_reduce,
    start,
    together,
)
from ringcoll.runtime.collectives.groups import communicator
from ringcoll.runtime.group import Work
from ringcoll.runtime.machine import whole
from ringcoll.runtime.operation import Operation, fusible
from ringcoll.runtime.reduction import Reproducible

_SUM = dist.ReduceOp.SUM


def _listed(tensors: object) -> list[Tensor]:
    """The tensors of an argument, in a list; `Arguments` refuses anything but tensors."""
    if tensors is None:
        return []
    return list(tensors) if isinstance(tensors, list | tuple) else [tensors]  # type: ignore[list-item]


def _sizes(sizes: Any) -> Any:
    """Split sizes as part of a key: their values, since lists and tensors may be filled anew."""
    try:
        return None if sizes is None else tuple(map(index, sizes))
    except (RuntimeError, TypeError):
        return sizes  # `Arguments.split` refuses them


def _reduction(call: Arguments, op: object, *root: int | None) -> Operation:
    """A reduction of a tensor over all ranks, or those before this one, into itself or ``out``."""
    if root:
        call.rooted(root[0], root[1], "dst")
    tensors, result = call.tensors, len(call.tensors) - 1
    call.like(tensors[result], tensors[0], "out")
    call.reduces(op)
    outputs = [result] * len(call.contract.outputs(call.rank, call.world_size, call.root))
    counts = len(tensors) > 1  # torch has no `out` here; elsewhere it counts
    return call.operation((0,), outputs, [tensors[0].numel()], counts=counts)


_all_reduce, _reduce, _scan, _exscan = (
    compiled(name, "tensor", "out")(_reduction)
    for name in ("all_reduce", "reduce", "scan", "exscan")
)


@collective
def all_reduce(
    tensor: Tensor,
    op: object = _SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: AlgorithmChoice = "auto",
    segment_bytes: int | None = None,
    wire_dtype: torch.dtype | None = None,
    reproducible: Reproducible = False,
    out: Tensor | None = None,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce a tensor over all ranks; every rank gets the result, bitwise the same.

    Parameters
    ----------
    tensor
        Any shape; same number of elements and dtype on all ranks. Overwritten with
        the result, unless ``out`` is given. It may be sparse, in coordinate layout, for
        sums and averages: see `ringcoll.runtime.collectives.calls`.
    op
        Reduction operator; see `ringcoll.runtime.reduction.as_operator`.
    group
        The group to work in; ``None`` for the default group.
    async_op
        Whether to return a work at once.
    algorithm
        Name of a registered algorithm (`ringcoll.schedules.algorithms`), such as ``"ring"``;
        ``"auto"`` for the one that is predicted to be the fastest; a `Schedule`; or the path of a
        file that holds a schedule (`ringcoll.runtime.user_files.algorithms`). A schedule is
        verified once, before it runs.
    segment_bytes
        Bytes of the segments in which chunks are pipelined. ``None``: only algorithms that need
        segments use them.
    wire_dtype
        Dtype in which data are sent. ``None``: that of the tensors, but float32 for arithmetic on
        floats of 16 and 8 bits. Partial results are added up in at least float32, and rounded
        whenever they are sent; the result is rounded as well.
    reproducible
        ``True``: the bits of the result depend on the ranks' inputs, in rank order, and not on
        algorithm, segments, transport, length or place; ``"any_world_size"``: not on the order and
        number of ranks either, as sums are exact, and are rounded once. See
        docs/reproducibility.md.
    timeout
        Time limit of the operation, in seconds or as a ``timedelta``; ``None`` for the group's, as
        it was when the group was first used here. torch's own functions follow a limit that changes
        later.
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
    if getattr(tensor, "layout", None) is torch.sparse_coo:
        of_dense: dict[str, object] = {"segment_bytes": segment_bytes, "wire_dtype": wire_dtype}
        of_dense |= {"out": out, "reproducible": reproducible or None}
        return sparse_all_reduce(tensor, op, group, async_op, algorithm, timeout, **of_dense)
    tensors = (tensor,) if out is None else (tensor, out)
    options = (algorithm, segment_bytes, wire_dtype, reproducible, operator(op))
    return start(_all_reduce, group, tensors, options, async_op, timeout)


def _fused(
    tensors: list[Tensor],
    op: object,
    group: Any,
    async_op: bool,
    *,
    algorithm: AlgorithmChoice = "auto",
    segment_bytes: int | None = None,
    wire_dtype: torch.dtype | None = None,
    reproducible: Reproducible = False,
    timeout: Timeout = None,
) -> Any:
    """A single all-reduce of several tensors, laid end to end."""
    options = (algorithm, segment_bytes, wire_dtype, reproducible, operator(op))
    return start(_all_reduce_packed, group, tensors, options, async_op, timeout)


@compiled("all_reduce", "tensors")
def _all_reduce_packed(call: Arguments, op: object) -> Operation:
    """A single all-reduce of several tensors, laid end to end."""
    call.reduces(op)
    lengths = [sum(tensor.numel() for tensor in call.tensors)]
    return call.operation((), (), lengths, is_packed=True, counts=True)


@collective
def all_reduce_coalesced(
    tensors: list[Tensor],
    op: object = _SUM,
    group: Any = None,
    async_op: bool = False,
    **options: Unpack[ReduceOptions],
) -> Work | None:
    """Reduce several tensors over all ranks, as one operation.

    Short tensors that follow each other are laid end to end and reduced together.

    Parameters
    ----------
    tensors
        Each as for `all_reduce`; the same on all ranks.
    op, group, async_op, **options
        As for `all_reduce`.

    Examples
    --------
    >>> import torch, ringcoll
    >>> def rank_main(group):
    ...     tensors = [torch.ones(2), torch.full((1,), group.rank())]
    ...     ringcoll.all_reduce_coalesced(tensors, group=group)
    ...     return [tensor.tolist() for tensor in tensors]
    >>> ringcoll.run_threads(rank_main, 2)
    [[[2.0, 2.0], [1]], [[2.0, 2.0], [1]]]
    """
    deferred = Deferred.of(group)
    runs = fusible([tensor for (tensor,) in side_by_side(deferred.group, tensors=tensors)])
    calls: list[Any] = [
        all_reduce(run[0], op, deferred, async_op, **options)
        if getattr(run[0], "layout", None) is torch.sparse_coo
        else _fused(run, op, deferred, async_op, **options)
        for run in runs
    ]
    return together(group, calls)


@collective
def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: object = _SUM,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    algorithm: AlgorithmChoice = "auto",
    segment_bytes: int | None = None,
    wire_dtype: torch.dtype | None = None,
    reproducible: Reproducible = False,
    out: Tensor | None = None,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce a tensor over all ranks onto one of them; the others' tensors stay as they are.

    Parameters
    ----------
    tensor
        Any shape; same number of elements and dtype on all ranks. Overwritten with
        the result on the destination, unless ``out`` is given there.
    dst, group_dst
        The destination, as a global rank or as a rank of the group: one of the two.
    op, group, async_op, out, algorithm, segment_bytes, wire_dtype, reproducible, timeout
        As for `all_reduce`.

    Examples
    --------
    >>> import torch, ringcoll
    >>> def rank_main(group):
    ...     tensor = torch.arange(2) + 10 * group.rank()
    ...     ringcoll.reduce(tensor, 0, group=group)
    ...     return tensor.tolist() if group.rank() == 0 else None
    >>> ringcoll.run_threads(rank_main, 2)
    [[10, 12], None]
    """
    tensors = (tensor,) if out is None else (tensor, out)
    if type(dst) is not int and type(group_dst) is not int:
        dst, group_dst = whole(dst), whole(group_dst)
    options = (algorithm, segment_bytes, wire_dtype, reproducible, operator(op), dst, group_dst)
    return start(_reduce, group, tensors, options, async_op, timeout)


@collective
def scan(
    tensor: Tensor,
    op: object = _SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: AlgorithmChoice = "auto",
    segment_bytes: int | None = None,
    wire_dtype: torch.dtype | None = None,
    reproducible: Reproducible = False,
    out: Tensor | None = None,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce the tensors of this rank and all ranks before it, in rank order, as MPI_Scan does.

    Parameters
    ----------
    tensor, op, group, async_op, out, algorithm, segment_bytes, wire_dtype, reproducible, timeout
        As for `all_reduce`. There is no AVG, as in MPI, and nothing that needs all operands at
        once.

    Examples
    --------
    >>> import torch, ringcoll
    >>> def rank_main(group):
    ...     tensor = torch.tensor([1, 10]) + group.rank()
    ...     ringcoll.scan(tensor, group=group)
    ...     return tensor.tolist()
    >>> ringcoll.run_threads(rank_main, 3)
    [[1, 10], [3, 21], [6, 33]]
    """
    tensors = (tensor,) if out is None else (tensor, out)
    options = (algorithm, segment_bytes, wire_dtype, reproducible, operator(op))
    return start(_scan, group, tensors, options, async_op, timeout)


@collective
def exscan(
    tensor: Tensor,
    op: object = _SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: AlgorithmChoice = "auto",
    segment_bytes: int | None = None,
    wire_dtype: torch.dtype | None = None,
    reproducible: Reproducible = False,
    out: Tensor | None = None,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce the tensors of all ranks before this rank, in rank order, as MPI_Exscan does.

    Rank 0 has no result: ``tensor`` and ``out`` stay as they are there. MPI leaves them undefined.

    Parameters
    ----------
    tensor, op, group, async_op, out, algorithm, segment_bytes, wire_dtype, reproducible, timeout
        As for `scan`.

    Examples
    --------
    >>> import torch, ringcoll
    >>> def rank_main(group):
    ...     tensor = torch.tensor([1, 10]) + group.rank()
    ...     ringcoll.exscan(tensor, group=group)
    ...     return tensor.tolist()
    >>> ringcoll.run_threads(rank_main, 3)
    [[1, 10], [1, 10], [3, 21]]
    """
    tensors = (tensor,) if out is None else (tensor, out)
    options = (algorithm, segment_bytes, wire_dtype, reproducible, operator(op))
    return start(_exscan, group, tensors, options, async_op, timeout)


@compiled("broadcast", "tensor")
def _broadcast(call: Arguments, src: int | None, group_src: int | None) -> Operation:
    inputs = (0,) if call.rooted(src, group_src, "src") else ()
    return call.operation(inputs, (0,), [call.tensors[0].numel()])


@collective
def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    algorithm: AlgorithmChoice = "auto",
    segment_bytes: int | None = None,
    timeout: Timeout = None,
) -> Work | None:
    """Send one rank's tensor to all.

    Parameters
    ----------
    tensor
        Any shape; same number of elements and dtype on all ranks. Sent by the
        source, overwritten on the others.
    src, group_src
        The source, as a global rank or as a rank of the group: one of the two.
    group, async_op, algorithm, segment_bytes, timeout
        As for `all_reduce`.

    Examples
    --------
    >>> import torch, ringcoll
    >>> def rank_main(group):
    ...     tensor = torch.arange(2) + 10 * group.rank()
    ...     ringcoll.broadcast(tensor, 1, group=group)
    ...     return tensor.tolist()
    >>> ringcoll.run_threads(rank_main, 2)
    [[10, 11], [10, 11]]
    """
    if type(src) is not int and type(group_src) is not int:
        src, group_src = whole(src), whole(group_src)
    options = (algorithm, segment_bytes, src, group_src)
    return start(_broadcast, group, (tensor,), options, async_op, timeout)


@compiled("all_gather", "tensor", "tensor_list")
def _all_gather(call: Arguments, list_type: type) -> Operation:
    lengths = call.one_a_rank(call.tensors[1:], list_type, "tensor_list")
    call.same_numel(call.tensors[0], lengths[call.rank], "tensor")
    listed = range(1, len(call.tensors))
    return call.operation((0,), listed, lengths, split_output=True, counts=True)


@collective
def all_gather(
    tensor_list: list[Tensor],
    tensor: Tensor,
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: AlgorithmChoice = "auto",
    segment_bytes: int | None = None,
    timeout: Timeout = None,
) -> Work | None:
    """Gather every rank's tensor into a list on all ranks.

    Parameters
    ----------
    tensor_list
        One tensor a rank, for the results; they may differ in size, but each has as many
        elements as that rank's tensor.
    tensor
        This rank's tensor.
    group, async_op, algorithm, segment_bytes, timeout
        As for `all_reduce`.

    Examples
    --------
    >>> import torch, ringcoll
    >>> def rank_main(group):
    ...     rows = [torch.empty(2, dtype=torch.int64) for _ in range(2)]
    ...     ringcoll.all_gather(rows, torch.arange(2) + 10 * group.rank(), group=group)
    ...     return [row.tolist() for row in rows]
    >>> ringcoll.run_threads(rank_main, 2)
    [[[0, 1], [10, 11]], [[0, 1], [10, 11]]]
    """
    tensors = [tensor, *_listed(tensor_list)]
    options = (algorithm, segment_bytes, type(tensor_list))
    return start(_all_gather, group, tensors, options, async_op, timeout)


@collective
def all_gather_coalesced(
    output_tensor_lists: list[list[Tensor]],
    input_tensor_list: list[Tensor],
    group: Any = None,
    async_op: bool = False,
    **options: Unpack[MoveOptions],
) -> Work | None:
    """Gather several tensors of every rank, as one operation.

    Parameters
    ----------
    output_tensor_lists
        A list for each rank, of one tensor for each input.
    input_tensor_list
        This rank's tensors.
    group, async_op, **options
        As for `all_gather`.

    Examples
    --------
    >>> import torch, ringcoll
    >>> def rank_main(group):
    ...     rows = [[torch.zeros(1), torch.zeros(2)] for _ in range(2)]
    ...     mine = [torch.full((n,), 1.0 + group.rank()) for n in (1, 2)]
    ...     ringcoll.all_gather_coalesced(rows, mine, group=group)
    ...     return [[tensor.tolist() for tensor in row] for row in rows]
    >>> ringcoll.run_threads(rank_main, 2)
    [[[[1.0], [1.0, 1.0]], [[2.0], [2.0, 2.0]]], [[[1.0], [1.0, 1.0]], [[2.0], [2.0, 2.0]]]]
    """
    deferred = Deferred.of(group)
    lists = side_by_side(deferred.group, output_tensor_lists=output_tensor_lists)
    named = {f"output_tensor_lists[{rank}]": outputs for rank, (outputs,) in enumerate(lists)}
    inputs = side_by_side(deferred.group, input_tensor_list=input_tensor_list, **named)
    calls: list[Any] = [
        all_gather(outputs, tensor, deferred, async_op, **options) for tensor, *outputs in inputs
    ]
    return together(group, calls)


@compiled("all_gather", "output_tensor", "input_tensor")
def _all_gather_single(call: Arguments) -> Operation:
    output, own = call.tensors
    call.same_numel(output, call.world_size * own.numel(), "output_tensor")
    return call.operation((1,), (0,), [own.numel()] * call.world_size, counts=True)


@collective
def all_gather_single(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: AlgorithmChoice = "auto",
    segment_bytes: int | None = None,
    timeout: Timeout = None,
) -> Work | None:
    """Gather every rank's tensor, one after the other, into one tensor on all ranks.

    Parameters
    ----------
    output_tensor
        world_size times as many elements as the input. The input may be this rank's
        block of it.
    input_tensor
        Same number of elements on all ranks.
    group, async_op, algorithm, segment_bytes, timeout
        As for `all_reduce`.

    Examples
    --------
    >>> import torch, ringcoll
    >>> def rank_main(group):
    ...     output = torch.empty(4, dtype=torch.int64)
    ...     ringcoll.all_gather_single(output, torch.arange(2) + 10 * group.rank(), group=group)
    ...     return output.tolist()
    >>> ringcoll.run_threads(rank_main, 2)
    [[0, 1, 10, 11], [0, 1, 10, 11]]
    """
    tensors = (output_tensor, input_tensor)
    options = (algorithm, segment_bytes)
    return start(_all_gather_single, group, tensors, options, async_op, timeout)


@collective
def all_gather_single_coalesced(
    output_tensors: list[Tensor],
    input_tensors: list[Tensor],
    group: Any = None,
    async_op: bool = False,
    **options: Unpack[MoveOptions],
) -> Work | None:
    """Do `all_gather_single` for several pairs of tensors, as one operation.

    Parameters
    ----------
    output_tensors, input_tensors
        Lists of the same length.
    group, async_op, **options
        As for `all_gather_single`.

    Examples
    --------
    >>> import torch, ringcoll
    >>> def rank_main(group):
    ...     outputs = [torch.zeros(2), torch.zeros(4)]
    ...     inputs = [torch.full((n,), 1.0 + group.rank()) for n in (1, 2)]
    ...     ringcoll.all_gather_single_coalesced(outputs, inputs, group=group)
    ...     return [output.tolist() for output in outputs]
    >>> ringcoll.run_threads(rank_main, 2)
    [[[1.0, 2.0], [1.0, 1.0, 2.0, 2.0]], [[1.0, 2.0], [1.0, 1.0, 2.0, 2.0]]]
    """
    deferred = Deferred.of(group)
    pairs = side_by_side(deferred.group, output_tensors=output_tensors, input_tensors=input_tensors)
    calls: list[Any] = [
        all_gather_single(output, tensor, deferred, async_op, **options) for output, tensor in pairs
    ]
    return together(group, calls)


@compiled("gather", "tensor", "gather_list")
def _gather(call: Arguments, dst: int | None, group_dst: int | None, list_type: type) -> Operation:
    call.rooted(dst, group_dst, "dst")
    listed, lengths = call.list_at_root(list_type, "gather_list")
    return call.operation((0,), listed, lengths, split_output=True, counts=True)


@compiled("scatter", "tensor", "scatter_list")
def _scatter(call: Arguments, src: int | None, group_src: int | None, list_type: type) -> Operation:
    call.rooted(src, group_src, "src")
    listed, lengths = call.list_at_root(list_type, "scatter_list")
    return call.operation(listed, (0,), lengths, split_input=True)


@collective
def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_dst: int | None = None,
    *,
    algorithm: AlgorithmChoice = "auto",
    segment_bytes: int | None = None,
    timeout: Timeout = None,
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
    group, async_op, algorithm, segment_bytes, timeout
        As for `all_reduce`.

    Examples
    --------
    >>> import torch, ringcoll
    >>> def rank_main(group):
    ...     is_root = group.rank() == 0
    ...     rows = [torch.empty(2, dtype=torch.int64) for _ in range(2)] if is_root else None
    ...     ringcoll.gather(torch.arange(2) + 10 * group.rank(), rows, dst=0, group=group)
    ...     return [row.tolist() for row in rows] if is_root else None
    >>> ringcoll.run_threads(rank_main, 2)
    [[[0, 1], [10, 11]], None]
    """
    tensors = [tensor, *_listed(gather_list)]
    dst = 0 if dst is None and group_dst is None else dst
    if type(dst) is not int and type(group_dst) is not int:
        dst, group_dst = whole(dst), whole(group_dst)
    options = (algorithm, segment_bytes, dst, group_dst, type(gather_list))
    return start(_gather, group, tensors, options, async_op, timeout)


@collective
def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int | None = None,
    group: Any = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    algorithm: AlgorithmChoice = "auto",
    segment_bytes: int | None = None,
    timeout: Timeout = None,
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
    group, async_op, algorithm, segment_bytes, timeout
        As for `all_reduce`.

    Examples
    --------
    >>> import torch, ringcoll
    >>> def rank_main(group):
    ...     tensor, is_root = torch.zeros(2), group.rank() == 0
    ...     rows = [torch.ones(2), torch.full((2,), 2.0)] if is_root else None
    ...     ringcoll.scatter(tensor, rows, src=0, group=group)
    ...     return tensor.tolist()
    >>> ringcoll.run_threads(rank_main, 2)
    [[1.0, 1.0], [2.0, 2.0]]
    """
    tensors = [tensor, *_listed(scatter_list)]
    src = 0 if src is None and group_src is None else src
    if type(src) is not int and type(group_src) is not int:
        src, group_src = whole(src), whole(group_src)
    options = (algorithm, segment_bytes, src, group_src, type(scatter_list))
    return start(_scatter, group, tensors, options, async_op, timeout)


@compiled("reduce_scatter", "output", "input_list")
def _reduce_scatter(call: Arguments, op: object, list_type: type) -> Operation:
    lengths = call.one_a_rank(call.tensors[1:], list_type, "input_list")
    call.same_numel(call.tensors[0], lengths[call.rank], "output")
    call.reduces(op)
    listed = range(1, len(call.tensors))
    return call.operation(listed, (0,), lengths, split_input=True, counts=True)


@collective
def reduce_scatter(
    output: Tensor,
    input_list: list[Tensor],
    op: object = _SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: AlgorithmChoice = "auto",
    segment_bytes: int | None = None,
    wire_dtype: torch.dtype | None = None,
    reproducible: Reproducible = False,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce a list of tensors over all ranks; rank r gets tensor r of the result.

    Parameters
    ----------
    output
        For the result; as large as tensor r of the lists.
    input_list
        One tensor a rank; they may differ in size, but tensor r has the same size on
        all ranks.
    op, group, async_op, algorithm, segment_bytes, wire_dtype, reproducible, timeout
        As for `all_reduce`.

    Examples
    --------
    >>> import torch, ringcoll
    >>> def rank_main(group):
    ...     output, rows = torch.zeros(1), [torch.ones(1), torch.full((1,), 5.0)]
    ...     ringcoll.reduce_scatter(output, rows, group=group)
    ...     return output.tolist()
    >>> ringcoll.run_threads(rank_main, 2)
    [[2.0], [10.0]]
    """
    tensors = [output, *_listed(input_list)]
    options = (algorithm, segment_bytes, wire_dtype, reproducible, operator(op), type(input_list))
    return start(_reduce_scatter, group, tensors, options, async_op, timeout)


@compiled("reduce_scatter", "output", "input")
def _reduce_scatter_single(call: Arguments, op: object) -> Operation:
    output, own = call.tensors
    call.same_numel(own, call.world_size * output.numel(), "input")
    call.reduces(op)
    return call.operation((1,), (0,), [output.numel()] * call.world_size, counts=True)


@collective
def reduce_scatter_single(
    output: Tensor,
    input: Tensor,  # noqa: A002  # torch's name
    op: object = _SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: AlgorithmChoice = "auto",
    segment_bytes: int | None = None,
    wire_dtype: torch.dtype | None = None,
    reproducible: Reproducible = False,
    timeout: Timeout = None,
) -> Work | None:
    """Reduce a tensor over all ranks; rank r gets block r of the result.

    Parameters
    ----------
    output
        Tensor for the result. It may be this rank's block of the input.
    input
        world_size times as many elements as the output; same size on all ranks.
    op, group, async_op, algorithm, segment_bytes, wire_dtype, reproducible, timeout
        As for `all_reduce`.

    Examples
    --------
    >>> import torch, ringcoll
    >>> def rank_main(group):
    ...     output = torch.empty(1, dtype=torch.int64)
    ...     ringcoll.reduce_scatter_single(output, torch.arange(2) + 10 * group.rank(), group=group)
    ...     return output.tolist()
    >>> ringcoll.run_threads(rank_main, 2)
    [[10], [12]]
    """
    tensors = (output, input)
    options = (algorithm, segment_bytes, wire_dtype, reproducible, operator(op))
    return start(_reduce_scatter_single, group, tensors, options, async_op, timeout)


@collective
def reduce_scatter_single_coalesced(
    output_tensors: list[Tensor],
    input_tensors: list[Tensor],
    op: object = _SUM,
    group: Any = None,
    async_op: bool = False,
    **options: Unpack[ReduceOptions],
) -> Work | None:
    """Do `reduce_scatter_single` for several pairs of tensors, as one operation.

    Parameters
    ----------
    output_tensors, input_tensors
        Lists of the same length.
    op, group, async_op, **options
        As for `reduce_scatter_single`.

    Examples
    --------
    >>> import torch, ringcoll
    >>> def rank_main(group):
    ...     outputs = [torch.zeros(1), torch.zeros(2)]
    ...     inputs = [torch.arange(2.0), torch.arange(4.0)]
    ...     ringcoll.reduce_scatter_single_coalesced(outputs, inputs, group=group)
    ...     return [output.tolist() for output in outputs]
    >>> ringcoll.run_threads(rank_main, 2)
    [[[0.0], [0.0, 2.0]], [[2.0], [4.0, 6.0]]]
    """
    deferred = Deferred.of(group)
    pairs = side_by_side(deferred.group, output_tensors=output_tensors, input_tensors=input_tensors)
    calls: list[Any] = [
        reduce_scatter_single(output, tensor, op, deferred, async_op, **options)
        for output, tensor in pairs
    ]
    return together(group, calls)


def _all_to_all(group: Any, tensors: Any, options: Any, prepared: bool) -> Operation:
    names = ("output_tensor_list",) * options[1] + ("input_tensor_list",)
    compile_ = compiled("all_to_all", *names)(_all_to_all_lists)
    return compile_(group, tensors, options, prepared)


def _all_to_all_lists(
    call: Arguments, num_outputs: int, output_type: type, input_type: type
) -> Operation:
    outputs, inputs = call.tensors[:num_outputs], call.tensors[num_outputs:]
    incoming = call.one_a_rank(outputs, output_type, "output_tensor_list")
    outgoing = call.one_a_rank(inputs, input_type, "input_tensor_list")
    lengths, k = call.exchange_lengths(outgoing, incoming), num_outputs
    split = partial(call.operation, split_input=True, split_output=True)
    return split(range(k, 2 * k), range(k), lengths, counts=True)


@collective
def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: AlgorithmChoice = "auto",
    timeout: Timeout = None,
) -> Work | None:
    """Send tensor j of the input list to rank j, and receive a tensor from each rank.

    Parameters
    ----------
    output_tensor_list
        One tensor a rank, for the data from that rank.
    input_tensor_list
        One tensor a rank, with the data for that rank; as large as the receiver expects.
    group, async_op
        As for `all_reduce`.
    algorithm, timeout
        As for `all_reduce`. All algorithms but ``"pairwise"`` need blocks of equal size.

    Examples
    --------
    >>> import torch, ringcoll
    >>> def rank_main(group):
    ...     rows = [torch.tensor([10 * group.rank() + peer]) for peer in range(2)]
    ...     outputs = [torch.empty_like(row) for row in rows]
    ...     ringcoll.all_to_all(outputs, rows, group=group)
    ...     return [output.item() for output in outputs]
    >>> ringcoll.run_threads(rank_main, 2)
    [[0, 10], [1, 11]]
    """
    outputs, inputs = _listed(output_tensor_list), _listed(input_tensor_list)
    options = (algorithm, len(outputs), type(output_tensor_list), type(input_tensor_list))
    return start(_all_to_all, group, [*outputs, *inputs], options, async_op, timeout)


@compiled("all_to_all", "output", "input")
def _all_to_all_single(call: Arguments, output_sizes: Any, input_sizes: Any) -> Operation:
    incoming = call.split(call.tensors[0], output_sizes, "output")
    outgoing = call.split(call.tensors[1], input_sizes, "input")
    return call.operation((1,), (0,), call.exchange_lengths(outgoing, incoming))


@collective
def all_to_all_single(
    output: Tensor,
    input: Tensor,  # noqa: A002  # torch's name
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: AlgorithmChoice = "auto",
    timeout: Timeout = None,
) -> Work | None:
    """Cut a tensor in pieces, send piece j to rank j, and join the pieces from all ranks.

    Parameters
    ----------
    output, input
        Tensor for the result, and tensor to send.
    output_split_sizes, input_split_sizes
        Sizes of the pieces along the first dimension; equal pieces by default.
    group, async_op, algorithm, timeout
        As for `all_to_all`.

    Examples
    --------
    >>> import torch, ringcoll
    >>> def rank_main(group):
    ...     output, mine = torch.empty(2, dtype=torch.int64), torch.arange(2) + 10 * group.rank()
    ...     ringcoll.all_to_all_single(output, mine, group=group)
    ...     return output.tolist()
    >>> ringcoll.run_threads(rank_main, 2)
    [[0, 10], [1, 11]]
    """
    options = (algorithm, _sizes(output_split_sizes), _sizes(input_split_sizes))
    return start(_all_to_all_single, group, (output, input), options, async_op, timeout)


@compiled("barrier", "tensor")
def _barrier(call: Arguments) -> Operation:
    call.reduces("bor")
    return call.operation((0,), (0,), [1])


@collective
def barrier(
    group: Any = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: Timeout = None,
    *,
    algorithm: AlgorithmChoice = "auto",
) -> Work | None:
    """Wait until all ranks have come.

    Parameters
    ----------
    group, async_op
        As for `all_reduce`.
    device_ids
        List whose first element names a CUDA device; the barrier then waits for the current
        stream of that device, too.
    algorithm, timeout
        As for `all_reduce`.

    Examples
    --------
    >>> import torch, ringcoll
    >>> def rank_main(group):
    ...     ringcoll.barrier(group=group)
    ...     return group.rank()
    >>> ringcoll.run_threads(rank_main, 2)
    [0, 1]
    """
    token = _token(_named_device(device_ids, group))
    return start(_barrier, group, (token,), (algorithm,), async_op, timeout)


@cache
def _token(device: torch.device) -> Tensor:
    """The tensor that all barriers reduce: a barrier writes the value that is there already."""
    with torch.inference_mode(False):
        return torch.ones(1, dtype=torch.uint8, device=device)


def _named_device(device_ids: Any, group: Any) -> torch.device:
    """The device of a barrier's ``device_ids``, by default the CPU."""
    is_list = isinstance(device_ids, list | tuple)
    if device_ids is None or (is_list and not device_ids):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not is_list or device_ids[0] not in range(count):
        message, rank = "names no CUDA device of this process", Deferred.of(group).rank()
        expected = f"a list of one of the {count} devices, or None"
        raise ArgumentError(message, "device_ids", expected, device_ids, rank)
    return torch.device("cuda", device_ids[0])


def monitored_barrier(
    group: Any = None, timeout: Timeout = None, wait_all_ranks: bool = False
) -> None:
    """Wait until all ranks have come, or name the missing ranks.

    The barrier goes through the store of the group, so it works when messages do not, and the
    group can be used after the barrier has failed. It waits for no operation in flight.

    Parameters
    ----------
    group
        As for `all_reduce`.
    timeout
        Time limit; by default the group's.
    wait_all_ranks
        Whether rank 0 waits for all ranks before it raises, so that it can name all
        missing ranks.

    Raises
    ------
    CollectiveTimeoutError
        Some rank did not come. The error of rank 0 names it; the errors of the others quote that.

    Examples
    --------
    >>> import torch, ringcoll
    >>> def rank_main(group):
    ...     ringcoll.monitored_barrier(group=group, timeout=10)
    ...     return group.rank()
    >>> ringcoll.run_threads(rank_main, 2)
    [0, 1]
    """
    member = communicator(group, torch.device("cpu"))
    at_once = timeout in (0, timedelta(0))
    member.monitored_barrier(0.0 if at_once else seconds(timeout, member), wait_all_ranks)


all_gather_into_tensor = all_gather_single  # the older name
reduce_scatter_tensor = reduce_scatter_single  # the older name
