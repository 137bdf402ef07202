"""Programs that fail on any process group in Python."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.support.users.models import mlp, state, train


def builtin_float16(rank: int, world_size: int) -> dict[str, Tensor]:
    """DDP's compressing hook in C++ takes futures of C++ only; `fp16_compress_hook` works."""
    model: Any = DistributedDataParallel(mlp())
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    train(model, model.parameters(), rank)
    return state(model)
