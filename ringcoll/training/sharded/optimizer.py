"""The sharded optimizer (ZeRO): each rank keeps a share of what plain data parallelism repeats.

Problem: in plain data-parallel training every rank holds all parameters, gradients and optimizer
state, and computes the same optimizer step. The all-reduce of the gradients is a reduce-scatter
and an all-gather. Between the two, rank r can do the step of shard r alone, if the all-gather
then moves parameters instead of gradients: the same bytes on the wire, and 1/k of the state.

::

    plain      gradients --all-reduce------> AdamW of everything
    sharded    gradients --reduce-scatter--> AdamW of the shard --all-gather--> parameters

=====  =============================================  ===================  ==================
stage  on each rank                                   bytes a parameter,   bytes a parameter,
                                                      bfloat16 + float32   float32
=====  =============================================  ===================  ==================
plain  everything                                     16                   16
1      1/k of the optimizer state                     4 + 12/k             8 + 8/k
2      and 1/k of the gradients                       2 + 14/k             4 + 12/k
3      and 1/k of the parameters                      16/k                 16/k
=====  =============================================  ===================  ==================

These bytes are the *model states*, without activations, buffers and temporary memory: AdamW has two
averages a parameter and, in mixed precision, a master copy of it, all three in float32.

A *bucket* is a flat tensor of several parameters, padded to a multiple of k; its *shards* are k
equal pieces, and rank r owns piece r. The parameters of the module become views of the buckets.

::

    backward        a bucket whose last gradient has arrived is reduce-scattered at once
    step            bucket by bucket, the first layers first: AdamW on the own shard, and in stages
                    1 and 2 its all-gather starts, while AdamW works on the next bucket
    next forward    a module waits for the buckets of its own parameters, not for others

In stage 3 a module gathers its buckets before its forward and before its backward. The bucket that
followed the last time is gathered ahead, and buckets that are no longer used are freed.

Cost: per step a rank sends (k-1)/k of the bytes of all gradients in the reduce-scatter, and as much
of the parameters in the all-gather: together as much as a ring all-reduce. Stage 3 gathers twice.

::

    optimizer = ShardedAdamW(model, stage=2, lr=1e-3)  # rank 0's parameters go to all ranks
    for inputs, targets in batches:                    # of this rank
        loss(model(inputs), targets).backward()        # buckets leave as they fill
        optimizer.step()                               # and forgets the gradients

Assumptions:

- A module reads its own parameters. A module that has parameters itself may also read those of
  the modules beneath it without calling these (as ``nn.MultiheadAttention`` does), so that it gets
  all of them. Code that reads parameters elsewhere calls `ShardedAdamW.gather` first.
- In stage 3 all ranks call the same modules in the same order, since a call may gather; otherwise
  `MismatchError` is raised. In stages 1 and 2 a rank may leave out modules.
- A parameter without a gradient counts as zeros, and decays; ``torch.optim.AdamW`` passes over it.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
SC 2020 (stages, bytes, figure 1); Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded
Data Parallel", VLDB 2023 (flat parameters, freed storage, gathering ahead); Loshchilov and Hutter,
"Decoupled Weight Decay Regularization", ICLR 2019 (AdamW).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ringcoll.runtime.collectives import functions as api
from ringcoll.training.data.buckets import BUCKET_BYTES
from ringcoll.training.model_on_ranks import storage_nbytes
from ringcoll.training.sharded.sharded_buckets import ShardedBuckets

_MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names of AdamW's averages


@dataclass(frozen=True, slots=True)
class ModelStates:
    """Bytes of what is trained on a rank; the master copy counts as optimizer."""

    parameters: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Bytes of all three."""
        return self.parameters + self.gradients + self.optimizer


def model_state_bytes(
    numel: int,
    world_size: int,
    stage: int,
    *,
    dtype: torch.dtype = torch.float32,
    mixed: torch.dtype | None = None,
) -> ModelStates:
    """Bytes a rank that the ZeRO paper predicts for training with AdamW (its figure 1).

    Parameters
    ----------
    numel
        Number of elements of all parameters together.
    stage
        0 for plain data parallelism, or 1, 2, 3.
    dtype
        Dtype of the parameters, if ``mixed`` is ``None``.
    mixed
        As for `ShardedAdamW`.

    Examples
    --------
    >>> import torch
    >>> [model_state_bytes(1, 4, stage, mixed=torch.bfloat16).total for stage in range(4)]
    [16.0, 7.0, 5.5, 4.0]
    """
    itemsize = (dtype if mixed is None else mixed).itemsize
    optimizer = 2 * dtype.itemsize if mixed is None else 3 * torch.float32.itemsize
    ranks = [world_size if stage >= first else 1 for first in (3, 2, 1)]
    kinds = zip((itemsize, itemsize, optimizer), ranks, strict=True)
    return ModelStates(*(numel * nbytes / sharing for nbytes, sharing in kinds))


class ShardedAdamW(ShardedBuckets):
    """AdamW that shards optimizer state, gradients and parameters over the ranks.

    After `step` all ranks have the same parameters to the last bit. They are those that
    ``torch.optim.AdamW`` computes on one process from the averaged gradients, up to the rounding
    of the average.

    Stages 2 and 3 hold at most three buckets of whole gradients at a time (more if a parameter of
    an early bucket is unused). Stage 3 holds the buckets of parameters that are in use, and the
    bucket that is gathered ahead; all other parameters of the module have no memory, and read as
    NaN until `gather`. In stage 1 the module's ``.grad`` is whole, but it is the average over
    ranks only in the own shards; in stages 2 and 3 it goes as soon as it is reduced.

    Learning-rate schedules work on ``.adamw``, the ``torch.optim.AdamW`` of this rank's shards.
    ``.last_norm`` is the global norm of the last step's averaged gradients before clipping.

    Parameters
    ----------
    module
        Module; it has the same parameters on all ranks, of any shapes. Its parameters and buffers
        become rank 0's. Parameters that need no gradient stay whole on every rank, the others are
        floating point.
    stage
        What is divided among the ranks, beside the optimizer's state. 1: nothing more; 2:
        gradients, too; 3: gradients and parameters.
    lr, betas, eps, weight_decay
        As for ``torch.optim.AdamW``.
    bucket_bytes
        Bytes of parameters with which a bucket is complete.
    max_norm
        Largest global norm of the averaged gradients; longer ones are scaled down as by
        ``torch.nn.utils.clip_grad_norm_``. ``None`` for no limit.
    mixed
        Dtype of parameters and gradients, for example ``torch.bfloat16``, beside a master copy of
        the own shard in float32 that AdamW works on. ``None``: AdamW works on the parameters.
        Gradients of 16 bits are sent, and added up, in float32.
    weight
        As for `ringcoll.training.average_gradients`. It is read anew when the first bucket of a
        step is full: set ``.weight``, or write into the tensor, before backward.

    Examples
    --------
    >>> import torch, ringcoll
    >>> models = [torch.nn.Linear(2, 1, bias=False) for _ in range(3)]
    >>> def rank_main(group):
    ...     model = models[group.rank()]
    ...     optimizer = ShardedAdamW(model, group, stage=3)
    ...     model(torch.full((1, 2), group.rank() + 1.0)).sum().backward()
    ...     optimizer.step()
    ...     return optimizer.state_dict()["parameters"]["weight"].tolist()
    >>> first, *others = ringcoll.run_threads(rank_main, 3)
    >>> others == [first, first]
    True
    """

    def __init__(
        self,
        module: nn.Module,
        group: Any = None,
        *,
        stage: int = 2,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        bucket_bytes: int = BUCKET_BYTES,
        max_norm: float | None = None,
        mixed: torch.dtype | None = None,
        weight: float | Tensor | None = None,
    ) -> None:
        self.group = group
        self._require("max_norm", max_norm is None or max_norm > 0, "> 0, or None", max_norm)
        super().__init__(
            module, group, stage=stage, bucket_bytes=bucket_bytes, mixed=mixed, weight=weight
        )
        self.max_norm = max_norm
        self.last_norm: float | None = None
        self.adamw = torch.optim.AdamW(
            [bucket.master for bucket in self._buckets], lr, betas, eps, weight_decay
        )

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters by the averaged gradients, and forget the gradients.

        All-gathers are on their way when it returns: call `gather` before the group is closed.
        """
        self.finish()
        factor = None if self.max_norm is None else self._clip_factor(self.max_norm)
        # AdamW counts its steps in a tensor on the default device.
        is_elsewhere = torch.get_default_device().type != "cpu"
        for bucket in reversed(self._buckets):
            assert bucket.grad_shard is not None
            grad = bucket.grad_shard.to(bucket.master.dtype)
            bucket.master.grad = grad if factor is None else grad.mul_(factor)
            with torch.device("cpu") if is_elsewhere else nullcontext():
                self.adamw.step()  # of this bucket: no other master has a gradient
            bucket.master.grad = None
            bucket.forget_gradients()
            bucket.publish()
        self._begin_step()

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Gather parameters and optimizer state, whole, on every rank; all ranks have to call it.

        ``"step"`` is the number of steps; ``"parameters"`` (master copies, if they exist),
        ``"exp_avg"`` and ``"exp_avg_sq"`` have a tensor by the parameter's name. The state is the
        same on all ranks, and can be loaded with other ranks, stages and buckets. Buffers and
        frozen parameters are the module's.
        """
        state: dict[str, Any] = {"step": 0, "parameters": {}} | {name: {} for name in _MOMENTS}
        for bucket in self._buckets:
            own = self.adamw.state.get(bucket.master, {})
            state["step"] = int(own.get("step", 0))
            state["parameters"] |= bucket.gathered(bucket.master)
            for moment in _MOMENTS:
                shard = own.get(moment, torch.zeros_like(bucket.master))
                state[moment] |= bucket.gathered(shard)
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this rank's shards from a state; all ranks have to load the same state.

        Names or shapes that are not those of the module raise `ArgumentError`; nothing is changed.
        """
        params = [pair for b in self._buckets for pair in zip(b.names, b.params, strict=True)]
        wanted = {name: tuple(param.shape) for name, param in params}
        kinds = ("parameters", *_MOMENTS)
        keys = {"step", *kinds}
        self._require("state", keys <= state.keys(), sorted(keys), sorted(state))
        for kind in kinds:
            shapes = {name: tuple(tensor.shape) for name, tensor in state[kind].items()}
            for name in wanted | shapes:
                expected, got = wanted.get(name, "nothing"), shapes.get(name, "nothing")
                self._require("state", expected == got, f"{kind}, {name}: {expected}", got)
        for bucket in self._buckets:
            bucket.wait_for_gather()
            bucket.master.copy_(bucket.own_shard(state["parameters"]))
            step = torch.tensor(state["step"], dtype=torch.float64, device="cpu")
            own = {moment: bucket.own_shard(state[moment]) for moment in _MOMENTS}
            self.adamw.state[bucket.master] = {"step": step} | own
            bucket.publish()

    def memory(self) -> ModelStates:
        """Measure the bytes that this rank holds, with the padding, to compare with the formula.

        The gradients exist between the first backward and the end of `step`: call it after
        `finish`, when no bucket is on its way. Buffers and frozen parameters are not counted.
        """
        buckets, states = self._buckets, self.adamw.state.values()
        masters = [bucket.master for bucket in buckets if bucket.master is not bucket.shard]
        grads = [
            grad for b in buckets for grad in (b.grad, b.grad_shard, *(p.grad for p in b.params))
        ]
        return ModelStates(
            storage_nbytes(tensor for bucket in buckets for tensor in (bucket.flat, bucket.shard)),
            storage_nbytes(grads),
            storage_nbytes([*masters, *(tensor for state in states for tensor in state.values())]),
        )

    def _clip_factor(self, max_norm: float) -> float:
        """Factor that shortens the gradients to the largest norm, the same on all ranks."""
        shards: list[Any] = [bucket.grad_shard for bucket in self._buckets]
        norms = [torch.linalg.vector_norm(shard, dtype=torch.float64) for shard in shards]
        square = torch.stack(norms).square().sum()
        api.all_reduce(square, group=self.group)
        self.last_norm = float(square.sqrt())
        return min(max_norm / (self.last_norm + 1e-6), 1.0)  # 1e-6 as in torch
