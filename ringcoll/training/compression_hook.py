"""Compressed averages inside torch's ``DistributedDataParallel``, as a communication hook.

::

    model = DistributedDataParallel(module)
    buckets = CompressedBuckets(lambda: PowerSGD(rank=2))  # of `compressors`
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
where `ringcoll.training.compression.CompressedGradients` gives it each parameter's own matrix.
"""

# Annotations stay objects in this file: torch looks at those of a hook.

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.errors import ArgumentError
from ringcoll.training.compression import Compressor, Sent

__all__ = ["CompressedBuckets", "compressed_hook"]


class CompressedBuckets:
    """Compressors of a ``DistributedDataParallel``, one a bucket: the state of `compressed_hook`.

    Parameters
    ----------
    make
        Makes the compressor of a bucket, for a group of the same ranks as that of
        ``DistributedDataParallel``.

    Attributes
    ----------
    last_step : Sent
        What all buckets of the last backward have sent and lost together.

    Raises
    ------
    ArgumentError
        ``make`` does not return a new `Compressor` in each call.
    """

    def __init__(self, make: Callable[[], Compressor]) -> None:
        first, second = make(), make()
        is_compressor = isinstance(first, Compressor)
        if not is_compressor or first is second:
            raise ArgumentError(
                "does not make a compressor for each bucket",
                argument="make",
                expected="a function that returns a new Compressor in each call",
                got="the same Compressor twice" if is_compressor else type(first).__name__,
            )
        self._make = make
        self._compressors: dict[tuple[Tensor, ...], Compressor] = {}  # by the bucket's parameters
        self._residuals: dict[Tensor, Tensor] = {}  # by parameter: views of the compressors'
        self._reports: list[Sent] = []
        self.last_step = Sent(0, 0, 0.0, 0.0)

    def average(self, bucket: dist.GradBucket) -> Tensor:
        """Replace a bucket's gradients by the average of what the ranks send, and return them.

        Raises
        ------
        ArgumentError, RingcollError
            As for `Compressor.average`.
        """
        params, gradients = tuple(bucket.parameters()), bucket.buffer()
        if params not in self._compressors:
            self._lay_out(params)
        compressor = self._compressors[params]
        if bucket.index() == 0:
            self._reports.clear()
        self._reports.append(compressor.average(gradients))
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

    If it fails, ``backward`` raises the error.

    Parameters
    ----------
    state
        The compressors.
    bucket
        Bucket that ``DistributedDataParallel`` passes: a flat tensor of gradients.

    Returns
    -------
    Future
        A future, already complete, of the same tensor, averaged.
    """
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(state.average(bucket))
    return future
