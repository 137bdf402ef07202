"""What a time is: by a clock that only the operations move, and ranks of different speed."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringcoll.tools.bench import BenchRequest, Meeting, alternate, caller, on_rank

module: Any = import_module("ringcoll.tools.bench.measure")
rounds: Any = import_module("ringcoll.tools.bench.rounds")


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(rounds, "time", SimpleNamespace(perf_counter=lambda: self.now_s))

    def operation(self, *costs_s: float) -> Callable[[int], None]:
        """Operations that take these times, in turn."""
        done = [0]

        def run(times: int) -> None:
            for _ in range(times):
                self.now_s += costs_s[done[0] % len(costs_s)]
                done[0] += 1

        run.done = done  # type: ignore[attr-defined]
        return run


class Alone(Meeting):
    """A meeting of one rank; meeting takes long, which must not count."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def start(self) -> None:
        self.clock.now_s += 1000.0

    world_size = 1

    def agree(self, number: int) -> int:
        return number

    def over_ranks(self, times_s: list[list[float]], how: str) -> list[tuple[float, ...]]:
        return [*map(tuple, times_s)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize("most", [8, 40, 1000])
def test_a_time_is_that_of_one_operation(clock: Clock, most: int) -> None:
    slow, quick = clock.operation(4e-4), clock.operation(1e-4)
    samples = alternate(Alone(clock), [slow, quick], warmup=2, most=most)
    for times_s, cost_s in zip(samples.times_s, (4e-4, 1e-4), strict=True):
        assert times_s == pytest.approx([cost_s] * len(times_s), rel=1e-6)
    (turn,) = set(samples.turns)
    for function, times_s in zip((slow, quick), samples.times_s, strict=True):
        assert len(times_s) == most // turn
        assert function.done[0] == len(times_s) * (turn + max(1, turn // 4)) + 2 * 2  # type: ignore[attr-defined]


def test_a_turn_is_the_mean_of_its_operations(clock: Clock) -> None:
    uneven = clock.operation(1e-3, 3e-3)
    samples = alternate(Alone(clock), [uneven], most=16, turn=4)
    assert samples.turns == [4]
    assert samples.times_s == [pytest.approx((2e-3,) * 4)]


def test_what_comes_before_a_turn_is_not_timed(clock: Clock) -> None:
    seen: list[str] = []

    def noting(name: str) -> Callable[[int], None]:
        def run(times: int) -> None:
            assert times == 1
            seen.append(name)
            clock.now_s += 1e-3

        return run

    def before(index: int) -> None:
        seen.append(f"before {index}")
        clock.now_s += 50.0

    functions = [noting("0"), noting("1")]
    samples = alternate(
        Alone(clock),
        functions, warmup=1, most=5, turn=1, before=before,
    )  # fmt: skip
    assert samples.times_s == [pytest.approx((1e-3,) * 5)] * 2
    assert len(seen) == 2 * 2 * (1 + 5)
    assert all(b == f"before {name}" for b, name in zip(seen[::2], seen[1::2], strict=True))


def over_ranks_on_rank() -> list[list[tuple[float, ...]]]:
    """Each rank has measured other times; the middle rank is the slowest in the first sample."""
    meeting = Meeting()
    own = {0: [[2.0, 5.0]], 1: [[9.0, 1.0]], 2: [[4.0, 3.0]]}[dist.get_rank()]
    found = [meeting.over_ranks(own, how) for how in ("rank0", "avg", "min", "max")]
    meeting.close()
    return found


@pytest.mark.processes
def test_whose_time_counts(pool: Any) -> None:
    for found in pool(3).run(over_ranks_on_rank):
        assert found == [[(2.0, 5.0)], [(5.0, 3.0)], [(2.0, 1.0)], [(9.0, 5.0)]]


def without_doing(contender: str, *arguments: Any) -> Callable[[bool], Any]:
    """Of two contenders, the second one leaves everything as it is."""
    return caller(contender, *arguments) if contender == "auto" else lambda later: None


def idle_on_rank(request: BenchRequest) -> Any:
    module.caller = without_doing
    try:
        return on_rank(request)
    finally:
        module.caller = caller


@pytest.mark.processes
@pytest.mark.parametrize(
    "collective,least",
    [("all_reduce", 3 * 120), ("all_gather", 3 * 120), ("all_to_all", 3 * 120), ("broadcast", 240)],
)
def test_who_does_nothing_is_wrong(pool: Any, collective: str, least: int) -> None:
    """The right result of the contender before it is not left in the output."""
    request = BenchRequest(collective, ("auto", "native"), (480,), warmup=0, most=2)
    busy, idle = pool(3).run(idle_on_rank, request)[0]
    assert busy.wrong == 0
    assert idle.out_of_place.wrong >= least


def written_on_rank(request: BenchRequest) -> tuple[int, float]:
    """How often inputs are written, and what is in them at the end."""
    fills: list[float] = []
    fill = torch.Tensor.fill_

    def noting(tensor: torch.Tensor, value: float) -> torch.Tensor:
        fills.append(value)
        return fill(tensor, value)

    torch.Tensor.fill_ = noting  # type: ignore[method-assign, assignment]
    try:
        on_rank(request)
    finally:
        torch.Tensor.fill_ = fill  # type: ignore[method-assign]
    return len(fills), float(sum(fills))


@pytest.mark.processes
def test_inputs_are_written_before_each_operation(pool: Any) -> None:
    request = BenchRequest("all_reduce", ("ring",), (480,), modes=(True,), warmup=1, most=6)
    without = pool(2).run(written_on_rank, request)
    request = BenchRequest(
        "all_reduce", ("ring",), (480,), modes=(True,), warmup=1, most=6, writes=True
    )
    for (count, _), (plain, _) in zip(pool(2).run(written_on_rank, request), without, strict=True):
        assert count - plain == 1 + 6
