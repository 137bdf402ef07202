"""The model that several ranks hold: compared and begun alike, laid end to end, put together.

Most checks the ranks make together, so that all of them raise. Parameters that lie end to end in a
flat tensor can be sent as one message.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcoll.errors import ArgumentError, MismatchError, TrainingError
from ringcoll.runtime.collectives import as_group
from ringcoll.runtime.collectives import functions as api
from ringcoll.training.arguments import require


def gathered(value: object, group: Any, device: torch.device | str = "cpu") -> list[Any]:
    """A value of each rank, which JSON can hold, on every rank; it travels on a device."""
    own = torch.frombuffer(bytearray(json.dumps(value), "utf-8"), dtype=torch.uint8).to(device)
    lengths = torch.empty(as_group(group).size(), dtype=torch.int64, device=device)
    api.all_gather_single(lengths, torch.tensor([own.numel()], device=device), group)
    texts = [own.new_empty(length) for length in lengths.tolist()]
    api.all_gather(texts, own, group)
    return [json.loads(bytes(text.tolist())) for text in texts]


def check_alike(
    lines: Sequence[Sequence[str]], argument: str, what: str, rank: int | None = None
) -> None:
    """Raise `ArgumentError` at the first line of a rank that is not that of rank 0."""
    for peer, theirs in enumerate(lines):
        for expected, got in zip_longest(lines[0], theirs, fillvalue="nothing"):
            message = f"rank {peer} has another {what} than rank 0"
            require(expected == got, argument, message, expected, got, rank)


def check_dense(grad: Tensor, name: object) -> None:
    """Raise `ArgumentError` if the gradient of the parameter with a name is sparse."""
    message = f"the gradient of parameter {name} is not dense"
    require(grad.layout is torch.strided, "module", message, torch.strided, grad.layout)


def _hash(module: nn.Module) -> str:
    """A hash of the names, dtypes, shapes and values of parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(content.numpy().tobytes())
    return digest.hexdigest()[:16]


def check_same(module: nn.Module, group: Any = None) -> None:
    """Raise `MismatchError`, on all ranks, unless all begin with the same model, to the last bit.

    Parameters and buffers are compared in name, dtype, shape and value, with those of rank 0.
    """
    rank, own = as_group(group).rank(), _hash(module)
    hashes = gathered(own, group)
    others = [peer for peer, peer_hash in enumerate(hashes) if peer_hash != hashes[0]]
    if others:
        peer = others[0] if rank == 0 or hashes[0] == own else 0
        raise MismatchError(
            f"rank {rank}: the ranks begin with different models: rank 0 has "
            f"{hashes[0]}, {', '.join(f'rank {rank} has {hashes[rank]}' for rank in others)}",
            peer=peer,
            mine=own,
            theirs=hashes[peer],
        )


def check_finite(loss: Tensor, step: int, group: Any = None) -> None:
    """Raise `TrainingError`, on all ranks, if the loss of some rank is infinite or NaN.

    Parameters
    ----------
    loss
        The loss of this rank, or the losses of steps in a row; any number of elements.
    step
        Number of the first of these steps, for the error; the same on all ranks.
    """
    member = as_group(group)
    rank, size, none = member.rank(), member.size(), torch.iinfo(torch.int64).max
    bad = (~torch.isfinite(loss.detach().flatten())).nonzero().flatten().tolist()
    first = torch.tensor([bad[0] * size + rank if bad else none], device="cpu")
    api.all_reduce(first, dist.ReduceOp.MIN, group)
    if int(first) != none:
        index, other = divmod(int(first), size)
        raise TrainingError(
            f"rank {rank}: the loss of rank {other} is not finite in step {step + index}"
        )


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that need gradients, by name; raises `ArgumentError` if there is none."""
    params = {name: param for name, param in module.named_parameters() if param.requires_grad}
    if not params:
        raise ArgumentError("no parameter needs a gradient", argument="module")
    return params


def begin_alike(module: nn.Module, group: Any) -> None:
    """Replace parameters and buffers by those of rank 0; all ranks raise if kinds differ."""
    kinds = {"parameter": module.named_parameters(), "buffer": module.named_buffers()}
    own = [
        f"{name}: {kind} {tuple(item.shape)} {item.dtype} requires_grad={item.requires_grad}"
        for kind, items in kinds.items()
        for name, item in items
    ]
    check_alike(gathered(own, group), "module", "module")
    for tensor in (*module.parameters(), *module.buffers()):
        api.broadcast(tensor.detach(), group=group, group_src=0)


def views_of(flat: Tensor, likes: Sequence[Tensor]) -> list[Tensor]:
    """Views of a flat tensor, from its begin, in the shapes of some tensors."""
    numels = [like.numel() for like in likes]
    pieces = torch.split(flat[: sum(numels)], numels)
    return [piece.view(like.shape) for piece, like in zip(pieces, likes, strict=True)]


def storage_nbytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the memory of tensors; memory that several tensors share is counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


class FlatParameters:
    """The parameters of a module that need gradients, end to end; of one dtype, on one device.

    >>> flat = FlatParameters(torch.nn.Linear(2, 1))
    >>> flat.write(torch.tensor([1.0, 2.0, 3.0]))
    >>> flat.read().tolist(), flat.grads().tolist()
    ([1.0, 2.0, 3.0], [0.0, 0.0, 0.0])
    """

    def __init__(self, module: nn.Module) -> None:
        self._params = list(trained(module).values())
        kinds = sorted({f"{param.dtype} on {param.device}" for param in self._params})
        require(len(kinds) == 1, "module", "the parameters cannot be laid end to end",
                "parameters of one dtype, on one device", ", ".join(kinds))  # fmt: skip

    def read(self) -> Tensor:
        """A copy of the parameters, (numel,)."""
        return torch.cat([param.detach().flatten() for param in self._params])

    @torch.no_grad()
    def write(self, flat: Tensor) -> None:
        """Copy a tensor, (numel,), into the parameters."""
        for param, piece in zip(self._params, views_of(flat, self._params), strict=True):
            param.copy_(piece)

    def grads(self) -> Tensor:
        """A copy of the gradients, (numel,); zeros for a parameter without a gradient."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._params]
        return torch.cat([grad.detach().flatten() for grad in grads])

    def set_grads(self, flat: Tensor) -> None:
        """Make the pieces of a tensor, (numel,), the gradients."""
        for param, piece in zip(self._params, views_of(flat, self._params), strict=True):
            param.grad = piece


def whole_parameters(
    held: Mapping[str, Tensor], shapes: Mapping[str, Tensor], group: Any, piece: int = 0
) -> dict[str, Tensor]:
    """Put the parameters of a model together, to the last bit, on every rank of a group.

    If ranks that hold the same parameter, or the same piece, have different values, all ranks raise
    `TrainingError`.

    Parameters
    ----------
    held
        What this rank holds, by name: whole parameters, or pieces along one dimension.
    shapes
        Tensors of the shapes of the whole parameters, by name, in the same order on all ranks.
    piece
        Place of this rank's pieces among the pieces of a parameter, from 0.
    """
    whole = {}
    for name, like in shapes.items():
        # Where a rank holds nothing it has infinities, which no number exceeds.
        bounds = [torch.full_like(like, end, requires_grad=False) for end in (-math.inf, math.inf)]
        for bound, op in zip(bounds, (dist.ReduceOp.MAX, dist.ReduceOp.MIN), strict=True):
            if name in held:
                tensor, place = held[name].detach(), bound
                for dim, (all_of, mine) in enumerate(zip(like.shape, tensor.shape, strict=True)):
                    if all_of != mine:
                        place = place.narrow(dim, piece * mine, mine)
                place.copy_(tensor)
            api.all_reduce(bound, op, group)
        whole[name], lowest = bounds
        if not torch.equal(whole[name], lowest):
            rank = as_group(group).rank()
            raise TrainingError(
                f"rank {rank}: the ranks that hold {name} have different values of it"
            )
    return whole
