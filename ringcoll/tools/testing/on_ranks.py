"""`ranks`: a test, or a function, that runs on several ranks."""

from __future__ import annotations

import copy
import os
import pickle
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import partial, wraps
from queue import Empty, SimpleQueue
from types import FunctionType
from typing import Any, TypeVar
from unittest import TestCase

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.errors import ArgumentError
from ringcoll.runtime.machine import seconds_of, whole
from ringcoll.tools.testing import plugin
from ringcoll.tools.testing.inputs import Expected, mismatch
from ringcoll.tools.testing.pool import (
    MORE_S,
    POOL,
    Arguments,
    Failure,
    Group,
    RanksTraceback,
    attempt,
    copied,
    join,
    leave,
    raise_first,
    stack_of,
    where,
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
            first, *others = self.values(inner, tuple(map(_copy_of_case, args)), options)
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
    >>> from ringcoll.tools.testing import ranks
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
            "a test needs ranks", "world_size", "a positive whole number", repr(world_size)
        )
    return OnRanks(Group(backend, number, seconds_of(timeout_s, "timeout_s")), threads)


def _copy_of_case(argument: Any) -> Any:
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


class _Threads:
    """Ranks that are threads and keep their default group, as the processes of the pool do.

    Each thread has its own world, as in torch's tests, while the program waits for a call's end.
    """

    def __init__(self, group: Group) -> None:
        from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

        self.group, self._world, self._store = group, ThreadLocalWorld(), dist.HashStore()
        self._calls = [SimpleQueue[Callable[[], Any] | None]() for _ in range(group.world_size)]
        self._answers = SimpleQueue[tuple[int, bytes | Failure, bool]]()
        self.threads = [
            threading.Thread(target=self._main, args=(rank,), name=f"rank-{rank}", daemon=True)
            for rank in range(group.world_size)
        ]
        # A late thread must not end the group of the program: the parent takes and keeps the locks.
        self._leaving = [threading.Lock() for _ in self.threads]
        for thread in self.threads:
            thread.start()

    def _main(self, rank: int) -> None:
        while (call := self._calls[rank].get()) is not None:
            outcome = attempt(rank, call, full_trace=plugin.full_trace)
            intact = isinstance(outcome, bytes) and len(dist.distributed_c10d._world.pg_map) == 1
            if not intact:
                self._leave(rank)  # ranks that wait for this one fail soon
            self._answers.put((rank, outcome, intact))
        self._leave(rank)

    def _leave(self, rank: int) -> None:
        if self._leaving[rank].acquire(blocking=False):
            leave()
            self._leaving[rank].release()

    def run(self, tests: Sequence[Callable[[], Any]]) -> dict[int, bytes | Failure]:
        """Call a function on each rank; the outcomes of those that are not late."""
        outcomes: dict[int, bytes | Failure] = {}
        intact = []

        def joined(rank: int) -> Any:
            if not dist.is_initialized():
                join(self.group, rank, self._store)
            return tests[rank]()

        deadline = time.monotonic() + self.group.timeout_s + MORE_S
        try:
            with self._own_worlds(), suppress(Empty):
                for rank, calls in enumerate(self._calls):
                    calls.put(partial(joined, rank))
                while len(outcomes) < len(tests):
                    left_s = min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)
                    rank, outcome, is_intact = self._answers.get(timeout=left_s)
                    outcomes[rank] = outcome
                    intact.append(is_intact)
        finally:
            if intact != [True] * len(tests):
                self.close(outcomes)
        return outcomes

    @contextmanager
    def _own_worlds(self) -> Iterator[None]:
        c10d = dist.distributed_c10d
        # torch's stubs do not have it.
        isolate: Any = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
        world, c10d._world = c10d._world, self._world  # type: ignore[assignment]
        isolate(True)
        try:
            yield
        finally:
            isolate(False)
            c10d._world = world

    def close(self, idle: Collection[int]) -> None:
        """End the threads; only those of ranks that are idle are waited for."""
        global _threads  # noqa: PLW0603  # of the process, as torch's default group is
        _threads = None
        for calls in self._calls:
            calls.put(None)
        with self._own_worlds():
            for rank, thread in enumerate(self.threads):
                if rank in idle:
                    thread.join(MORE_S)
                self._leaving[rank].acquire()


_threads: _Threads | None = None  # of the last call, if it left them a group


def end_threads() -> None:
    """End the ranks that are threads."""
    if _threads is not None:
        _threads.close(range(_threads.group.world_size))


def _end_before_fork() -> None:
    # A process that is forked off drops the threads with their groups, which end it.
    if _threads is not None and threading.current_thread() not in _threads.threads:
        end_threads()


os.register_at_fork(before=_end_before_fork)


def _on_threads(
    group: Group, function: Callable[..., Any], arguments: Sequence[Arguments]
) -> list[Any]:
    """Call a function on ranks that are threads."""
    global _threads  # noqa: PLW0603  # of the process, as torch's default group is
    __tracebackhide__ = True
    copies = [copied([each], copy.deepcopy)[0] for each in arguments]
    if _threads is None or _threads.group != group:
        end_threads()
        _threads = _Threads(group)
    threads = _threads.threads
    outcomes = _threads.run([partial(function, *args, **options) for args, options in copies])
    late = sorted(set(range(group.world_size)) - outcomes.keys())
    hanging = where({rank: stack_of(threads[rank].ident) for rank in late})
    failures = [item for item in outcomes.values() if isinstance(item, Failure)]
    raise_first(failures, group.world_size, hanging)
    if late:
        text = f"ranks {late} were not done after {group.timeout_s + MORE_S:g} s"
        raise TimeoutError(text) from RanksTraceback(hanging)
    values = [outcomes[rank] for rank in range(group.world_size)]
    return [pickle.loads(value) for value in values if isinstance(value, bytes)]
