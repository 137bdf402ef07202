"""Operators, and their reductions for each dtype, with torch's own functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isnan
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.errors import ArgumentError
from ringcoll.runtime.reduction.names import OPERATORS, operator_named
from ringcoll.runtime.reduction.user_code import version_of
from ringcoll.schedules import OperandOrder

Combiner = Callable[..., object]
"""``combine(left, right, out=...)`` reduces two tensors into ``out``, which may be an operand."""


@dataclass(frozen=True)
class UserOp:
    """A reduction operator of the user.

    Parameters
    ----------
    fn
        ``fn(left, right)`` returns a new tensor of the operands' shape and dtype, computed element
        by element. The function must not change its operands.
    commutative
        Whether the operands may change places. If not, only algorithms that keep the operands in
        rank order are allowed.
    associative
        Whether the brackets may move. If not, only algorithms that reduce from left to right, in
        rank order, are allowed.
    name
        Name in errors; by default the name of ``fn``. The ranks compare it, and the code of ``fn``:
        see `ringcoll.runtime.reduction.user_code`.

    Examples
    --------
    >>> import torch
    >>> from ringcoll import UserOp
    >>> larger_norm = UserOp(lambda x, y: torch.where(x.abs() < y.abs(), y, x), commutative=False)
    """

    fn: Callable[[Tensor, Tensor], Tensor]
    commutative: bool = False
    associative: bool = True
    name: str = ""

    def __str__(self) -> str:
        return self.name or getattr(self.fn, "__name__", "user operator")


class _Nan(float):
    """NaN that is equal to itself, so that a call with such a factor is found again."""

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


_NAN = _Nan("nan")


@dataclass(frozen=True)
class Operator:
    """An operator that is not bound to a dtype.

    ``name`` is torch's name, in lower case, or ``"user"``; ``factor`` is the factor of PREMUL_SUM;
    ``user`` is the user's operator; ``version`` tells apart what is equal in Python and computes
    different results: see `now`.
    """

    name: str
    factor: complex | Tensor | None = None
    user: UserOp | None = None
    version: Any = ""

    def now(self) -> Operator:
        """The operator with the factor's value and the version of the user's function as of now."""
        if self.user is not None:
            fn = self.user.fn
            # Objects of the user may be equal, and compute different results.
            return replace(self, version=(version_of(fn), id(getattr(fn, "__self__", fn))))
        factor: Any = self.factor
        if isinstance(factor, Tensor) and not factor.is_cpu:
            # The host would have to wait for its value; no call is remembered by a list.
            return replace(self, factor=factor.detach().clone(), version=[])
        with suppress(AttributeError, RuntimeError, ValueError):  # a number of Python, or several
            factor = factor.item()
        if isinstance(factor, float) and isnan(factor):
            factor = _NAN
        return replace(self, factor=factor, version=repr(factor))  # -0.0 equals 0.0

    @property
    def has_real_factor(self) -> bool:
        """Whether a real number scales inputs, which scales both parts of a complex number."""
        if isinstance(self.factor, Tensor):
            return not self.factor.is_complex()
        return isinstance(self.factor, Real)

    @property
    def order(self) -> OperandOrder:
        """The order in which operands have to be reduced; rounding does not count."""
        if self.user is None:
            return OperandOrder.ANY
        if not self.user.associative:
            return OperandOrder.LEFT_TO_RIGHT
        return OperandOrder.ANY if self.user.commutative else OperandOrder.RANK

    def __str__(self) -> str:
        return self.name if self.user is None else f"user operator {self.user}"


def premul_sum(factor: complex | Tensor) -> Operator:
    """The operator PREMUL_SUM: the sum of the inputs, each scaled by ``factor``.

    Parameters
    ----------
    factor
        A number, or a tensor of one element, which is read when a collective is called, or its
        ``plan`` is made. Ranks may use different factors.

    Examples
    --------
    >>> import torch, ringcoll
    >>> def rank_main(group):
    ...     tensor = torch.ones(1)
    ...     scaled = ringcoll.premul_sum(0.5 + group.rank())
    ...     ringcoll.all_reduce(tensor, scaled, group=group)
    ...     return tensor.item()
    >>> ringcoll.run_threads(rank_main, 2)
    [2.0, 2.0]
    """
    return Operator("premul_sum", factor=factor)


_NAMES = {
    getattr(dist.ReduceOp, name.upper()): name
    for name in OPERATORS.values()
    if name != "premul_sum"
}


def as_operator(op: object, rank: int | None = None) -> Operator:
    """Make an operator of the argument ``op`` of a public function.

    Parameters
    ----------
    op
        A member of ``torch.distributed.ReduceOp``, its name as torch, nccl-tests or MPI spell it
        (``"product"``, ``"prod"``, ``"MPI_PROD"``), the result of `premul_sum`, a `UserOp`, or a
        plain function of two tensors, which counts as associative but not commutative.
    rank
        Rank for the error message.

    Raises
    ------
    ArgumentError
        ``op`` is something else.
    """
    if isinstance(op, Operator):
        return op
    if isinstance(op, UserOp):
        return Operator("user", user=op)
    if isinstance(op, str) and (name := operator_named(op)) and name != "premul_sum":
        return Operator(name)
    # isinstance takes a member of the enumeration for a ReduceOp, but the member is not a ReduceOp.
    if isinstance(op, dist.ReduceOp.RedOpType):
        if op in _NAMES:
            return Operator(_NAMES[op])
    elif isinstance(op, dist.ReduceOp):
        state: Any = op.__getstate__()
        kind, factor = state
        if kind == dist.ReduceOp.PREMUL_SUM:
            return premul_sum(factor)
        if kind in _NAMES:
            return Operator(_NAMES[kind])
    elif callable(op) and not isinstance(op, type):
        return Operator("user", user=UserOp(op))
    message = "not a reduction operator"
    expected = (
        f"a ReduceOp, one of the names {', '.join(_NAMES.values())}, premul_sum(factor), "
        "a UserOp or a function"
    )
    raise ArgumentError(message, "op", expected, repr(op), rank)


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Reduction:
    """An operator bound to a dtype.

    Parameters
    ----------
    operator, dtype
        The operator, and the dtype of the user's tensors.
    work_dtype
        Dtype in which partial results are kept and added up.
    wire_dtype
        Dtype in which data are sent. If it is not ``work_dtype``, every encoded, scaled or finished
        tensor has been rounded to it, so that a send loses nothing.
    combine
        ``combine(left, right, out=...)`` on flat tensors of ``work_dtype``; ``out`` may be one of
        the operands.
    encode, decode
        Conversions from ``dtype`` to ``work_dtype`` and back. If ``shares_memory`` is set, both
        return views of the same memory.
    scale
        Function for the encoded input of each rank, before the first send.
    finish
        Function that changes a complete chunk in place: of the tensor and the number of ranks.
    combine_all
        ``combine_all(sources, out)`` reduces the operands of all ranks together, in place of
        ``combine``, which would round in between; ``out`` may be one of them. ``None`` to combine
        two at a time.
    order
        The order in which operands have to be reduced; by default that of the operator.
    manner
        Word before the operator's name, where results are not those of any order.
    """

    operator: Operator
    dtype: torch.dtype
    work_dtype: torch.dtype
    wire_dtype: torch.dtype
    combine: Combiner
    encode: Callable[[Tensor], Tensor] = _same
    decode: Callable[[Tensor], Tensor] = _same
    shares_memory: bool = True
    scale: Callable[[Tensor], Tensor] | None = None
    finish: Callable[[Tensor, int], object] | None = None
    combine_all: Callable[[Sequence[Tensor], Tensor], object] | None = None
    order: OperandOrder = OperandOrder.ANY
    manner: str = ""

    @property
    def name(self) -> str:
        """The operator in words; ranks that combine otherwise have other words."""
        return f"{self.manner} {self.operator}".lstrip()

    @property
    def code(self) -> str:
        """The code of a user's operator, for ranks to compare; empty for others: factors differ."""
        return "" if self.operator.user is None else self.operator.version[0]

    def in_pieces(self) -> Reduction:
        """The same reduction without torch's threads, for ranks that have no cores for them.

        torch divides an operation among threads from 32768 elements on, and the threads wait for
        each other. On 2 cores, with 2 ranks of 2 threads each, an addition of 2 MiB took 6.6 ms, in
        pieces 0.2 ms (with one thread each 0.08 ms), an addition of 32 MiB 7.4 and 6.7 ms.
        """
        combine = self.combine
        if self.operator.user is not None or self.combine_all is not None:
            return self  # a user's function may do anything to a piece; the other works in pieces

        def combined(*vectors: Tensor, out: Tensor) -> None:
            numel = SERIAL_NUMEL // 2 if out.is_complex() else SERIAL_NUMEL  # numbers of two parts
            pieces = (torch.split(vector, numel) for vector in (*vectors, out))
            for left, right, into in zip(*pieces, strict=True):
                combine(left, right, out=into)

        return replace(self, combine=combined)


# Below at::internal::GRAIN_SIZE (32768), and a multiple of every vector register.
SERIAL_NUMEL = 32_704

_AND, _OR = torch.bitwise_and, torch.bitwise_or
_BITWISE: dict[str, Combiner] = {"band": _AND, "bor": _OR, "bxor": torch.bitwise_xor}
_ARITHMETIC: dict[str, Combiner] = {
    **dict.fromkeys(("sum", "avg", "premul_sum"), torch.add),
    "product": torch.mul,
}
_ORDERING: dict[str, Combiner] = {"min": torch.minimum, "max": torch.maximum}
_BOOL: dict[str, Combiner] = {"sum": _OR, "max": _OR, "product": _AND, "min": _AND, **_BITWISE}
SIGNED_TWIN = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Unsigned dtypes, and the signed dtypes of as many bits that stand for them."""
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
"""Floats of 8 bits, which torch can convert only."""
_NARROW = (torch.float16, torch.bfloat16, *FLOAT8)
_COMPUTED = (torch.float64, torch.float32, *_NARROW, torch.complex64, torch.complex128)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *SIGNED_TWIN)
MOVED = {*_COMPUTED, *_INTEGERS, torch.bool, torch.complex32, torch.float8_e8m0fnu}
"""Dtypes of tensors that torch can fill and copy."""
_TOP_BIT = torch.iinfo(torch.int64).min


def _flip_top_bit(tensor: Tensor) -> Tensor:
    """Map the order of unsigned numbers to the order of signed numbers, and back."""
    return tensor.bitwise_xor(_TOP_BIT)


def _divide(tensor: Tensor, world_size: int) -> object:
    if tensor.is_complex():  # torch would divide by a complex number, with more roundings
        return _divide(torch.view_as_real(tensor), world_size)
    if tensor.dtype.is_floating_point:
        if tensor.is_cuda and world_size & (world_size - 1):
            # To divide by a number on a GPU, torch multiplies with the reciprocal and rounds twice
            # (BinaryDivTrueKernel.cu); the kernels and the CPU round once.
            return tensor.div_(
                torch.full((1,), world_size, dtype=tensor.dtype, device=tensor.device)
            )
        return tensor.div_(world_size)
    if world_size > torch.iinfo(tensor.dtype).max:  # it would wrap around
        return tensor.copy_(tensor.long().div(world_size, rounding_mode="trunc"))
    return tensor.div_(world_size, rounding_mode="trunc")


def _add_parts(left: Tensor, right: Tensor, *, out: Tensor) -> object:
    """Add complex numbers as real ones: torch multiplies by a complex 1, which makes NaN of inf."""
    parts = torch.view_as_real
    return torch.add(parts(left), parts(right), out=parts(out))


def _divide_unsigned(bits: int) -> Callable[[Tensor, int], object]:
    """Division of unsigned numbers that are kept in a signed dtype of ``bits`` bits."""
    if bits < 64:
        mask = (1 << bits) - 1
        return lambda tensor, world_size: tensor.copy_((tensor.long() & mask) // world_size)

    def divide(tensor: Tensor, world_size: int) -> object:
        # Long division by halves: the remainder is below 2^31, so nothing overflows.
        high, low = (tensor >> 32) & 0xFFFFFFFF, tensor & 0xFFFFFFFF
        quotient, rest = high // world_size, high % world_size
        return tensor.copy_((quotient << 32) | (((rest << 32) | low) // world_size))

    return divide


def _user(function: Callable[[Tensor, Tensor], Tensor]) -> Combiner:
    def combined(left: Tensor, right: Tensor, *, out: Tensor) -> object:
        return out.copy_(function(left, right))

    return combined


def _dtypes(
    operator: Operator, dtype: torch.dtype, wire_dtype: torch.dtype | None, rank: int | None
) -> tuple[torch.dtype, torch.dtype]:
    """Dtypes in which an operator computes, and in which data are sent."""
    wide = dtype in FLOAT8 or (dtype in _NARROW and operator.name in _ARITHMETIC)
    work = torch.float32 if wide else dtype
    if wire_dtype is None or (wire_dtype is dtype and not wide):
        return work, work

    if not isinstance(wire_dtype, torch.dtype):
        raise ArgumentError("not a dtype", "wire_dtype", "a torch.dtype", wire_dtype, rank)
    are_real = dtype.is_floating_point and wire_dtype.is_floating_point
    if not (are_real or (dtype.is_complex and wire_dtype.is_complex)):
        message = (
            "the wire dtype must be a floating-point dtype for floating-point tensors, "
            "a complex dtype for complex tensors"
        )
        expected = f"of the kind of {dtype}"
        raise ArgumentError(message, "wire_dtype", expected, wire_dtype, rank)
    if wire_dtype not in _COMPUTED:
        expected = f"one of {', '.join(map(str, _COMPUTED))}"
        raise ArgumentError("cannot be sent", "wire_dtype", expected, wire_dtype, rank)
    return (work if wire_dtype.itemsize < work.itemsize else wire_dtype), wire_dtype


def _check_factor(operator: Operator, dtype: torch.dtype, rank: int | None) -> None:
    factor: Any = operator.factor
    if isinstance(factor, Tensor):
        fits = factor.numel() == 1
    elif isinstance(factor, int):
        fits = abs(factor) < 1 << 63  # for torch
    else:
        fits = isinstance(factor, float | complex)
    if not fits or not (dtype.is_complex or operator.has_real_factor):
        message = "the factor of PREMUL_SUM must be a number, or a tensor of one element"
        expected = "a complex or real factor" if dtype.is_complex else "a real factor"
        raise ArgumentError(message, "op", expected, repr(factor), rank)


def resolve(
    op: object,
    dtype: torch.dtype,
    *,
    wire_dtype: torch.dtype | None = None,
    rank: int | None = None,
) -> Reduction:
    """Bind an operator to a dtype.

    Parameters
    ----------
    op
        See `as_operator`.
    dtype
        Dtype of the user's tensors.
    wire_dtype
        Dtype in which data are sent; by default ``dtype``, but float32 for arithmetic on narrower
        floats. Partial results are added up in float32, in ``dtype`` or in the wire dtype,
        whichever is widest, and rounded when they are sent.
    rank
        Rank for error messages.

    Raises
    ------
    ArgumentError
        The operator is not defined for the dtype, or the wire dtype is of another kind.
    """
    is_fixed = isinstance(op, Operator) and op.user is None and not isinstance(op.factor, Tensor)
    if is_fixed or isinstance(op, dist.ReduceOp.RedOpType | str):
        return _resolve_cached(op, dtype, wire_dtype, rank)
    return _resolve(op, dtype, wire_dtype, rank)


def _resolve(
    op: object, dtype: torch.dtype, wire_dtype: torch.dtype | None, rank: int | None
) -> Reduction:
    operator = as_operator(op, rank)
    name = operator.name

    def refuse(allowed: str, argument: str = "op", got: object = name) -> ArgumentError:
        return ArgumentError(
            f"operator {operator} is not defined for {dtype}", argument, allowed, got, rank
        )

    if operator.user is not None:
        work, wire = dtype, dtype
        if wire_dtype is not None:
            work, wire = _dtypes(operator, dtype, wire_dtype, rank)
        return _cast(operator, dtype, work, wire, _user(operator.user.fn))
    if dtype is torch.bool:
        if name not in _BOOL:
            raise refuse(f"one of {', '.join(_BOOL)}")
        return Reduction(operator, dtype, dtype, dtype, _BOOL[name])
    if dtype.is_floating_point or dtype.is_complex:
        if dtype not in _COMPUTED:
            raise refuse(f"one of {', '.join(map(str, _COMPUTED))}", "tensor", dtype)
        allowed = _ARITHMETIC if dtype.is_complex else _ARITHMETIC | _ORDERING
        if name not in allowed:
            raise refuse(f"one of {', '.join(allowed)}")
        work, wire = _dtypes(operator, dtype, wire_dtype, rank)
        if name == "premul_sum":
            _check_factor(operator, dtype, rank)
        adds_parts = dtype.is_complex and allowed[name] is torch.add
        return _cast(operator, dtype, work, wire, _add_parts if adds_parts else allowed[name])
    if dtype not in _INTEGERS:
        raise refuse(f"one of {', '.join(map(str, _INTEGERS))}", "tensor", dtype)
    if wire_dtype not in (None, dtype):
        _dtypes(operator, dtype, wire_dtype, rank)  # refuses it
    if name == "premul_sum":
        raise refuse("a floating-point or complex dtype", "tensor", dtype)
    combine = (_ARITHMETIC | _ORDERING | _BITWISE)[name]
    if dtype not in SIGNED_TWIN:
        finish = _divide if name == "avg" else None
        return Reduction(operator, dtype, dtype, dtype, combine, finish=finish)
    if name in _ORDERING and dtype is not torch.uint64:
        return _cast(operator, dtype, torch.int64, torch.int64, combine)
    twin = SIGNED_TWIN[dtype]
    reduction = Reduction(
        operator,
        dtype,
        twin,
        twin,
        combine,
        encode=lambda tensor: tensor.view(twin),
        decode=lambda tensor: tensor.view(dtype),
        finish=_divide_unsigned(8 * dtype.itemsize) if name == "avg" else None,
    )
    if name not in _ORDERING:
        return reduction
    return replace(
        reduction,
        encode=lambda tensor: _flip_top_bit(tensor.view(twin)),
        decode=lambda tensor: _flip_top_bit(tensor).view(dtype),
        shares_memory=False,
    )


def _cast(
    operator: Operator, dtype: torch.dtype, work: torch.dtype, wire: torch.dtype, combine: Combiner
) -> Reduction:
    """A reduction that converts to ``work`` before, and back afterwards."""
    rounded = _same if wire is work else lambda tensor: tensor.to(wire).to(work)
    scale: Callable[[Tensor], Tensor] | None = None
    if operator.factor is not None:
        factor = operator.factor
        if isinstance(factor, Tensor):  # without a dimension, torch takes it from the CPU to a GPU
            factor = factor.reshape(())

        def scaled(tensor: Tensor) -> Tensor:
            if tensor.is_complex() and operator.has_real_factor:  # torch would make it complex
                return rounded(torch.view_as_complex(torch.view_as_real(tensor) * factor))
            wide = torch.float32 if tensor.dtype in _NARROW else tensor.dtype
            return rounded((tensor.to(wide) * factor).to(tensor.dtype))

        scale = scaled
    divide = _divide if operator.name == "avg" else None

    def divided_and_rounded(tensor: Tensor, world_size: int) -> object:
        if divide is not None:
            divide(tensor, world_size)
        return tensor.copy_(rounded(tensor))

    return Reduction(
        operator,
        dtype,
        work,
        wire,
        combine,
        encode=_same if work is wire is dtype else lambda tensor: rounded(tensor.to(work)),
        decode=_same if work is dtype else lambda tensor: tensor.to(dtype),
        shares_memory=work is wire is dtype,
        scale=scale,
        finish=divide if wire is work else divided_and_rounded,
        order=operator.order,
    )


_resolve_cached = lru_cache(maxsize=256)(_resolve)
