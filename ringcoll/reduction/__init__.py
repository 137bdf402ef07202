"""Reduction operators: what ``(+)`` means for a dtype, and in which dtype it is done.

`resolve` turns an operator and a dtype into a `Reduction`. Arithmetic on 16-bit
and 8-bit floats runs in float32, and is sent as such unless a narrower wire dtype is
asked for: eight times 60000 is already infinite in float16.

Integers wrap around, as in torch. Unsigned types that torch cannot add go
through views or wider types. For bool, SUM and MAX are *or*, PRODUCT and MIN are
*and*, as in torch's NCCL backend.
"""

from ringcoll.reduction.engine import TORCH, Engine, TorchEngine
from ringcoll.reduction.operators import (
    Operator,
    Reduction,
    UserOp,
    as_operator,
    premul_sum,
    resolve,
)

__all__ = [
    "TORCH",
    "Engine",
    "Operator",
    "Reduction",
    "TorchEngine",
    "UserOp",
    "as_operator",
    "premul_sum",
    "resolve",
]
