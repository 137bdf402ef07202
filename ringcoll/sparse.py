"""All-reduce of sparse tensors, from all-gathers of what is not zero.

No rank knows how many entries the others have, so it takes three steps: how many they
are, their indices, their values. Each rank then adds all of them up, in rank order, so
that the result is bitwise the same everywhere. Cost: that of the all-gathers, so k times
as many bytes as one rank has, which is what may be left of it after the sum.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ringcoll.call import AlgorithmChoice, Builder, Timeout
from ringcoll.communicator import Call
from ringcoll.errors import ArgumentError, MismatchError
from ringcoll.groups import as_group
from ringcoll.reduction import as_operator

__all__ = ["all_reduce"]


def all_reduce(
    tensor: Tensor,
    op: object,
    group: Any,
    async_op: bool,
    *,
    algorithm: AlgorithmChoice,
    timeout: Timeout,
    **of_dense: object,
) -> Builder:
    """Add up a sparse tensor over all ranks.

    Parameters
    ----------
    tensor
        In coordinate layout; same shape, dtype and number of sparse dimensions on all
        ranks. Becomes the coalesced sum, or average.
    op
        SUM or AVG.
    group, async_op, timeout
        See `ringcoll.all_reduce`.
    algorithm
        Of the all-gathers, if they have one of that name.
    **of_dense
        Other arguments, which only dense tensors have.

    Raises
    ------
    ArgumentError
        Another operator: what is not stored would not be its neutral element. Or one of
        the other arguments was given.
    MismatchError
        The ranks' tensors differ in shape.
    """
    rank = as_group(group).rank()
    for argument, given in of_dense.items():
        if given is not None:
            raise ArgumentError(
                "not for sparse tensors",
                rank=rank,
                argument=argument,
                expected="None",
                got=type(given),
            )
    operator = as_operator(op, rank)
    if operator.name not in ("sum", "avg"):
        raise ArgumentError(
            "sparse tensors can be added up only",
            rank=rank,
            argument="op",
            expected="sum or avg",
            got=operator,
        )
    own = tensor.detach().coalesce()
    signature = f"{tuple(own.shape)}, {own.sparse_dim()} of the dimensions sparse"
    # The two that every rank tells the others; shapes may differ in length.
    about = torch.tensor([own._nnz(), zlib.crc32(signature.encode())], device=own.device)
    first = _gather(group, about, [2], async_op, "auto", timeout)
    world_size = first.world_size
    others = first.call.results[0].view(world_size, 2)

    def following() -> Iterator[Call]:
        for peer, theirs in enumerate(others[:, 1].tolist()):
            if theirs != about[1]:
                raise MismatchError(
                    f"rank {first.rank} called all_reduce with a sparse tensor of shape "
                    f"{signature}, rank {peer} with one of another shape",
                    peer=peer,
                    mine=signature,
                )
        counts = others[:, 0].tolist()
        sparse_dims, entry = own.sparse_dim(), own.values().shape[1:].numel()
        # Entry by entry, so that what comes from the ranks can be laid end to end.
        indices = _gather(
            group,
            own.indices().t(),
            [sparse_dims * count for count in counts],
            async_op,
            algorithm,
            timeout,
        )
        yield indices.call
        values = _gather(
            group,
            own.values(),
            [entry * count for count in counts],
            async_op,
            algorithm,
            timeout,
        )
        yield values.call
        total = torch.sparse_coo_tensor(
            indices.call.results[0].view(-1, sparse_dims).t(),
            values.call.results[0].view(-1, *own.values().shape[1:]),
            own.shape,
            check_invariants=False,
        ).coalesce()
        if operator.name == "avg":
            total = total / world_size
        with torch.no_grad():
            tensor.copy_(total)

    first.call.following, first.call.num_calls, first.call.results = following(), 3, [tensor]
    if first.call.tensors:
        first.call.tensors = [*first.call.tensors, own.indices(), own.values()]
    first.following = None
    return first


def _gather(
    group: Any,
    tensor: Tensor,
    lengths: list[int],
    async_op: bool,
    algorithm: AlgorithmChoice,
    timeout: Timeout,
) -> Builder:
    """An all-gather into one tensor, of parts of different lengths (or all of the one given)."""
    call = Builder("all_gather", group, [tensor], async_op, algorithm, None, timeout)
    lengths = lengths * call.world_size if len(lengths) == 1 else lengths
    gathered = torch.empty(sum(lengths), dtype=tensor.dtype, device=tensor.device)
    call.blocks([tensor.contiguous()], [gathered], lengths)
    return call
