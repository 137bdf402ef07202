"""The collectives, with the names, arguments and results of ``torch.distributed``.

Every function has torch's positional arguments, and beyond them keyword-only ones:

``algorithm``
    Name of a registered algorithm (`ringcoll.algorithms`), a `Schedule`, or
    ``"auto"``.
``segment_bytes``
    Size of the pieces in which chunks are pipelined; by default only the
    algorithms made for it are.
``wire_dtype``
    Dtype in which data are sent; by default that of the tensors, but float32 for
    arithmetic on 16-bit and 8-bit floats. Partial results are added up in at least
    float32, and rounded whenever they are sent; the result is rounded as well, and
    bitwise the same on all ranks.
``timeout``
    Time limit of the operation; by default the group's.

Called as ``function.plan(...)``, with the same arguments, they return a persistent operation:
checked, decided and bound to its tensors once, and run whenever it is called
(`ringcoll.prepared.Collective.plan`).

All arguments are checked before anything is sent. Errors are `ArgumentError` and
`ScheduleError` for a bad call, `MismatchError` if ranks disagree, `PeerLostError` if
one dies and `CollectiveTimeoutError` if one does not come.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll import sparse
from ringcoll.call import AlgorithmChoice, Builder, Timeout, seconds, side_by_side, together
from ringcoll.errors import ArgumentError
from ringcoll.groups import as_group, communicator, group_rank
from ringcoll.prepared import Repeat, collective, repeat
from ringcoll.stage import fusible

__all__ = [
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor",
    "scatter",
]

_SUM = dist.ReduceOp.SUM
_WITH_A_FACTOR = (dist.ReduceOp.PREMUL_SUM, "premul_sum")


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
    out: Tensor | None = None,
    timeout: Timeout = None,
) -> Builder:
    """Reduce a tensor over all ranks; every rank gets the result, bitwise the same.

    Parameters
    ----------
    tensor
        Any shape; same number of elements and dtype on all ranks. Overwritten with
        the result, unless ``out`` is given. It may be sparse, in coordinate layout, for
        sums and averages: see `ringcoll.sparse`.
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
    if getattr(tensor, "layout", None) is torch.sparse_coo:
        return sparse.all_reduce(
            tensor,
            op,
            group,
            async_op,
            algorithm=algorithm,
            timeout=timeout,
            segment_bytes=segment_bytes,
            wire_dtype=wire_dtype,
            out=out,
        )
    result = tensor if out is None else out
    options = algorithm, segment_bytes, timeout
    call = Builder("all_reduce", group, [tensor, result], async_op, *options)
    call.like(result, tensor, "out")
    call.reduces(op, wire_dtype)
    call.vector([tensor], [result])
    return call


def _all_reduce_as_before(
    tensor: Tensor,
    op: object = _SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: AlgorithmChoice = "auto",
    segment_bytes: int | None = None,
    wire_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    timeout: Timeout = None,
) -> Repeat | None:
    kind = getattr(op, "op", op)  # of a ReduceOp
    if out is not None or not isinstance(algorithm, str):
        return None

    def build(own: Tensor) -> Builder | None:
        if not isinstance(kind, dist.ReduceOp.RedOpType | str) or kind in _WITH_A_FACTOR:
            return None
        return all_reduce.build(
            own,
            kind,
            group,
            algorithm=algorithm,
            segment_bytes=segment_bytes,
            wire_dtype=wire_dtype,
            timeout=timeout,
        )

    options = kind, algorithm, segment_bytes, wire_dtype, timeout
    return repeat(options, tensor, group, async_op, build)


all_reduce.shortcut = _all_reduce_as_before


@collective
def all_reduce_coalesced(
    tensors: list[Tensor],
    op: object = _SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: AlgorithmChoice = "auto",
    segment_bytes: int | None = None,
    wire_dtype: torch.dtype | None = None,
    timeout: Timeout = None,
) -> Builder:
    """Reduce several tensors over all ranks, as one operation.

    Short ones that follow each other are laid end to end and reduced together.

    Parameters
    ----------
    tensors
        Each as for `all_reduce`; the same on all ranks.
    op, group, async_op, algorithm, segment_bytes, wire_dtype, timeout
        As for `all_reduce`.
    """
    options: dict[str, Any] = {
        "algorithm": algorithm,
        "segment_bytes": segment_bytes,
        "wire_dtype": wire_dtype,
        "timeout": timeout,
    }
    calls = []
    for run in fusible([tensor for (tensor,) in side_by_side(group, tensors=tensors)]):
        flat = (
            run[0]
            if len(run) == 1
            else torch.empty(sum(map(torch.numel, run)), dtype=run[0].dtype, device=run[0].device)
        )
        call = all_reduce.build(flat, op, group, async_op, **options)
        if len(run) > 1:
            call.fused(run)
        calls.append(call)
    return together(calls)


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
    out: Tensor | None = None,
    timeout: Timeout = None,
) -> Builder:
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
    call = Builder("reduce", group, [tensor, result], async_op, algorithm, segment_bytes, timeout)
    call.root = group_rank(group, dst, group_dst, "dst")
    call.like(result, tensor, "out")
    call.reduces(op, wire_dtype)
    call.vector([tensor], [result] if call.is_root else [])
    return call


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
) -> Builder:
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
    call = Builder("broadcast", group, [tensor], async_op, algorithm, segment_bytes, timeout)
    call.root = group_rank(group, src, group_src, "src")
    call.vector([tensor] if call.is_root else [], [tensor])
    return call


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
) -> Builder:
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
    call = Builder(
        "all_gather",
        group,
        [tensor, *_listed(tensor_list)],
        async_op,
        algorithm,
        segment_bytes,
        timeout,
    )
    call.one_a_rank(tensor_list, "tensor_list")
    call.same_numel(tensor, tensor_list[call.rank].numel(), "tensor")
    call.blocks([tensor], tensor_list, [item.numel() for item in tensor_list], split_output=True)
    return call


@collective
def all_gather_coalesced(
    output_tensor_lists: list[list[Tensor]],
    input_tensor_list: list[Tensor],
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: AlgorithmChoice = "auto",
    segment_bytes: int | None = None,
    timeout: Timeout = None,
) -> Builder:
    """Gather several tensors of every rank, as one operation.

    Parameters
    ----------
    output_tensor_lists
        One list a rank, of one tensor for each input.
    input_tensor_list
        This rank's tensors.
    group, async_op, algorithm, segment_bytes, timeout
        As for `all_gather`.
    """
    options: dict[str, Any] = {
        "algorithm": algorithm,
        "segment_bytes": segment_bytes,
        "timeout": timeout,
    }
    lists = side_by_side(group, output_tensor_lists=output_tensor_lists)
    named = {f"output_tensor_lists[{rank}]": outputs for rank, (outputs,) in enumerate(lists)}
    calls = [
        all_gather.build(outputs, tensor, group, async_op, **options)
        for tensor, *outputs in side_by_side(group, input_tensor_list=input_tensor_list, **named)
    ]
    return together(calls)


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
) -> Builder:
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
    call = Builder("all_gather", group, tensors, async_op, algorithm, segment_bytes, timeout)
    call.same_numel(output_tensor, call.world_size * input_tensor.numel(), "output_tensor")
    call.blocks([input_tensor], [output_tensor], [input_tensor.numel()] * call.world_size)
    return call


@collective
def all_gather_single_coalesced(
    output_tensors: list[Tensor],
    input_tensors: list[Tensor],
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: AlgorithmChoice = "auto",
    segment_bytes: int | None = None,
    timeout: Timeout = None,
) -> Builder:
    """Do `all_gather_single` for several pairs of tensors, as one operation.

    Parameters
    ----------
    output_tensors, input_tensors
        As many of the one as of the other.
    group, async_op, algorithm, segment_bytes, timeout
        As for `all_gather_single`.
    """
    options: dict[str, Any] = {
        "algorithm": algorithm,
        "segment_bytes": segment_bytes,
        "timeout": timeout,
    }
    calls = [
        all_gather_single.build(output, tensor, group, async_op, **options)
        for output, tensor in side_by_side(
            group, output_tensors=output_tensors, input_tensors=input_tensors
        )
    ]
    return together(calls)


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
) -> Builder:
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
    call = Builder("gather", group, [tensor, *results], async_op, algorithm, segment_bytes, timeout)
    dst = 0 if dst is None and group_dst is None else dst
    call.root = group_rank(group, dst, group_dst, "dst")
    call.list_at_root(results, tensor, "gather_list")
    call.blocks([tensor], results, [tensor.numel()] * call.world_size, split_output=True)
    return call


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
) -> Builder:
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
    call = Builder(
        "scatter", group, [tensor, *sources], async_op, algorithm, segment_bytes, timeout
    )
    src = 0 if src is None and group_src is None else src
    call.root = group_rank(group, src, group_src, "src")
    call.list_at_root(sources, tensor, "scatter_list")
    call.blocks(sources, [tensor], [tensor.numel()] * call.world_size, split_input=True)
    return call


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
    timeout: Timeout = None,
) -> Builder:
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
    call = Builder("reduce_scatter", group, tensors, async_op, algorithm, segment_bytes, timeout)
    call.one_a_rank(input_list, "input_list")
    call.same_numel(output, input_list[call.rank].numel(), "output")
    call.reduces(op, wire_dtype)
    call.blocks(input_list, [output], [item.numel() for item in input_list], split_input=True)
    return call


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
    timeout: Timeout = None,
) -> Builder:
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
    call = Builder(
        "reduce_scatter", group, [output, input], async_op, algorithm, segment_bytes, timeout
    )
    call.same_numel(input, call.world_size * output.numel(), "input")
    call.reduces(op, wire_dtype)
    call.blocks([input], [output], [output.numel()] * call.world_size)
    return call


@collective
def reduce_scatter_single_coalesced(
    output_tensors: list[Tensor],
    input_tensors: list[Tensor],
    op: object = _SUM,
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: AlgorithmChoice = "auto",
    segment_bytes: int | None = None,
    wire_dtype: torch.dtype | None = None,
    timeout: Timeout = None,
) -> Builder:
    """Do `reduce_scatter_single` for several pairs of tensors, as one operation.

    Parameters
    ----------
    output_tensors, input_tensors
        As many of the one as of the other.
    op, group, async_op, algorithm, segment_bytes, wire_dtype, timeout
        As for `reduce_scatter_single`.
    """
    options: dict[str, Any] = {
        "algorithm": algorithm,
        "segment_bytes": segment_bytes,
        "wire_dtype": wire_dtype,
        "timeout": timeout,
    }
    calls = [
        reduce_scatter_single.build(output, tensor, op, group, async_op, **options)
        for output, tensor in side_by_side(
            group, output_tensors=output_tensors, input_tensors=input_tensors
        )
    ]
    return together(calls)


@collective
def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: Any = None,
    async_op: bool = False,
    *,
    algorithm: AlgorithmChoice = "auto",
    timeout: Timeout = None,
) -> Builder:
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
    call = Builder("all_to_all", group, [*outputs, *inputs], async_op, algorithm, None, timeout)
    call.one_a_rank(outputs, "output_tensor_list")
    call.one_a_rank(inputs, "input_tensor_list")
    call.exchange(
        inputs,
        outputs,
        [item.numel() for item in inputs],
        [item.numel() for item in outputs],
        split=True,
    )
    return call


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
) -> Builder:
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
    call = Builder("all_to_all", group, [output, input], async_op, algorithm, None, timeout)
    incoming = call.split(output, output_split_sizes, "output")
    outgoing = call.split(input, input_split_sizes, "input")
    call.exchange([input], [output], outgoing, incoming, split=False)
    return call


@collective
def barrier(
    group: Any = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: Timeout = None,
    *,
    algorithm: AlgorithmChoice = "auto",
) -> Builder:
    """Wait until all ranks have come.

    Parameters
    ----------
    group, async_op
        As for `all_reduce`.
    device_ids
        The first one names a CUDA device, whose current stream is then waited for, too.
    algorithm, timeout
        See the module.
    """
    token = torch.ones(1, dtype=torch.uint8, device=_named_device(device_ids, group))
    call = Builder("barrier", group, [token], async_op, algorithm, None, timeout)
    call.reduces("bor", None)
    call.vector([token], [token])
    return call


def _named_device(device_ids: Any, group: Any) -> torch.device:
    """The device of a barrier's ``device_ids``, by default the CPU."""
    is_list = isinstance(device_ids, list | tuple)
    if device_ids is None or (is_list and not device_ids):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not is_list or device_ids[0] not in range(count):
        raise ArgumentError(
            "names no CUDA device of this process",
            rank=as_group(group).rank(),
            argument="device_ids",
            expected=f"a list of one of the {count} devices, or None",
            got=device_ids,
        )
    return torch.device("cuda", device_ids[0])


def monitored_barrier(
    group: Any = None, timeout: Timeout = None, wait_all_ranks: bool = False
) -> None:
    """Wait until all ranks have come, and say which ones do not.

    It goes through the store of the group, so it works when messages do not, and the
    group can be used after it has failed. Operations in flight are not waited for.

    Parameters
    ----------
    group
        As for `all_reduce`.
    timeout
        How long to wait; by default the group's time limit.
    wait_all_ranks
        Whether rank 0 waits for all ranks before it complains, so that it can name all
        that are missing.

    Raises
    ------
    CollectiveTimeoutError
        Some rank did not come. On rank 0 it names which; the others are told.
    """
    member = communicator(group, torch.device("cpu"))
    at_once = timeout in (0, timedelta(0))
    member.monitored_barrier(0.0 if at_once else seconds(timeout, member), wait_all_ranks)


all_gather_into_tensor = all_gather_single  # the older name
reduce_scatter_tensor = reduce_scatter_single  # the older name


def _listed(tensors: object) -> list[Tensor]:
    """A list of tensors as given; anything else is complained about by `Builder`."""
    if tensors is None:
        return []
    return list(tensors) if isinstance(tensors, list | tuple) else [tensors]  # type: ignore[list-item]
