"""Users of sharded training and of checkpoints: FSDP, HSDP, ZeRO, DCP."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import Shard as Piece
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.programs.users.harness import folder
from tests.programs.users.models import batch, mlp, state, train

_CPU = torch.device("cpu")


# --- FullyShardedDataParallel ---------------------------------------------------------


def _fsdp(rank: int, strategy: ShardingStrategy, **options: Any) -> dict[str, Tensor]:
    model: Any = FullyShardedDataParallel(
        mlp(),
        sharding_strategy=strategy,
        device_id=_CPU,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        **options,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(batch(rank, step)).square().mean()
        loss.backward()
        norm = model.clip_grad_norm_(1.0)
        optimizer.step()
        losses += [loss.detach().float(), norm.detach().float()]
    everything = FullStateDictConfig(offload_to_cpu=False, rank0_only=False)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, everything):
        found = dict(model.state_dict())
    moments = FullyShardedDataParallel.full_optim_state_dict(model, optimizer, rank0_only=False)
    for name, entry in moments["state"].items():
        found[f"moment {name}"] = entry["exp_avg"]
    return {**found, "losses": torch.stack(losses)}


def fsdp_full_shard(rank: int, world_size: int) -> dict[str, Tensor]:
    """Parameters, gradients and optimizer state are sharded."""
    return _fsdp(rank, ShardingStrategy.FULL_SHARD)


def fsdp_original_parameters(rank: int, world_size: int) -> dict[str, Tensor]:
    """The same, with the parameters as the user made them."""
    return _fsdp(rank, ShardingStrategy.FULL_SHARD, use_orig_params=True)


def fsdp_grad_op(rank: int, world_size: int) -> dict[str, Tensor]:
    """Gradients and optimizer state are sharded."""
    return _fsdp(rank, ShardingStrategy.SHARD_GRAD_OP)


def fsdp_bfloat16(rank: int, world_size: int) -> dict[str, Tensor]:
    """Computed, and gathered, in bfloat16; gradients are summed in float32."""
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return _fsdp(rank, ShardingStrategy.FULL_SHARD, mixed_precision=precision)


def fsdp_hybrid(rank: int, world_size: int) -> dict[str, Tensor]:
    """Sharded over pairs, replicated over the pairs."""
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
    return _fsdp(rank, ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)


# --- fully_shard ----------------------------------------------------------------------


def _full(tensor: Any) -> Tensor:
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full


def _fully_sharded(rank: int, **options: Any) -> dict[str, Tensor]:
    model: Any = mlp()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(batch(rank, step)).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses += [loss.detach().float(), _full(norm).detach().float()]
    found = {name: _full(value) for name, value in state(model).items()}
    return {**found, "losses": torch.stack(losses)}


def fully_sharded(rank: int, world_size: int) -> dict[str, Tensor]:
    """Every layer by itself; the average is the collective's own."""
    return _fully_sharded(rank)


def fully_sharded_kept(rank: int, world_size: int) -> dict[str, Tensor]:
    """Parameters stay gathered after the forward pass."""
    return _fully_sharded(rank, reshard_after_forward=False)


def fully_sharded_bfloat16(rank: int, world_size: int) -> dict[str, Tensor]:
    """Computed, and gathered, in bfloat16; gradients are summed in float32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return _fully_sharded(rank, mp_policy=policy)


def fully_sharded_hybrid(rank: int, world_size: int) -> dict[str, Tensor]:
    """Sharded over pairs, replicated over the pairs."""
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("replicate", "shard"))
    return _fully_sharded(rank, mesh=mesh)


def fully_sharded_accumulated(rank: int, world_size: int) -> dict[str, Tensor]:
    """Gradients are accumulated without communication, and multiplied before they are summed."""
    model: Any = mlp()
    fully_shard(model)
    model.set_gradient_divide_factor(3.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        model.set_requires_gradient_sync(step % 2 == 1)
        model(batch(rank, step)).square().mean().backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return {name: _full(value) for name, value in model.named_parameters()}


def accumulated_alone(rank: int, world_size: int) -> dict[str, Tensor]:
    """What `fully_sharded_accumulated` should give; gloo has no such operator."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        for peer in range(world_size):
            (model(batch(peer, step)).square().mean() / 3).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return dict(model.named_parameters())


# --- ZeroRedundancyOptimizer ----------------------------------------------------------


def _zero(rank: int, world_size: int, **options: Any) -> dict[str, Tensor]:
    model: Any = DistributedDataParallel(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.05, **options)
    losses = train(model, model.parameters(), rank, optimizer=optimizer)
    optimizer.consolidate_state_dict(to=world_size - 1)
    found = {**state(model), "losses": torch.stack(losses)}
    if rank == world_size - 1:
        for name, entry in optimizer.state_dict()["state"].items():
            found[f"moment {name}"] = entry["exp_avg"]
    return found


def zero_redundancy(rank: int, world_size: int) -> dict[str, Tensor]:
    """Each rank updates some of the parameters, and broadcasts them."""
    return _zero(rank, world_size)


def zero_redundancy_buckets(rank: int, world_size: int) -> dict[str, Tensor]:
    """The same, with the parameters in buckets."""
    return _zero(rank, world_size, parameters_as_bucket_view=True)


# --- distributed checkpoints ----------------------------------------------------------


def _sharded_model(world_size: int, seed: int) -> Any:
    model: Any = mlp(seed=seed)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    return model


def checkpoint(rank: int, world_size: int) -> dict[str, Tensor]:
    """Saved by one model and optimizer, loaded by others."""
    model = _sharded_model(world_size, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, model.parameters(), rank, optimizer=optimizer)
    saved: dict[str, Any] = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    other = _sharded_model(world_size, 2)
    loaded: dict[str, Any] = {"model": get_model_state_dict(other), "optimizer": {"state": {}}}
    for name, entry in saved["optimizer"]["state"].items():
        loaded["optimizer"]["state"][name] = {"exp_avg": torch.zeros_like(entry["exp_avg"])}
    with folder() as path:
        dcp.save(saved, checkpoint_id=path)
        dcp.load(loaded, checkpoint_id=path)
    set_model_state_dict(other, loaded["model"])
    found = {name: _full(value) for name, value in other.named_parameters()}
    for name, entry in loaded["optimizer"]["state"].items():
        found[f"moment {name}"] = _full(entry["exp_avg"])
    return found


def checkpoint_placed_otherwise(rank: int, world_size: int) -> dict[str, Tensor]:
    """Saved by rows, unevenly, and loaded by columns and whole."""
    mesh = init_device_mesh("cpu", (world_size,))
    rows = distribute_tensor(torch.arange(77.0).reshape(7, 11), mesh, [Shard(0)])
    loaded: dict[str, Any] = {}
    columns = distribute_tensor(torch.zeros(7, 11), mesh, [Shard(1)])
    whole = distribute_tensor(torch.zeros(7, 11), mesh, [Replicate()])
    with folder() as path:
        dcp.save({"rows": rows}, checkpoint_id=path)
        for name, target in (("columns", columns), ("whole", whole)):
            dcp.load({"rows": target}, checkpoint_id=path)
            loaded[name] = _full(target)
    return loaded


def checkpoint_in_the_background(rank: int, world_size: int) -> dict[str, Tensor]:
    """Saved by a thread, with a plan that the ranks agree on, while training goes on."""
    model = _sharded_model(world_size, 1)
    wanted = {name: _full(value).clone() for name, value in model.named_parameters()}
    with folder() as path:
        future: Any = dcp.async_save(
            {"model": get_model_state_dict(model)},
            checkpoint_id=path,
            process_group=dist.new_group(),  # the world's is used by training at the same time
        )
        train(model, model.parameters(), rank)
        getattr(future, "upload_completion", future).result()
        other = _sharded_model(world_size, 2)
        loaded = {"model": get_model_state_dict(other)}
        dcp.load(loaded, checkpoint_id=path)
        set_model_state_dict(other, loaded["model"])
    found = {name: _full(value) for name, value in other.named_parameters()}
    assert all(found[name].equal(value) for name, value in wanted.items())
    return {**found, **{f"trained {n}": _full(p) for n, p in model.named_parameters()}}


def sharded_tensor_with_empty_shards(rank: int, world_size: int) -> dict[str, Tensor]:
    """The last rank has no part: its tensor is where collectives take place, and on no GPU."""
    last = world_size - 1

    def made(start: float) -> ShardedTensor:
        rows = torch.arange(start, start + 6).view(2, 3) + 10 * rank
        pieces = [] if rank == last else [Piece.from_tensor_and_offsets(rows, [2 * rank, 0], rank)]
        return init_from_local_shards(pieces, 2 * last, 3)

    tensor, found = made(1.0), {}
    for root in (0, last):
        gathered = torch.zeros(2 * last, 3)
        tensor.gather(root, gathered if rank == root else None)
        found[f"gathered at {root}"] = gathered
    assert str(tensor.device) == "cpu"
    for name, to in (("double", torch.float64), ("cpu", "cpu"), ("half", torch.ones(1).half())):
        other = tensor.to(to)
        assert str(other.device) == "cpu"
        found |= {f"{name} {i}": piece.tensor for i, piece in enumerate(other.local_shards())}
    loaded = made(90.0)
    with folder() as path:
        dcp.save({"tensor": tensor}, checkpoint_id=path)
        dcp.load({"tensor": loaded}, checkpoint_id=path)
    return found | {f"loaded {i}": piece.tensor for i, piece in enumerate(loaded.local_shards())}


def state_from_rank_0(rank: int, world_size: int) -> dict[str, Tensor]:
    """Whole tensors that only rank 0 has are scattered into shards, and gathered again."""
    model = _sharded_model(world_size, rank)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    whole = mlp(seed=9).state_dict() if rank == 0 else {}
    set_model_state_dict(model, whole, options=options)
    dist.barrier()
    gathered: Any = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    found = {name: _full(value) for name, value in model.named_parameters()}
    return {**found, **{f"gathered {name}": gathered[name] for name in gathered}}
