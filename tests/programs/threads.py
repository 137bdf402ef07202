"""Ranks that are threads: functions on all of them, and cases."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor

import ringcoll
from ringcoll import LocalGroup, run_threads
from tests.cases.calls import Case, fingerprint, prepare, verdict

__all__ = ["Planned", "run_case", "together"]


def together(world_size: int, main: Callable[[int], Any], limit_s: float = 60.0) -> list[Any]:
    """Call a function on threads with their ranks; what it returned or raised on each."""
    results: list[Any] = [None] * world_size

    def rank_main(rank: int) -> None:
        try:
            results[rank] = main(rank)
        except Exception as error:  # noqa: BLE001  # looked at by the test
            results[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s)
    assert not any(thread.is_alive() for thread in threads), "some rank hangs"
    return results


def run_case(case: Case, world_size: int, library: Any = ringcoll, **options: Any) -> None:
    """Make a call on all ranks and check everything that they have afterwards."""

    def main(group: LocalGroup) -> tuple[list[str], str]:
        prepared = prepare(case, group.rank(), world_size)
        work = prepared.start(library, group)
        assert (work is not None) == case.async_op
        if work is not None:
            assert work.wait()
        return verdict(prepared, group.rank(), world_size), fingerprint(prepared)

    results = run_threads(main, world_size, timeout_s=20, **options)
    wrong = [item for found, _ in results for item in found]
    assert not wrong, (wrong, case)
    if case.collective in ("all_reduce", "all_gather", "broadcast"):
        assert len({hashed for _, hashed in results}) == 1, ("ranks differ", case)


def _tensors_in(*arguments: object) -> list[Tensor]:
    found: list[Tensor] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            found.append(argument)
        elif isinstance(argument, list | tuple):
            found += _tensors_in(*argument)
    return found


class Planned:
    """The library, with every function run as a persistent operation, twice."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(ringcoll, name)

        def twice(*args: Any, **kwargs: Any) -> Any:
            # With nothing of the user's own in the way: what a run reads is what is there then.
            tensors = [one.detach() for one in _tensors_in(*args, *kwargs.values())]
            before = [one.clone() for one in tensors]
            operation = function.plan(*args, **kwargs)
            work = operation()
            if work is not None:
                work.wait()
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
            return operation()

        return twice
