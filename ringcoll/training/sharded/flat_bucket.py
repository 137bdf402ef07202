"""A bucket of a sharded optimizer: parameters end to end in a flat tensor, a shard for each rank.

::

    names   a.weight  a.bias  b.weight   padding
    flat    |---------|------|-----------|--|
    shards  |-------------|-------------|-------------|    of 3 ranks, all of one length

It knows where its parameters lie, whether they are whole on this rank, and how far their gradients
are. `ringcoll.training.sharded.sharded_buckets` says when it is reduced, gathered and freed.

Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023
(flat parameters, storage that is freed and allocated again under the same views).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ringcoll.runtime.collectives import as_group
from ringcoll.runtime.collectives import functions as api
from ringcoll.runtime.group import Work
from ringcoll.runtime.transport import lasting_zeros
from ringcoll.training.data.buckets import GradientBucket
from ringcoll.training.model_on_ranks import views_of


def _lasting(tensor: Tensor) -> Tensor:
    """A copy that lives long."""
    return lasting_zeros(tensor.numel(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


class FlatBucket(GradientBucket):
    """Parameters end to end in a flat tensor of k equal shards, and their gradients.

    The parameters become views of the flat tensor; ``master`` is what AdamW works on. The group,
    the stage and ``mixed`` are as for `ShardedAdamW`.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        group: Any,
        stage: int,
        mixed: torch.dtype | None,
    ) -> None:
        super().__init__(named)
        self.group, self.stage, self.device = group, stage, self.params[0].device
        rank, self.world_size = as_group(group).rank(), as_group(group).size()
        self.shard_numel = -(-self.numel // self.world_size)
        self.own = slice(rank * self.shard_numel, (rank + 1) * self.shard_numel)
        whole = self.laid_out([param.detach() for param in self.params], self.params[0].dtype)
        self.flat = whole if mixed is None else whole.to(mixed)
        if stage == 3:  # of the parameters; memory that comes and goes is not worth sharing
            self.shard = _lasting(self.flat[self.own])
        else:
            self.flat = _lasting(self.flat)
            self.shard = self.flat[self.own]
        self.master = self.shard
        if mixed is not None:
            self.master = whole[self.own].to(torch.float32, copy=True)
        nan = self.flat.new_full((), float("nan"))
        self.unreadable = [nan.expand(param.shape) for param in self.params]
        self.readable = views_of(self.flat, self.params)
        self._show(self.readable)
        self.is_whole = True  # whether all shards are in the flat tensor, or on their way
        self.gathering: Work | None = None
        self.num_calls = 0  # modules in their forward that use the parameters
        self.is_in_backward = False
        self.grad_shard: Tensor | None = None  # averaged over ranks
        self.reducing: Work | None = None

    def laid_out(self, tensors: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
        """Copy a tensor for each parameter into a new flat tensor, whose padding is zero."""
        flat = torch.zeros(self.shard_numel * self.world_size, dtype=dtype, device=self.device)
        for view, tensor in zip(views_of(flat, self.params), tensors, strict=True):
            view.copy_(tensor)
        return flat

    def own_shard(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Own shard of tensors by the parameters' names, in the dtype of the master copy."""
        whole = self.laid_out([tensors[name] for name in self.names], self.master.dtype)
        return whole[self.own].clone()

    def gathered(self, shard: Tensor) -> dict[str, Tensor]:
        """Gather shards of the master copy's length: whole tensors by the parameters' names."""
        whole = shard.new_empty(self.flat.numel())
        api.all_gather_single(whole, shard, self.group)
        return dict(zip(self.names, views_of(whole, self.params), strict=True))

    # --- parameters

    def gather(self) -> None:
        """Start the all-gather of the parameters, unless they are whole."""
        if self.is_whole:
            return
        if self.stage == 3:
            self.flat.untyped_storage().resize_(self.flat.nbytes)
            self._show(self.readable)
        self.gathering = api.all_gather_single(self.flat, self.shard, self.group, async_op=True)
        self.is_whole = True

    def wait_for_gather(self) -> None:
        """Wait until the parameters may be read, and their shard be written."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def free(self) -> None:
        """Give back the memory of the flat tensor; the parameters are NaN until it is gathered."""
        self.wait_for_gather()
        self._show(self.unreadable)  # reading freed memory would end the process
        # A tensor that autograd has saved for backward stays a view of the flat tensor.
        self.flat.untyped_storage().resize_(0)
        self.is_whole = self.is_in_backward = False

    def _show(self, tensors: Sequence[Tensor]) -> None:
        """Let the parameters be these tensors."""
        for param, tensor in zip(self.params, tensors, strict=True):
            param.data = tensor

    def publish(self) -> None:
        """Take over the parameters that AdamW has computed."""
        if self.master is not self.shard:
            self.shard.copy_(self.master)
        self.is_whole = False
        if self.stage == 3:
            self.free()
        else:
            self.gather()

    # --- gradients

    def new_grad(self) -> Tensor:
        """Memory for all gradients, with the padding; in stage 1 it lasts."""
        zeros = torch.zeros if self.stage > 1 else lasting_zeros
        return zeros(self.flat.numel(), dtype=self.flat.dtype, device=self.device)

    def launch(self, op: object) -> None:
        """Start the reduce-scatter of the gradients."""
        assert self.grad is not None
        self.grad_shard = self.grad[self.own] if self.stage == 1 else torch.empty_like(self.shard)
        self.reducing = api.reduce_scatter_single(
            self.grad_shard, self.grad, op, self.group, async_op=True
        )

    def settle(self) -> None:
        """Wait for the reduce-scatter; from stage 2 on only the shard is kept."""
        if self.reducing is not None:
            self.reducing.wait()
            self.reducing = None
            if self.stage > 1:
                self.grad, self.grad_views = None, []
                self._forget()

    def forget_gradients(self) -> None:
        """Let go of the gradients; stage 1 keeps the memory for the next step."""
        self.grad_shard = None
        self._forget()
        self.expect_gradients()

    def _forget(self) -> None:
        for param in self.params:
            param.grad = None
