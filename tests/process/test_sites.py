"""Where a call stands in the user's code."""

from __future__ import annotations

import threading

from ringcoll.runtime.process import (
    line_in_words,
    line_of_thread,
    thread_stacks,
    user_frame,
    user_line,
)


def waits(begun: threading.Event, end: threading.Event) -> None:
    begun.set()
    end.wait(30)  # the line


def test_the_line_of_another_thread():
    begun, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=waits, args=(begun, end), name='File "no.py", line 1 in x')
    thread.start()
    begun.wait(30)
    assert thread.ident is not None
    try:
        file, line = line_of_thread(thread.ident)
    finally:
        end.set()
        thread.join()
    assert (file, line) == (__file__, waits.__code__.co_firstlineno + 2)
    assert line_of_thread(thread.ident) == ("", 0)  # it has ended
    assert line_in_words("", 0) == ""


def test_a_thread_without_a_line_of_the_user():
    thread = threading.Timer(30, print)  # Python's own code only
    thread.start()
    assert thread.ident is not None
    assert line_of_thread(thread.ident) == ("", 0)
    thread.cancel()
    thread.join()
    assert user_line(None) == ("", 0)


def test_stacks_are_those_of_all_threads():
    begun, end = threading.Event(), threading.Event()
    threads = [threading.Thread(target=waits, args=(begun, end)) for _ in range(3)]
    for thread in threads:
        thread.start()
    begun.wait(30)
    found = thread_stacks()
    end.set()
    for thread in threads:
        thread.join()
        assert thread.ident is not None
        line = user_frame(found[thread.ident])
        assert line == (__file__, waits.__code__.co_firstlineno + 2, "waits")
    own = found[threading.get_ident()]
    assert [frame.function for frame in own[:2]] == [
        "thread_stacks",
        "test_stacks_are_those_of_all_threads",
    ]
