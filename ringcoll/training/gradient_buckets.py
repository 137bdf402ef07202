"""Buckets: gradients that are averaged together, and how long that takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ringcoll.group.work import Work
from ringcoll.transport.shared.tensors import lasting_zeros

__all__ = [
    "GradientBucket",
    "StepReport",
    "assign_buckets",
    "covered",
    "move_gradient",
]


def move_gradient(param: Tensor, view: Tensor) -> None:
    """Put a gradient, or zeros, in its place, which from then on is the parameter's ``.grad``."""
    if param.grad is None:
        view.zero_()
    elif param.grad.data_ptr() != view.data_ptr():
        view.copy_(param.grad)
    param.grad = view


def assign_buckets(
    params: Sequence[Tensor], bucket_bytes: int, first_bucket_bytes: int
) -> tuple[tuple[int, ...], ...]:
    """Distribute parameters over buckets, the last parameter first, as backward finds them.

    Parameters
    ----------
    params
        Parameters in the order of registration, any shapes.
    bucket_bytes, first_bucket_bytes
        Bytes with which a bucket is complete, and the first bucket. As in torch, the parameter
        that reaches the number is still in the bucket: a bias does not part from its weight.

    Returns
    -------
    tuple of tuple of int
        Indices of parameters, bucket by bucket. All parameters of a bucket have the same dtype
        and device.

    Examples
    --------
    >>> import torch
    >>> from ringcoll.training.gradient_buckets import assign_buckets
    >>> params = [torch.zeros(n) for n in (100, 10, 10, 10)]  # of 400, 40, 40, 40 bytes
    >>> assign_buckets(params, bucket_bytes=60, first_bucket_bytes=40)
    ((3,), (2, 1), (0,))
    """
    buckets: list[list[int]] = []
    kind, room = None, 0
    for index in reversed(range(len(params))):
        param = params[index]
        if room <= 0 or kind != (param.dtype, param.device):
            room = bucket_bytes if buckets else first_bucket_bytes
            kind = (param.dtype, param.device)
            buckets.append([])
        buckets[-1].append(index)
        room -= param.nbytes
    return tuple(map(tuple, buckets))


@dataclass(frozen=True, slots=True)
class StepReport:
    """Report of a training step of `BucketedDataParallel` on this rank.

    Parameters
    ----------
    nbytes
        Bytes of gradients that were all-reduced, in the wire dtype if there is a wire dtype.
    communication_s
        Time, in seconds, in which at least one all-reduce was under way.
    waited_s
        Time, in seconds, that `BucketedDataParallel.finish` took: it was not hidden.
    """

    nbytes: int
    communication_s: float
    waited_s: float

    @property
    def overlap(self) -> float:
        """Share of the communication that was hidden behind backward, 0 to 1.

        The number means nothing over NCCL, where an all-reduce counts as over when it is enqueued.
        """
        if self.communication_s <= 0:
            return 0.0
        return min(1.0, max(0.0, 1 - self.waited_s / self.communication_s))


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals.

    >>> covered([(0.0, 2.0), (5.0, 6.0), (1.0, 3.0)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


class GradientBucket:
    """Gradients that travel together, end to end in a flat tensor."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self.params = params
        numel = sum(param.numel() for param in params)
        self.flat = lasting_zeros(numel, params[0].dtype, params[0].device)
        pieces = torch.split(self.flat, [param.numel() for param in params])
        self.views = [piece.view_as(param) for piece, param in zip(pieces, params, strict=True)]
        self.missing = set(range(len(params)))  # indices of gradients that have not arrived
        self.work: Work | None = None
        self.begin_s, self.ends_s = 0.0, list[float]()

    def take(self, index: int) -> None:
        """Put a gradient in its place, which from then on is the parameter's ``.grad``."""
        move_gradient(self.params[index], self.views[index])
        self.missing.remove(index)

    def launch(self, all_reduce: Callable[[Tensor], Work | None]) -> None:
        """Start the all-reduce."""
        self.begin_s = time.perf_counter()
        self.work = all_reduce(self.flat)
        assert self.work is not None
        ends_s = self.ends_s = []  # a new list: the callback of the step before may be late
        self.work.get_future().add_done_callback(lambda _: ends_s.append(time.perf_counter()))

    def wait(self) -> tuple[float, float]:
        """Wait for the all-reduce, and return when it began and ended."""
        assert self.work is not None
        self.work.wait()
        self.work = None
        self.missing = set(range(len(self.params)))
        # The callback has a thread of its own, and may be later than this thread.
        return self.begin_s, (self.ends_s or [time.perf_counter()])[0]
