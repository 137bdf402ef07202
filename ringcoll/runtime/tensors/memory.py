"""The memory of a user's tensors: whether it is there, and may be written.

No address of a user's tensor is read before the tensor has passed `with_memory`. A tensor that is
on a device need not have memory there. A subclass with a ``__torch_dispatch__`` of its own may
stand for other tensors: an ``AsyncCollectiveTensor`` of torch for the result of a collective that
is still under way, a ``DTensor`` for a part on each rank, a ``FakeTensor`` for nothing. And a
storage can be freed, or made shorter than the tensors that look at it.

torch's collectives are operators, so that such a class itself says what an operator does to its
tensors. Here an operator that does nothing goes the same way, and notes the tensor that arrives.
"""

from __future__ import annotations

import ctypes
import errno
import threading
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.parameter import is_lazy

from ringcoll.errors import ArgumentError
from ringcoll.runtime.machine import FUTEX


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's memory holds its elements in logical order, as they are."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


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


# Of futex(2): FUTEX_WAKE_OP, FUTEX_PRIVATE_FLAG, and FUTEX_OP_ADD of 0 to the second word.
_WAKE_OP, _PRIVATE, _ADD = 5, 128, 1 << 28
_libc = ctypes.CDLL(None, use_errno=True)
_nobody = ctypes.byref(ctypes.c_uint32())  # a word on which nobody sleeps


def may_write(address: int) -> bool:
    """Whether this process may write to an address; nothing changes there.

    The kernel is asked to add 0 to the word, as it does when it wakes those who sleep on another
    word, and nobody sleeps there. Where the kernel cannot be asked, the answer is yes.
    """
    if FUTEX < 0:
        return True
    word = address & ~3
    done = _libc.syscall(FUTEX, _nobody, _WAKE_OP | _PRIVATE, 0, None, ctypes.c_void_p(word), _ADD)
    return done >= 0 or ctypes.get_errno() != errno.EFAULT


def can_write(tensor: Tensor) -> bool:
    """Whether the first and the last element of a strided tensor can be written.

    A file that is mapped for reading cannot; torch does not know. torch's own memory can.
    """
    if tensor.untyped_storage().resizable() or not tensor.is_cpu or not tensor.numel():
        return True
    begin = tensor.data_ptr()
    return may_write(begin) and may_write(begin + extent(tensor) - 1)


def with_memory(
    tensor: object, rank: int | None = None, argument: str = "tensor", *, is_written: bool = False
) -> Tensor:
    """The dense tensor in whose memory the elements of a user's tensor lie.

    It is the tensor itself; or, for a tensor of a class that dispatches operators, the tensor that
    the class hands to an operator. It has been waited for. Raises `ArgumentError`, with the rank
    and the name of the argument, if that is no tensor, is not dense, or has no memory; or if it
    ``is_written``, and its memory can only be read.
    """
    if not isinstance(tensor, Tensor):
        raise ArgumentError("not a tensor", argument, "a torch.Tensor", type(tensor), rank)
    if is_lazy(tensor):
        raise ArgumentError("is not initialized yet", argument, "memory", type(tensor), rank)
    if is_functorch_wrapped_tensor(tensor):
        message = "is of a transformation such as vmap"
        raise ArgumentError(message, argument, "memory", "no memory", rank)
    if _has_own_dispatch(tensor):
        tensor = _behind(tensor, argument, rank)
    if not is_dense(tensor):
        kind: object = tensor.dtype if tensor.is_quantized else tensor.layout
        kind = "a nested tensor" if tensor.is_nested else kind
        raise ArgumentError("must be dense", argument, "a strided tensor", kind, rank)
    if tensor.is_meta:
        raise ArgumentError("has no data", argument, "memory", tensor.device, rank)
    if not has_memory(tensor):
        size = tensor.untyped_storage().nbytes()
        message = "has no memory: its storage was freed, or has become too short, or never had any"
        got = f"{type(tensor).__name__} with a storage of {size} bytes"
        raise ArgumentError(message, argument, f"{extent(tensor)} bytes", got, rank)
    if is_written and not can_write(tensor):
        expected = "memory that can be written: clone() it"
        got = "memory that can only be read, as a file's"
        raise ArgumentError("would be written", argument, expected, got, rank)
    return tensor


def _has_own_dispatch(tensor: Tensor) -> bool:
    kind: Any = type(tensor)
    return bool(kind.__torch_dispatch__ is not _NO_DISPATCH)


class _Arrived(threading.local):
    def __init__(self) -> None:
        self.tensors: list[Tensor] = []


_NO_DISPATCH = Tensor.__torch_dispatch__
_arrived = _Arrived()
_making = threading.Lock()
_operator: list[Any] = []


def _behind(tensor: Tensor, argument: str, rank: int | None) -> Tensor:
    """The tensor that arrives at an operator in the place of a tensor that dispatches."""
    with _making:
        if not _operator:
            library: Any = torch.library.Library("ringcoll", "FRAGMENT")  # type: ignore[no-untyped-call]
            library.define("arrive(Tensor tensor) -> ()")
            for key in ("CPU", "CUDA"):
                library.impl("arrive", lambda tensor: _arrived.tensors.append(tensor), key)  # noqa: PLW0108  # those of the thread
            _operator.extend((torch.ops.ringcoll.arrive.default, library))
    expected, kind = "memory, or a class that stands for a single tensor", type(tensor)
    _arrived.tensors = []
    try:
        with torch.no_grad():
            _operator[0](tensor)
    except Exception as error:
        message = f"a tensor of this class cannot be sent ({error})"
        raise ArgumentError(message, argument, expected, kind, rank) from error
    finally:
        arrived, _arrived.tensors = _arrived.tensors, []
    if len(arrived) != 1 or _has_own_dispatch(arrived[0]):
        message = f"its class stands for {len(arrived)} tensors"
        raise ArgumentError(message, argument, expected, kind, rank)
    return arrived[0]
