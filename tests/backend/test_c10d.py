"""The table of c10d's collectives: which arguments of a call become which of a public function."""

from __future__ import annotations

import inspect
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.errors import ArgumentError
from ringcoll.runtime.collectives import functions
from ringcoll.schedules import CONTRACTS
from ringcoll.training.backend import ProcessGroup
from ringcoll.training.backend.c10d import METHODS, Method

A, B, C = (torch.tensor([number]) for number in (1, 2, 3))
LIMIT = timedelta(seconds=7)
MAX, SUM = dist.ReduceOp.MAX, dist.ReduceOp.SUM


def method(name: str) -> Method:
    (found,) = (method for method in METHODS if name in method.names)
    return found


def options(kind: Any, **fields: Any) -> Any:
    made = kind()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


REDUCE = options(dist.ReduceOptions, rootRank=2, reduceOp=MAX)


@pytest.mark.parametrize(
    "name, arguments, keywords, results, tensors, public",
    [
        ("allreduce", ([A],), {}, [A], [A], {"op": SUM}),
        ("allreduce", (A, MAX, LIMIT), {}, [A], [A], {"op": MAX}),
        ("allreduce", (), {"tensors": [A], "op": MAX, "timeout": LIMIT}, [A], [A], {"op": MAX}),
        (
            "allreduce",
            ([A], options(dist.AllreduceOptions, reduceOp=MAX)),
            {},
            [A],
            [A],
            {"op": MAX},
        ),
        ("allreduce_coalesced", ((A, B),), {}, [A, B], [[A, B]], {"op": SUM}),
        ("reduce", ([A], REDUCE), {}, [A], [A], {"group_dst": 2, "op": MAX}),
        ("reduce", (A, 1, MAX), {}, [A], [A], {"group_dst": 1, "op": MAX}),
        ("reduce", (A,), {"root": 1, "op": MAX}, [A], [A], {"group_dst": 1, "op": MAX}),
        ("broadcast", ([A], 1, LIMIT), {}, [A], [A], {"group_src": 1}),
        ("broadcast", (A,), {}, [A], [A], {"group_src": 0}),
        ("allgather", ([[A, B]], [C]), {}, [A, B], [[A, B], C], {}),
        ("allgather", ([A, B], C), {}, [A, B], [[A, B], C], {}),
        (
            "allgather_coalesced",
            ([(A, B), (C, A)], (B, C)),
            {},
            [A, B, C, A],
            [[[A, B], [C, A]], [B, C]],
            {},
        ),
        ("gather", ([[A, B]], [C], 1), {}, [A, B], [C, [A, B]], {"group_dst": 1}),
        ("gather", ([], C), {"root": 1}, [], [C, None], {"group_dst": 1}),
        ("scatter", ([A], [[B, C]], 0), {}, [A], [A, [B, C]], {"group_src": 0}),
        ("scatter", (A, []), {"root": 1}, [A], [A, None], {"group_src": 1}),
        ("reduce_scatter", ([A], [[B, C]]), {"op": MAX}, [A], [A, [B, C]], {"op": MAX}),
        ("_allgather_base", (A, B), {}, [A], [A, B], {}),
        ("alltoall_base", (A, B, None, (1,)), {}, [A], [A, B, [], (1,)], {}),
    ],
)
def test_arguments_find_their_places(
    name: str,
    arguments: tuple[Any, ...],
    keywords: dict[str, Any],
    results: list[Tensor],
    tensors: list[Any],
    public: dict[str, Any],
):
    call = method(name).read(arguments, keywords)
    assert list(map(id, call.results)) == list(map(id, results))
    assert repr(call.tensors) == repr(tensors)
    assert call.keywords == public
    assert call.timeout == (LIMIT if LIMIT in (*arguments, *keywords.values()) else None)


@pytest.mark.parametrize(
    "arguments, keywords", [((A, SUM, LIMIT, 1), {}), ((A,), {"root": 1}), ((A,), {"opt": 1})]
)
def test_other_arguments_are_refused(arguments: tuple[Any, ...], keywords: dict[str, Any]):
    with pytest.raises(ArgumentError, match="allreduce has no such argument") as caught:
        method("allreduce").read(arguments, keywords)
    assert "expected tensors, opts, timeout" in str(caught.value)


@pytest.mark.parametrize("entry", METHODS, ids=lambda entry: entry.names[0])
def test_an_entry_fits_the_public_function(entry: Method):
    assert entry.collective in CONTRACTS
    parameters = inspect.signature(getattr(functions, entry.function)).parameters
    assert entry.reduces == ("op" in parameters)
    assert not entry.root or entry.root in parameters
    for name in entry.names:
        call = getattr(ProcessGroup, name)
        assert call._torchdynamo_disable, "the tracer stays out"
        assert f"{entry.names[0]}({', '.join(entry.positional)})" in call.__doc__
    assert any(hasattr(dist.ProcessGroup, name) for name in entry.names), "in some version of torch"
