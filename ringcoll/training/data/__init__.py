"""Data parallel: the samples of each rank, and the averages of the ranks' gradients.

==============  =================================================================
`samples`       digits and text, and who sees which samples
`average`       averages of gradients, parameter by parameter
`buckets`       gradients that travel together
`parallel`      data-parallel training in buckets, to read and to use
`compression`   compressed averages of gradients, with error feedback
`compressors`   the largest elements, numbers of 8 bits, low rank
`hooks`         both kinds of averages inside torch's DistributedDataParallel
==============  =================================================================

`ringcoll.ddp` is this folder.
"""

from ringcoll.training.data.average import average_gradients
from ringcoll.training.data.buckets import StepReport, assign_buckets
from ringcoll.training.data.hooks import HookOptions, all_reduce_hook
from ringcoll.training.data.parallel import BucketedDataParallel
from ringcoll.training.data.samples import (
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
