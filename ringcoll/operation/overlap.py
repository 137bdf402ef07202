"""Whether elements of strided tensors share memory, decided from sizes and strides.

Problem: the elements of a tensor lie at ``start + stride_0 x_0 + stride_1 x_1 + ...`` with ``0 <=
x_i < size_i``. Two elements share memory if an equation with bounded unknowns has a solution: for
elements of two tensors

    a_0 x_0 + a_1 x_1 + ... - b_0 y_0 - b_1 y_1 - ... = distance of the starts,

and for elements of one tensor the same with both sides its own, besides ``x = y``. With ``size - 1
- y`` in place of y all coefficients are positive. The largest coefficient comes first: what is left
for the others bounds its unknown from both sides, and their greatest common divisor leaves one
value of so many. Strides that are nested, as in all views of a matrix by slices, leave one or two
values in all. In general the problem is NP-hard, so the work has a limit; beyond it each byte is
marked, if the memory in question is not too long.

Source: the same equation, with another search, is in NumPy's ``mem_overlap.c``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from math import gcd

import torch
from torch import Tensor

_MOST_VALUES = 20_000  # of all unknowns together; a millisecond has some 1,000
_MOST_MARKED = 64 << 20  # bytes

_Terms = tuple[tuple[int, int], ...]  # coefficient, and largest value of its unknown


class TooIntricateError(Exception):
    """Neither the strides nor marks decide within their limits."""


def share_memory(tensors: Sequence[Tensor]) -> bool:
    """Whether elements of the tensors, in one or in two of them, share memory.

    Examples
    --------
    >>> matrix = torch.zeros(5, 4)
    >>> share_memory(matrix.unbind(-1)), share_memory([matrix[:, :2], matrix[2:, 1:]])
    (False, True)
    """
    tensors = [tensor for tensor in tensors if tensor.numel()]
    places = sorted((tensor.data_ptr(), _terms(tensor), tensor.itemsize) for tensor in tensors)
    steps = {(other[0] - one[0], other[1:] == one[1:]) for one, other in pairwise(places)}
    try:
        if len(steps) == 1:  # all are alike and equally far apart, as columns: they are one tensor
            ((step, is_alike),) = steps
            _, terms, itemsize = places[0]
            if is_alike and step % itemsize == 0:
                return _meets_itself((*terms, (step, len(places) - 1)))
        if any(_meets_itself(terms) for _, terms, _ in places):
            return True
        for number, (start, terms, itemsize) in enumerate(places):
            end = start + _reach(terms) + itemsize
            for other, other_terms, other_itemsize in places[number + 1 :]:
                if other >= end:
                    break
                if _meet(terms, other_terms, other - start, itemsize, other_itemsize):
                    return True
    except _WorkError:
        return _is_marked_twice(tensors)
    return False


def _terms(tensor: Tensor) -> _Terms:
    """Strides in bytes, and largest indices."""
    sizes = zip(tensor.stride(), tensor.shape, strict=True)
    return tuple((stride * tensor.itemsize, size - 1) for stride, size in sizes if size > 1)


def _reach(terms: Iterable[tuple[int, int]]) -> int:
    return sum(coefficient * most for coefficient, most in terms)


@lru_cache(maxsize=256)
def _meets_itself(terms: _Terms) -> bool:
    strides = {stride for stride, _ in terms}
    if 0 in strides or len(strides) < len(terms):
        return True
    doubled = [(stride, 2 * most) for stride, most in terms]
    return _solutions(doubled, _reach(terms), 2) == 2  # x = y is one


@lru_cache(maxsize=4096)
def _meet(first: _Terms, second: _Terms, distance: int, *itemsizes: int) -> bool:
    """Whether two elements share a byte: the last unknown is the byte within its element."""
    first_size, second_size = itemsizes
    bytes_within = (1, first_size + second_size - 2)
    target = distance + _reach(second) + second_size - 1
    return bool(_solutions([*first, *second, bytes_within], target, 1))


class _WorkError(Exception):
    """There are too many values to try."""


def _solutions(terms: Iterable[tuple[int, int]], target: int, most: int) -> int:
    """Solutions of ``sum(coefficient * x) = target`` with ``0 <= x <= bound``, up to ``most``."""
    bounds: dict[int, int] = {}
    for coefficient, bound in terms:
        bounds[coefficient] = bounds.get(coefficient, 0) + bound
    ordered = sorted(bounds.items(), reverse=True)
    lowest_first = ordered[::-1]
    reaches = [0, *accumulate(coefficient * bound for coefficient, bound in lowest_first)][::-1]
    divisors = [0, *accumulate((coefficient for coefficient, _ in lowest_first), gcd)][::-1]
    known: dict[tuple[int, int], int] = {}
    work = 0

    def count(level: int, rest: int) -> int:
        nonlocal work
        if level == len(ordered):
            return int(rest == 0)
        if (level, rest) in known:
            return known[level, rest]
        coefficient, bound = ordered[level]
        lowest = max(0, -((reaches[level + 1] - rest) // coefficient))
        highest = min(bound, rest // coefficient)
        common = gcd(coefficient, divisors[level + 1])
        total = 0
        if rest % common == 0 and lowest <= highest:
            # What is left has to be a multiple of the others' divisor.
            step = divisors[level + 1] // common or 1
            first = rest // common * pow(coefficient // common, -1, step)
            for value in range(lowest + (first - lowest) % step, highest + 1, step):
                work += 1
                if work > _MOST_VALUES:
                    raise _WorkError
                total += count(level + 1, rest - coefficient * value)
                if total >= most:
                    break
        known[level, rest] = min(total, most)
        return known[level, rest]

    return count(0, target)


def _is_marked_twice(tensors: Sequence[Tensor]) -> bool:
    """Mark the bytes of all elements."""
    begin = min(map(Tensor.data_ptr, tensors))
    end = max(tensor.data_ptr() + _reach(_terms(tensor)) + tensor.itemsize for tensor in tensors)
    if end - begin > _MOST_MARKED:
        raise TooIntricateError
    marks = torch.zeros(end - begin, dtype=torch.uint8, device="cpu")
    for tensor in tensors:
        strides = [stride * tensor.itemsize for stride in tensor.stride()]
        sizes = (*tensor.shape, tensor.itemsize)
        marks.as_strided(sizes, (*strides, 1), tensor.data_ptr() - begin).fill_(1)
    return int(marks.sum()) < sum(tensor.nbytes for tensor in tensors)
