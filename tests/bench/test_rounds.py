"""The arithmetic of a measurement, on one rank and with a clock of the test's own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringcoll.errors import ArgumentError
from ringcoll.tools.bench import (
    DTYPES,
    LIMITS,
    SHARED,
    BenchRequest,
    Meeting,
    Result,
    Timing,
    Workload,
    alternate,
    measure,
    turn_seconds,
)
from ringcoll.tools.bench.measure import _Bench, _defined, _settled, _several
from ringcoll.tools.bench.rounds import _more_rounds, _one_round, _turns

module: Any = import_module("ringcoll.tools.bench.measure")
rounds: Any = import_module("ringcoll.tools.bench.rounds")


class Clock(Meeting):
    """A clock that stands still unless an operation moves it; and a meeting of one rank."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 50.0
        self.slept_s: list[float] = []
        self.orders: list[int] = []
        now = SimpleNamespace(
            perf_counter=lambda: self.now_s, monotonic=lambda: self.now_s, sleep=self.sleep
        )
        monkeypatch.setattr(module, "time", now)
        monkeypatch.setattr(rounds, "time", now)

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.slept_s.append(seconds)
        self.now_s += seconds + 1.0

    def start(self) -> None:
        self.now_s += 1000.0

    world_size = 1

    def agree(self, number: int) -> int:
        return number

    def over_ranks(self, times_s: list[list[float]], how: str) -> list[tuple[float, ...]]:
        return [*map(tuple, times_s)]

    def operation(self, cost_s: float, name: int = 0) -> Callable[[int], None]:
        def run(times: int) -> None:
            self.orders.append(name)
            self.now_s += cost_s * times

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.fixture
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# --- rounds and turns --------------------------------------------------------------------


def test_rounds_follow_the_clock() -> None:
    assert _more_rounds(10, 100, 1.0, 5.0) == 20  # half of the 40 that 4 s are good for
    assert _more_rounds(90, 100, 1.0, 500.0) == 10
    assert _more_rounds(10, 100, 1.0, 1.05) == 0
    assert _more_rounds(10, 100, 1.0, 1.125) == 1
    assert _more_rounds(5, 100, 2.0, 1.0) == 0
    assert _more_rounds(100, 100, 1.0, 500.0) == 0


@pytest.mark.parametrize(
    "cost_s, most, turn",
    [
        (1e-3, 40, 5),  # 5 ms
        (1e-3, 12, 3),  # a quarter, so that there are 4 samples
        (1e-3, 7, 1),
        (1e-3, 3, 1),
        (2.2e-3, 40, 2),
        (1.0, 40, 1),
        (1e-6, 4000, 1000),
    ],
)
def test_turns_of_a_fixed_number(clock: Clock, cost_s: float, most: int, turn: int) -> None:
    run = clock.operation(cost_s)
    slow = clock.operation(3 * cost_s)
    samples = alternate(clock, [run, slow], most=most)
    assert samples.turns == [turn, turn]
    assert [len(times) for times in samples.times_s] == [max(1, most // turn)] * 2
    assert samples.times_s[0] == pytest.approx([cost_s] * len(samples.times_s[0]))
    assert samples.times_s[1] == pytest.approx([3 * cost_s] * len(samples.times_s[1]))


@pytest.mark.parametrize(
    "cost_s, tried, turn", [(1e-6, [10, 100, 1000], 1000), (2.2e-3, [2], 2), (1.0, [], 1)]
)
def test_turns_that_the_clock_limits(
    clock: Clock, cost_s: float, tried: list[int], turn: int
) -> None:
    rounds: list[list[int]] = []

    def one_round(times: list[list[float]], *, seed: int, turns: list[int]) -> None:
        rounds.append(turns)

    times = [[2 * cost_s, cost_s], [10 * cost_s, 1.0]]
    turns = _turns(clock, one_round, times, 20, 3.0)
    assert ([first for first, _ in rounds], turns[0]) == (tried, turn)


def test_the_start_of_a_turn_does_not_count(clock: Clock) -> None:
    """Turns become so long that they have a lead, and that is not timed."""
    is_cold = True

    def start() -> None:
        nonlocal is_cold
        is_cold = True

    def run(times: int) -> None:
        nonlocal is_cold
        for _ in range(times):
            clock.now_s += 3e-3 if is_cold else 1e-4
            is_cold = False

    clock.start = start  # type: ignore[method-assign]
    samples = alternate(clock, [run], least=5, most=1000, seconds=0.5)
    assert samples.turns == [50]
    assert samples.times_s[0] == pytest.approx([1e-4] * len(samples.times_s[0]))


def test_rounds_end_with_the_time(clock: Clock) -> None:
    def start() -> None:
        clock.now_s += 0.9

    clock.start = start  # type: ignore[method-assign]
    samples = alternate(clock, [clock.operation(0.1)], turn=1, least=3, most=100, seconds=10.0)
    assert 8 <= len(samples.times_s[0]) <= 10
    samples = alternate(clock, [clock.operation(0.1)], turn=1, least=3, most=100, seconds=0.0)
    assert len(samples.times_s[0]) == 3


def test_the_order_of_turns_changes_and_is_the_same_on_all_ranks(clock: Clock) -> None:
    def orders() -> list[tuple[int, ...]]:
        result = []
        for seed in range(60):
            clock.orders = []
            runs = [clock.operation(1.0, name) for name in range(3)]
            _one_round(clock, runs, None, False, [[], [], []], seed=seed, turns=[1, 1, 1])
            result.append(tuple(clock.orders))
        return result

    first = orders()
    assert orders() == first
    assert len(set(first)) == 6
    assert min(Counter(order[0] for order in first).values()) >= 10
    clock.orders = []
    alternate(clock, [clock.operation(1.0, name) for name in range(3)], warmup=0, turn=1, most=60)
    assert clock.orders == [name for order in first for name in order]


def test_before_is_called_for_each_turn_and_not_timed(clock: Clock) -> None:
    asked: list[int] = []

    def before(index: int) -> None:
        asked.append(index)
        clock.now_s += 7.0

    runs = [clock.operation(1.0, 0), clock.operation(2.0, 1)]
    samples = alternate(clock, runs, warmup=1, turn=1, most=4, before=before)
    assert asked == clock.orders
    assert samples.times_s == [(1.0,) * 4, (2.0,) * 4]


# --- where ranks meet ----------------------------------------------------------------------


def meeting(monkeypatch: pytest.MonkeyPatch, others: list[torch.Tensor]) -> Meeting:
    """Rank 0 of a group in which the other ranks have these tensors."""
    combine: dict[Any, Callable[..., torch.Tensor]] = {
        dist.ReduceOp.SUM: torch.sum,
        dist.ReduceOp.MIN: torch.amin,
        dist.ReduceOp.MAX: torch.amax,
    }

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        every = torch.stack([tensor, *(other.to(tensor.dtype) for other in others)])
        tensor.copy_(combine[op](every, 0))

    fake = SimpleNamespace(
        all_reduce=all_reduce, broadcast=lambda *_, **__: None, ReduceOp=dist.ReduceOp
    )
    monkeypatch.setattr(rounds, "dist", fake)
    made = Meeting.__new__(Meeting)
    made.rank, made.world_size, made._group, made._one_clock = 0, len(others) + 1, None, True
    return made


@pytest.mark.parametrize(
    "how, expected",
    [("rank0", (1.0, 6.0)), ("avg", (3.0, 5.0)), ("min", (1.0, 4.0)), ("max", (6.0, 6.0))],
)
def test_whose_time_counts(
    monkeypatch: pytest.MonkeyPatch, how: str, expected: tuple[float, float]
) -> None:
    others = [torch.tensor([[2.0, 4.0]]), torch.tensor([[6.0, 5.0]])]
    assert meeting(monkeypatch, others).over_ranks([[1.0, 6.0]], how) == [expected]


def test_all_ranks_start_when_the_last_one_is_ready(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    meeting(monkeypatch, [torch.tensor([53.0])]).start()
    assert clock.slept_s == [pytest.approx(3.0 - 5e-4)]
    clock.slept_s.clear()
    own = meeting(monkeypatch, [torch.tensor([1.0])])
    own._one_clock = False
    before = clock.now_s
    own.start()
    assert clock.slept_s == [pytest.approx(5e-3 - 5e-4)]
    assert clock.now_s > before + 5e-3
    clock.slept_s.clear()
    late = meeting(monkeypatch, [])
    monkeypatch.setattr(rounds, "_QUIET_S", 1e-4)
    late.start()
    assert clock.slept_s == [0.0], "the moment has almost come: it does not sleep"


def test_totals_and_gathered_items(world: None) -> None:
    own = Meeting()
    assert own.totals(3, 4) == [3, 4]
    assert own.gather("item") == ["item"]
    assert own.agree(7) == 7
    assert own._one_clock
    own.close()


# --- what is measured -----------------------------------------------------------------------


def test_operators_and_their_dtypes() -> None:
    every = ["none", "sum", "prod", "avg", "min", "max", "mulsum", "band", "bor", "bxor"]
    right = {
        "bool": "none sum prod min max band bor bxor",
        "int32": "none sum prod avg min max band bor bxor",
        "float": "none sum prod avg min max mulsum",
        "complex64": "none sum prod avg mulsum",
    }
    names = {
        str(dtype).removeprefix("torch."): name for name, dtype in reversed(DTYPES.items())
    } | {"float": "float"}
    for dtype, ops in right.items():
        if dtype in names:
            assert [op for op in every if _defined(names[dtype], op)] == ops.split(), dtype


def result(out_of_place: Timing | None, in_place: Timing | None) -> Result:
    workload = Workload("all_reduce", 8, "float")
    return Result(workload, "ring", 4, 2, 8, out_of_place, in_place)


def test_which_time_and_which_errors_count() -> None:
    first, second = Timing((1.0,), 1, 2), Timing((2.0,), 1, 3)
    untimed, unchecked = Timing((), 1, 0), Timing((4.0,), 1, None)
    assert result(first, second).timed is second
    assert result(first, None).timed is first
    assert result(first, untimed).timed is first
    assert result(None, None).timed is None
    assert result(first, second).wrong == 5
    assert result(first, unchecked).wrong == 2
    assert result(untimed, None).wrong == 0
    assert result(unchecked, None).wrong is None
    assert result(first, second).busbw(1.0) == 8 / 1e9 * 1.5
    assert result(first, second).algbw(2.0) == 4 / 1e9


def test_what_is_asked_for_unless_it_is_said() -> None:
    request = BenchRequest("all_reduce", ("ring",), (4, 8))
    assert (request.modes, request.timed_modes) == ((False, True), (False, True))
    assert (request.warmup, request.least, request.most) == (1, 5, 20)
    assert (request.blocking, request.writes, request.check) == (2, False, True)
    assert [(w.nbytes, w.dtype, w.op, w.root) for w in request.workloads] == [
        (4, "float", "sum", 0),
        (8, "float", "sum", 0),
    ] or [w.root for w in request.workloads] == [-1, -1]
    assert [w.op for w in BenchRequest("broadcast", ("ring",), (4,)).workloads] == ["none"]
    assert [w.nbytes for w in BenchRequest("barrier", ("ring",), (4, 8)).workloads] == [0]


class Contenders:
    """Stands in for `caller`: operations on one rank that take a time by the clock."""

    def __init__(self, clock: Clock, **costs_s: float) -> None:
        self.clock, self.costs_s = clock, costs_s
        self.calls: list[tuple[str, bool]] = []
        self.waited = 0
        self.error: type[Exception] = ValueError

    def __call__(self, contender: str, workload: Workload, buffers: Any, *_: Any) -> Any:
        def call(async_op: bool) -> Any:
            self.calls.append((contender, async_op))
            if contender == "refusing":
                raise self.error("not\tfor\nthis")
            storages = [each.untyped_storage().data_ptr() for each in (buffers.inp, buffers.out)]
            name = f"{contender}_in_place" if storages[0] == storages[1] else contender
            self.clock.now_s += self.costs_s.get(name, self.costs_s[contender])
            if contender != "idle":
                buffers.out.copy_(buffers.inp)
            return SimpleNamespace(wait=self.wait)

        return call

    def wait(self) -> None:
        self.waited += 1


@pytest.fixture
def contenders(monkeypatch: pytest.MonkeyPatch, clock: Clock, world: None) -> Contenders:
    made = Contenders(clock, ring=1.0, native=2.0, slow=5.0, fast=0.5, idle=0.1, refusing=0.0)
    monkeypatch.setattr(module, "caller", made)
    return made


def test_times_errors_and_refusals_of_each_contender(contenders: Contenders) -> None:
    request = BenchRequest(
        "all_gather", ("ring", "idle"), (400,), most=4, modes=(False,), over_ranks="max"
    )
    reports: list[Any] = []
    ring, idle = measure(request, reports.append)
    assert reports == [[ring, idle]]
    assert (ring.contender, ring.wrong, ring.scouted, ring.refused) == ("ring", 0, False, None)
    assert idle.wrong == 100
    assert ring.out_of_place is not None
    assert ring.in_place is None
    assert ring.out_of_place.samples_s == pytest.approx([1.0] * 4)
    assert idle.out_of_place is not None
    assert idle.out_of_place.samples_s == pytest.approx([0.1] * 4)
    assert {async_op for _, async_op in contenders.calls} == {False}
    assert contenders.waited == 0


def test_without_check_nothing_is_called_right(contenders: Contenders) -> None:
    request = BenchRequest("all_gather", ("idle",), (400,), most=1, check=False)
    (idle,) = measure(request)
    assert idle.wrong is None
    assert idle.timed is not None


@pytest.mark.parametrize("blocking", [0, 1, 2])
def test_how_operations_follow_each_other(
    contenders: Contenders, monkeypatch: pytest.MonkeyPatch, blocking: int
) -> None:
    monkeypatch.setattr(rounds, "_TURN_S", 3.0)
    request = BenchRequest(
        "all_gather", ("ring",), (400,), most=12, warmup=1, modes=(False,), blocking=blocking
    )
    (ring,) = measure(request)
    assert ring.out_of_place is not None
    assert ring.out_of_place.turn == (1 if blocking == 1 else 3)
    assert len(ring.out_of_place.samples_s) == (12 if blocking == 1 else 4)
    # A warm-up and 4 turns, each with one operation in advance.
    calls = 1 + 12 if blocking == 1 else (1 + 1) + 4 * (1 + 3)
    assert contenders.calls == [("ring", False)] + [("ring", blocking == 0)] * calls
    assert contenders.waited == (calls if blocking == 0 else 0)


def test_only_asked_modes_are_timed(contenders: Contenders) -> None:
    request = BenchRequest("all_gather", ("ring",), (400,), most=2, timed_modes=(True,))
    (ring,) = measure(request)
    assert ring.out_of_place is not None
    assert ring.out_of_place.samples_s == ()
    assert ring.out_of_place.wrong == 0
    assert ring.in_place is not None
    assert len(ring.in_place.samples_s) == 2


@pytest.mark.parametrize("error", [RuntimeError, ValueError, TypeError, NotImplementedError])
def test_what_native_refuses_is_said_and_not_timed(
    contenders: Contenders, error: type[Exception]
) -> None:
    contenders.error = error

    def named(contender: str, *arguments: Any) -> Any:
        return contenders("refusing" if contender == "native" else contender, *arguments)

    module.caller = named
    native, ring = measure(BenchRequest("all_gather", ("native", "ring"), (400,), most=1))
    assert native.refused == "notfor"
    assert (native.timed, native.wrong) == (None, None)
    assert ring.timed is not None


def test_what_is_no_refusal_is_a_failure(contenders: Contenders) -> None:
    with pytest.raises(ValueError, match="this"):
        measure(BenchRequest("all_gather", ("refusing",), (400,), most=1))


def test_the_fastest_scout_is_measured_anew(contenders: Contenders) -> None:
    request = BenchRequest("all_gather", ("ring",), (400,), scouts=("slow", "fast"), most=2)
    ring, fast = measure(request)
    assert (ring.contender, fast.contender) == ("ring", "fast")
    assert (ring.scouted, fast.scouted) == (False, True)
    assert fast.wrong == 0
    assert fast.timed is not None
    assert fast.timed.samples_s == pytest.approx([0.5, 0.5])


def test_scouts_are_compared_in_the_last_mode_that_is_timed(contenders: Contenders) -> None:
    contenders.costs_s["slow_in_place"] = 0.25
    request = BenchRequest("all_gather", ("ring",), (400,), scouts=("slow", "fast"), most=2)
    assert [each.contender for each in measure(request)] == ["ring", "slow"]


def test_a_limit_is_timed_in_the_last_mode_and_not_checked(
    monkeypatch: pytest.MonkeyPatch, world: None
) -> None:
    done: list[int] = []
    monkeypatch.setattr(module, "limit_caller", lambda *_: done.append)
    request = BenchRequest("all_gather", (LIMITS[0],), (400,), most=2)
    (limit,) = measure(request)
    assert limit.out_of_place is None
    assert limit.in_place is not None
    assert (limit.wrong, len(limit.in_place.samples_s) * limit.in_place.turn) == (None, 2)
    assert sum(done) > 2

    def refuse(*_: object) -> None:
        raise ArgumentError("not here", argument="name", expected="another", got="this")

    monkeypatch.setattr(module, "limit_caller", refuse)
    (limit,) = measure(request)
    assert limit.timed is None
    assert "not here" in str(limit.refused)


@pytest.mark.parametrize("device, waits", [("cuda", 1), ("cpu", 0)])
def test_a_turn_ends_when_the_gpu_has_done_everything(
    monkeypatch: pytest.MonkeyPatch, device: str, waits: int
) -> None:
    events: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append("settled"))
    _several(events.append, False, torch.device(device), 2)
    assert events == [False, False] + ["settled"] * waits
    events.clear()
    _settled(events.append, torch.device(device), 3)
    assert events == [3] + ["settled"] * waits


def test_groups_are_closed_at_the_end(
    contenders: Contenders, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[int] = []
    monkeypatch.setattr(module, "close_groups", lambda: closed.append(len(contenders.calls)))
    measure(BenchRequest("all_gather", ("ring",), (400,), most=1))
    assert closed == [len(contenders.calls)]


def test_contenders_in_shared_memory_have_buffers_of_their_own(world: None) -> None:
    request = BenchRequest("all_gather", ("ring",), (400,))
    own = Meeting()
    bench = _Bench(own, request, request.workloads[0])
    plain = bench._buffers_of("ring", False)
    assert bench._buffers_of("native", False) is plain
    assert bench._buffers_of("ring", True) is not plain
    assert {is_shared for _, is_shared in bench._buffers} == {False}
    assert bench._buffers_of(SHARED, False) is not plain
    assert (False, True) in bench._buffers
    own.close()


def test_a_turn_is_as_much_longer_as_ranks_share_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "cores", lambda: 2)
    alone = turn_seconds(1)
    assert [turn_seconds(k) / alone for k in (1, 2, 3, 8)] == [1.0, 1.0, 1.5, 4.0]
