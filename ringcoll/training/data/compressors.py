"""Three compressors of gradients: the largest elements, numbers of 8 bits, and low rank.

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

An all-gather moves k - 1 times the bytes of a rank: `TopK` and `Int8` suit few ranks. The factors of
PowerSGD are linear in the gradients, so that they can be added up on the way, for any number of
ranks. Error feedback, and what follows from what is lost: `ringcoll.training.data.compression`.

Source: Stich et al., "Sparsified SGD with Memory", NeurIPS 2018 (top-k); Vogels et al., "PowerSGD:
Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ringcoll.collectives import functions as api
from ringcoll.training.checks import require
from ringcoll.training.data.compression import Compressor

__all__ = ["Int8", "PowerSGD", "TopK", "gram_schmidt"]


class TopK(Compressor):
    """Sends the elements of largest magnitude, and their indices.

    Parameters
    ----------
    fraction
        Share of the elements that are sent, in (0, 1]; rounded up to whole elements.
    group, error_feedback
        As for `Compressor`.

    Raises
    ------
    ArgumentError
        The fraction is not in (0, 1].

    Examples
    --------
    >>> import torch, ringcoll
    >>> from ringcoll.training import TopK
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
    """Sends numbers of 8 bits, -127 to 127, and a float32 scale for each piece.

    Parameters
    ----------
    piece
        Number of elements that share a scale.
    group, error_feedback
        As for `Compressor`.

    Raises
    ------
    ArgumentError
        The piece has no elements.
    """

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
        numbers = (pieces / divisors).round_().clamp_(-127, 127).to(torch.int8)
        flat = numbers.flatten()[: wanted.numel()]  # the padding is not sent
        (all_numbers, all_scales), nbytes = self.gathered(flat, scales)

        def decoded(numbers: Tensor, scales: Tensor) -> Tensor:
            spread = scales.to(wanted.dtype).expand(-1, self.piece).flatten()[: wanted.numel()]
            return (numbers * spread).view_as(wanted)

        average = torch.zeros_like(wanted)
        for some_numbers, some_scales in zip(all_numbers, all_scales, strict=True):
            average += decoded(some_numbers, some_scales)
        return decoded(flat, scales), average / self.world_size, nbytes


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
        Number r of columns.
    group, error_feedback
        As for `Compressor`.
    seed
        Seed of the first Q; the same on all ranks.

    Raises
    ------
    ArgumentError
        r is below 1.
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
        matrix = (
            wanted.flatten(1)
            if wanted.dim() > 1
            else pad(wanted.flatten(), (0, -wanted.numel() % columns)).view(-1, columns)
        )
        if self.rank * sum(matrix.shape) >= wanted.numel():
            average = wanted.clone()
            return wanted, average, self._averaged(average)
        q = self._start(matrix)
        p = matrix @ q
        nbytes = self._averaged(p)
        gram_schmidt(p)
        own_q = matrix.T @ p
        q = own_q.clone()
        nbytes += self._averaged(q)
        self._q = q
        own, average = (
            (p @ factor.T).flatten()[: wanted.numel()].view_as(wanted) for factor in (own_q, q)
        )
        return own, average, nbytes

    def _start(self, matrix: Tensor) -> Tensor:
        """The Q of the step before; random columns for those that have become zero."""
        if self._q is not None and bool(self._q.any(0).all()):
            return self._q
        fresh = torch.randn(
            matrix.shape[1], self.rank, generator=self._random, device=self._random.device
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
