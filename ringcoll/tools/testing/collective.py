"""`given_collective`: a collective against its definition, by hypothesis.

Each example is a dtype, an operator, a length and inputs; each world size is a test of its own, as
the ranks keep their group. The ranks make the call; the parent knows the inputs of all ranks, and
computes what has to come out in one process: native collectives themselves refuse some dtypes, and
round others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.errors import ArgumentError, MissingExtraError
from ringcoll.tools.testing.inputs import (
    LARGEST,
    OPERATORS,
    Expected,
    mismatch,
    operators,
    reduced,
    values,
)
from ringcoll.tools.testing.on_ranks import ranks

DTYPES = (
    torch.int64,
    torch.float32,
    torch.float64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
)
"""From those whose failures are read with ease to the others, as hypothesis shrinks."""


@dataclass(frozen=True)
class Case:
    """A call: of ``numel`` elements, a multiple of the world size where blocks are cut."""

    collective: str
    world_size: int
    op: str
    dtype: torch.dtype
    numel: int
    exact: bool
    seed: int

    def inputs(self) -> list[Tensor]:
        """Each rank's tensor."""
        kind = "exact" if self.exact else "rough"
        options: dict[str, Any] = {"seed": self.seed, "kind": kind, "op": self.op}
        return [
            values(self.dtype, self.numel, rank=rank, **options) for rank in range(self.world_size)
        ]

    def answers(self) -> list[Expected]:
        """The result that each rank has to get."""
        return _ANSWERS[self.collective](self, self.inputs())


def _blocks(case: Case, answer: Expected) -> list[Expected]:
    bounds: Sequence[Tensor | None] = [None] * case.world_size
    if answer.bound is not None:
        bounds = answer.bound.chunk(case.world_size)
    pieces = torch.tensor_split(answer.value, case.world_size)
    return [Expected(*pair) for pair in zip(pieces, bounds, strict=True)]


def _total(case: Case, inputs: list[Tensor]) -> Expected:
    return reduced(case.op, inputs, exact=case.exact)


def _exchanged(case: Case, inputs: list[Tensor]) -> list[Expected]:
    rows = [tensor.tensor_split(case.world_size) for tensor in inputs]
    return [Expected(torch.cat(blocks)) for blocks in zip(*rows, strict=True)]


_REDUCING = ("all_reduce", "reduce_scatter")
_ANSWERS: dict[str, Callable[[Case, list[Tensor]], list[Expected]]] = {
    "all_reduce": lambda case, inputs: [_total(case, inputs)] * case.world_size,
    "reduce_scatter": lambda case, inputs: _blocks(case, _total(case, inputs)),
    "all_gather": lambda case, inputs: [Expected(torch.cat(inputs))] * case.world_size,
    "broadcast": lambda case, inputs: [Expected(inputs[0])] * case.world_size,
    "all_to_all": _exchanged,
}


def given_collective(
    collective: str = "all_reduce",
    *,
    world_sizes: Collection[int] = (1, 2, 3, 4),
    dtypes: Iterable[torch.dtype] = DTYPES,
    ops: Iterable[str] = tuple(OPERATORS),
    longest: int = 100,
    max_examples: int | None = None,
    **options: Any,
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Hold a collective against what ``torch.distributed`` defines, on many examples.

    Parameters
    ----------
    collective
        ``"all_reduce"``, ``"reduce_scatter"``, ``"all_gather"``, ``"broadcast"`` (from rank 0) or
        ``"all_to_all"``, of single tensors.
    world_sizes, dtypes, ops
        Numbers of ranks, dtypes, and names of operators, of which each that is defined for the
        dtype is tried.
    longest
        Largest number of elements; of a block, where the collective cuts or joins tensors.
    max_examples
        Number of examples for each world size; by default that of hypothesis' profile.
    options
        ``backend``, ``threads`` and ``timeout_s``, as `ranks` takes them.

    Returns
    -------
    callable
        A decorator of functions with the arguments ``tensor``, this rank's input, and, where the
        collective reduces, ``op``, a ``torch.distributed.ReduceOp``. The function runs on each rank
        and returns the result, the same tensor or another. Inputs differ by rank and by index.
        Integers, data that are only moved, minima, maxima, and sums and products of floats that
        need no rounding have to be exact; other floats may differ by as much as `Expected.bound`
        allows for additions in the dtype, in whatever order. Other arguments of the function may be
        parameters and fixtures of pytest.

    Raises
    ------
    ArgumentError
        The collective, or an operator, is not one of these.
    MissingExtraError
        pytest or hypothesis is not installed.
    """
    if collective not in _ANSWERS:
        message = "this collective has no definition here"
        raise ArgumentError(message, "collective", ", ".join(_ANSWERS), repr(collective))
    dtypes, ops = tuple(dtypes), tuple(ops)
    if unknown := [op for op in ops if op not in OPERATORS]:
        raise ArgumentError("no such operator", "ops", ", ".join(OPERATORS), unknown)
    try:
        import pytest
        from hypothesis import given, settings
        from hypothesis import strategies as st
    except ImportError as error:
        raise MissingExtraError(
            "given_collective needs pytest and hypothesis: pip install 'ringcoll[testing]'"
        ) from error
    tried = ops if collective in _REDUCING else ("sum",)
    named = [(dtype, op) for dtype in dtypes for op in tried if op in operators(dtype)]

    @st.composite
    def cases(draw: st.DrawFn, world_size: int) -> Case:
        dtype, op = draw(st.sampled_from(named))
        near = [0, 1, world_size - 1, world_size, world_size + 1]
        numel = draw(st.sampled_from(near) | st.integers(0, longest))
        if collective in ("reduce_scatter", "all_to_all"):
            numel *= world_size
        whole = dtype.is_floating_point and world_size * LARGEST > 2 / torch.finfo(dtype).eps
        exact = not whole and not draw(st.booleans())
        return Case(collective, world_size, op, dtype, numel, exact, draw(st.integers(0, 1 << 16)))

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        def test(*args: Any, world_size: int, data: st.DataObject, **others: Any) -> None:
            __tracebackhide__ = True
            case = data.draw(cases(world_size), "case")
            own = [{"tensor": tensor} for tensor in case.inputs()]
            if collective in _REDUCING:
                own = [{**each, "op": getattr(dist.ReduceOp, case.op.upper())} for each in own]
            others |= dict(zip(names, args, strict=False))  # hypothesis gives some by position
            outputs = ranks(case.world_size, **options).values(function, (), others, own)
            for rank, (output, answer) in enumerate(zip(outputs, case.answers(), strict=True)):
                assert isinstance(output, Tensor), "the function has to return the result"
                wrong = mismatch(output, answer, f"{collective} on rank {rank}")
                assert not wrong, wrong

        test.__name__, test.__qualname__ = function.__name__, function.__qualname__
        test.__module__, test.__doc__ = function.__module__, function.__doc__
        kind = inspect.Parameter.KEYWORD_ONLY
        added = [inspect.Parameter(name, kind) for name in ("world_size", "data")]
        arguments = inspect.signature(function).parameters
        names = [name for name in arguments if name not in ("tensor", "op")]
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [*(arguments[name] for name in names), *added]
        )
        examples = max_examples or settings().max_examples
        limits = settings(deadline=None, max_examples=examples)  # ranks have a limit of their own
        outer: Any = limits(given(data=st.data())(test))
        outer = pytest.mark.parametrize("world_size", world_sizes)(outer)
        outer.ringcoll_ranks = ranks(max(world_sizes), **options), function
        return outer  # type: ignore[no-any-return]

    return decorate
