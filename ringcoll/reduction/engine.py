"""Engines compute reductions: with torch's operators, or with kernels for a GPU.

An engine binds a reduction to memory once; the bound reduction then runs any number of times
(`Engine.bind`). torch's operators are the reference, and the fallback. ``Engine.name`` says which
engine is used, and ``Engine.reason`` why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from ringcoll.reduction.operators import Combiner, Reduction


class Engine:
    """torch's own operators, one after the other; other engines derive from this one.

    Parameters
    ----------
    reason
        Why reductions run on torch's operators.
    """

    name = "torch"

    def __init__(self, reason: str = "tensors of the CPU") -> None:
        self.reason = reason

    def bind(
        self,
        reduction: Reduction,
        into: Sequence[Tensor],
        sources: Sequence[Tensor],
        world_size: int | None,
        narrow: Tensor | None = None,
    ) -> Callable[[], object]:
        """Make a function that reduces vectors, from left to right.

        Parameters
        ----------
        reduction
            Reduction: an operator bound to a dtype.
        into
            Vectors for the total, in the reduction's ``work_dtype``: at least one. The first
            vector may be one of the first two sources, and overlaps no other source.
        sources
            Vectors to reduce, in ``work_dtype`` or ``wire_dtype``: at least one.
        world_size
            Number of ranks if the total is complete and is to be finished, otherwise ``None``.
        narrow
            Vector for the total in ``wire_dtype``; the total itself is then rounded as well.
        """
        target, *copies = into
        total, *others = sources
        steps: list[Callable[[], object]] = []
        if not others and total is not target:
            steps.append(partial(target.copy_, total))
        if others and reduction.combine_all is not None:
            steps.append(partial(reduction.combine_all, sources, target))
            others = []
        for other in others:
            mixed = total.dtype is not target.dtype or other.dtype is not target.dtype
            combine = partial(_widened, reduction.combine) if mixed else reduction.combine
            steps.append(partial(combine, total, other, out=target))
            total = target
        if world_size is not None and reduction.finish is not None:
            steps.append(partial(reduction.finish, target, world_size))
        if narrow is not None:
            steps.append(self.round(narrow, target))
        steps += [partial(copy.copy_, target) for copy in copies]
        return run_all(steps)

    def round(self, narrow: Tensor, tensor: Tensor) -> Callable[[], object]:
        """Make a function that converts a tensor to a narrower one, and rounds the tensor, too."""
        return run_all([partial(narrow.copy_, tensor), partial(tensor.copy_, narrow)])

    def encode(self, reduction: Reduction, flat: Tensor) -> Tensor:
        """Convert a rank's flat input to the work dtype, and scale it if the operator scales."""
        encoded = reduction.encode(flat)
        return encoded if reduction.scale is None else reduction.scale(encoded)


TORCH = Engine()
"""The engine for CPU tensors."""


def _widened(combine: Combiner, left: Tensor, right: Tensor, *, out: Tensor) -> object:
    return combine(left.to(out.dtype), right.to(out.dtype), out=out)


def run_all(steps: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Make one function of several, which run one after the other."""
    return steps[0] if len(steps) == 1 else partial(_in_turn, steps)


def _in_turn(steps: Sequence[Callable[[], object]]) -> None:
    for step in steps:
        step()
