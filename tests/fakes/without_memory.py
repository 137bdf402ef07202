"""Tensors whose elements do not lie in memory of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.nn import UninitializedParameter
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map

__all__ = ["WITHOUT", "Wrapper", "pending"]

_c10d: Any = torch._C._distributed_c10d


class Wrapper(Tensor):
    """A tensor that stands for another one, to which it hands all operators."""

    behind: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Self:
        strides, dtype = inner.stride(), inner.dtype
        made: Any = torch.Tensor._make_wrapper_subclass
        self: Self = made(cls, inner.shape, strides=strides, dtype=dtype)
        self.behind = inner
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # a class method, as torch's own
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def unwrapped(value: Any) -> Any:
            return value.behind if isinstance(value, cls) else value

        return func(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs or {}))


def pending(value: Tensor, delay_s: float = 0.05) -> AsyncCollectiveTensor:
    """What torch's functional collectives return: the value is there when it has been waited for."""
    arriving, future = torch.full_like(value, 77), torch.futures.Future[list[Tensor]]()

    def arrive() -> None:
        arriving.copy_(value)
        future.set_result([arriving])

    _c10d._register_work(arriving, _c10d._create_work_from_future(future))
    threading.Timer(delay_s, arrive).start()
    return AsyncCollectiveTensor(arriving)


def _freed(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


def _shortened(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    storage.resize_(storage.nbytes() - 1)
    return tensor


WITHOUT: dict[str, Callable[[Tensor], Any]] = {
    "FakeTensor": lambda tensor: FakeTensorMode().from_tensor(tensor),
    "stands for 2 tensors": lambda tensor: TwoTensor(tensor, tensor.clone()),
    "storage of 0 bytes": lambda tensor: _freed(tensor.clone()),
    "a storage of 0 bytes": lambda tensor: _freed(torch.cat([tensor, tensor])[len(tensor) :]),
    "has become too short": lambda tensor: _shortened(torch.cat([tensor, tensor])[len(tensor) :]),
    "never had any": lambda tensor: torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype),
    "has no memory": torch._to_functional_tensor,
    "not initialized": lambda tensor: UninitializedParameter(),
    "has no data": lambda tensor: tensor.to("meta"),
}
"""Tensors that no collective can work on, by what the error says."""
