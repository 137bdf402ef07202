"""Reduction operators: what ``(+)`` means for a dtype, and in which dtype it is computed.

`resolve` binds an operator to a dtype, which is a `Reduction`. 16-bit and 8-bit floats are added
and multiplied in float32, and partial results travel in float32 unless the call asks for a narrower
wire dtype: eight times 60000 is already infinite in float16.

Integers wrap around, as in torch. torch cannot add all unsigned dtypes: their bits are viewed as
signed numbers, or converted to a wider dtype. For bool, SUM and MAX are *or*, PRODUCT and MIN are
*and*, as in torch's NCCL backend.

==============  =========================================================
`names`         the names of operators; without torch
`operators`     operators, and for each dtype the dtype in which it is computed
`engine`        the engine that computes with torch's operators, also to predict a result
`gpu`           kernels for CUDA tensors, and the engine that computes with them
`reproducible`  reductions whose bits depend on the inputs only
`user_code`     what a function of a user computes, for ranks to compare
==============  =========================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
