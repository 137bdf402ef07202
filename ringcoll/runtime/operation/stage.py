"""Before and after the schedule: the user's tensors as flat ones, and back.

A schedule runs on flat, contiguous tensors of one dtype. Here the user's tensors become such
tensors: conjugation and negation are resolved, strided views are copied in logical order and back,
dtypes are converted to the work dtype and back, short tensors are laid end to end. A tensor that
is flat already is used at its own place, and nothing is copied.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import memmove
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ringcoll.runtime.reduction import TORCH, Engine, Reduction
from ringcoll.runtime.tensors import is_dense
from ringcoll.runtime.transport import has_streams

Load = tuple[Callable[[Tensor], object], int]
"""A function of a tensor, which copies it in or out, and the number of the tensor."""


class Flat(NamedTuple):
    """The flat tensors of one call, what copies to them, and what copies results back."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    loads: list[Load]
    stores: list[Load]


@dataclass(frozen=True, slots=True)
class Stage:
    """The way from the tensors of a call, which have numbers, to the flat tensors of a schedule."""

    inputs: tuple[tuple[int, ...], ...]  # for each flat tensor, those that it holds, end to end
    outputs: tuple[tuple[int, ...], ...]
    plain: tuple[bool, ...]  # for each tensor, whether its memory can be used as it is
    numels: tuple[int, ...]
    nbytes: int  # of all tensors together
    dtype: torch.dtype
    one_copy: bool  # input and output are the same tensor, and one flat tensor serves as both
    written: tuple[int, ...]  # tensors that get a result; other memory of the call is only read
    counted: tuple[int, ...]  # tensors whose version moves, so that autograd sees the writes
    reduction: Reduction | None  # ``None`` if data are only moved
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
        return self._moves and all(
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
        return not (self.scales or self.converts)

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
        """A function that copies a result out, and leaves the tensor's version to ``counted``."""
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
    """A plain tensor as a vector, which keeps no CPU tensor alive, and has no inference mode."""
    if has_streams(tensor.device) or not tensor.nbytes:
        return tensor.data.view(-1)  # its version is not the tensor's
    memory = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=torch.uint8).view(tensor.dtype)


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
