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

Compression, in place of the all-reduce of a bucket: an all-reduce of gradients moves 2(k - 1)/k of
their bytes. A *compressor* sends less, and loses something. With *error feedback* the loss is not
lost: rank i keeps a residual e, sends ``c = C(g + e)`` instead of its gradient g, and keeps ``e <-
g + e - c`` for the next step. So after T steps the sum of what a rank has sent differs from the sum
of its gradients by the last e alone. Where C loses at most a fraction q < 1 of the norm, e never
grows beyond ``q / (1 - q) max |g|``.

=========== ================================ ====================== ================================
compressor  sent by each rank                collective             lost of x, of n elements
=========== ================================ ====================== ================================
`TopK`      the m elements of largest        all-gather             at most sqrt(1 - m/n) of the
            magnitude, and their indices                            norm
`Int8`      n numbers of 8 bits; a float32   all-gather             of each element at most 1/254 of
            scale for each piece                                    the largest in its piece
`PowerSGD`  two factors of a matrix, of r    two all-reduces        whatever is not in the span of
            columns each                                            r directions; nothing of rank r
=========== ================================ ====================== ================================

An all-gather moves k - 1 times the bytes of a rank: `TopK` and `Int8` suit few ranks. The factors
of PowerSGD are linear in the gradients, so that they can be added up on the way, for any number of
ranks. All ranks get the same average, to the last bit, if their processors multiply alike.
Gradients have to be finite: an infinity would stay in the residual.

Source: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al.,
"Error Feedback Fixes SignSGD", ICML 2019 (the bound); Stich et al., "Sparsified SGD with Memory",
NeurIPS 2018 (top-k); Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization", NeurIPS 2019.
"""

# Annotations stay objects in this file: torch looks at those of a hook.

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad

from ringcoll.collectives import as_group, share_for
from ringcoll.collectives import functions as api
from ringcoll.errors import ArgumentError
from ringcoll.reduction import Reproducible
from ringcoll.schedule import Schedule
from ringcoll.training.data.parallel import Weighing, average_op
from ringcoll.training.model_on_ranks import require, trained


class Sent(NamedTuple):
    """Report of one compressed average on this rank.

    Bytes that this rank sent, and bytes of an all-reduce without compression, both as rings send
    them; norm of gradient and old residual together, and norm of the new residual.
    """

    nbytes: int
    plain_nbytes: int
    norm: float
    lost_norm: float

    @property
    def relative_error(self) -> float:
        """Share of the norm that was not sent; 0 if there was nothing to send."""
        return self.lost_norm / self.norm if self.norm else 0.0

    @staticmethod
    def total(reports: "Sequence[Sent]") -> "Sent":
        """A report on several averages, at least one, together."""
        sent, plain, norms, lost = zip(*reports, strict=True)
        return Sent(sum(sent), sum(plain), math.hypot(*norms), math.hypot(*lost))


class Compressor(ABC):
    """Averages one tensor over ranks, step after step; it keeps what it could not send.

    A bucket, or a parameter, has a compressor of its own. ``residual`` is what was not sent so far,
    in at least float32; ``None`` before the first call. With ``error_feedback`` it is added to the
    next gradient; otherwise it is lost.
    """

    def __init__(self, group: Any = None, *, error_feedback: bool = True) -> None:
        self.group, self.error_feedback = group, error_feedback
        self.rank_in_group, self.world_size = as_group(group).rank(), as_group(group).size()
        self.residual: Tensor | None = None

    def average(self, tensor: Tensor, weighing: Weighing | None = None) -> Sent:
        """Replace a tensor by the average over ranks of what the ranks send; report what was lost.

        ``weighing`` has the shares of the ranks in the average; by default they are equal.
        All calls on all ranks have tensors of one shape and floating dtype. A tensor that is empty,
        is not floating or has changed its shape raises `ArgumentError`.
        """
        shape = tensor.shape if self.residual is None else self.residual.shape
        is_usual = tensor.numel() > 0 and tensor.is_floating_point() and tensor.shape == shape
        require(is_usual, "tensor", "cannot be compressed",
                f"floating numbers, at least 1, of shape {tuple(shape)}",
                f"{tensor.dtype} of shape {tuple(tensor.shape)}", self.rank_in_group)  # fmt: skip
        wanted = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
        if weighing is not None:
            weighing.weigh(wanted)
            wanted *= self.world_size
        if self.residual is not None and self.error_feedback:
            wanted += self.residual
        own, average, nbytes = self.exchange(wanted)
        self.residual = wanted - own
        with torch.no_grad():
            tensor.copy_(average)
        norms = float(wanted.norm()), float(self.residual.norm())
        return Sent(nbytes, self.reduced_nbytes(tensor), *norms)

    @abstractmethod
    def exchange(self, wanted: Tensor) -> tuple[Tensor, Tensor, int]:
        """Send a tensor, compressed.

        It returns the tensor as this rank has sent it, the average of all ranks' such tensors, and
        the bytes that this rank sent.
        """

    def refuse(self, message: str, argument: str, expected: object, got: object) -> ArgumentError:
        """An error about an argument, with this rank."""
        rank = self.rank_in_group
        return ArgumentError(message, rank=rank, argument=argument, expected=expected, got=got)

    def gathered(self, *tensors: Tensor) -> tuple[list[Tensor], int]:
        """Tensors of all ranks, each (k, ...), and the bytes that this rank sends."""
        k = self.world_size
        outputs = [tensor.new_empty(k, *tensor.shape) for tensor in tensors]
        api.all_gather_single_coalesced(outputs, list(tensors), self.group)
        return outputs, (k - 1) * sum(tensor.nbytes for tensor in tensors)

    def reduced_nbytes(self, tensor: Tensor) -> int:
        """Bytes that a rank sends when a tensor is all-reduced."""
        return 2 * (self.world_size - 1) * tensor.nbytes // self.world_size


class CompressedGradients:
    """Replaces each ``.grad`` of a module by its compressed average; a compressor each.

    ::

        gradients = CompressedGradients(model, lambda: PowerSGD(rank=2))
        loss(model(inputs), targets).backward()
        report = gradients.average()
        optimizer.step()

    Parameters
    ----------
    module
        Module; a parameter whose ``.grad`` is ``None`` takes part with zeros.
    make
        Makes the compressor of a parameter.
    """

    def __init__(self, module: nn.Module, make: Callable[[], Compressor]) -> None:
        self._pairs = [(param, make()) for param in trained(module).values()]

    def average(self, weight: float | Tensor | None = None) -> Sent:
        """Average all gradients, in the order of the parameters; report on all of them together.

        ``weight`` as for `average_gradients`.
        """
        reports, weighing = [], None
        for param, compressor in self._pairs:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            if weight is not None:
                weighing = weighing or Weighing(weight, compressor.group)
            reports.append(compressor.average(param.grad, weighing))
        return Sent.total(reports)


class TopK(Compressor):
    """Sends the elements of largest magnitude, and their indices.

    Parameters
    ----------
    fraction
        Share of the elements that are sent, in (0, 1]; rounded up to whole elements.
    group, error_feedback
        As for `Compressor`.

    Examples
    --------
    >>> import torch, ringcoll
    >>> def rank_main(group):
    ...     compressor, gradient = TopK(1 / 3, group), torch.tensor([1.0, 4.0, 2.0])
    ...     report = compressor.average(gradient)
    ...     return gradient.tolist(), compressor.residual.tolist(), report.nbytes
    >>> ringcoll.run_threads(rank_main, 2)[0]
    ([0.0, 4.0, 0.0], [1.0, 0.0, 2.0], 8)
    """

    def __init__(self, fraction: float, group: Any = None, *, error_feedback: bool = True) -> None:
        super().__init__(group, error_feedback=error_feedback)
        rank, most = self.rank_in_group, "above 0, at most 1"
        require(0 < fraction <= 1, "fraction", "not a share", most, fraction, rank)
        self.fraction = fraction

    def exchange(self, wanted: Tensor) -> tuple[Tensor, Tensor, int]:
        """Send a tensor, compressed; see `Compressor.exchange`."""
        flat = wanted.flatten()
        indices = flat.abs().topk(math.ceil(self.fraction * len(flat)), sorted=False).indices
        values = flat[indices]
        own, average = torch.zeros_like(flat), torch.zeros_like(flat)
        own[indices] = values
        narrow = torch.int32 if len(flat) <= torch.iinfo(torch.int32).max else torch.int64
        (all_values, all_indices), nbytes = self.gathered(values, indices.to(narrow))
        for some_values, some_indices in zip(all_values, all_indices, strict=True):
            average.index_add_(0, some_indices, some_values)
        average /= self.world_size
        return own.view_as(wanted), average.view_as(wanted), nbytes


class Int8(Compressor):
    """Sends numbers of 8 bits, -127 to 127, and a float32 scale for each ``piece`` elements."""

    def __init__(
        self, piece: int = 1024, group: Any = None, *, error_feedback: bool = True
    ) -> None:
        super().__init__(group, error_feedback=error_feedback)
        least = "at least 1 element"
        require(piece > 0, "piece", "must be positive", least, piece, self.rank_in_group)
        self.piece = piece

    def exchange(self, wanted: Tensor) -> tuple[Tensor, Tensor, int]:
        """Send a tensor, compressed; see `Compressor.exchange`."""
        pieces = pad(wanted.flatten(), (0, -wanted.numel() % self.piece)).view(-1, self.piece)
        scales = (pieces.abs().amax(1, keepdim=True) / 127).float()
        divisors = scales.where(scales > 0, 1)
        rounded = (pieces / divisors).round_().clamp_(-127, 127).to(torch.int8)
        numbers = rounded.flatten()[: wanted.numel()]  # the padding is not sent
        (all_numbers, all_scales), nbytes = self.gathered(numbers, scales)

        def decoded(numbers: Tensor, scales: Tensor) -> Tensor:
            spread = scales.to(wanted.dtype).expand(-1, self.piece).flatten()[: wanted.numel()]
            return (numbers * spread).view_as(wanted)

        average = torch.zeros_like(wanted)
        for some_numbers, some_scales in zip(all_numbers, all_scales, strict=True):
            average += decoded(some_numbers, some_scales)
        return decoded(numbers, scales), average / self.world_size, nbytes


class PowerSGD(Compressor):
    """Sends a matrix M as two factors: ``P Q^T``, of r columns each.

    One power iteration a step, from the Q of the step before::

        P <- mean_i(M_i) Q      all-reduce;  then Gram-Schmidt, so that P^T P = 1
        Q <- mean_i(M_i)^T P    all-reduce
        mean_i(M_i) is replaced by P Q^T = P P^T mean_i(M_i)

    A tensor of several dimensions is a matrix of its first dimension and all others; a vector, such
    as a bucket, is laid out as a square matrix, padded with zeros. If the factors are not smaller
    than the matrix, the matrix is all-reduced as it is.

    Parameters
    ----------
    rank
        Number r of columns, at least 1.
    group, error_feedback
        As for `Compressor`.
    seed
        Seed of the first Q; the same on all ranks.
    """

    def __init__(
        self, rank: int, group: Any = None, *, error_feedback: bool = True, seed: int = 0
    ) -> None:
        super().__init__(group, error_feedback=error_feedback)
        least = "at least 1 column"
        require(rank > 0, "rank", "must be positive", least, rank, self.rank_in_group)
        self.rank = rank
        self._random = torch.Generator().manual_seed(seed)
        self._q: Tensor | None = None

    def exchange(self, wanted: Tensor) -> tuple[Tensor, Tensor, int]:
        """Send a tensor, compressed; see `Compressor.exchange`."""
        columns = math.isqrt(wanted.numel() - 1) + 1
        if wanted.dim() > 1:
            matrix = wanted.flatten(1)
        else:
            matrix = pad(wanted.flatten(), (0, -wanted.numel() % columns)).view(-1, columns)
        if self.rank * sum(matrix.shape) >= wanted.numel():
            average = wanted.clone()
            return wanted, average, self._averaged(average)
        p = matrix @ self._start(matrix)
        nbytes = self._averaged(p)
        gram_schmidt(p)
        own_q = matrix.T @ p
        self._q = q = own_q.clone()
        nbytes += self._averaged(q)
        own, average = (
            (p @ factor.T).flatten()[: wanted.numel()].view_as(wanted) for factor in (own_q, q)
        )
        return own, average, nbytes

    def _start(self, matrix: Tensor) -> Tensor:
        """The Q of the step before; random columns for those that have become zero."""
        if self._q is not None and bool(self._q.any(0).all()):
            return self._q
        fresh = torch.randn(
            matrix.shape[1],
            self.rank,
            dtype=torch.float32,
            generator=self._random,
            device=self._random.device,
        ).to(matrix)
        return fresh if self._q is None else self._q.where(self._q.any(0), fresh)

    def _averaged(self, tensor: Tensor) -> int:
        api.all_reduce(tensor, dist.ReduceOp.AVG, self.group)
        return self.reduced_nbytes(tensor)


def gram_schmidt(matrix: Tensor) -> None:
    """Make the columns of a matrix, (m, r), orthonormal, in place; they keep their span.

    A column that depends on the columns before it becomes zero.
    """
    least = torch.finfo(matrix.dtype).eps ** 0.5
    for number, column in enumerate(matrix.unbind(1)):
        earlier, before = matrix[:, :number], column.norm()
        for _ in range(2):  # twice is enough: Giraud et al., Numerische Mathematik 101 (2005)
            column.sub_(earlier @ (earlier.T @ column))
        after = column.norm()
        column.mul_(after.reciprocal() if after > least * before else 0)


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
