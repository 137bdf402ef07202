"""Data parallel: the averages of the ranks' gradients.

==============  =================================================================
`parallel`      averages parameter by parameter, and in buckets during backward
`hooks`         averages inside torch's DistributedDataParallel
==============  =================================================================

`ringcoll.ddp` is this folder, with the samples of each rank from `ringcoll.training.task`.
"""

from ringcoll.training.data.hooks import HookOptions, all_reduce_hook
from ringcoll.training.data.parallel import (
    BucketedDataParallel,
    StepReport,
    assign_buckets,
    average_gradients,
)
from ringcoll.training.task import (
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
