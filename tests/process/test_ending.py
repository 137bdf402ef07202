"""What starts and what is refused while a program ends."""

from __future__ import annotations

import sys
import threading
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

import ringcoll
from ringcoll.errors import GroupBrokenError
from ringcoll.runtime.collectives import StoreGroup
from ringcoll.runtime.group import Queue, Work
from ringcoll.runtime.process import call_in_thread, threads
from ringcoll.training.backend import ProcessGroup


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the functions of `atexit` from Python 3.12 on."""

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", start)


@pytest.fixture
def is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after the functions of `atexit`: no thread starts, and Python 3.11 would wait for it."""

    def start(thread: threading.Thread) -> None:
        pytest.fail("a thread was started")

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(sys, "is_finalizing", lambda: True)


@pytest.mark.usefixtures("is_over")
@pytest.mark.parametrize(
    "make",
    [
        lambda store: ProcessGroup(store, 0, 1, timedelta(seconds=5)),
        lambda store: StoreGroup(store, 0, 1, 5.0),
        lambda _: ringcoll.run_threads(lambda group: None, 2),
        lambda _: threads.start_thread(print, "a thread"),
    ],
    ids=["backend", "group at a store", "threads", "thread"],
)
def test_past_the_end_nothing_is_made(make: Any) -> None:
    with pytest.raises(GroupBrokenError, match="the program ends: Python starts no thread"):
        make(dist.HashStore())


@pytest.mark.usefixtures("no_threads")
def test_without_threads_the_caller_does_the_work() -> None:
    assert call_in_thread(threading.current_thread).result() is threading.main_thread()
    done: list[int] = []

    class Item(NamedTuple):
        number: int
        work: Work

    def run(item: Item) -> None:
        done.append(item.number)
        item.work.complete(None)

    queue: Queue[Item] = Queue("no threads", run)
    works = [Work("operation", [torch.ones(1)]) for _ in range(3)]
    future = works[1].get_future().then(lambda _: done.append(10))
    for number, work in enumerate(works):
        queue.items.append(Item(number, work))
        queue.call_thread()
    assert done == []
    queue.serve_alone()
    future.wait()
    assert done == [0, 1, 10, 2]
    assert queue.close(0.0)


@pytest.mark.parametrize("algorithm", ["ring", "auto"])
def test_without_threads_collectives_go_on(
    algorithm: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    def rank_main(group: Any) -> list[float]:
        tensor = torch.tensor([group.rank() + 1.0, 5.0])
        ringcoll.all_reduce(tensor, group=group, algorithm=algorithm)
        if group.rank() == 0:
            request.getfixturevalue("no_threads")
        ringcoll.barrier(group=group)
        work = ringcoll.all_reduce(tensor, group=group, algorithm=algorithm, async_op=True)
        assert work is not None
        work.wait()
        return tensor.tolist()

    assert ringcoll.run_threads(rank_main, 2) == [[6.0, 20.0]] * 2


def test_all_that_comes_last_is_called_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    def fail() -> None:
        called.append("fails")
        raise OSError("at the end")

    monkeypatch.setattr(threads, "_last", [])
    threads.at_end(lambda: called.append("first registered"))
    threads.at_end(fail)
    threads.at_end(lambda: called.append("last registered"))
    with pytest.raises(OSError, match="at the end"):
        threads._run_last()
    assert called == ["last registered", "fails", "first registered"]
    threads._run_last()
    assert len(called) == 3


def test_who_joins_threads_in_a_program_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process of `multiprocessing`, which does not run its parent's functions of `atexit`."""
    called: list[str] = []
    monkeypatch.setattr(threads, "_last", [lambda: called.append("last")])
    monkeypatch.setattr(threads, "_join_threads", lambda: called.append("joined"))
    threading._shutdown()  # type: ignore[attr-defined]
    assert called == ["joined"]

    def _bootstrap() -> None:
        threading._shutdown()  # type: ignore[attr-defined]

    _bootstrap()  # what such a process ends with; what is registered here is its own
    assert called == ["joined", "joined", "last"]
