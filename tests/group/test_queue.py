"""A group's queue: order, who serves it, callbacks, and its end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from ringcoll.runtime.group import Queue, Work
from ringcoll.runtime.group import queue as queueing

PATIENCE_S = 10.0


class Item:
    """An operation: what it does, and whether its work has callbacks."""

    def __init__(self, act: Callable[[], object] = lambda: None) -> None:
        self.act = act
        self.work = Work("item", [])
        self.thread: threading.Thread | None = None

    def with_callback(self, callback: Callable[[Any], object]) -> Item:
        self.work.get_future().then(callback)
        return self


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue[Item]]:
    # pytest-timeout has a function for a signal: the main thread would serve no queue.
    monkeypatch.setattr("ringcoll.runtime.group.queue.hears_signals", lambda: False)

    def run(item: Item) -> None:
        item.act()
        item.thread = threading.current_thread()
        item.work.complete(None)

    made: Queue[Item] = Queue("a queue", run)
    yield made
    made.close(PATIENCE_S)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def put(queue: Queue[Item], *items: Item) -> None:
    for item in items:
        queue.items.append(item)
        queue.call_thread()


def test_operations_run_one_at_a_time_in_their_order(queue: Queue[Item]) -> None:
    ran: list[int] = []
    items = [Item(partial(ran.append, number)) for number in range(50)]
    put(queue, *items)
    for item in items:
        item.work.wait()
    assert ran == list(range(50))
    assert not queue.items
    assert len(queue.threads) == 1
    assert {item.thread for item in items} == set(queue.threads)
    assert queue.threads[0].name == "a queue"
    assert queue.threads[0].daemon


def test_nothing_is_started_before_there_is_an_operation(queue: Queue[Item]) -> None:
    assert queue.threads == []
    assert queue.close(0.0)


def test_who_waits_helps_up_to_the_own_operation(queue: Queue[Item]) -> None:
    items = [Item() for _ in range(4)]
    queue.items.extend(items)  # without a thread that could serve
    queue.help(items[1].work)
    assert [item.work.done for item in items] == [True, True, False, False]
    assert items[0].thread is threading.current_thread()
    queue.help(items[1].work)
    assert len(queue.items) == 2
    with ThreadPoolExecutor(1) as another:
        assert another.submit(queue.serving.acquire, blocking=False).result(), "nobody serves it"
        queue.help(items[3].work)
        assert not items[2].work.done
        another.submit(queue.serving.release).result()
    queue.help(items[3].work)
    assert items[3].work.done
    elsewhere = Work("elsewhere", [])
    queue.help(elsewhere)  # nothing is left to do
    queue.items.append(Item())
    queue.help(elsewhere)
    assert not queue.items
    assert not elsewhere.done


def test_the_queue_is_free_after_a_helper_has_failed(queue: Queue[Item]) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    item = Item(fail)
    queue.items.append(item)
    with pytest.raises(ZeroDivisionError):
        queue.help(item.work)
    with ThreadPoolExecutor(1) as another:
        assert another.submit(queue.serving.acquire, blocking=False).result()
        another.submit(queue.serving.release).result()


def test_callbacks_of_what_a_helper_runs_run_elsewhere(queue: Queue[Item]) -> None:
    called: list[threading.Thread] = []
    item = Item().with_callback(lambda _: called.append(threading.current_thread()))
    queue.items.append(item)
    queue.help(item.work)
    assert item.thread is threading.current_thread()
    until(lambda: called)
    assert called[0] is not threading.current_thread()


def test_a_callback_may_wait_for_later_operations(queue: Queue[Item]) -> None:
    results: list[bool] = []
    later = [Item() for _ in range(3)]
    first = Item().with_callback(lambda _: results.append(later[-1].work.wait()))
    second = Item().with_callback(lambda _: results.append(later[-1].work.wait()))
    put(queue, first, second, *later)
    until(lambda: len(results) == 2)
    assert results == [True, True]
    assert all(item.work.done for item in (first, second, *later))


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("_", range(10))
def test_threads_that_callbacks_have_made_end(queue: Queue[Item], _: int) -> None:
    go_on = threading.Event()
    items = [Item().with_callback(lambda _: go_on.wait(PATIENCE_S)) for _ in range(4)]
    put(queue, *items)
    until(lambda: all(item.work.done for item in items))
    until(lambda: len({item.thread for item in items}) == 4)
    go_on.set()
    until(lambda: sum(thread.is_alive() for thread in queue.threads) == 1)
    last = Item()
    put(queue, last)
    assert last.work.wait()


def test_a_queue_that_does_not_end_in_time_says_so(queue: Queue[Item]) -> None:
    go_on = threading.Event()
    item = Item(lambda: go_on.wait(PATIENCE_S))
    put(queue, item)
    start = time.monotonic()
    assert not queue.close(0.05)
    assert 0.04 < time.monotonic() - start < PATIENCE_S / 2
    go_on.set()
    item.work.wait()
    assert queue.close(PATIENCE_S)
    assert not any(thread.is_alive() for thread in queue.threads)


def test_a_queue_is_closed_by_its_own_thread(queue: Queue[Item]) -> None:
    closed: list[bool] = []
    item = Item().with_callback(lambda _: closed.append(queue.close(PATIENCE_S)))
    put(queue, item)
    until(lambda: closed)
    assert closed == [True]
    until(lambda: not any(thread.is_alive() for thread in queue.threads))


def test_the_end_waits_for_callbacks_of_one_operation_after_another(queue: Queue[Item]) -> None:
    called: list[int] = []

    def take_time(number: int, _: Any) -> None:
        time.sleep(0.01)
        called.append(number)

    items = [Item().with_callback(partial(take_time, number)) for number in range(20)]
    put(queue, *items)
    assert queue.close(PATIENCE_S)
    assert sorted(called) == list(range(20))
    assert not any(thread.is_alive() for thread in queue.threads)
    assert queue.close(PATIENCE_S), "it may be closed again"


def test_the_end_waits_for_operations_that_callbacks_append(queue: Queue[Item]) -> None:
    appended = [Item(partial(time.sleep, 0.01)) for _ in range(10)]
    called: list[Item] = []

    def append(item: Item, _: Any) -> None:
        put(queue, item)
        called.append(item)

    put(queue, *(Item().with_callback(partial(append, item)) for item in appended))
    assert queue.close(PATIENCE_S)
    assert len(called) == 10
    assert all(item.work.done for item in appended)
    assert not queue.items


def test_callbacks_of_a_helper_run_also_when_the_queue_has_ended(queue: Queue[Item]) -> None:
    put(queue, Item())
    assert queue.close(PATIENCE_S)
    called: list[object] = []
    item = Item().with_callback(called.append)
    queue.items.append(item)
    queue.help(item.work)
    until(lambda: called)
    until(lambda: not any(thread.is_alive() for thread in queue.threads))


def test_a_queue_is_not_at_its_end_while_a_thread_serves_it(
    queue: Queue[Item], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread, as of the user's; or this one, in the middle of an operation."""
    held, may_go = threading.Event(), threading.Event()

    def serve() -> None:
        with queue.serving:
            held.set()
            may_go.wait(PATIENCE_S)

    assert queue.close(0.0)
    threading.Thread(target=serve).start()
    assert held.wait(PATIENCE_S), "the queue is free again"
    begin = time.monotonic()
    assert not queue.close(0.3)
    assert 0.3 <= time.monotonic() - begin < PATIENCE_S
    assert not queue.close(PATIENCE_S, 0.0), "another limit for who runs an operation"
    assert time.monotonic() - begin < PATIENCE_S
    monkeypatch.setattr(queueing, "_MOMENT_S", PATIENCE_S)
    threading.Timer(0.1, may_go.set).start()
    assert queue.close(0.0), "a thread that is about to give the turn back has a moment"
    with queue.serving:
        assert not queue.close(PATIENCE_S)


def test_a_queue_with_operations_that_were_not_run_is_not_at_its_end(queue: Queue[Item]) -> None:
    item = Item()
    queue.items.append(item)
    assert not queue.close(0.0)
    queue.help(item.work)
    assert queue.close(0.0)
