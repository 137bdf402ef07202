"""The state of a sharded optimizer: put together, taken apart, and its bytes counted.

A state that was put together (`gathered_state`) names whole parameters, so that it can be loaded
with other ranks, stages and buckets than it was saved with.

The *model states* are parameters, gradients and optimizer state; activations, buffers and
temporary memory are not among them. AdamW has two averages a parameter; in mixed precision, also a
master copy of the parameter, all three in float32. Stage 1 shards the optimizer state over k
ranks, stage 2 also the gradients, stage 3 also the parameters.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
SC 2020 (the term, the stages, figure 1).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ringcoll.training.checks import require
from ringcoll.training.sharded.flat_bucket import FlatBucket

_MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names of AdamW's averages
_WRONG = "cannot be used"


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


def storage_nbytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the memory of tensors; memory that several tensors share is counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def gathered_state(buckets: Sequence[FlatBucket], adamw: torch.optim.AdamW) -> dict[str, Any]:
    """Gather parameters and optimizer state; see `ShardedAdamW.state_dict`."""
    state: dict[str, Any] = {"step": 0, "parameters": {}} | {name: {} for name in _MOMENTS}
    for bucket in buckets:
        own = adamw.state.get(bucket.master, {})
        state["step"] = int(own.get("step", 0))
        state["parameters"] |= bucket.gathered(bucket.master)
        for moment in _MOMENTS:
            shard = own.get(moment, torch.zeros_like(bucket.master))
            state[moment] |= bucket.gathered(shard)
    return state


def load_state(
    buckets: Sequence[FlatBucket], adamw: torch.optim.AdamW, state: Mapping[str, Any], rank: int
) -> None:
    """Take a rank's shards from a state; see `ShardedAdamW.load_state_dict`."""
    wanted = {
        name: tuple(param.shape)
        for bucket in buckets
        for name, param in zip(bucket.names, bucket.params, strict=True)
    }
    kinds = ("parameters", *_MOMENTS)
    keys = {"step", *kinds}
    require(keys <= set(state), "state", _WRONG, sorted(keys), sorted(state), rank)
    for kind in kinds:
        shapes = {name: tuple(tensor.shape) for name, tensor in state[kind].items()}
        for name in wanted | shapes:
            expected, got = wanted.get(name, "nothing"), shapes.get(name, "nothing")
            require(expected == got, "state", _WRONG, f"{kind}, {name}: {expected}", got, rank)
    for bucket in buckets:
        bucket.wait_for_gather()
        bucket.master.copy_(bucket.own_shard(state["parameters"]))
        step = torch.tensor(float(state["step"]), device="cpu")
        own = {moment: bucket.own_shard(state[moment]) for moment in _MOMENTS}
        adamw.state[bucket.master] = {"step": step} | own
        bucket.publish()


def held_states(buckets: Sequence[FlatBucket], adamw: torch.optim.AdamW) -> ModelStates:
    """Measure the memory that a rank holds, in bytes; see `ShardedAdamW.memory`."""
    masters = [bucket.master for bucket in buckets if bucket.master is not bucket.shard]
    states = [state.values() for state in adamw.state.values()]
    grads = [(bucket.grad, bucket.grad_shard) for bucket in buckets]
    own_grads = [param.grad for bucket in buckets for param in bucket.params]
    return ModelStates(
        storage_nbytes(tensor for bucket in buckets for tensor in (bucket.flat, bucket.shard)),
        storage_nbytes([*own_grads, *(grad for pair in grads for grad in pair)]),
        storage_nbytes([*masters, *(tensor for values in states for tensor in values)]),
    )
