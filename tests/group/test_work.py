"""The result of an asynchronous call: what it tells, when, and to whom."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any, cast

import pytest
import torch

from ringcoll.errors import CollectiveTimeoutError, PeerLostError
from ringcoll.runtime.group import Work
from ringcoll.runtime.transport import Mark


class End:
    """A point in a stream."""

    def __init__(self, *, is_past: bool) -> None:
        self.is_past, self.joined = is_past, 0
        self.error: BaseException | None = None

    def is_over(self) -> bool:
        return self.is_past

    def join(self) -> None:
        self.joined += 1


def test_before_and_after_the_end() -> None:
    tensors = [torch.ones(2)]
    work = Work("all_reduce", tensors)
    assert not work.is_completed()
    assert not work.is_success()
    work.complete(None)
    assert not work.has_callbacks
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.wait() is True
    assert work.wait() is True
    assert work.result()[0] is tensors[0]


def test_an_error_is_raised_by_each_wait() -> None:
    work = Work("all_reduce", [])
    error = PeerLostError("rank 1 is gone", peer=1)
    work.complete(error)
    for _ in range(2):
        with pytest.raises(PeerLostError):
            work.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert work.exception() is error


def test_a_limit_ends_the_wait_and_not_the_operation() -> None:
    helped: list[Work] = []
    work = Work("all_reduce number 7", [], helped.append)
    for _ in range(2):
        with pytest.raises(CollectiveTimeoutError, match="all_reduce number 7 is not complete"):
            work.wait(timedelta(milliseconds=1))
    assert helped == [], "helping could take longer than the limit"
    work.complete(None)
    assert work.wait(timedelta(milliseconds=1))
    assert work.wait()
    assert helped == [], "there is nothing left to help with"


@pytest.mark.parametrize("timeout", [None, timedelta(0)])
def test_who_waits_helps(timeout: timedelta | None) -> None:
    helped: list[Work] = []

    def help_(work: Work) -> None:
        helped.append(work)
        work.complete(None)

    work = Work("all_reduce", [], help_)
    assert work.wait(timeout)
    assert helped == [work]
    assert work.wait(timeout)
    assert helped == [work]


def test_all_threads_that_wait_wake_up() -> None:
    work = Work("all_reduce", [])
    threads = [threading.Thread(target=work.wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    work.complete(None)
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_what_a_stream_has_not_done_is_not_complete() -> None:
    end = End(is_past=False)
    work = Work("all_reduce", [])
    work.complete(None, cast("Mark", end))
    assert not work.is_completed()
    assert not work.is_success()
    assert work.wait()
    assert end.joined == 1
    end.is_past = True
    assert work.is_success()


def test_a_failed_operation_leaves_no_stream_to_wait_for() -> None:
    end = End(is_past=True)
    work = Work("all_reduce", [])
    error = ValueError("no")
    work.complete(error, cast("Mark", end))
    with pytest.raises(ValueError, match="no"):
        work.wait()
    assert work.exception() is error
    assert end.joined == 0


@pytest.mark.parametrize("is_early", [True, False])
def test_the_future_has_the_tensors(is_early: bool) -> None:
    tensors = [torch.ones(2)]
    work = Work("all_reduce", tensors)
    values: list[Any] = []
    if is_early:
        future = work.get_future()
        future.add_done_callback(lambda done: values.append(done.value()))
        work.complete(None)
        assert work.has_callbacks
        assert not future.done()
        assert values == []
        work.settle()
    else:
        work.complete(None)
        assert not work.has_callbacks
        future = work.get_future()
    assert future.done()
    assert future.wait()[0] is tensors[0]
    assert work.get_future() is future
    assert len(values) == is_early


def test_the_future_of_a_stream_waits_for_it() -> None:
    end = End(is_past=False)
    work = Work("all_reduce", [])
    work.complete(None, cast("Mark", end))
    work.get_future().wait()
    assert end.joined == 1


def test_the_future_of_an_error_raises_it() -> None:
    work = Work("all_reduce", [])
    future = work.get_future()
    work.complete(PeerLostError("rank 1 is gone", peer=1))
    work.settle()
    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        future.wait()
