"""`ranks`: a test, or a function, that runs on several ranks."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from types import FunctionType
from typing import Any, TypeVar
from unittest import TestCase

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.errors import ArgumentError
from ringcoll.machine import seconds_of, whole
from ringcoll.testing.inputs import Expected, mismatch
from ringcoll.testing.pool import (
    POOL,
    Arguments,
    Failure,
    Group,
    attempt,
    copied,
    join,
    leave,
    raise_first,
)

Test = TypeVar("Test", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class OnRanks:
    """So many ranks, with a default group: what `ranks` returns."""

    group: Group
    threads: bool

    def __call__(self, test: Test) -> Test:
        """Let a test run on the ranks, each of which has to return the same."""
        hypothesis = getattr(test, "hypothesis", None)  # of ``@ranks(4) @given(...)``
        inner = test if hypothesis is None else hypothesis.inner_test

        @wraps(inner)
        def on_ranks(*args: Any, **options: Any) -> None:
            __tracebackhide__ = True
            first, *others = self.values(inner, tuple(map(_case, args)), options)
            for rank, value in enumerate(others, 1):
                wrong = _difference(value, first)
                assert not wrong, f"rank {rank} does not return what rank 0 returns: {wrong}"

        outer: Any = on_ranks
        if hypothesis is not None:
            hypothesis.inner_test, outer = on_ranks, test
        outer.ringcoll_ranks = on_ranks.ringcoll_ranks = self, inner  # type: ignore[attr-defined]
        return outer  # type: ignore[no-any-return]

    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
        """Call a function on the ranks.

        Parameters
        ----------
        function
            A function of a module; with cloudpickle installed, any function.
        args, options
            Its arguments. Each rank gets a copy.

        Returns
        -------
        list
            Return value of the function on each rank.

        Raises
        ------
        BaseException
            The exception of the rank that failed first, with the rank's traceback as its cause.
        RankError
            A rank died, or its exception cannot be sent.
        TimeoutError
            A rank did not return in time.
        """
        __tracebackhide__ = True
        return self.values(function, args, options)

    def warm(self, function: Callable[..., Any]) -> None:
        """Start what a function needs, before its time counts."""
        if not self.threads:
            POOL.warm(self.group.world_size, function)

    def values(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        options: dict[str, Any],
        own: Sequence[dict[str, Any]] = (),
    ) -> list[Any]:
        """As `run`; ``own`` holds options of each rank."""
        __tracebackhide__ = True
        if not own:
            own = [{}] * self.group.world_size
        run = _on_threads if self.threads else POOL.run
        return run(self.group, function, [(args, {**options, **each}) for each in own])


def ranks(
    world_size: int, *, backend: str = "ringcoll", threads: bool = False, timeout_s: float = 60.0
) -> OnRanks:
    """Run a test on several ranks, each with its default group of ``torch.distributed``.

    Parameters
    ----------
    world_size
        Number of ranks.
    backend
        Backend of the default group: ``"ringcoll"``, ``"gloo"``, or any other that torch knows.
    threads
        Whether the ranks are threads of this process: quick to start, seen by a debugger and by
        coverage; but what hangs cannot be ended. Otherwise they are processes of a pool.
    timeout_s
        Time limit of the test, and of the group's operations, in seconds; ``inf`` means for ever.

    Returns
    -------
    OnRanks
        A decorator of tests. Arguments of the test (fixtures, parameters, what hypothesis draws)
        are made once, and each rank gets a copy. The ranks have to return the same. The method
        `OnRanks.run` calls any function, and returns the ranks' values.

    Raises
    ------
    ArgumentError
        The number of ranks is no positive whole number, or the time limit is not positive.

    Examples
    --------
    >>> import torch
    >>> import torch.distributed as dist
    >>> from ringcoll.testing import ranks
    >>> @ranks(3, threads=True)
    ... def test_sum():
    ...     tensor = torch.tensor([dist.get_rank() + 1])
    ...     dist.all_reduce(tensor)
    ...     assert tensor.item() == 6
    >>> test_sum()
    """
    number = None if isinstance(world_size, bool) else whole(world_size)
    if not isinstance(number, int) or number < 1:  # also of ``@ranks``, a test
        raise ArgumentError(
            "a test needs ranks",
            argument="world_size",
            expected="a positive whole number",
            got=repr(world_size),
        )
    return OnRanks(Group(backend, number, seconds_of(timeout_s, "timeout_s")), threads)


def _case(argument: Any) -> Any:
    """Of a ``unittest.TestCase``, a copy that knows nothing of its run in this process."""
    if not isinstance(argument, TestCase):
        return argument
    case = copy.copy(argument)
    vars(case).update(_outcome=None, _cleanups=[])
    vars(case).pop(argument.id().rpartition(".")[2], None)  # where pytest puts the method
    return case


def _difference(value: Any, first: Any) -> str:
    """The difference between the values of two ranks, in words; empty if there is none."""
    if pickle.dumps(value) == pickle.dumps(first):
        return ""
    if type(value) is type(first):
        if isinstance(value, Tensor):
            if value.shape != first.shape:
                return f"shape {tuple(value.shape)}, expected {tuple(first.shape)}"
            try:
                return mismatch(value, Expected(first), "tensor")
            except RuntimeError:  # torch computes nothing of this dtype
                return f"tensor of {value.dtype} has other bits"
        if isinstance(value, dict) and value.keys() == first.keys():
            value, first = list(value.values()), [first[key] for key in value]
        elif is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in fields(value) if field.compare]
            value, first = ([getattr(each, name) for name in names] for each in (value, first))
        elif value.__class__.__eq__ is object.__eq__ and not isinstance(value, type | FunctionType):
            value, first = value.__reduce_ex__(2), first.__reduce_ex__(2)  # as pickle reads it
        if isinstance(value, list | tuple) and len(value) == len(first):
            pairs = zip(value, first, strict=True)
            return next(filter(None, (_difference(*pair) for pair in pairs)), "")
    # Arrays are not equal as a whole, and NaN is not equal to itself.
    is_array = isinstance(value, np.ndarray | Tensor) or isinstance(first, np.ndarray | Tensor)
    if not is_array and (value == first or (value != value and first != first)):  # noqa: PLR0124
        return ""
    return f"{value!r}, expected {first!r}"


def _on_threads(
    group: Group, function: Callable[..., Any], arguments: Sequence[Arguments]
) -> list[Any]:
    """Call a function on ranks that are threads, each with its own world, as in torch's tests."""
    from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

    __tracebackhide__ = True
    copies = [copied([each], copy.deepcopy)[0] for each in arguments]
    outcomes: dict[int, bytes | Failure] = {}
    # A late thread must not end the group of the program: the parent takes and keeps the locks.
    leaving = [threading.Lock() for _ in copies]
    store = dist.HashStore()
    c10d = dist.distributed_c10d
    # torch's stubs do not have it.
    isolate: Any = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]

    def main(rank: int) -> None:
        args, options = copies[rank]

        def test() -> Any:
            join(group, rank, store)
            return function(*args, **options)

        outcomes[rank] = attempt(rank, test)
        if leaving[rank].acquire(blocking=False):
            leave()
            leaving[rank].release()

    threads = [
        threading.Thread(target=main, args=(rank,), name=f"rank-{rank}", daemon=True)
        for rank in range(group.world_size)
    ]
    world = c10d._world
    c10d._world = ThreadLocalWorld()  # type: ignore[assignment]
    isolate(True)
    try:
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + group.timeout_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    finally:
        for lock in leaving:
            lock.acquire()
        isolate(False)
        c10d._world = world
    raise_first([item for item in outcomes.values() if isinstance(item, Failure)], group.world_size)
    late = sorted(set(range(group.world_size)) - outcomes.keys())
    if late:
        raise TimeoutError(f"ranks {late} were not done after {group.timeout_s:g} s")
    values = [outcomes[rank] for rank in range(group.world_size)]
    return [pickle.loads(value) for value in values if isinstance(value, bytes)]
