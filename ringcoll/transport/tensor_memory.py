"""The memory of a user's tensors: no address is read before the tensor has passed here.

A tensor that is on a device need not have memory there. A subclass with a ``__torch_dispatch__`` of
its own may stand for other tensors: an ``AsyncCollectiveTensor`` of torch for the result of a
collective that is still under way, a ``DTensor`` for a part on each rank, a ``FakeTensor`` for
nothing. And a storage can be freed, or made shorter than the tensors that look at it.

torch's collectives are operators, so that such a class itself says what an operator does to its
tensors. Here an operator that does nothing goes the same way, and notes the tensor that arrives.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.parameter import is_lazy

from ringcoll.errors import ArgumentError


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements lie in memory by strides, as they are."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def extent(tensor: Tensor) -> int:
    """Bytes from a strided tensor's first element to the end of its last element."""
    if tensor.is_contiguous():
        return tensor.nbytes
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.itemsize


def has_memory(tensor: Tensor) -> bool:
    """Whether the storage of a strided tensor has all its elements."""
    nbytes = extent(tensor)
    if not nbytes:
        return True
    end = nbytes + tensor.storage_offset() * tensor.itemsize
    return tensor.data_ptr() != 0 and tensor.untyped_storage().nbytes() >= end


def with_memory(tensor: object, rank: int | None = None, argument: str = "tensor") -> Tensor:
    """The dense tensor in whose memory the elements of a user's tensor lie.

    Parameters
    ----------
    tensor
        Argument of the user, unchecked.
    rank, argument
        Rank and name of the argument, for the error.

    Returns
    -------
    Tensor
        The tensor itself; or, for a tensor of a class that dispatches operators, the tensor that the
        class hands to an operator. It has been waited for.

    Raises
    ------
    ArgumentError
        The argument is no tensor, is not dense, or has no memory.
    """

    def refuse(message: str, expected: object, got: object) -> ArgumentError:
        return ArgumentError(message, rank=rank, argument=argument, expected=expected, got=got)

    if not isinstance(tensor, Tensor):
        raise refuse("not a tensor", "a torch.Tensor", type(tensor))
    if is_lazy(tensor):
        raise refuse("is not initialized yet", "memory", type(tensor))
    if is_functorch_wrapped_tensor(tensor):
        raise refuse("is of a transformation such as vmap", "memory", "no memory")
    if _dispatches(tensor):
        tensor = _behind(tensor, refuse)
    if not is_dense(tensor):
        kind: object = tensor.dtype if tensor.is_quantized else tensor.layout
        raise refuse(
            "must be dense", "a strided tensor", "a nested tensor" if tensor.is_nested else kind
        )
    if tensor.is_meta:
        raise refuse("has no data", "memory", tensor.device)
    if not has_memory(tensor):
        size = tensor.untyped_storage().nbytes()
        raise refuse(
            "has no memory: its storage was freed, or has become too short, or never had any",
            f"{extent(tensor)} bytes",
            f"{type(tensor).__name__} with a storage of {size} bytes",
        )
    return tensor


def _dispatches(tensor: Tensor) -> bool:
    """Whether a tensor's class says itself what operators do."""
    kind: Any = type(tensor)
    return bool(kind.__torch_dispatch__ is not _NONE)


class _Arrived(threading.local):
    """The tensors that have arrived at the operator in this thread."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []


_arrived = _Arrived()


def _arrive(tensor: Tensor) -> None:
    _arrived.tensors.append(tensor)


_NONE = Tensor.__torch_dispatch__
_making = threading.Lock()
_operator: list[Any] = []


def _behind(tensor: Tensor, refuse: Any) -> Tensor:
    """The tensor that arrives at an operator in the place of a tensor that dispatches."""
    with _making:
        if not _operator:
            library: Any = torch.library.Library("ringcoll", "FRAGMENT")  # type: ignore[no-untyped-call]
            library.define("arrive(Tensor tensor) -> ()")
            for key in ("CPU", "CUDA"):
                library.impl("arrive", _arrive, key)
            _operator.extend((torch.ops.ringcoll.arrive.default, library))
    expected, kind = "memory, or a class that stands for a single tensor", type(tensor)
    _arrived.tensors = []
    try:
        with torch.no_grad():
            _operator[0](tensor)
    except Exception as error:
        raise refuse(f"a tensor of this class cannot be sent ({error})", expected, kind) from error
    finally:
        arrived, _arrived.tensors = _arrived.tensors, []
    if len(arrived) != 1 or _dispatches(arrived[0]):
        raise refuse(f"its class stands for {len(arrived)} tensors", expected, kind)
    return arrived[0]
