"""Inputs whose exact result is known, so that a wrong element can be counted.

Floating-point sums depend on the order of the additions, so that "close enough" hides lost and
doubled contributions. Here the inputs are small integers, such that every partial sum, in any
order, is exact in the dtype: the result is then known to the last bit. They differ by rank and by
index. A table as long as the largest prime below 2^16 is repeated, so that data that end up
displaced by a power of two show. Source of the idea: nccl-tests, ``verifiable``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, reduce

import torch
from torch import Tensor

from ringcoll.schedules import contract
from ringcoll.tools.bench.contenders import PREMUL_FACTOR

_PERIOD = 65521  # of the table of inputs
_LARGEST = 1 << 20  # more different values would not show more
_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
# On bool, as in torch: "or", and "and"; see ringcoll.runtime.reduction.
_BOOL_OPERATORS = dict.fromkeys(("sum", "max", "bor"), "max")
_BOOL_OPERATORS |= dict.fromkeys(("product", "min", "band"), "min")
_COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **dict.fromkeys(("sum", "avg", "premul_sum"), torch.add),
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


@lru_cache(maxsize=256)
def _hashes(rank: int) -> Tensor:
    """Well mixed numbers of 32 bits, a number for each index of the period."""
    mixed = torch.arange(_PERIOD, dtype=torch.int64, device="cpu") + (rank + 1) * 0x9E3779B1
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 0x2C1B3C6D)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & 0xFFFFFFFF
    return mixed ^ (mixed >> 15)


def _exact_up_to(dtype: torch.dtype) -> int:
    """Up to here the dtype has every integer."""
    if dtype is torch.bool:
        return 1
    if dtype.is_floating_point or dtype.is_complex:
        return round(2 / torch.finfo(dtype).eps)
    return int(torch.iinfo(dtype).max)


@dataclass(frozen=True)
class Oracle:
    """Inputs and exact results of one collective.

    ``op`` is the name of an operator of `ringcoll.runtime.reduction`, unused where nothing is
    reduced.
    """

    collective: str
    op: str
    dtype: torch.dtype
    world_size: int
    root: int = 0

    @property
    def exact(self) -> bool:
        """Whether there are inputs with an exact result; a narrow float fails many ranks."""
        limit = _exact_up_to(self.dtype)
        if not contract(self.collective).reduces or self.dtype is torch.bool:
            return True
        return limit >= {"sum": 1, "avg": 2, "premul_sum": 2}.get(self.op, 0) * self.world_size

    def input(self, rank: int, numel: int) -> Tensor:
        """The input of a rank."""
        return self._repeated(self._contribution(rank), 0, numel)

    def output(self, rank: int, count: int) -> Tensor | None:
        """The output of a rank; ``None`` if it has none. ``count`` is of a block, or the vector."""
        k, rules = self.world_size, contract(self.collective)
        blocks = rules.outputs(rank, k, self.root)
        if not blocks:
            return None
        if rules.reduces:
            table = self._reduced(rules.contributors(rank, k))
            return self._repeated(table, blocks[0] * count, count)
        pieces = []
        for block in blocks:
            source = rules.owner(block, k, self.root)
            first = rules.inputs(source, k, self.root)[0]
            table = self._contribution(source)
            pieces.append(self._repeated(table, (block - first) * count, count))
        return torch.cat(pieces)

    def _contribution(self, rank: int) -> Tensor:
        """One period of the input of a rank, as integers."""
        k, hashes = self.world_size, _hashes(rank)
        limit = min(_exact_up_to(self.dtype), _LARGEST)
        if not contract(self.collective).reduces:
            return hashes % (limit + 1)
        if self.dtype is torch.bool:  # on average, one rank in k decides the result
            if self.op == "bxor":
                return hashes % 2
            is_rare = hashes % k == 0
            return (~is_rare if _BOOL_OPERATORS[self.op] == "min" else is_rare).to(torch.int64)
        match self.op:
            case "sum":
                return _up_to(limit // k, hashes)
            case "premul_sum":
                return _up_to(limit // int(PREMUL_FACTOR * k), hashes)
            case "avg" if rank == k - 1 > 0:  # it makes the sum a multiple of k
                return -torch.stack([self._contribution(r) for r in range(k - 1)]).sum(0) % k
            case "avg":
                return _up_to(limit // k - (k > 1), hashes)
            case "product":  # at each index some ranks, not always the same, bring a 2
                has_exponent = self.dtype.is_floating_point or self.dtype.is_complex
                limits = (torch.finfo if has_exponent else torch.iinfo)(self.dtype)
                doublings = min(62, int(limits.max).bit_length() - 1)  # sums are of 64 bits
                turn = (rank + torch.arange(_PERIOD, device="cpu")) % k < doublings
                return 1 + (turn & (hashes % 2 == 1)).to(torch.int64)
            case "min" | "max":
                lowest = 0 if not self.dtype.is_signed else -(limit // 2)
                return hashes % limit + lowest
        bit = torch.bitwise_left_shift(torch.ones_like(hashes), hashes % (8 * self.dtype.itemsize))
        if self.op == "bxor":
            return hashes * 0x9E3779B97F4A7C1
        return ~bit if self.op == "band" else bit

    def _reduced(self, ranks: int) -> Tensor:
        """One period of the result, as integers."""
        op = _BOOL_OPERATORS.get(self.op, self.op) if self.dtype is torch.bool else self.op
        total = reduce(_COMBINE[op], map(self._contribution, range(ranks)))
        if op == "avg":
            total = total // self.world_size
        return total * int(PREMUL_FACTOR) if op == "premul_sum" else total

    def _repeated(self, table: Tensor, start: int, numel: int) -> Tensor:
        """Elements from ``start`` on of a table that repeats itself for ever."""
        start %= _PERIOD
        if start + numel <= _PERIOD:
            return _converted(table[start : start + numel], self.dtype)
        values = _converted(table, self.dtype)
        return values.repeat(-(-(start + numel) // _PERIOD) or 1)[start : start + numel]


def _up_to(largest: int, hashes: Tensor) -> Tensor:
    """Numbers that add something; only where there are too few of them, some are 0."""
    return hashes % largest + 1 if largest > 1 else hashes % 2


def _converted(table: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point and dtype.itemsize == 1:
        return table.to(torch.float32).to(dtype)  # there is no direct way to 8 bits
    return table.to(dtype, copy=True)  # the table stays as it is


def _bits(tensor: Tensor) -> Tensor:
    """The elements as integers of the same size, so that they compare bit by bit."""
    if tensor.dtype is torch.bool:  # to torch, any byte but 0 is true
        return tensor.view(torch.int8).ne(0).view(torch.int8).view(-1, 1)
    return tensor.view(_SAME_SIZE[tensor.itemsize]).view(tensor.numel(), -1)


def count_wrong(result: Tensor, expected: Tensor) -> int:
    """Count the elements that differ in any bit; both tensors flat, of one length and dtype.

    The result may be on a GPU, and is then compared there.
    """
    if not expected.numel():
        return 0
    return int((_bits(result) != _bits(expected.to(result.device))).any(1).sum())


def spoil(result: Tensor, expected: Tensor) -> None:
    """Overwrite every element with a wrong one, so that an element that is never written shows."""
    if expected.dtype is torch.bool:
        result.copy_(~expected)
    elif expected.numel():
        _bits(result).copy_(~_bits(expected))
