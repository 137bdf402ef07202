"""Parameters are whole when a module needs them: hooks on the modules of a `ShardedAdamW`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ringcoll.training.sharded.flat_bucket import FlatBucket

_Recent = tuple[FlatBucket | None, FlatBucket | None]
"""The last two buckets that were used; ``None`` before the first."""


class ModuleHooks:
    """Lets modules gather their buckets before forward and, in stage 3, before backward.

    It remembers in which order the modules use the buckets, of which the last parameters are in the
    first. In stage 3 buckets that are not used are freed.
    """

    def __init__(self, buckets: Sequence[FlatBucket], stage: int) -> None:
        self._buckets, self.stage = buckets, stage
        self._recent: _Recent = (None, None)
        self._followers: dict[_Recent, FlatBucket] = {}  # the bucket that came next, last time

    def _begin_forward(self) -> None:
        """Forget the calls of an earlier forward, which may have failed."""
        self._recent = (None, None)
        for bucket in self._buckets:
            bucket.num_calls, bucket.is_in_backward = 0, False

    def watch(self, root: nn.Module) -> None:
        """Let each module that has parameters get them before its forward and its backward."""
        root.register_forward_pre_hook(lambda *_: self._begin_forward())
        for module in root.modules():
            if any(param.requires_grad for param in module.parameters(recurse=False)):
                read = {id(param) for param in module.parameters()}
                buckets = [
                    bucket
                    for bucket in reversed(self._buckets)
                    if any(id(param) in read for param in bucket.params)
                ]
                module.register_forward_pre_hook(partial(self._enter, buckets))
                if self.stage == 3:
                    module.register_forward_hook(partial(self._leave, buckets))

    def _enter(self, buckets: Sequence[FlatBucket], *_: object, backward: bool = False) -> None:
        """Make the parameters of some buckets whole, and gather the next bucket ahead."""
        ahead = None
        for bucket in buckets:
            bucket.num_calls += not backward
            bucket.is_in_backward |= backward
            ahead = self._follower(bucket)
        if self.stage == 3:
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
