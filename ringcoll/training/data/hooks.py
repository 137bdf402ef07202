"""Averages inside torch's ``DistributedDataParallel``, as communication hooks.

`all_reduce_hook` averages a bucket of gradients by `ringcoll.all_reduce`; `compressed_hook` sends
less::

    model = DistributedDataParallel(module)
    buckets = CompressedBuckets(lambda: PowerSGD(rank=2))
    model.register_comm_hook(buckets, compressed_hook)
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()  # .grad is the average of what the ranks have sent
        optimizer.step()
        print(buckets.last_step.nbytes, buckets.last_step.relative_error)

torch calls the hook with each bucket of gradients, a vector, as backward fills the bucket. A bucket
has a compressor of its own, with the residual of its parameters.

torch lays the buckets out anew once, after the first backward: then it knows the order in which
gradients arrive. The residual belongs to the parameters, so it survives: a bucket with other
parameters than before gets a new compressor, whose residual is put together from those of the
parameters. What else a compressor remembers, such as the Q of `PowerSGD`, begins anew. All ranks
have the same buckets.

Cost: that of the compressor, for each bucket. The collectives of a bucket end before backward goes
on: they send less, but are not hidden behind backward. `PowerSGD` sees a bucket as a square matrix,
where `CompressedGradients` gives it each parameter's own matrix.
"""

# Annotations stay objects in this file: torch looks at those of a hook.

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.collectives import as_group, share_for
from ringcoll.collectives import functions as api
from ringcoll.reduction import Reproducible
from ringcoll.schedule import Schedule
from ringcoll.training.data.compression import Compressor, Sent
from ringcoll.training.data.parallel import Weighing, average_op
from ringcoll.training.model_on_ranks import require


@dataclass(frozen=True, slots=True)
class HookOptions:
    """Options of `all_reduce_hook`: its ``state``.

    Parameters
    ----------
    group
        The same group as that of ``DistributedDataParallel``.
    algorithm, segment_bytes, wire_dtype, reproducible
        As for `ringcoll.all_reduce`.
    share
        Whether the buckets move to shared memory at their first use: see `ringcoll.share`. For the
        ranks of one host; others raise `ArgumentError`.
    weight
        As for `average_gradients`. A tensor is read anew in each step: write into it before
        backward.
    """

    group: Any = None
    algorithm: str | Schedule = "auto"
    segment_bytes: int | None = None
    wire_dtype: torch.dtype | None = None
    reproducible: Reproducible = False
    share: bool = False
    weight: float | Tensor | None = None
    of_step: list[Weighing] = field(default_factory=list, init=False, repr=False, compare=False)


def all_reduce_hook(state: HookOptions, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of ``DistributedDataParallel`` with ringcoll instead of natively.

    ::

        model = DistributedDataParallel(module)
        options = ringcoll.ddp.HookOptions(algorithm="tree", wire_dtype=torch.bfloat16)
        model.register_comm_hook(options, ringcoll.ddp.all_reduce_hook)

    The future has the same tensor, averaged. If an operation fails, ``backward`` raises a
    ``RuntimeError`` with the text of the operation's error.
    """
    if state.share:
        share_for(as_group(state.group), bucket.buffer())
    if state.weight is not None and bucket.index() == 0:
        state.of_step[:] = [Weighing(state.weight, state.group)]
    op = average_op(state.wire_dtype, as_group(state.group).size())
    for weighing in state.of_step:
        op = weighing.weigh(bucket.buffer())
    work = api.all_reduce(
        bucket.buffer(), op, state.group, True, algorithm=state.algorithm,
        segment_bytes=state.segment_bytes, wire_dtype=state.wire_dtype,
        reproducible=state.reproducible,
    )  # fmt: skip
    assert work is not None
    # C++ understands an exception that the callback raises. C++ would take a Python future's
    # exception, passed on as it is, for the tensor.
    return work.get_future().then(lambda future: future.value()[0])


class CompressedBuckets:
    """Compressors of a ``DistributedDataParallel``, one a bucket: the state of `compressed_hook`.

    ``last_step`` reports what all buckets of the last backward have sent and lost together.

    Parameters
    ----------
    make
        Makes a new compressor in each call, for a group of the same ranks as that of
        ``DistributedDataParallel``; otherwise `ArgumentError` is raised.
    weight
        As for `HookOptions`.
    """

    def __init__(
        self, make: Callable[[], Compressor], weight: float | Tensor | None = None
    ) -> None:
        first, second = make(), make()
        is_compressor = isinstance(first, Compressor)
        require(is_compressor and first is not second, "make",
                "does not make a compressor for each bucket",
                "a function that returns a new Compressor in each call",
                "the same Compressor twice" if is_compressor else type(first).__name__)  # fmt: skip
        self._make, self.weight = make, weight
        self._weighing: Weighing | None = None  # of this step
        self._compressors: dict[tuple[Tensor, ...], Compressor] = {}  # by the bucket's parameters
        self._residuals: dict[Tensor, Tensor] = {}  # by parameter: views of the compressors'
        self._reports: list[Sent] = []
        self.last_step = Sent(0, 0, 0.0, 0.0)

    def average(self, bucket: dist.GradBucket) -> Tensor:
        """Replace a bucket's gradients by the average of what the ranks send, and return them."""
        params, gradients = tuple(bucket.parameters()), bucket.buffer()
        if params not in self._compressors:
            self._lay_out(params)
        compressor = self._compressors[params]
        if bucket.index() == 0:
            self._reports.clear()
            weight = self.weight
            self._weighing = None if weight is None else Weighing(weight, compressor.group)
        self._reports.append(compressor.average(gradients, self._weighing))
        assert compressor.residual is not None
        pieces = torch.split(compressor.residual, [param.numel() for param in params])
        self._residuals.update(zip(params, pieces, strict=True))
        if bucket.is_last():
            self.last_step = Sent.total(self._reports)
        return gradients

    def _lay_out(self, params: tuple[Tensor, ...]) -> None:
        """Make the compressor of a new bucket, in place of those that had its parameters."""
        compressor = self._make()
        if any(param in self._residuals for param in params):
            pieces = [self._residuals.get(p, torch.zeros_like(p).flatten()) for p in params]
            compressor.residual = torch.cat(pieces)  # in the wider dtype
        for others in [key for key in self._compressors if not set(key).isdisjoint(params)]:
            del self._compressors[others]
        self._compressors[params] = compressor


def compressed_hook(
    state: CompressedBuckets, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """Average a bucket of ``DistributedDataParallel``, compressed, in place of its all-reduce.

    If it fails, ``backward`` raises the error. The future is already complete.
    """
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(state.average(bucket))
    return future
