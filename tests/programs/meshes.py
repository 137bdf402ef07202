"""One rank of a transformer that is trained on a mesh of ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.training import Mesh, ParallelTransformer, TransformerShape, whole_parameters
from tests.programs.faults import catch
from tests.training.reference import tokens, transformer

__all__ = ["SHAPE", "refused", "table", "trained"]

SHAPE = TransformerShape(vocabulary=16, context=8, width=16, heads=4, layers=2)


def trained(
    sizes: tuple[int, int, int], options: dict[str, Any]
) -> tuple[list[float], list[Tensor]]:
    """Train for 20 steps; the losses, and the parameters of the whole model."""
    mesh = Mesh(*sizes)
    shapes = dict(transformer(SHAPE).named_parameters())
    share = ParallelTransformer(transformer(SHAPE), mesh, num_microbatches=2, **options)
    optimizer = torch.optim.AdamW(share.params, lr=1e-2)
    losses = []
    for step in range(20):
        inputs, targets = tokens(step, 8, SHAPE)
        optimizer.zero_grad()
        losses.append(share.step(inputs, targets).item())
        optimizer.step()
    held = {id(param) for param in share.params}
    named = {n: p for n, p in share.model.named_parameters() if id(p) in held}
    whole = whole_parameters(named, shapes, None, mesh.place["tensor"])
    mesh.close()
    return losses, list(whole.values())


def table(sizes: tuple[int, int, int]) -> str:
    """What runs where."""
    mesh = Mesh(*sizes)
    text = mesh.table()
    mesh.close()
    return text


def refused(sizes: tuple[int, int, int]) -> list[str]:
    """The errors of a mesh of another size, of a batch that does not divide, of layers, and of schedules."""
    mesh = Mesh(*sizes)

    def share(shape: TransformerShape = SHAPE, **options: Any) -> ParallelTransformer:
        return ParallelTransformer(transformer(shape), mesh, **options)

    caught = [
        catch(lambda: Mesh(sizes[0] + 1, *sizes[1:])),
        catch(lambda: share().step(*tokens(0, 5, SHAPE))),
        catch(lambda: share(replace(SHAPE, layers=1))),
        catch(lambda: share(schedule="2f2b")),
    ]
    mesh.close()
    dist.barrier()
    return [f"{error.kind}: {error.text}" for error in caught]
