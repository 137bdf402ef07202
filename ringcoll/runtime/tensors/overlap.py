"""Tensors of a user that share memory.

Whether elements of strided tensors share memory is decided from sizes and strides, by
`numpy.shares_memory`, which solves an equation with bounded unknowns. In general the problem is
NP-hard, so the work has a limit. numpy compares two arrays; elements of one array share memory if
those of its halves do, or elements of a half.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor

from ringcoll.errors import ArgumentError
from ringcoll.runtime.tensors.memory import extent, is_plain

_Interval = tuple[int, int, bool, int]  # first byte, end, is an output, block
_OVERLAP = "overlapping memory"
# Values that numpy tries for two arrays, some 10 ms; its type hints know two numbers only.
_MOST_WORK: Any = 1_000_000


def share_blocks(
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    input_blocks: Sequence[int],
    output_blocks: Sequence[int],
    lengths: dict[int, int],
    rank: int,
) -> bool:
    """Whether a block that is both input and output has the same memory as both.

    ``lengths`` has the elements of each block. Raises `ArgumentError` if inputs and outputs overlap
    in any other way, or outputs overlap.
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
    """Raise `ArgumentError` if elements of strided outputs share memory, or that takes too long."""
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
    """The memory of each block of plain tensors: of one each, or of one tensor end to end."""
    intervals: list[_Interval] = []
    is_split, end = len(tensors) == len(blocks), 0
    for position, block in enumerate(blocks):
        tensor = tensors[position if is_split else 0]
        start = tensor.data_ptr() if is_split or not position else end
        end = start + (tensor.nbytes if is_split else lengths[block] * tensor.itemsize)
        if is_plain(tensor) and start < end:
            intervals.append((start, end, is_output, block))
    return intervals


class TooIntricateError(Exception):
    """The strides do not decide within the limit."""


def share_memory(tensors: Sequence[Tensor]) -> bool:
    """Whether elements of the tensors, in one or in two of them, share memory.

    Examples
    --------
    >>> from torch import zeros
    >>> matrix = zeros(5, 4)
    >>> share_memory(matrix.unbind(-1)), share_memory([matrix[:, :2], matrix[2:, 1:]])
    (False, True)
    """
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if any(tensor.nbytes > extent(tensor) for tensor in tensors):
        return True  # it has more bytes than its memory
    tensors.sort(key=Tensor.data_ptr)
    arrays = [_array(tensor, tensor.shape, tensor.stride()) for tensor in tensors]
    kinds = {(tensor.itemsize, tensor.shape, tensor.stride()) for tensor in tensors}
    steps = {second.data_ptr() - first.data_ptr() for first, second in pairwise(tensors)}
    if len(kinds) == len(steps) == 1:  # all are alike and equally far apart, as columns
        arrays = [
            _array(tensors[0], (len(tensors), *tensors[0].shape), tensors[0].stride(), *steps)
        ]
    if any(map(_overlaps_itself, arrays)):
        return True
    for number, first in enumerate(arrays):
        end = tensors[number].data_ptr() + extent(tensors[number])
        for second, tensor in zip(arrays[number + 1 :], tensors[number + 1 :], strict=False):
            if tensor.data_ptr() >= end:
                break
            if _overlap(first, second):
                return True
    return False


def _array(tensor: Tensor, shape: Sequence[int], strides: Sequence[int], *outer: int) -> Any:
    """An array in the place of a tensor of any device; ``outer`` are strides of more dimensions."""
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


def _overlaps_itself(array: Any) -> bool:
    for _ in range(array.ndim):
        while len(array) > 1:
            half = -(-len(array) // 2)
            if _overlap(array[:half], array[half:]):
                return True
            array = array[:half]  # the other half is as long at most
        array = array[0]
    return False


def _overlap(first: Any, second: Any) -> bool:
    try:
        return np.shares_memory(first, second, max_work=_MOST_WORK)
    except np.exceptions.TooHardError:
        raise TooIntricateError from None
