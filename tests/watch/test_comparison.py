"""Calls that ranks compare through the store: when, and what becomes of ranks that differ or do not come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from ringcoll.errors import CollectiveTimeoutError, MismatchError, PeerLostError
from ringcoll.runtime.operation import Turn
from ringcoll.runtime.watch import CallComparison, Lives, Monitor
from ringcoll.runtime.watch.notices import LEFT
from tests.programs.threads import together

WORLD_SIZE = 3
LIMIT_S = 20.0


class CallsOfARank:
    """A rank's comparisons, with the calls that it has compared in this store."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self.store = store
        about = dist.PrefixStore("monitor", store)
        self.monitor = Monitor(
            about, rank, WORLD_SIZE, lambda: None, Lives(about, rank, WORLD_SIZE)
        )
        self.monitor.progress.current = 0, Turn("a call", lambda: None)
        self.comparison = CallComparison(store, self.monitor)

    def compare(self, call: str, limit_s: float = LIMIT_S, *, capturing: bool = False) -> None:
        self.comparison.compare(call, limit_s, capturing=capturing)


def on_all(main: Callable[[CallsOfARank], Any], store: dist.Store | None = None) -> list[Any]:
    store = store or dist.HashStore()
    return together(WORLD_SIZE, lambda rank: main(CallsOfARank(store, rank)))


@pytest.fixture(autouse=True)
def _debug_level(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("RINGCOLL_DEBUG", raising=False)
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.OFF)
    yield
    dist.set_debug_level(before)


def test_a_kind_of_call_is_compared_once() -> None:
    store = dist.HashStore()

    def main(end: CallsOfARank) -> bool:
        for call in ("sum", "sum", "max", "sum", "max"):
            end.compare(call)
        return bool(end.monitor.progress.meets)

    assert on_all(main, store) == [False] * WORLD_SIZE
    # Those of the second comparison; what nobody reads any more is deleted.
    compared = [store.check([f"call/{number}/{rank}"]) for number in (1, 2, 3) for rank in range(3)]
    assert compared == [False] * 3 + [True] * 3 + [False] * 3


def test_all_wait_for_the_last() -> None:
    came = threading.Event()

    def main(end: CallsOfARank) -> bool:
        if end.monitor.rank == 2:
            time.sleep(0.2)
            came.set()
        end.compare("sum")
        return came.is_set()

    assert on_all(main) == [True] * WORLD_SIZE


@pytest.mark.parametrize("how", ["the library's variable", "torch's level"])
def test_each_call_is_compared_for_debugging(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "torch's level":
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    else:
        monkeypatch.setenv("RINGCOLL_DEBUG", "detail")
    store = dist.HashStore()

    def main(end: CallsOfARank) -> bool:
        end.compare("sum")
        end.compare("sum", capturing=True)  # a captured call is never made by the host
        for _ in range(2):
            end.compare("sum")
        return end.comparison.compares_each

    assert on_all(main, store) == [how == "the library's variable"] * WORLD_SIZE
    assert store.check(["call/3/0"])
    assert not store.check(["call/4/0"])


def test_torchs_lower_level_is_not_enough() -> None:
    dist.set_debug_level(dist.DebugLevel.INFO)
    store = dist.HashStore()

    def main(end: CallsOfARank) -> None:
        end.compare("sum")
        end.compare("sum")

    assert on_all(main, store) == [None] * WORLD_SIZE
    assert not store.check(["call/2/0"])


def test_ranks_that_call_something_else_are_named() -> None:
    def main(end: CallsOfARank) -> None:
        end.compare("sum")
        end.compare("max" if end.monitor.rank == 1 else "min")

    errors = on_all(main)
    for rank, (error, peer) in enumerate(zip(errors, (1, 0, 1), strict=True)):
        own, other = ("max", "min") if rank == 1 else ("min", "max")
        assert isinstance(error, MismatchError), error
        assert str(error).startswith(f"rank {rank}: the ranks disagree on call 1 of the group: ")
        for each, call in ((rank, own), (peer, other)):
            assert f"rank {each} called {call}" in str(error)
        assert (error.peer, error.mine, error.theirs) == (peer, own, other)


def test_a_rank_that_does_not_come_is_named_in_time() -> None:
    def main(end: CallsOfARank) -> tuple[BaseException, bool, float]:
        if end.monitor.rank == 1:
            return KeyError(), True, 0.0
        start = time.monotonic()
        with pytest.raises(CollectiveTimeoutError) as caught:
            end.compare("sum", 0.4)
        return caught.value, end.monitor.progress.meets, time.monotonic() - start

    for rank, (error, meets, seconds) in enumerate(on_all(main)):
        if rank != 1:
            assert str(error) == f"rank {rank} waited 0.4 s for rank 1"
            assert error.peer == 1
            assert meets  # what it waited for when it failed
            assert 0.4 <= seconds < 10


def test_a_rank_that_has_left_is_not_waited_for() -> None:
    store = dist.HashStore()
    store.set(LEFT.format(1), "0")

    def main(end: CallsOfARank) -> None:
        if end.monitor.rank != 1:
            end.compare("sum")

    first, _, second = on_all(main, store)
    for error in (first, second):
        assert isinstance(error, PeerLostError), error
        assert (str(error), error.peer) == ("rank 1 has closed the group", 1)


def test_a_rank_that_has_come_and_left_is_heard() -> None:
    store = dist.HashStore()
    for peer in (1, 2):
        store.set(LEFT.format(peer), "0")
        store.set(f"call/1/{peer}", "sum\n")
    end = CallsOfARank(store, 0)
    end.compare("sum")
    assert end.comparison.known == {"sum"}


def test_a_rank_that_comes_and_leaves_between_two_looks_is_heard() -> None:
    class Quick(dist.HashStore):
        """Rank 1 comes, and leaves, as soon as it was looked for."""

        def check(self, keys: list[str]) -> bool:
            is_there: bool = super().check(keys)
            if keys == ["call/1/1"]:
                self.set("call/1/1", "sum\n")
                self.set(LEFT.format(1), "0")
            return is_there

    store = Quick()
    store.set("call/1/2", "sum\n")
    end = CallsOfARank(store, 0)
    end.compare("sum")
    assert end.comparison.known == {"sum"}


def test_the_wait_ends_when_the_monitor_knows_why() -> None:
    def main(end: CallsOfARank) -> None:
        if end.monitor.rank:
            return
        threading.Timer(0.2, setattr, (end.monitor, "error", PeerLostError("x", peer=2))).start()
        start = time.monotonic()
        with pytest.raises(PeerLostError, match="rank 0 gave up rank 1") as caught:
            end.compare("sum")
        assert caught.value.peer == 1
        assert time.monotonic() - start < LIMIT_S / 2

    assert on_all(main) == [None] * WORLD_SIZE
