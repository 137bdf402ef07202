"""The buckets of a sharded optimizer: gradients go in, averaged shards come out.

`ringcoll.training.sharded.optimizer` says when buckets are reduced, gathered and freed. Here is the
part that no optimizer has to know: hooks take the gradients as backward computes them, full buckets
are reduced at once, and modules get their parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from ringcoll.collectives import as_group
from ringcoll.errors import BackwardError
from ringcoll.training.checks import check_dense, require
from ringcoll.training.data.buckets import assign_buckets
from ringcoll.training.data.parallel import Weighing
from ringcoll.training.flat import begin_alike
from ringcoll.training.sharded.flat_bucket import FlatBucket
from ringcoll.training.sharded.gather_ahead import ModuleHooks

_MOST_REDUCING = 2  # buckets on their way while the gradients of the next are computed


class ShardedBuckets:
    """The parameters of a module in buckets; arguments and errors are those of `ShardedAdamW`."""

    def __init__(
        self,
        module: nn.Module,
        group: Any,
        *,
        stage: int,
        bucket_bytes: int,
        mixed: torch.dtype | None,
        weight: float | Tensor | None,
    ) -> None:
        self.group, self.stage, self.weight = group, stage, weight
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
        params = [param for _, param in named]
        self._buckets = [
            FlatBucket([named[index] for index in indices], group, stage, mixed)
            for indices in assign_buckets(params, bucket_bytes, bucket_bytes)
        ]
        self._syncing = True
        self.begin()
        ModuleHooks(self._buckets, stage).watch(module)
        for bucket in self._buckets:
            bucket.watch(partial(self._arrived, bucket))
            if stage == 3:
                bucket.free()

    def begin(self) -> None:
        """Begin a step: no bucket of it is on its way."""
        self._launched = 0
        self._weighing: Weighing | None = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward only add to this rank's own ``.grad``, whole in every stage.

        For the accumulation of gradients over several batches: all batches but the last are
        in such a block, on all ranks alike.
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
        """Wait until this rank has its shards of the averaged gradients; `step` begins with it."""
        for bucket in self._buckets[self._launched :]:
            bucket.take_missing()
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

    def _arrived(self, bucket: FlatBucket, index: int, param: Tensor) -> None:
        """Let a bucket take a parameter's gradient, which backward has computed."""
        assert param.grad is not None
        check_dense(param.grad, bucket.names[index])
        if self._syncing:
            bucket.accept(index, "step()")
        bucket.missing.discard(index)
        if bucket.missing:
            return
        if self.stage == 3:
            bucket.free()
        if self._syncing:
            self._launch_full()
        else:
            bucket.expect_gradients()

    def _launch_full(self) -> None:
        """Reduce full buckets, in their order, up to the first bucket that is not full."""
        if self._weighing is None and self.weight is not None:
            self._weighing = Weighing(self.weight, self.group)
        waiting = self._buckets[self._launched :]
        for bucket in takewhile(lambda bucket: not bucket.missing, waiting):
            if self.stage > 1 and self._launched >= _MOST_REDUCING:
                self._buckets[self._launched - _MOST_REDUCING].settle()
            if self._weighing is None:
                bucket.launch()
            else:
                assert bucket.grad is not None
                weighing, self._weighing = (
                    self._weighing,
                    None,
                )  # weights that are refused may be mended
                op = weighing.weigh(bucket.grad)
                self._weighing = weighing
                bucket.launch(op)
            self._launched += 1

    def _require(self, argument: str, holds: bool, expected: object, got: object) -> None:
        rank = as_group(self.group).rank()
        require(holds, argument, "cannot be used", expected, got, rank)
