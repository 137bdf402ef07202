"""The state of a sharded optimizer: put together, taken apart, and counted.

A state that was put together (`gathered_state`) names whole parameters, so that it can be loaded
with other ranks, stages and buckets than it was saved with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ringcoll.training.checks import require
from ringcoll.training.flat_bucket import FlatBucket
from ringcoll.training.state_bytes import ModelStates, storage_nbytes

__all__ = ["gathered_state", "held_states", "load_state"]

_MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names of AdamW's averages
_WRONG = "cannot be used"


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
    buckets: Sequence[FlatBucket],
    adamw: torch.optim.AdamW,
    state: Mapping[str, Any],
    rank: int,
) -> None:
    """Take a rank's shards from a state; see `ShardedAdamW.load_state_dict`."""
    wanted = {
        name: tuple(shape)
        for bucket in buckets
        for name, shape in zip(bucket.names, bucket.shapes, strict=True)
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
        own = {moment: bucket.own_shard(state[moment]) for moment in _MOMENTS}
        adamw.state[bucket.master] = {
            "step": torch.tensor(float(state["step"]), device="cpu"),
            **own,
        }
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
