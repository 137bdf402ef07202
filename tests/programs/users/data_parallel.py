"""Users of DistributedDataParallel: its ways of working, and its communication hooks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.join import Join
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.programs.users.models import batch, mlp, state, train

_SMALL_MB = 0.0002  # about 200 bytes a bucket, so that there are several


def _wrapped(model: nn.Module, **options: Any) -> Any:
    return DistributedDataParallel(model, bucket_cap_mb=_SMALL_MB, **options)


def _trained(model: nn.Module, rank: int) -> dict[str, Tensor]:
    losses = train(model, model.parameters(), rank)
    return {**state(model), "losses": torch.stack(losses)}


def several_buckets(rank: int, world_size: int) -> dict[str, Tensor]:
    """Many small buckets; the models start out different, and are broadcast."""
    model = _wrapped(mlp(seed=rank))
    return _trained(model, rank)


def in_a_sub_group(rank: int, world_size: int) -> dict[str, Tensor]:
    """Two of the ranks train together."""
    group = dist.new_group([world_size - 2, world_size - 1])
    model: Any = mlp()
    if rank >= world_size - 2:
        model = _wrapped(model, process_group=group)
    found = _trained(model, rank)
    dist.barrier()
    return found


class _Branches(nn.Module):
    """Which branch is used differs by rank and step; the third never is."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(mlp(seed=seed) for seed in range(3))
        self.turn = rank

    def forward(self, inputs: Tensor) -> Tensor:
        self.turn += 1
        chosen: Tensor = self.branches[self.turn % 2](inputs)
        return chosen


def unused_parameters(rank: int, world_size: int) -> dict[str, Tensor]:
    """Parameters without a gradient, others on every rank."""
    return _trained(_wrapped(_Branches(rank), find_unused_parameters=True), rank)


def static_graph(rank: int, world_size: int) -> dict[str, Tensor]:
    """The same graph every time, with one branch never used."""
    branches = _Branches(0)
    branches.forward = branches.branches[0].forward  # type: ignore[method-assign]
    return _trained(_wrapped(branches, static_graph=True), rank)


def bucket_views(rank: int, world_size: int) -> dict[str, Tensor]:
    """Gradients are views of the buckets."""
    return _trained(_wrapped(mlp(), gradient_as_bucket_view=True), rank)


def accumulated(rank: int, world_size: int) -> dict[str, Tensor]:
    """Gradients are accumulated without communication, then summed once."""
    model = _wrapped(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            model(batch(rank, 2 * step)).square().mean().backward()
        model(batch(rank, 2 * step + 1)).square().mean().backward()
        optimizer.step()
    return state(model)


def uneven_inputs(rank: int, world_size: int) -> dict[str, Tensor]:
    """Rank r has r + 1 batches; those that are done shadow the others' collectives."""
    model = _wrapped(mlp())
    with model.join():
        train(model, model.parameters(), rank, steps=rank + 1)
    return {name: value for name, value in state(model).items() if not name.startswith("grad")}


def uneven_inputs_and_optimizer(rank: int, world_size: int) -> dict[str, Tensor]:
    """The same, joined with an optimizer that shards its state."""
    model = _wrapped(mlp())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    with Join([model, optimizer]):
        train(model, model.parameters(), rank, steps=rank + 1, optimizer=optimizer)
    return {name: value for name, value in state(model).items() if not name.startswith("grad")}


def uneven_inputs_refused(rank: int, world_size: int) -> dict[str, Tensor]:
    """All ranks raise as soon as the first has no more data."""
    model = _wrapped(mlp())
    raised = 0
    try:
        with model.join(throw_on_early_termination=True):
            train(model, model.parameters(), rank, steps=rank + 1)
    except RuntimeError:
        raised = 1
    found = {name: value for name, value in state(model).items() if not name.startswith("grad")}
    return {**found, "raised": torch.tensor(raised)}


def buffers(rank: int, world_size: int) -> dict[str, Tensor]:
    """The statistics of a batch normalisation are rank 0's on all ranks."""
    model = nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
    )
    return _trained(_wrapped(model), rank)


def sparse_gradients(rank: int, world_size: int) -> dict[str, Tensor]:
    """An embedding whose gradients are sparse, with other rows on every rank."""
    model: Any = nn.Sequential(nn.Embedding(11, 4, sparse=True), nn.Linear(4, 2))
    wrapped = _wrapped(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        rows = torch.tensor([rank, 2 * rank + step, 5])
        wrapped(rows).square().mean().backward()
        optimizer.step()
    found = {name: parameter.detach() for name, parameter in wrapped.named_parameters()}
    assert model[0].weight.grad.is_sparse
    found["grad"] = model[0].weight.grad.to_dense()
    return found


# --- communication hooks --------------------------------------------------------------


def _hooked(rank: int, hook: Any, hook_state: Any = None) -> dict[str, Tensor]:
    model = _wrapped(mlp())
    model.register_comm_hook(hook_state, hook)
    return _trained(model, rank)


def hook_all_reduce(rank: int, world_size: int) -> dict[str, Tensor]:
    """The default, as a hook."""
    return _hooked(rank, default_hooks.allreduce_hook)


def hook_float16(rank: int, world_size: int) -> dict[str, Tensor]:
    """Gradients travel as float16."""
    return _hooked(rank, default_hooks.fp16_compress_hook)


def hook_bfloat16(rank: int, world_size: int) -> dict[str, Tensor]:
    """Gradients travel as bfloat16."""

    def hook(hook_state, bucket):  # DDP looks at annotations, and here at their text
        # Under its own name DDP refuses it for tensors on the CPU.
        return default_hooks.bf16_compress_hook(hook_state, bucket)

    return _hooked(rank, hook)


def hook_float16_around(rank: int, world_size: int) -> dict[str, Tensor]:
    """The wrapper of a hook that compresses what the hook sends."""
    return _hooked(rank, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))


def hook_power_sgd(rank: int, world_size: int) -> dict[str, Tensor]:
    """PowerSGD, on the same data everywhere; its callbacks start collectives and wait for them."""
    # One bucket: with several, the collectives that the hook starts in callbacks and those
    # of the next bucket come in another order on every rank, where callbacks do not run in
    # the order of a CUDA stream. Gloo mixes them up, this library raises MismatchError.
    model = DistributedDataParallel(mlp(hidden=16))
    hook_state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=2
    )
    model.register_comm_hook(hook_state, powerSGD_hook.powerSGD_hook)
    losses = train(model, model.parameters(), 0, steps=5)
    return {**state(model), "losses": torch.stack(losses)}


def power_sgd_alone(rank: int, world_size: int) -> dict[str, Tensor]:
    """What `hook_power_sgd` should give: an average of equal terms is each of them."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return hook_power_sgd(0, 1)
    finally:
        dist.destroy_process_group()


def hook_power_sgd_lossless(rank: int, world_size: int) -> dict[str, Tensor]:
    """PowerSGD of full rank, which loses nothing."""
    model = DistributedDataParallel(mlp(hidden=16))
    hook_state = powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=16,
        start_powerSGD_iter=2,
        min_compression_rate=0.0,
    )
    model.register_comm_hook(hook_state, powerSGD_hook.powerSGD_hook)
    train(model, model.parameters(), rank, steps=5)
    return {name: value.detach() for name, value in model.module.named_parameters()}


def without_communication(rank: int, world_size: int) -> dict[str, Tensor]:
    """What `hook_power_sgd_lossless` should give: one process takes all ranks' batches."""
    model = mlp(hidden=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        optimizer.zero_grad()
        for peer in range(world_size):
            (model(batch(peer, step)).square().mean() / world_size).backward()
        optimizer.step()
    return dict(model.named_parameters())


def hook_local_sgd(rank: int, world_size: int) -> dict[str, Tensor]:
    """Gradients are summed in the first steps, later the models are averaged."""
    model = _wrapped(mlp())
    subgroup, _ = dist.new_subgroups(1)
    hook_state = local_sgd.PostLocalSGDState(
        process_group=None, subgroup=subgroup, start_localSGD_iter=2
    )
    model.register_comm_hook(hook_state, local_sgd.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=2)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    losses = train(model, model.parameters(), rank, steps=6, optimizer=optimizer)
    return {**state(model), "losses": torch.stack(losses)}


def hook_then_optimizer(rank: int, world_size: int) -> dict[str, Tensor]:
    """The optimizer's step runs in the callback of the gradients' sum."""
    from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
        _hook_then_optimizer,
        _OptimizerHookState,
    )
    from torch.distributed.optim import _FunctionalSGD

    model = _wrapped(mlp())
    hook_state = _OptimizerHookState(_FunctionalSGD([], lr=0.1, _allow_empty_param_list=True))
    model.register_comm_hook(None, _hook_then_optimizer(default_hooks.allreduce_hook, hook_state))
    losses = train(
        model, model.parameters(), rank, optimizer=torch.optim.SGD(model.parameters(), lr=0.0)
    )
    return {**state(model), "losses": torch.stack(losses)}


def builtin_float16(rank: int, world_size: int) -> dict[str, Tensor]:
    """The hook that is C++ on gloo, and has to be replaced here."""
    model = _wrapped(mlp())
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    return _trained(model, rank)


def builtin_all_reduce(rank: int, world_size: int) -> dict[str, Tensor]:
    """The hook that is C++."""
    model = _wrapped(mlp())
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return _trained(model, rank)
