"""Gradient compression with error feedback, in place of the all-reduce of a bucket.

Problem: an all-reduce of gradients moves 2(k - 1)/k of their bytes. A *compressor* sends less, and
loses something. With *error feedback* the loss is not lost: rank i keeps a residual e, sends
``c = C(g + e)`` instead of its gradient g, and keeps ``e <- g + e - c`` for the next step. So after
T steps the sum of what a rank has sent differs from the sum of its gradients by the last e alone.
Where C loses at most a fraction q < 1 of the norm, e never grows beyond ``q / (1 - q) max |g|``.

`ringcoll.training.data.compressors` has three of them, and says what each sends and loses;
`ringcoll.training.data.hooks` runs them inside torch's DistributedDataParallel. All ranks get
the same average, to the last bit, if their processors multiply alike. Gradients have to be finite:
an infinity would stay in the residual.

Source: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al.,
"Error Feedback Fixes SignSGD", ICML 2019 (the bound).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ringcoll.collectives import functions as api
from ringcoll.collectives.groups import as_group
from ringcoll.errors import ArgumentError
from ringcoll.training.checks import require
from ringcoll.training.flat import trained

__all__ = ["CompressedGradients", "Compressor", "Sent"]


class Sent(NamedTuple):
    """Report of one compressed average on this rank.

    Parameters
    ----------
    nbytes
        Bytes that this rank sent, as rings send them.
    plain_nbytes
        Bytes of an all-reduce without compression, as a ring sends them.
    norm, lost_norm
        Norm of gradient and old residual together, and norm of the new residual.
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
    def total(reports: Sequence[Sent]) -> Sent:
        """A report on several averages, at least one, together."""
        sent, plain, norms, lost = zip(*reports, strict=True)
        return Sent(sum(sent), sum(plain), math.hypot(*norms), math.hypot(*lost))


class Compressor(ABC):
    """Averages one tensor over ranks, step after step; it keeps what it could not send.

    A bucket, or a parameter, has a compressor of its own. ``residual`` is what was not sent so far,
    in at least float32; ``None`` before the first call.

    Parameters
    ----------
    group
        Group of the ranks that train together; ``None`` for the default group.
    error_feedback
        Whether the residual is added to the next gradient; without it, the residual is lost.
    """

    def __init__(self, group: Any = None, *, error_feedback: bool = True) -> None:
        self.group, self.error_feedback = group, error_feedback
        self.rank_in_group, self.world_size = as_group(group).rank(), as_group(group).size()
        self.residual: Tensor | None = None

    def average(self, tensor: Tensor) -> Sent:
        """Replace a tensor by the average over ranks of what the ranks send.

        Parameters
        ----------
        tensor
            Any shape; the same shape and floating dtype on all ranks and in all calls.

        Returns
        -------
        Sent
            What was sent, and how much was lost.

        Raises
        ------
        ArgumentError
            The tensor is empty, does not hold real floating numbers, or has changed its shape.
        RingcollError
            A collective failed.
        """
        shape = tensor.shape if self.residual is None else self.residual.shape
        is_usual = tensor.numel() > 0 and tensor.is_floating_point() and tensor.shape == shape
        require(is_usual, "tensor", "cannot be compressed",
                f"floating numbers, at least 1, of shape {tuple(shape)}",
                f"{tensor.dtype} of shape {tuple(tensor.shape)}", self.rank_in_group)  # fmt: skip
        wanted = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
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

        Returns
        -------
        own, average
            The tensor as this rank has sent it, and the average of all ranks' such tensors.
        nbytes
            Bytes that this rank sent.
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

        gradients = CompressedGradients(model, lambda: PowerSGD(rank=2))  # of `compressors`
        loss(model(inputs), targets).backward()
        report = gradients.average()
        optimizer.step()

    Parameters
    ----------
    module
        Module; a parameter whose ``.grad`` is ``None`` takes part with zeros.
    make
        Makes the compressor of a parameter.

    Raises
    ------
    ArgumentError
        No parameter needs a gradient.
    """

    def __init__(self, module: nn.Module, make: Callable[[], Compressor]) -> None:
        self._pairs = [(param, make()) for param in trained(module).values()]

    def average(self) -> Sent:
        """Average all gradients, in the order of the parameters; report on all of them together.

        Raises
        ------
        ArgumentError, RingcollError
            As for `Compressor.average`.
        """
        reports = []
        for param, compressor in self._pairs:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
            reports.append(compressor.average(param.grad))
        return Sent.total(reports)
