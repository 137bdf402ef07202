"""Inputs whose exact result is known, so that a wrong element can be counted.

Problem: floating-point sums depend on the order of the additions, so that "close
enough" hides lost and doubled contributions. Here the inputs are small integers, such
that every partial sum, in any order, is exact in the dtype: the result is then known
to the last bit. They differ by rank and by index. A table as long as the largest
prime below 2^16 is repeated, so that data that end up displaced by a power of two show.

Source of the idea: nccl-tests, ``verifiable``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ringcoll.schedule import contract

FACTOR = 2.0
"""The factor of the inputs of PREMUL_SUM."""

_PERIOD = 65521
_LARGEST = 1 << 20  # more different values would not show more
_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_ANY = ("sum", "max", "bor")  # on bool these are "or", as in torch; see ringcoll.reduction
_ALL = ("product", "min", "band")


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


def _doublings(dtype: torch.dtype) -> int:
    """How many factors of two a product may have."""
    if dtype.is_floating_point or dtype.is_complex:
        return min(60, int(torch.finfo(dtype).max).bit_length() - 1)
    return int(torch.iinfo(dtype).max).bit_length() - 1


@dataclass(frozen=True)
class Oracle:
    """Inputs and exact results of one collective.

    ``op`` is the name of an operator of `ringcoll.reduction`, unused where nothing is reduced.
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
        needed = {"sum": 1, "avg": 2, "premul_sum": 2}
        return limit >= needed.get(self.op, 0) * self.world_size

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
        if self.dtype is torch.bool:
            return self._bools(rank)
        match self.op:
            case "sum":
                return _up_to(limit // k, hashes)
            case "premul_sum":
                return _up_to(limit // int(FACTOR * k), hashes)
            case "avg" if rank == k - 1 > 0:  # it makes the sum a multiple of k
                return -sum((self._contribution(r) for r in range(k - 1)), _zeros()) % k
            case "avg":
                return _up_to(limit // k - (k > 1), hashes)
            case "product":  # at each index some ranks, not always the same, bring a 2
                turn = (rank + torch.arange(_PERIOD, device="cpu")) % k < _doublings(self.dtype)
                return 1 + (turn & (hashes % 2 == 1)).to(torch.int64)
            case "min" | "max":
                lowest = 0 if not self.dtype.is_signed else -(limit // 2)
                return hashes % limit + lowest
        bit = torch.bitwise_left_shift(torch.ones_like(hashes), hashes % (8 * self.dtype.itemsize))
        if self.op == "bxor":
            return hashes * 0x9E3779B97F4A7C1
        return ~bit if self.op == "band" else bit

    def _bools(self, rank: int) -> Tensor:
        """Make inputs such that, on average, one rank in k decides the result."""
        rare = _hashes(rank) % self.world_size == 0
        if self.op == "bxor":
            return _hashes(rank) % 2
        return (~rare if self.op in _ALL else rare).to(torch.int64)

    def _reduced(self, ranks: int) -> Tensor:
        """One period of the result, as integers."""
        op = self.op
        if self.dtype is torch.bool:
            op = "max" if op in _ANY else "min" if op in _ALL else op
        total, *others = (self._contribution(rank) for rank in range(ranks))
        for other in others:
            match op:
                case "sum" | "avg" | "premul_sum":
                    total = total + other
                case "product":
                    total = total * other
                case "min":
                    total = torch.minimum(total, other)
                case "max":
                    total = torch.maximum(total, other)
                case "band":
                    total = total & other
                case "bor":
                    total = total | other
                case _:
                    total = total ^ other
        if op == "avg":
            total = total // self.world_size
        return total * int(FACTOR) if op == "premul_sum" else total

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


def _zeros() -> Tensor:
    return torch.zeros(_PERIOD, dtype=torch.int64, device="cpu")


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
