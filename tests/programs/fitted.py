"""Programs of ranks on several hosts that fit their algorithms to the network; see benchmarks/fit.py."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ringcoll
from ringcoll.lab.simulation import Measurements
from ringcoll.runtime.collectives import close
from ringcoll.tools.bench import measurements

__all__ = ["ddp_losses", "fsdp_losses", "probed", "time_both"]


def probed(budget_s: float) -> tuple[Measurements, float]:
    """The measurements, and the seconds that they took."""
    begin = time.perf_counter()
    found = measurements(None, budget_s)
    return found, time.perf_counter() - begin


def time_both(file: str, sizes: Sequence[int], repetitions: int) -> list[Any]:
    """Seconds of all-reduces of each size without and with a fit, in turns, and what runs with it.

    Short ones are repeated five times as often: six ranks on a few cores need it.
    """
    groups = [dist.new_group(timeout=timedelta(seconds=120)) for _ in range(2)]
    ringcoll.use(groups[1], fit=file)
    results = []
    for nbytes in sizes:
        tensor = torch.empty(nbytes // 4)
        times: list[list[float]] = [[], []]
        for repetition in range(1 + repetitions * (1 if nbytes >= 1 << 20 else 5)):
            pairs = [*zip(groups, times, strict=True)]
            for group, own in pairs[:: -1 if repetition % 2 else 1]:
                tensor.fill_(dist.get_rank() + 1.0)
                ringcoll.barrier(group)
                begin = time.perf_counter()
                ringcoll.all_reduce(tensor, group=group)
                seconds = time.perf_counter() - begin
                ranks = dist.get_world_size()
                assert tensor[0].item() == tensor[-1].item() == ranks * (ranks + 1) / 2
                if repetition:
                    own.append(seconds)
        chosen = [
            str(ringcoll.explain("all_reduce", nbytes, group)).splitlines()[:2] for group in groups
        ]
        results.append((nbytes, times, chosen))
    for group in groups:
        close(group)
    return results


def ddp_losses(file: str | None, steps: int) -> tuple[list[float], str]:
    """Losses of a model of 4 MiB under torch's DDP, in whole numbers, whose sums are exact in every order.

    The second result says what the group ran.
    """
    options = ringcoll.Options(fit=file)
    group = dist.new_group(backend="ringcoll", pg_options=options)
    torch.manual_seed(0)
    layer = torch.nn.Linear(96, 10_922, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.randint(-3, 4, layer.weight.shape).float())
    model = DistributedDataParallel(layer, process_group=group)
    losses = []
    for _ in range(steps):
        inputs = torch.randint(-2, 3, (4, 96)).float() * (dist.get_rank() + 1)
        model.zero_grad()
        loss = (model(inputs) * 0.25 * dist.get_world_size()).sum()  # DDP divides by that first
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad)
        losses.append(loss.item())
    words = str(ringcoll.explain("all_reduce", layer.weight.nbytes, group)).splitlines()[1]
    return losses, words


def fsdp_losses(file: str | None, steps: int) -> tuple[list[float], list[str]]:
    """Losses of a small model under torch's FSDP2, in whole numbers, and what its gathers and scatters ran."""
    group = dist.new_group(backend="ringcoll", pg_options=ringcoll.Options(fit=file))
    torch.manual_seed(0)
    model = torch.nn.Linear(96, 700, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.randint(-3, 4, model.weight.shape).float())
    fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1.0), []
    for _ in range(steps):
        inputs = torch.randint(-2, 3, (4, 96)).float() * (dist.get_rank() + 1)
        optimizer.zero_grad()
        loss = (model(inputs) * dist.get_world_size()).sum()  # FSDP2 divides by that
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    nbytes = 96 * 700 * 4
    kinds = ("all_gather", "reduce_scatter")
    return losses, [str(ringcoll.explain(kind, nbytes, group)).splitlines()[1] for kind in kinds]
