"""Functions that train on the ranks of a pool, to be compared with torch's own trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ringcoll
from ringcoll.errors import BackwardError
from ringcoll.runtime.collectives import functions
from ringcoll.training import (
    BucketedDataParallel,
    HookOptions,
    StepReport,
    all_reduce_hook,
    average_gradients,
)
from tests.programs.faults import Caught, catch
from tests.programs.ranks import fresh_group

__all__ = ["Setting", "Trained", "train"]

_INPUTS, _OUTPUTS, _BATCH = 6, 3, 4


class Branching(nn.Module):
    """Layers of odd sizes, two branches of which a rank may leave out, a buffer, a frozen layer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(_INPUTS, 7)
        self.left = nn.Linear(7, 5)
        self.right = nn.Linear(7, 5, bias=False)
        self.frozen = nn.Linear(5, 5).requires_grad_(requires_grad=False)
        self.norm = nn.BatchNorm1d(5)
        self.never = nn.Linear(2, 2)
        self.last = nn.Linear(5, _OUTPUTS)

    def forward(self, inputs: Tensor, branches: str) -> Tensor:
        hidden = self.first(inputs).tanh()
        outputs = [getattr(self, branch)(hidden) for branch in branches.split("+")]
        total = self.frozen(torch.stack(outputs).sum(0))
        result: Tensor = self.last(self.norm(total))
        return result


@dataclass(frozen=True)
class Setting:
    """How to train: what is varied by the tests."""

    trainer: str
    algorithm: str = "ring"
    wire: torch.dtype | None = None
    steps: int = 4
    accumulate: int = 1
    set_to_none: bool = True
    branches: tuple[str, ...] = ("left+right",)  # of the ranks, in turn
    bucket_bytes: int = 120
    backend: str = "gloo"


@dataclass(frozen=True)
class Trained:
    """What a rank ends with."""

    params: list[Tensor]
    grads: list[Tensor | None]
    report: StepReport | None


def _batch(step: int, part: int, rank: int) -> tuple[Tensor, Tensor]:
    """Data that differ by step, part and rank."""
    generator = torch.Generator().manual_seed(1 + step + 100 * part + 10_000 * rank)
    inputs = torch.randn(_BATCH, _INPUTS, generator=generator)
    return inputs, torch.randn(_BATCH, _OUTPUTS, generator=generator)


_Sync = Callable[[], contextlib.AbstractContextManager[None]]


def _wrap(
    setting: Setting, module: nn.Module, optimizer: torch.optim.Optimizer, group: Any
) -> tuple[nn.Module, _Sync, Callable[[], object]]:
    """The model to call, what accumulation is done in, and what is called after backward."""
    if setting.trainer == "per-parameter":
        return (
            module,
            contextlib.nullcontext,
            lambda: average_gradients(
                module, group, algorithm=setting.algorithm, wire_dtype=setting.wire
            ),
        )
    if setting.trainer == "bucketed":
        model = BucketedDataParallel(
            module,
            group,
            bucket_bytes=setting.bucket_bytes,
            algorithm=setting.algorithm,
            wire_dtype=setting.wire,
        )
        model.finish_before(optimizer)
        return model, model.no_sync, lambda: None
    ddp = DistributedDataParallel(
        module,
        process_group=group,
        bucket_cap_mb=setting.bucket_bytes / (1 << 20),
        find_unused_parameters=True,
        forward_sync_buffers=False,  # as with ringcoll: every rank has its own statistics
    )
    if setting.trainer == "hook":
        options = HookOptions(group, setting.algorithm, wire_dtype=setting.wire)
        ddp.register_comm_hook(options, all_reduce_hook)
    return ddp, ddp.no_sync, lambda: None


def weighted(counts: list[tuple[int, ...]]) -> list[Tensor]:
    """The gradients of each step of DistributedDataParallel, whose ranks have so many samples."""
    rank, weight = dist.get_rank(), torch.tensor(0)
    module = nn.Sequential(nn.Linear(3, 40), nn.Linear(40, 2)).double()
    model = DistributedDataParallel(module, bucket_cap_mb=0.0001)  # several buckets
    model.register_comm_hook(HookOptions(weight=weight), all_reduce_hook)
    grads = []
    for step, numbers in enumerate(counts):
        model.zero_grad()
        inputs = samples_of(step, sum(numbers)).split(numbers)[rank]
        weight.fill_(len(inputs))
        torch.autograd.backward(model(inputs).square().sum(1).mean())
        grads.append(flat_grads(module))
    module.zero_grad()
    torch.autograd.backward(module(samples_of(0, sum(counts[0]))).square().sum(1).mean())
    return [*grads, flat_grads(module)]


def flat_grads(module: nn.Module) -> Tensor:
    """A copy of all gradients, end to end."""
    return torch.cat(
        [param.grad.flatten() for param in module.parameters() if param.grad is not None]
    )


def samples_of(step: int, count: int) -> Tensor:
    """Rows of a step, which differ."""
    generator = torch.Generator().manual_seed(7 + step)
    return torch.randn(count, 3, generator=generator, dtype=torch.float64)


def train(setting: Setting) -> Trained:
    """Train for some steps; ranks begin with different weights, and get rank 0's."""
    rank = dist.get_rank()
    group = None if setting.backend == "gloo" else new_group(setting)
    module = Branching(seed=0 if setting.trainer == "per-parameter" else rank)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    model, no_sync, after = _wrap(setting, module, optimizer, group)
    branches = setting.branches[rank % len(setting.branches)]
    for step in range(setting.steps):
        optimizer.zero_grad(set_to_none=setting.set_to_none)
        for part in range(setting.accumulate):
            last = part == setting.accumulate - 1
            with contextlib.nullcontext() if last else no_sync():
                inputs, targets = _batch(step, part, rank)
                loss = nn.functional.mse_loss(model(inputs, branches), targets)
                torch.autograd.backward(loss)
        after()
        optimizer.step()
    return Trained(
        [param.detach().clone() for param in module.parameters()],
        [None if param.grad is None else param.grad.clone() for param in module.parameters()],
        getattr(model, "last_step", None),
    )


def new_group(setting: Setting) -> Any:
    """A group of the library's own backend."""
    from ringcoll.training.backend import Options

    return dist.new_group(backend=setting.backend, pg_options=Options(algorithm=setting.algorithm))


# --- order, reports -------------------------------------------------------------------


@contextlib.contextmanager
def _lengths() -> Iterator[list[int]]:
    """Note the length of every all-reduce that a trainer issues."""
    issued: list[int] = []
    original = functions.all_reduce

    def noting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        issued.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    functions.all_reduce = noting  # type: ignore[assignment]
    try:
        yield issued
    finally:
        functions.all_reduce = original


def order_of_buckets(branches: tuple[str, ...]) -> tuple[list[int], list[int], int]:
    """The all-reduces that are issued in a step, before and in finish, and how many buckets."""
    rank = dist.get_rank()
    module = Branching(seed=0)
    model = BucketedDataParallel(module, bucket_bytes=1)
    with _lengths() as issued:
        inputs, _ = _batch(0, 0, rank)
        torch.autograd.backward(model(inputs, branches[rank % len(branches)]).sum())
        early = len(issued)
        model.finish()
        model.finish()  # does nothing more
    return issued[:early], issued[early:], len(model._buckets)


# --- errors ---------------------------------------------------------------------------


class Sparse(nn.Module):
    """A model whose gradients are not dense."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3, sparse=True)

    def forward(self) -> Tensor:
        result: Tensor = self.embedding(torch.tensor([1, 2]))
        return result


def _backward(model: nn.Module) -> None:
    torch.autograd.backward(model(torch.ones(1, 2)).sum())


def _not_dense() -> None:
    torch.autograd.backward(BucketedDataParallel(Sparse())().sum())


def _not_dense_afterwards() -> None:
    module = Sparse()
    torch.autograd.backward(module().sum())
    average_gradients(module)


def _twice() -> None:
    model = BucketedDataParallel(nn.Linear(2, 1))
    _backward(model)
    try:
        _backward(model)
    finally:
        model.finish()


def _retained() -> None:
    model = BucketedDataParallel(nn.Linear(2, 1))
    loss = model(torch.ones(1, 2)).sum()
    torch.autograd.backward(loss, retain_graph=True)
    try:
        torch.autograd.backward(loss)
    finally:
        model.finish()


BAD_CALLS: dict[str, Callable[[], object]] = {
    "nothing to train": lambda: BucketedDataParallel(nn.ReLU()),
    "no bytes": lambda: BucketedDataParallel(nn.Linear(2, 1), bucket_bytes=0),
    "not dense": _not_dense,
    "not dense, per parameter": _not_dense_afterwards,
    "twice": _twice,
    "twice through one graph": _retained,
}


def bad_calls() -> dict[str, Caught]:
    """What each of them raises."""
    assert issubclass(BackwardError, ringcoll.errors.RingcollError)
    return {name: catch(call) for name, call in BAD_CALLS.items()}


def _odd_model(what: str) -> nn.Module:
    match what:
        case "shape":
            return nn.Sequential(nn.Linear(2, 3), nn.Linear(4, 1))
        case "everything":
            return nn.ReLU()
        case "dtype":
            return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1).double())
        case "missing":
            return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False))
        case "frozen":
            model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
            model[1].requires_grad_(requires_grad=False)
            return model
        case _:
            model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
            model.register_buffer("extra", torch.zeros(2))
            return model


def differing_models(what: str, odd_rank: int) -> tuple[Caught, bool]:
    """One rank's model differs; and whether the group can be used afterwards."""
    odd = dist.get_rank() == odd_rank
    model = _odd_model(what) if odd else nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    caught = catch(lambda: BucketedDataParallel(model))
    tensor = torch.ones(3)
    ringcoll.all_reduce(tensor)
    return caught, tensor.tolist() == [dist.get_world_size()] * 3


def disagreeing(trainer: str) -> Caught:
    """Rank 0 uses another algorithm than the others, in a group of their own."""
    group = fresh_group(timeout_s=30.0)
    torch.manual_seed(0)
    module = nn.Linear(2, 1)
    algorithm = "tree" if dist.get_rank() == 0 else "ring"

    def step() -> None:
        if trainer == "hook":
            ddp = DistributedDataParallel(module)
            ddp.register_comm_hook(HookOptions(group, algorithm), all_reduce_hook)
            _backward(ddp)
            return
        if trainer == "bucketed":
            model = BucketedDataParallel(module, group)
            model._options["algorithm"] = algorithm  # only now, for the broadcasts agree
            _backward(model)
            model.finish()
            return
        _backward(module)
        average_gradients(module, group, algorithm=algorithm)

    return catch(step)
