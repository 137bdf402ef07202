"""Before and after the schedule: what no algorithm should know about tensors.

A schedule runs on flat, contiguous tensors of one dtype. Here the user's tensors
become such: detached, conjugation and negation resolved, strided views copied in
logical order and back, dtypes converted to the one that is computed in and back.
Where a tensor is flat already, its own memory is used and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ringcoll.errors import ArgumentError
from ringcoll.reduction import TORCH, Engine, Reduction

__all__ = ["Opened", "Stage", "fusible", "is_dense", "packed"]

Opened = tuple[Sequence[Tensor], Sequence[Tensor], Callable[[], None] | None]
"""Flat inputs, flat outputs, and what brings results home that are not there yet."""

_Interval = tuple[int, int, bool, int]  # first byte, end, is an output, block


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements lie in memory by strides, as they are."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


class Stage:
    """The inputs and outputs of one call.

    Parameters
    ----------
    rank
        For error messages.
    inputs, outputs
        The user's tensors.
    reduction
        What is computed; ``None`` where data are only moved.
    engine
        What converts.

    Raises
    ------
    ArgumentError
        An output has elements that share memory with each other.
    """

    def __init__(
        self,
        rank: int,
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        reduction: Reduction | None,
        engine: Engine = TORCH,
    ) -> None:
        self._rank, self._reduction, self._engine = rank, reduction, engine
        self._converts = reduction is not None and not reduction.shares_memory
        self._scales = reduction is not None and reduction.scale is not None
        # All of them: autograd may come to need the gradient of a tensor while it is in use.
        self._inputs = [tensor.detach() for tensor in inputs]
        self._outputs = [tensor.detach() for tensor in outputs]
        if any(not tensor.is_contiguous() for tensor in self._outputs) and _overlap(self._outputs):
            raise _shared_memory("elements of the outputs share memory", "distinct elements", rank)
        self._one_copy = self._keeps = False
        self._opened: Opened | None = None
        self._refills: list[tuple[Tensor, Tensor]] = []  # what is a copy, and of what

    def _as_it_is(self, tensor: Tensor) -> bool:
        """Whether the schedule can run on the tensor's own memory."""
        plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        return plain and not self._converts

    def shared_memory(
        self, inputs: Sequence[int], outputs: Sequence[int], lengths: dict[int, int]
    ) -> bool:
        """Whether a block that is both input and output has the same memory as both.

        Parameters
        ----------
        inputs, outputs
            Blocks of the input and of the output, in order.
        lengths
            Number of elements of each block.

        Raises
        ------
        ArgumentError
            Inputs and outputs overlap in any other way.
        """
        if len(self._inputs) == len(self._outputs) == 1:
            source, target = self._inputs[0], self._outputs[0]
            same = source.data_ptr() == target.data_ptr() and source.shape == target.shape
            same = same and source.stride() == target.stride()
            # A lazy conjugate of the same memory is another tensor.
            same = same and (source.is_conj(), source.is_neg()) == (
                target.is_conj(),
                target.is_neg(),
            )
            if same and len(inputs) == len(outputs) == 1:
                # The same tensor: the copy that is made of it, if any, serves as both.
                self._one_copy = not self._scales
                return self._one_copy
        found = [
            *self._intervals(self._inputs, inputs, lengths, is_output=False),
            *self._intervals(self._outputs, outputs, lengths, is_output=True),
        ]
        shared = False
        input_end = output_end = 0
        last: _Interval | None = None
        for interval in sorted(found):
            first, end, is_output, block = interval
            if first < output_end or (is_output and first < input_end):
                twin = last is not None and (first, end, not is_output, block) == last
                if not twin:
                    raise _shared_memory(
                        "an output overlaps an input or another output",
                        "separate memory, or a block in its own place",
                        self._rank,
                    )
                shared = True
            if is_output:
                output_end = max(output_end, end)
            else:
                input_end = max(input_end, end)
            last = interval
        return shared and not self._scales

    def _intervals(
        self,
        tensors: Sequence[Tensor],
        blocks: Sequence[int],
        lengths: dict[int, int],
        *,
        is_output: bool,
    ) -> list[_Interval]:
        """The memory of each block, for tensors whose own memory is used."""
        found: list[_Interval] = []
        if len(tensors) == len(blocks):
            for tensor, block in zip(tensors, blocks, strict=True):
                if self._as_it_is(tensor) and tensor.numel():
                    start = tensor.data_ptr()
                    found.append((start, start + tensor.nbytes, is_output, block))
            return found
        (tensor,) = tensors
        if self._as_it_is(tensor):
            start = tensor.data_ptr()
            for block in blocks:
                end = start + lengths[block] * tensor.itemsize
                if lengths[block]:
                    found.append((start, end, is_output, block))
                start = end
        return found

    @property
    def is_plain(self) -> bool:
        """Whether all tensors' own memory is used."""
        tensors = (*self._inputs, *self._outputs)
        return not self._scales and all(map(self._as_it_is, tensors))

    @property
    def tensors(self) -> list[Tensor]:
        """The user's tensors, all of them."""
        return [*self._inputs, *self._outputs]

    def keep(self) -> None:
        """Let `open` give the same memory every time."""
        self._keeps = True

    def forget(self) -> None:
        """Let the next `open` give other memory, which is then kept."""
        self._opened, self._refills = None, []

    def open(self) -> Opened:
        """Make the flat tensors."""
        if self._opened is None:
            if not self._keeps:
                return self._open()
            with torch.inference_mode(False):  # it may be used again outside of that mode
                opened = self._opened = self._open()
            self._refills = [
                (flat, tensor)
                for flat, tensor in zip(opened[0], self._inputs, strict=True)
                if self._scales or not self._as_it_is(tensor)
            ]
            return opened
        for flat, tensor in self._refills:
            flat.copy_(self._flat_input(tensor))
        return self._opened

    def _open(self) -> Opened:
        inputs = [self._flat_input(tensor) for tensor in self._inputs]
        if self._one_copy:
            outputs = inputs
        else:
            outputs = [self._flat_output(tensor) for tensor in self._outputs]
        copied = [
            (tensor, flat)
            for tensor, flat in zip(self._outputs, outputs, strict=True)
            if not self._as_it_is(tensor)
        ]
        if not copied:
            return inputs, outputs, None

        def finish() -> None:
            for tensor, flat in copied:
                decoded = self._reduction.decode(flat) if self._reduction else flat
                tensor.copy_(decoded.view(tensor.shape))

        return inputs, outputs, finish

    def _flat_input(self, tensor: Tensor) -> Tensor:
        if not self._as_it_is(tensor):
            tensor = tensor.resolve_conj().resolve_neg()
        flat = tensor if tensor.dim() == 1 else tensor.reshape(-1)
        if self._reduction is None:
            return flat.contiguous()
        return self._engine.encode(self._reduction, flat.contiguous())

    def _flat_output(self, tensor: Tensor) -> Tensor:
        if self._as_it_is(tensor):
            flat = tensor if tensor.dim() == 1 else tensor.view(-1)
            return flat if self._reduction is None else self._reduction.encode(flat)
        dtype = tensor.dtype if self._reduction is None else self._reduction.work_dtype
        return torch.empty(tensor.numel(), dtype=dtype, device=tensor.device)


_FUSED_NBYTES = 32 << 10  # a message of so much costs little more than an empty one
_MOST_FUSED_NBYTES = 1 << 20


def fusible(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Divide tensors into runs that may be laid end to end.

    It depends on what is the same on all ranks: dtypes and numbers of elements.
    """
    runs: list[list[Tensor]] = []
    total = 0
    for tensor in tensors:
        short = _may_be_fused(tensor)
        last = runs[-1][-1] if runs else None
        if (
            short
            and last is not None
            and _may_be_fused(last)
            and total + tensor.nbytes <= _MOST_FUSED_NBYTES
            and (last.dtype, last.device) == (tensor.dtype, tensor.device)
        ):
            runs[-1].append(tensor)
            total += tensor.nbytes
        else:
            runs.append([tensor])
            total = tensor.nbytes if short else _MOST_FUSED_NBYTES
    return runs


def _may_be_fused(tensor: object) -> bool:
    if not isinstance(tensor, Tensor) or not is_dense(tensor):
        return False
    return 0 < tensor.nbytes <= _FUSED_NBYTES


def packed(
    open_flat: Callable[[], Opened], flat: Tensor, tensors: Sequence[Tensor]
) -> Callable[[], Opened]:
    """Open a flat tensor in place of several: they are copied to it, and the results back.

    Parameters
    ----------
    open_flat
        Opens the flat tensor, which is input and output.
    flat
        As many elements as all tensors together.
    tensors
        Dense ones, of its dtype.

    Raises
    ------
    ArgumentError
        Elements of one of them share memory.
    """
    users = [tensor.detach() for tensor in tensors]
    if any(not one.is_contiguous() and _overlap([one]) for one in users):
        raise _shared_memory("elements of a tensor share memory", "distinct elements")
    parts = torch.split(flat, [one.numel() for one in users])

    def open_() -> Opened:
        torch.cat([one.reshape(-1) for one in users], out=flat)
        inputs, outputs, finish = open_flat()

        def bring_home() -> None:
            if finish is not None:
                finish()
            for one, part in zip(users, parts, strict=True):
                one.copy_(part.view(one.shape))

        return inputs, outputs, bring_home

    return open_


def _shared_memory(message: str, expected: str, rank: int | None = None) -> ArgumentError:
    return ArgumentError(
        message, rank=rank, argument="output", expected=expected, got="overlapping memory"
    )


def _overlap(tensors: Sequence[Tensor]) -> bool:
    """Whether elements of the tensors, in one or in two of them, share memory."""
    spans: list[tuple[int, int]] = []
    certain = True
    for tensor in tensors:
        reach = 0  # of the dimensions with smaller strides, in elements
        for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            certain &= size <= 1 or stride > reach
            reach += (size - 1) * stride
        if tensor.numel():
            start = tensor.data_ptr()
            spans.append((start, start + (reach + 1) * tensor.itemsize))
    spans.sort()
    apart = all(end <= start for (_, end), (start, _) in pairwise(spans))
    if certain and apart:
        return False
    addresses = torch.cat([_addresses(tensor) for tensor in tensors])
    return bool((addresses.sort().values.diff() == 0).any())


def _addresses(tensor: Tensor) -> Tensor:
    """Where each element of a tensor lies."""
    found = torch.tensor(tensor.data_ptr() // tensor.itemsize, device="cpu")
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        found = found.unsqueeze(-1) + torch.arange(size, device="cpu") * stride
    return found.reshape(-1)
