"""Before and after the schedule: facts of tensors that no algorithm should know.

A schedule runs on flat, contiguous tensors of one dtype. Here the user's tensors become such
tensors: conjugation and negation are resolved, strided views are copied in logical order and back,
dtypes are converted to the work dtype and back, short tensors are laid end to end. A tensor that
is flat already is used at its own place, and nothing is copied.

Whether elements of strided tensors share memory is decided from sizes and strides, by
`numpy.shares_memory`, which solves an equation with bounded unknowns. In general the problem is
NP-hard, so the work has a limit. numpy compares two arrays; elements of one array share memory if
those of its halves do, or elements of a half.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import memmove
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ringcoll.errors import ArgumentError
from ringcoll.runtime.reduction import TORCH, Engine, Reduction
from ringcoll.runtime.transport import has_streams, is_dense

Load = tuple[Callable[[Tensor], object], int]
"""A function of a tensor, which copies it in or out, and the number of the tensor."""

_Interval = tuple[int, int, bool, int]  # first byte, end, is an output, block


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's memory holds its elements in logical order, as they are."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


class Flat(NamedTuple):
    """The flat tensors of one call, what copies to them, and what copies results back."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    loads: list[Load]
    stores: list[Load]


@dataclass(frozen=True, slots=True)
class Stage:
    """The way from the tensors of a call to the flat tensors of a schedule.

    Parameters
    ----------
    inputs, outputs
        For each flat tensor, the numbers of the call's tensors that it holds, end to end.
    plain
        For each of the call's tensors, whether its memory can be used as it is.
    numels
        Elements of each of the call's tensors.
    nbytes
        Bytes of all tensors together.
    one_copy
        Whether input and output are the same tensor, and one flat tensor serves as both.
    written
        Numbers of the tensors that get a result which they do not have yet. Other memory of the
        call is only read.
    counted
        Numbers of the tensors whose version moves, so that autograd sees that they are written.
    reduction, engine
        Meaning of ``(+)``, and the engine that computes it; ``None`` if data are only moved.
    """

    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    plain: tuple[bool, ...]
    numels: tuple[int, ...]
    nbytes: int
    dtype: torch.dtype
    one_copy: bool
    written: tuple[int, ...]
    counted: tuple[int, ...]
    reduction: Reduction | None
    engine: Engine = TORCH

    @property
    def scales(self) -> bool:
        """Whether inputs are multiplied by a factor first."""
        return self.reduction is not None and self.reduction.scale is not None

    @property
    def converts(self) -> bool:
        """Whether the schedule cannot run on the tensors' own memory."""
        return self.reduction is not None and not self.reduction.shares_memory

    @property
    def is_direct(self) -> bool:
        """Whether the schedule runs on the tensors' own memory, without a copy."""
        return not (self.scales or self.converts) and all(
            len(numbers) == 1 and self.plain[numbers[0]]
            for numbers in (*self.inputs, *self.outputs)
        )

    def bind(self, tensors: Sequence[Tensor], *, is_own: bool) -> Flat:
        """Make the flat tensors; if ``is_own``, all in new memory, which serves other tensors."""
        flat = Flat([], [], [], [])
        for numbers in self.inputs:
            if self._is_used_in_place(numbers, is_own) and not self.scales:
                flat.inputs.append(self._encoded(_alias(tensors[numbers[0]])))
                continue
            whole = self._memory(numbers, tensors)
            for number, piece in self._pieces(numbers, whole):
                flat.loads.append((self._load(piece, tensors[number], number), number))
            flat.inputs.append(whole)
        for index, numbers in enumerate(self.outputs):
            if self.one_copy:
                whole = flat.inputs[index]
            elif self._is_used_in_place(numbers, is_own):
                flat.outputs.append(self._encoded(_alias(tensors[numbers[0]])))
                continue
            else:
                whole = self._memory(numbers, tensors)
            flat.outputs.append(whole)
            if self.one_copy and self._is_used_in_place(numbers, is_own):
                continue
            for number, piece in self._pieces(numbers, whole):
                if number in self.written:
                    flat.stores.append((self._store(piece, tensors[number], number), number))
        flat.stores.extend((increment_version, number) for number in self.counted)
        return flat

    def _is_used_in_place(self, numbers: tuple[int, ...], is_own: bool) -> bool:
        is_one_plain = len(numbers) == 1 and self.plain[numbers[0]]
        return is_one_plain and not is_own and not self.converts

    def _encoded(self, flat: Tensor) -> Tensor:
        """A view of a tensor in the dtype that is computed in."""
        return flat if self.reduction is None else self.reduction.encode(flat)

    def _memory(self, numbers: tuple[int, ...], tensors: Sequence[Tensor]) -> Tensor:
        numel = sum(self.numels[number] for number in numbers)
        dtype = self.dtype if self.reduction is None else self.reduction.work_dtype
        return torch.empty(numel, dtype=dtype, device=tensors[numbers[0]].device)

    def _pieces(self, numbers: tuple[int, ...], whole: Tensor) -> list[tuple[int, Tensor]]:
        if len(numbers) == 1:
            return [(numbers[0], whole)]
        sizes = [self.numels[number] for number in numbers]
        return list(zip(numbers, torch.split(whole, sizes), strict=True))

    @property
    def _moves(self) -> bool:
        """Whether tensors are copied as they are, without arithmetic or rounding."""
        return self.reduction is None or (self.reduction.shares_memory and not self.scales)

    def _is_moved(self, tensor: Tensor, number: int) -> bool:
        """Whether a tensor's bytes, as they lie in memory, are what the schedule works on."""
        return self.plain[number] and not has_streams(tensor.device)

    def _load(self, piece: Tensor, tensor: Tensor, number: int) -> Callable[[Tensor], object]:
        if self._moves and self._is_moved(tensor, number):
            return _moved(piece)[0]
        if self._moves:
            return piece.view(self.dtype).view(tensor.shape).copy_
        assert self.reduction is not None
        engine, reduction = self.engine, self.reduction

        def encode(tensor: Tensor) -> None:
            resolved = tensor.resolve_conj().resolve_neg().reshape(-1).contiguous()
            piece.copy_(engine.encode(reduction, resolved))

        return encode

    def _store(self, piece: Tensor, tensor: Tensor, number: int) -> Callable[[Tensor], object]:
        """A function that copies a result out, and leaves the tensor's version as it is.

        Where torch's collectives move it, ``counted`` has the tensor.
        """
        shape, reduction = tensor.shape, self.reduction
        if reduction is not None and not reduction.shares_memory:
            return lambda tensor: tensor.data.copy_(reduction.decode(piece).view(shape))
        if self._is_moved(tensor, number):
            return _moved(piece)[1]
        result = piece.view(self.dtype).view(shape)
        return lambda tensor: tensor.data.copy_(result)


def _moved(piece: Tensor) -> tuple[Callable[[Tensor], object], Callable[[Tensor], object]]:
    """Functions that copy a plain CPU tensor to a piece of memory, and the piece to the tensor."""
    place, nbytes = piece.data_ptr(), piece.nbytes
    address = Tensor.data_ptr

    # The functions keep the piece.
    def load(tensor: Tensor, _piece: Tensor = piece) -> None:
        memmove(place, address(tensor), nbytes)

    def store(tensor: Tensor, _piece: Tensor = piece) -> None:
        memmove(address(tensor), place, nbytes)

    return load, store


def _alias(tensor: Tensor) -> Tensor:
    """View the memory of a plain tensor as a vector.

    The vector does not keep a CPU tensor alive, and has neither inference mode nor autograd.
    """
    if has_streams(tensor.device) or not tensor.nbytes:
        return tensor.data.view(-1)  # its version is not the tensor's
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype)


def share_blocks(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    input_blocks: Sequence[int],
    output_blocks: Sequence[int],
    lengths: dict[int, int],
    rank: int,
) -> bool:
    """Whether a block that is both input and output has the same memory as both.

    ``lengths`` has the elements of each block.

    Raises
    ------
    ArgumentError
        Inputs and outputs overlap in any other way, or outputs overlap.
    """
    intervals = [
        *_intervals(inputs, input_blocks, lengths, is_output=False),
        *_intervals(outputs, output_blocks, lengths, is_output=True),
    ]
    is_shared = False
    # Of the inputs, of the inputs before the last, and of the outputs so far.
    input_end = earlier_end = output_end = 0
    last: _Interval | None = None
    for interval in sorted(intervals):
        first, end, is_output, block = interval
        if first < output_end or (is_output and first < input_end):
            is_twin = is_output and last == (first, end, False, block)
            if not is_twin or first < max(earlier_end, output_end):
                message = "an output overlaps an input or another output"
                expected = "separate memory, or a block in its own place"
                raise ArgumentError(message, "output", expected, _OVERLAP, rank)
            is_shared = True
        if is_output:
            output_end = max(output_end, end)
        else:
            earlier_end, input_end = input_end, max(input_end, end)
        last = interval
    return is_shared


def check_apart(outputs: Sequence[Tensor], rank: int) -> None:
    """Check that no two elements of strided outputs share memory.

    Raises
    ------
    ArgumentError
        Two elements share memory, or the strides are too intricate to tell.
    """
    if all(tensor.is_contiguous() for tensor in outputs):
        return
    try:
        is_shared = share_memory(outputs)
    except TooIntricateError:
        message = "nobody can tell in time whether elements of the outputs share memory"
        raise ArgumentError(message, "output", "contiguous outputs", _OVERLAP, rank) from None
    if is_shared:
        message = "elements of the outputs share memory"
        raise ArgumentError(message, "output", "distinct elements", _OVERLAP, rank)


def _intervals(
    tensors: Sequence[Tensor], blocks: Sequence[int], lengths: dict[int, int], *, is_output: bool
) -> list[_Interval]:
    """The memory of each block of plain tensors."""
    intervals: list[_Interval] = []
    if len(tensors) == len(blocks):
        for tensor, block in zip(tensors, blocks, strict=True):
            if is_plain(tensor) and tensor.numel():
                start = tensor.data_ptr()
                intervals.append((start, start + tensor.nbytes, is_output, block))
        return intervals
    (tensor,) = tensors
    if is_plain(tensor):
        start = tensor.data_ptr()
        for block in blocks:
            end = start + lengths[block] * tensor.itemsize
            if lengths[block]:
                intervals.append((start, end, is_output, block))
            start = end
    return intervals


_FUSED_NBYTES = 32 << 10  # a message of so many bytes costs little more than an empty message
_MOST_FUSED_NBYTES = 1 << 20


def fusible(tensors: Sequence[Any]) -> list[list[Any]]:
    """Divide tensors into runs that may be laid end to end.

    The division depends on facts that are the same on all ranks: dtypes and numbers of elements.
    """
    runs: list[list[Any]] = []
    total = 0
    for tensor in tensors:
        is_known = isinstance(tensor, Tensor) and is_dense(tensor)
        short = is_known and 0 < tensor.nbytes <= _FUSED_NBYTES
        last = runs[-1][-1] if runs else None
        if (
            short
            and last is not None
            and total + tensor.nbytes <= _MOST_FUSED_NBYTES
            and (last.dtype, last.device) == (tensor.dtype, tensor.device)
        ):
            runs[-1].append(tensor)
            total += tensor.nbytes
        else:
            runs.append([tensor])
            total = tensor.nbytes if short else _MOST_FUSED_NBYTES
    return runs


_OVERLAP = "overlapping memory"
# Values that numpy tries for two arrays, some 10 ms; its type hints know two numbers only.
_MOST_WORK: Any = 1_000_000


class TooIntricateError(Exception):
    """The strides do not decide within the limit."""


def share_memory(tensors: Sequence[Tensor]) -> bool:
    """Whether elements of the tensors, in one or in two of them, share memory.

    Examples
    --------
    >>> matrix = torch.zeros(5, 4)
    >>> share_memory(matrix.unbind(-1)), share_memory([matrix[:, :2], matrix[2:, 1:]])
    (False, True)
    """
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if any(tensor.nbytes > _end(tensor) - tensor.data_ptr() for tensor in tensors):
        return True  # it has more bytes than its memory
    tensors.sort(key=Tensor.data_ptr)
    arrays = [_array(tensor, tensor.shape, tensor.stride()) for tensor in tensors]
    kinds = {(tensor.itemsize, tensor.shape, tensor.stride()) for tensor in tensors}
    steps = {other.data_ptr() - one.data_ptr() for one, other in pairwise(tensors)}
    if len(kinds) == len(steps) == 1:  # all are alike and equally far apart, as columns
        arrays = [
            _array(tensors[0], (len(tensors), *tensors[0].shape), tensors[0].stride(), *steps)
        ]
    if any(map(_meets_itself, arrays)):
        return True
    for number, one in enumerate(arrays):
        end = _end(tensors[number])
        for other, tensor in zip(arrays[number + 1 :], tensors[number + 1 :], strict=False):
            if tensor.data_ptr() >= end:
                break
            if _meet(one, other):
                return True
    return False


def _end(tensor: Tensor) -> int:
    """The first byte behind a tensor."""
    places = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in places)
    return tensor.data_ptr() + (last + 1) * tensor.itemsize


def _array(tensor: Tensor, shape: Sequence[int], strides: Sequence[int], *outer: int) -> Any:
    """An array in the place of a tensor, of any dtype and device, for questions about its place.

    ``outer`` are strides in bytes of dimensions before the tensor's.
    """
    nbytes = (*outer, *(stride * tensor.itemsize for stride in strides))
    # Dimensions of one element say nothing; numpy has at most 64 dimensions, or 32.
    places = [place for place in zip(shape, nbytes, strict=True) if place[0] > 1]
    about = {
        "version": 3,
        "data": (tensor.data_ptr(), True),
        "typestr": f"|V{tensor.itemsize}",
        "shape": tuple(size for size, _ in places),
        "strides": tuple(stride for _, stride in places),
    }
    try:
        return np.asarray(SimpleNamespace(__array_interface__=about))
    except ValueError:
        raise TooIntricateError from None


def _meets_itself(array: Any) -> bool:
    """Whether two elements of an array share memory."""
    for _ in range(array.ndim):
        while len(array) > 1:
            half = -(-len(array) // 2)
            if _meet(array[:half], array[half:]):
                return True
            array = array[:half]  # the other half is as long at most
        array = array[0]
    return False


def _meet(one: Any, other: Any) -> bool:
    try:
        return np.shares_memory(one, other, max_work=_MOST_WORK)
    except np.exceptions.TooHardError:
        raise TooIntricateError from None
