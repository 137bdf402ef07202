"""Local SGD: the ranks average their models every H steps.

Problem: an all-reduce of the gradients in every step needs a fast network. Here each rank takes H
steps of its own optimizer, the *inner* one, and only then the ranks meet: 1/H of the bytes is sent,
and a rank that is late for once delays the others only if it is late over H steps.

All ranks keep the parameters a of their last meeting. At the next meeting rank i has x_i. The ranks
average ``d = mean_i(a - x_i)``, an *outer* optimizer takes one step on a with d as its gradient;
then all ranks go on from a. The usual outer optimizer is SGD of learning rate 1: the average, as
``a - d = mean_i(x_i)``.

The difference is averaged by an all-reduce, which gives the same bits on all ranks: so a, and the
outer optimizer's state, are the same everywhere without being sent. The states of the inner
optimizers stay on their ranks. The cost: the bytes of the parameters, all-reduced once in H steps;
a copy of the parameters, and the outer optimizer's state.

Source: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ringcoll.runtime.collectives import as_group
from ringcoll.runtime.collectives import functions as api
from ringcoll.training.arguments import require
from ringcoll.training.model_on_ranks import begin_alike, trained

OuterOptimizer = Callable[[list[Tensor]], Optimizer]
"""Makes the outer optimizer from the parameters of the last meeting."""


class LocalSGD:
    """Averages the parameters of a module every H steps.

    ::

        averaging = LocalSGD(model, every=8)         # rank 0's parameters go to all ranks
        for inputs, targets in batches:              # of this rank
            optimizer.zero_grad()
            loss(model(inputs), targets).backward()
            optimizer.step()
            averaging.step()

    ``nbytes_sent`` counts the bytes that this rank has sent so far, as a ring sends them.

    Parameters
    ----------
    module
        Module; the same parameters on all ranks, any shapes and dtypes.
    every
        Number of steps H from one meeting to the next, at least 1.
    outer
        Makes the outer optimizer; by default SGD of learning rate 1, which is the average.
    """

    def __init__(
        self,
        module: nn.Module,
        group: Any = None,
        *,
        every: int,
        outer: OuterOptimizer | None = None,
    ) -> None:
        k, never = as_group(group).size(), "the ranks would never meet"
        require(every >= 1, "every", never, "at least 1 step", every, as_group(group).rank())
        self._params = list(trained(module).values())
        begin_alike(module, group)
        self._group, self._every, self._steps = group, every, 0
        self._anchors = [param.detach().clone() for param in self._params]  # of the last meeting
        self._outer = (outer or partial(SGD, lr=1.0))(self._anchors)
        self._nbytes = 2 * (k - 1) * sum(anchor.nbytes for anchor in self._anchors) // k
        self.nbytes_sent = 0

    def kept(self) -> list[Tensor]:
        """Parameters and the outer optimizer's state, kept until the next meeting."""
        values = [value for state in self._outer.state.values() for value in state.values()]
        return [*self._anchors, *(value for value in values if isinstance(value, Tensor))]

    @torch.no_grad()
    def step(self) -> bool:
        """Count a step of the inner optimizer; meet the other ranks in every H-th step.

        It returns whether the ranks have met, so that all have the same parameters.
        """
        self._steps += 1
        if self._steps % self._every:
            return False
        differences = []
        for anchor, param in zip(self._anchors, self._params, strict=True):
            anchor.grad = anchor - param
            differences.append(anchor.grad)
        api.all_reduce_coalesced(differences, dist.ReduceOp.AVG, self._group)
        self._outer.step()
        for anchor, param in zip(self._anchors, self._params, strict=True):
            param.copy_(anchor)
        self.nbytes_sent += self._nbytes
        return True
