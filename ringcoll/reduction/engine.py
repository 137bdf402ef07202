"""Who reduces: torch's operators, or kernels of our own on a GPU.

An engine makes work ready that may then be done any number of times (`Engine.bind`). torch's
operators are the reference, and what is fallen back to; which one is used is visible in
``Engine.name``, and why in ``Engine.reason``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from ringcoll.reduction.operators import Combiner, Reduction

__all__ = ["TORCH", "Engine", "TorchEngine", "run_all"]


class Engine(Protocol):
    """What reduces and converts."""

    @property
    def name(self) -> str:
        """``"torch"``, or the name and version of what else is used."""
        ...

    @property
    def reason(self) -> str:
        """Why it is this one."""
        ...

    def bind(
        self,
        reduction: Reduction,
        into: Sequence[Tensor],
        sources: Sequence[Tensor],
        world_size: int | None,
        narrow: Tensor | None = None,
    ) -> Callable[[], object]:
        """Make ready to reduce vectors, from left to right.

        Parameters
        ----------
        reduction
            What ``(+)`` means.
        into
            Where the total goes, in the reduction's ``work_dtype``: one vector or more. The
            first may be any of the first two sources, and overlaps no other.
        sources
            One vector or more, in ``work_dtype`` or ``wire_dtype``.
        world_size
            For a total that is complete, and is to be finished; otherwise None.
        narrow
            Gets the total in ``wire_dtype``, and the total itself is rounded to that as well.
        """
        ...

    def round(self, narrow: Tensor, tensor: Tensor) -> Callable[[], object]:
        """Make ready to convert a tensor to a narrower one, and to round it itself as well."""
        ...

    def encode(self, reduction: Reduction, flat: Tensor) -> Tensor:
        """Convert a rank's flat input to what is reduced, scaled if the operator says so."""
        ...


class TorchEngine:
    """torch's own operators, one after the other."""

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
        """Make ready to reduce vectors; see `Engine.bind`."""
        target, *copies = into
        total, *others = sources
        steps: list[Callable[[], object]] = []
        if not others and total is not target:
            steps.append(partial(target.copy_, total))
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
        """Make ready to convert; see `Engine.round`."""
        return run_all([partial(narrow.copy_, tensor), partial(tensor.copy_, narrow)])

    def encode(self, reduction: Reduction, flat: Tensor) -> Tensor:
        """Convert a rank's input; see `Engine.encode`."""
        encoded = reduction.encode(flat)
        return encoded if reduction.scale is None else reduction.scale(encoded)


TORCH = TorchEngine()
"""For CPU tensors."""


def _widened(combine: Combiner, left: Tensor, right: Tensor, *, out: Tensor) -> object:
    return combine(left.to(out.dtype), right.to(out.dtype), out=out)


def run_all(steps: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """One function of several."""
    return steps[0] if len(steps) == 1 else partial(_one_after_the_other, steps)


def _one_after_the_other(steps: Sequence[Callable[[], object]]) -> None:
    for step in steps:
        step()
