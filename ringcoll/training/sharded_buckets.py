"""The buckets of a sharded optimizer: gradients go in, averaged shards come out.

`ringcoll.training.sharded` says when buckets are reduced, gathered and freed. Here is the part that
no optimizer has to know: hooks take the gradients as backward computes them, full buckets are
reduced at once, and modules get their parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ringcoll.collectives.groups import as_group
from ringcoll.errors import ArgumentError, BackwardError
from ringcoll.training.checks import check_dense
from ringcoll.training.flat import begin_alike
from ringcoll.training.flat_bucket import FlatBucket
from ringcoll.training.gather_ahead import gather_for_modules
from ringcoll.training.gradient_buckets import assign_buckets

__all__ = ["BUCKET_BYTES", "ShardedBuckets"]

BUCKET_BYTES = 25 << 20
"""Bytes of parameters of a bucket, as in torch's DistributedDataParallel."""

_MOST_REDUCING = 2  # buckets on their way while the gradients of the next are computed


class ShardedBuckets:
    """The parameters of a module in buckets, of which each rank owns a shard.

    Parameters
    ----------
    module, group, stage, bucket_bytes, mixed
        As for `ringcoll.training.sharded.ShardedAdamW`.

    Raises
    ------
    ArgumentError
        As for `ShardedAdamW`.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Any,
        *,
        stage: int,
        bucket_bytes: int,
        mixed: torch.dtype | None,
    ) -> None:
        self.group, self.stage = group, stage
        self._require("stage", stage in (1, 2, 3), "1, 2 or 3", stage)
        self._require("bucket_bytes", bucket_bytes > 0, "> 0", bucket_bytes)
        is_float = mixed is None or mixed.is_floating_point
        self._require("mixed", is_float, "a floating-point dtype, or None", mixed)
        named = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
        self._require("module", bool(named), "parameters that need a gradient", "none")
        for name, param in named:
            wanted = f"a floating-point dtype of parameter {name}"
            self._require("module", param.is_floating_point(), wanted, param.dtype)
        begin_alike(module, group)
        for param in module.parameters() if mixed is not None else ():
            if param.is_floating_point() and not param.requires_grad:
                param.data = param.data.to(mixed)
        # The last parameters are in the first bucket, as backward finds them.
        buckets = assign_buckets([param for _, param in named], bucket_bytes, bucket_bytes)
        self._buckets = [
            FlatBucket([named[index] for index in indices], group, stage, mixed)
            for indices in buckets
        ]
        self._syncing = True
        self.begin()
        gather_for_modules(module, self._buckets, stage)
        for bucket in self._buckets:
            for index in range(len(bucket.params)):
                self._watch_gradient(bucket, index)
            if stage == 3:
                bucket.free()

    def begin(self) -> None:
        """Begin a step: no bucket of it is on its way."""
        self._launched = 0

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward only add to this rank's own ``.grad``, whole in every stage.

        For the accumulation of gradients over several batches: all batches but the last are
        in such a block, on all ranks alike.

        Raises
        ------
        BackwardError
            Gradients of an earlier backward wait for `step`.
        """
        if any(len(bucket.missing) < len(bucket.params) for bucket in self._buckets):
            raise BackwardError("call step() after each backward that is not in no_sync()")
        self._syncing = False
        try:
            yield
        finally:
            self._syncing = True
            for bucket in self._buckets:
                bucket.expect_gradients()

    def finish(self) -> None:
        """Wait until this rank has its shards of the averaged gradients; `step` begins with it.

        Raises
        ------
        RingcollError
            A reduce-scatter or an all-gather failed.
        """
        for bucket in self._buckets[self._launched :]:
            for index in tuple(bucket.missing):
                bucket.take(index)
        self._launch_full()
        for bucket in self._buckets:
            bucket.wait_for_gather()
            bucket.settle()
            if self.stage == 3:
                bucket.free()

    def gather(self) -> None:
        """Make all parameters of the module whole, for reading until the next forward or step."""
        for bucket in reversed(self._buckets):
            bucket.gather()
        for bucket in self._buckets:
            bucket.wait_for_gather()

    def _watch_gradient(self, bucket: FlatBucket, index: int) -> None:
        """Let a bucket take a parameter's gradient when backward has computed it."""

        def arrived(param: Tensor) -> None:
            assert param.grad is not None
            check_dense(param.grad, bucket.names[index])
            if self._syncing:
                if index not in bucket.missing:
                    raise BackwardError(
                        f"a second gradient of {bucket.names[index]} arrived; "
                        "call step() after each backward, or use no_sync()"
                    )
                bucket.take(index)
            bucket.missing.discard(index)
            if bucket.missing:
                return
            if self.stage == 3:
                bucket.free()
            if self._syncing:
                self._launch_full()
            else:
                bucket.expect_gradients()

        param: Any = bucket.params[index]  # torch has no types for this method
        param.register_post_accumulate_grad_hook(arrived)

    def _launch_full(self) -> None:
        """Reduce full buckets, in their order, up to the first bucket that is not full."""
        for bucket in self._buckets[self._launched :]:
            if bucket.missing:
                break
            if self.stage > 1 and self._launched >= _MOST_REDUCING:
                self._buckets[self._launched - _MOST_REDUCING].settle()
            bucket.launch()
            self._launched += 1

    def _require(self, argument: str, holds: bool, expected: object, got: object) -> None:
        """Raise unless an argument is as it has to be."""
        if not holds:
            rank = as_group(self.group).rank()
            raise ArgumentError(
                "cannot be used", rank=rank, argument=argument, expected=expected, got=got
            )
