"""All-reduce of sparse tensors, from all-gathers of their entries.

No rank knows how many entries the others have, so there are three all-gathers: of the numbers of
entries, of the indices, and of the values. Each rank then adds all entries up, in rank order, so
that the result is bitwise the same on all ranks. As of dense tensors, values of 16 and 8 bits are sent and added
up in float32, and the real and imaginary parts of complex numbers are added as real numbers. Cost: k times the
bytes of a rank, as many as the sum may have.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ringcoll.collectives.arguments import AlgorithmChoice, Arguments, Timeout, check_dtype
from ringcoll.collectives.calls import Deferred, start
from ringcoll.collectives.groups import as_group
from ringcoll.errors import ArgumentError, MismatchError
from ringcoll.group import Part, Work
from ringcoll.operation import Operation
from ringcoll.reduction import as_operator, resolve
from ringcoll.transport import with_memory


def all_reduce(
    tensor: Tensor,
    op: object,
    group: Any,
    async_op: bool,
    algorithm: AlgorithmChoice,
    timeout: Timeout,
    **of_dense: object,
) -> Work | None:
    """Add up a sparse tensor over all ranks.

    Parameters
    ----------
    tensor
        In coordinate layout; same shape, dtype and number of sparse dimensions on all
        ranks. Becomes the coalesced sum, or average.
    op
        SUM or AVG.
    group, async_op, timeout
        As for `ringcoll.all_reduce`.
    algorithm
        Algorithm of the all-gathers, if they have an algorithm of that name.
    **of_dense
        Arguments for dense tensors only.

    Raises
    ------
    ArgumentError
        Another operator: zero is not its neutral element. Or a value for an argument for
        dense tensors only.
    MismatchError
        The ranks' tensors differ in shape.
    """
    deferred = Deferred.of(group)
    own_group = as_group(deferred.group)
    rank, world_size = own_group.rank(), own_group.size()
    for argument, value in of_dense.items():
        if value is not None:
            raise ArgumentError(
                "not for sparse tensors",
                rank=rank,
                argument=argument,
                expected="None",
                got=type(value),
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
    for part in (tensor._indices(), tensor._values()):
        with_memory(part, rank)
    check_dtype(tensor.dtype, rank)
    reduction = resolve(operator, tensor.dtype, rank=rank)
    entries = tensor.detach()
    values = reduction.encode(entries._values().resolve_conj().resolve_neg())
    indices, values = _added(entries._indices(), values, entries.shape)
    sparse_dims, entry = entries.sparse_dim(), values.shape[1:]
    signature = (
        f"{tuple(tensor.shape)}, {sparse_dims} of the dimensions sparse, {tensor.dtype}, {operator}"
    )
    # Number of entries and checksum: two numbers, whatever the length of the shape.
    about = torch.tensor([len(values), zlib.crc32(signature.encode())], device=tensor.device)
    call: Any = _gather(deferred, about, [2] * world_size, async_op, "auto", timeout)
    abouts = call.tensors[0].view(world_size, 2)

    def following() -> Iterator[Part]:
        for peer, checksum in enumerate(abouts[:, 1].tolist()):
            if checksum != about[1]:
                raise MismatchError(
                    f"rank {rank} called all_reduce with a sparse tensor of shape "
                    f"{signature}, rank {peer} with one of another shape, dtype or operator",
                    peer=peer,
                    mine=signature,
                )
        counts = abouts[:, 0].tolist()
        gathered = []
        # Entry by entry, so that the ranks' entries can be laid end to end.
        for part, width in ((indices.t(), sparse_dims), (values, entry.numel())):
            lengths = [width * count for count in counts]
            each = _gather(deferred, part, lengths, async_op, algorithm, timeout)
            yield each.operation, each.tensors
            gathered.append(each.tensors[0])
        everywhere = gathered[0].view(-1, sparse_dims).t(), gathered[1].view(-1, *entry)
        places, sums = _added(*everywhere, tensor.shape)
        if reduction.finish is not None:
            reduction.finish(sums, world_size)
        total = torch.sparse_coo_tensor(
            places,
            reduction.decode(sums),
            tensor.shape,
            device=sums.device,
            check_invariants=False,
            is_coalesced=True,
        )
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tensor):
            tensor.copy_(total)

    call.following, call.num_parts, call.results = following(), 3, [tensor]
    call.tensors = [*call.tensors, indices, values]  # for `Lane.use`
    work: Work | None = call if deferred is group else call()
    return work


def _added(indices: Tensor, values: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Add up the entries of each place; indices and values of the sums."""
    if values.is_complex():  # torch would multiply by a complex 1, which makes NaN of infinities
        indices, parts = _added(indices, torch.view_as_real(values), torch.Size([*shape, 2]))
        return indices, torch.view_as_complex(parts)
    entries = torch.sparse_coo_tensor(
        indices, values, shape, device=values.device, check_invariants=False
    ).coalesce()
    return entries.indices(), entries.values()


def _gather(
    group: Deferred,
    tensor: Tensor,
    lengths: list[int],
    async_op: bool,
    algorithm: AlgorithmChoice,
    timeout: Timeout,
) -> Any:
    """An all-gather into one tensor, of parts of different lengths."""
    gathered = torch.empty(sum(lengths), dtype=tensor.dtype, device=tensor.device)
    options = (algorithm, tuple(lengths))
    tensors = (gathered, tensor.contiguous())
    return start(_all_gather_parts, Deferred(group.group), tensors, options, async_op, timeout)


def _all_gather_parts(
    group: Any, tensors: Sequence[Any], options: tuple[Any, ...], prepared: bool
) -> Operation:
    algorithm, lengths = options
    call = Arguments("all_gather", group, tensors, algorithm)
    return call.operation((1,), (0,), lengths, prepared=prepared)
