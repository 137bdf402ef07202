"""Averages of gradients: `averages` after backward, `bucketed` during it, `hooks` in torch's DDP.

`ringcoll.ddp` is this folder, with the samples of each rank from `ringcoll.training.examples`.
"""

from ringcoll.training.data.averages import average_gradients
from ringcoll.training.data.bucketed import BucketedDataParallel, StepReport
from ringcoll.training.data.buckets import assign_buckets
from ringcoll.training.data.hooks import HookOptions, all_reduce_hook
from ringcoll.training.examples import (
    Examples,
    Text,
    batches,
    load_digits,
    load_text,
    text_examples,
    windows,
)

__all__ = [
    "BucketedDataParallel", "Examples", "HookOptions", "StepReport", "Text", "all_reduce_hook",
    "assign_buckets", "average_gradients", "batches", "load_digits", "load_text", "text_examples",
    "windows",
]  # fmt: skip
