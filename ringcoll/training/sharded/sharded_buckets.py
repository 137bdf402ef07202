"""The buckets of a sharded optimizer: gradients go in, averaged shards come out.

`ShardedBuckets` takes the gradients as backward computes them, reduces full buckets at once, and
lets modules have their parameters. No optimizer is known here:
`ringcoll.training.sharded.optimizer` says what is done with the shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ringcoll.errors import BackwardError
from ringcoll.runtime.collectives import as_group
from ringcoll.training.arguments import require
from ringcoll.training.data.buckets import BucketsInOrder, assign_buckets
from ringcoll.training.model_on_ranks import begin_alike, check_dense
from ringcoll.training.sharded.flat_bucket import FlatBucket

_MOST_REDUCING = 2  # buckets on their way while the gradients of the next are computed

# --- parameters are whole when a module needs them -----------------------------------------

_Recent = tuple[FlatBucket | None, FlatBucket | None]  # the last two that were used


class ModuleHooks:
    """Lets modules gather their buckets before forward and, in stage 3, before backward.

    It remembers in which order modules use the buckets. In stage 3 those not in use are freed.
    """

    def __init__(self, buckets: Sequence[FlatBucket], stage: int, root: nn.Module) -> None:
        self._buckets, self._stage = buckets, stage
        self._recent: _Recent = (None, None)
        self._followers: dict[_Recent, FlatBucket] = {}  # the bucket that came next, last time
        root.register_forward_pre_hook(lambda *_: self._begin_forward())
        for module in root.modules():
            if any(param.requires_grad for param in module.parameters(recurse=False)):
                read = {id(param) for param in module.parameters()}
                used = [b for b in reversed(buckets) if not read.isdisjoint(map(id, b.params))]
                module.register_forward_pre_hook(partial(self._enter, used))
                if stage == 3:
                    module.register_forward_hook(partial(self._leave, used))

    def _begin_forward(self) -> None:
        """Forget the calls of an earlier forward, which may have failed."""
        self._recent = (None, None)
        for bucket in self._buckets:
            bucket.num_calls, bucket.is_in_backward = 0, False

    def _enter(self, buckets: Sequence[FlatBucket], *_: object, backward: bool = False) -> None:
        """Make the parameters of some buckets whole, and gather the next bucket ahead."""
        ahead = None
        for bucket in buckets:
            bucket.num_calls += not backward
            bucket.is_in_backward |= backward
            ahead = self._follower(bucket)
        if self._stage == 3:
            for bucket in self._buckets:
                is_used = bucket.num_calls or bucket.is_in_backward or bucket is ahead
                if bucket.is_whole and not is_used:
                    bucket.free()
        for bucket in buckets:
            bucket.gather()
        if ahead is not None:
            ahead.gather()
        for bucket in buckets:
            bucket.wait_for_gather()

    def _follower(self, bucket: FlatBucket) -> FlatBucket | None:
        """The bucket that was used next when these two were used last, forward or backward."""
        if bucket is not self._recent[-1]:
            self._followers[self._recent] = bucket
            self._recent = (self._recent[-1], bucket)
        return self._followers.get(self._recent)

    def _leave(self, buckets: Sequence[FlatBucket], _: object, __: object, outputs: object) -> None:
        """After a module's forward: its parameters may be freed until its backward begins."""
        for bucket in buckets:
            bucket.num_calls -= 1
        tensors: list[Any] = [item for item in tree_leaves(outputs) if isinstance(item, Tensor)]
        for tensor in tensors:  # torch has no types for this method
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._enter(buckets, backward=True))


# --- all buckets of a module ----------------------------------------------------------------


class ShardedBuckets(BucketsInOrder):
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
        self._syncing = True
        buckets = [
            FlatBucket([named[index] for index in indices], group, stage, mixed)
            for indices in assign_buckets(params, bucket_bytes, bucket_bytes)
        ]
        ModuleHooks(buckets, stage, module)
        known = weakref.ref(self)  # the hooks do not keep the optimizer's memory

        def arrived(number: int, index: int, param: Tensor) -> None:
            if (own := known()) is not None:
                own._arrived(own._buckets[number], index, param)

        self._watch(buckets, arrived)
        for bucket in buckets if stage == 3 else ():
            bucket.free()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward only add to this rank's own ``.grad``, whole in every stage.

        For the accumulation of gradients over several batches: all batches but the last are
        in such a block, on all ranks alike.
        """
        if self._has_gradients():
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
        self._launch_all()
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

    def _launch(self, bucket: FlatBucket, op: object) -> None:
        if self.stage > 1 and self._launched >= _MOST_REDUCING:
            self._buckets[self._launched - _MOST_REDUCING].settle()
        bucket.launch(op)

    def _require(self, argument: str, holds: bool, expected: object, got: object) -> None:
        rank = as_group(self.group).rank()
        require(holds, argument, "cannot be used", expected, got, rank)
