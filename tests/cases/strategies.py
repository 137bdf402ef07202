"""Hypothesis strategies of cases."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch
from hypothesis import strategies as st

from ringcoll.errors import RingcollError
from ringcoll.runtime.reduction import as_operator
from ringcoll.schedules import OperandOrder, contract
from ringcoll.schedules.algorithms import algorithms, find, proved_schedule
from ringcoll.tools.testing import inputs as data
from tests.cases.calls import STYLES, USER_OPS, Case

__all__ = ["cases", "operators"]

COLLECTIVES = (
    "all_reduce",
    "all_reduce",  # twice as often as the others
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "barrier",
    "scan",
    "exscan",
)
DTYPES = (*data.INTEGERS, *data.FLOATS, *data.COMPLEX, torch.bool)


def operators(dtype: torch.dtype) -> tuple[str, ...]:
    """The operators that are defined for a dtype."""
    if dtype is torch.bool:
        return ("sum", "product", "min", "max", "band", "bor", "bxor")
    if dtype.is_complex:
        return ("sum", "avg", "product", "premul_sum")
    if dtype.is_floating_point:
        return ("sum", "avg", "product", "min", "max", "premul_sum")
    integer = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
    return (*integer, *USER_OPS) if dtype is torch.int64 else integer


def _fits(collective: str, name: str, world_size: int, root: int, op: str) -> bool:
    """Whether an algorithm may run with an operator: some keep an order, from some roots."""
    operator = as_operator(USER_OPS[op]) if op in USER_OPS else None
    try:
        hosts = (0,) * world_size  # all processes and threads of these tests are on one
        proved_schedule(
            collective,
            find(collective, name),
            world_size,
            root,
            hosts,
            order=OperandOrder.ANY if operator is None else operator.order,
            operator=op,
            rank=0,
        )
    except RingcollError:
        return False
    return True


@st.composite
def cases(
    draw: st.DrawFn,
    world_size: int,
    *,
    collectives: Sequence[str] = COLLECTIVES,
    styles: Sequence[str] = STYLES,
    longest: int = 40,
) -> Case:
    """Calls that a group of so many ranks can make."""
    collective = draw(st.sampled_from(collectives))
    if collective == "barrier":
        return Case("barrier", async_op=draw(st.booleans()))
    rules = contract(collective)
    form = draw(st.sampled_from(["list", "single"]))
    dtype = draw(st.sampled_from(DTYPES))
    op = draw(st.sampled_from(operators(dtype))) if rules.reduces else "sum"
    op = "sum" if rules.is_prefix and op == "avg" else op
    op = (
        "user_affine" if collective == "exscan" and op == "user_skewed" else op
    )  # none is a left fold
    root = draw(st.integers(0, world_size - 1)) if rules.rooted else 0
    names = [
        entry.name
        for entry in algorithms(collective, world_size)
        if _fits(collective, entry.name, world_size, root, op)
    ]
    algorithm = draw(st.sampled_from(["auto", *names]))
    near = [0, 1, world_size - 1, world_size, world_size + 1]
    numel = draw(st.one_of(st.sampled_from(near), st.integers(0, longest)))
    lengths = [numel]
    uneven = draw(st.booleans())
    random = Random(draw(st.integers(0, 1 << 16)))
    if uneven and form == "list" and collective in ("all_gather", "reduce_scatter"):
        lengths = [random.choice([0, 1, 3, numel]) for _ in range(world_size)]
    elif uneven and collective == "all_to_all" and algorithm in ("auto", "pairwise"):
        lengths = [random.choice([0, 1, 3, numel]) for _ in range(world_size * world_size)]
    wire = None
    if (
        rules.reduces
        and dtype.is_floating_point
        and op in ("sum", "avg", "min", "max")
        and draw(st.booleans())
    ):
        wire = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    kind = draw(st.sampled_from(["exact", "rough"]))
    if wire is not None:
        kind = "rough"  # integers of the exact kind do not all fit a narrow wire dtype
    return Case(
        collective,
        algorithm,
        form=form,
        op=op,
        dtype=dtype,
        lengths=tuple(lengths),
        root=root,
        segment_bytes=draw(st.sampled_from([None, None, 1, 16, 100])),
        in_place=draw(st.booleans()) and collective != "all_to_all",
        async_op=draw(st.booleans()),
        wire_dtype=wire,
        kind=kind,
        style=draw(st.sampled_from(styles)),
        seed=draw(st.integers(0, 1 << 16)),
    )
