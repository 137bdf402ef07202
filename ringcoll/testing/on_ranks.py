"""`ranks`: a test, or a function, that runs on several ranks."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.errors import ArgumentError
from ringcoll.testing.answers import Expected, mismatch
from ringcoll.testing.outcome import Failure, attempt, leave, raise_first
from ringcoll.testing.pool import POOL, Arguments, Group, join

__all__ = ["OnRanks", "ranks"]

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
            first, *others = self.values(inner, args, options)
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
    world_size: int,
    *,
    backend: str = "ringcoll",
    threads: bool = False,
    timeout_s: float = 60.0,
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
        Time limit of the test, and of the group's operations, in seconds.

    Returns
    -------
    OnRanks
        A decorator of tests. Arguments of the test (fixtures, parameters, what hypothesis draws)
        are made once, and each rank gets a copy. The ranks have to return the same. The method
        `OnRanks.run` calls any function, and returns the ranks' values.

    Raises
    ------
    ArgumentError
        The number of ranks or the time limit is not positive.

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
    numbers: dict[str, object] = {"world_size": world_size, "timeout_s": timeout_s}
    for argument, number in numbers.items():
        if not isinstance(number, int | float) or not number > 0:  # also of ``@ranks``, a test
            raise ArgumentError(
                "a test needs ranks and time",
                argument=argument,
                expected="a positive number",
                got=repr(number),
            )
    return OnRanks(Group(backend, world_size, float(timeout_s)), threads)


def _difference(value: Any, first: Any) -> str:
    """What differs between the values of two ranks, in words; empty if nothing does."""
    if type(value) is type(first):
        if isinstance(value, Tensor):
            if value.shape != first.shape:
                return f"shape {tuple(value.shape)}, expected {tuple(first.shape)}"
            return mismatch(value, Expected(first), "tensor")
        if isinstance(value, dict) and value.keys() == first.keys():
            value, first = list(value.values()), [first[key] for key in value]
        if isinstance(value, list | tuple) and len(value) == len(first):
            pairs = zip(value, first, strict=True)
            return next(filter(None, (_difference(*pair) for pair in pairs)), "")
    # NaN is not equal to itself, and arrays are not equal as a whole.
    if pickle.dumps(value) == pickle.dumps(first):
        return ""
    is_same = not isinstance(value, np.ndarray) and bool(value == first)
    return "" if is_same else f"{value!r}, expected {first!r}"


# --- threads ------------------------------------------------------------------------------


def _on_threads(
    group: Group, function: Callable[..., Any], arguments: Sequence[Arguments]
) -> list[Any]:
    """Call a function on ranks that are threads, each with a world of its own, as torch's tests do."""
    from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

    __tracebackhide__ = True
    outcomes: dict[int, bytes | Failure] = {}
    store = dist.HashStore()
    c10d = dist.distributed_c10d
    # torch's stubs do not have it.
    isolate: Any = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]

    def main(rank: int) -> None:
        args, options = copy.deepcopy(arguments[rank])

        def test() -> Any:
            join(group, rank, store)
            return function(*args, **options)

        outcomes[rank] = attempt(rank, test)
        leave()

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
        isolate(False)
        c10d._world = world
    raise_first([item for item in outcomes.values() if isinstance(item, Failure)], group.world_size)
    late = sorted(set(range(group.world_size)) - outcomes.keys())
    if late:
        raise TimeoutError(f"ranks {late} were not done after {group.timeout_s:g} s")
    values = [outcomes[rank] for rank in range(group.world_size)]
    return [pickle.loads(value) for value in values if isinstance(value, bytes)]
