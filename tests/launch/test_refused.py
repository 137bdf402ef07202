"""What is said where ranks cannot be started or brought together; nothing is started."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest

from ringcoll.errors import ArgumentError
from ringcoll.runtime.launch import Ranks, processes


@pytest.mark.parametrize("world_size", [0, -1, 1.5, True, "2", None])
def test_what_is_no_number_of_ranks(world_size: Any) -> None:
    with pytest.raises(ArgumentError, match="must be a positive whole number"):
        Ranks(world_size)


@pytest.mark.parametrize(
    "error, scarce",
    [
        (OSError(errno.EMFILE, ""), "file descriptors"),
        (OSError(errno.ENFILE, ""), "file descriptors"),
        (OSError(errno.ENOMEM, ""), "memory"),
        (BlockingIOError(errno.EAGAIN, ""), "processes"),
        (EOFError(), "processes"),  # of the server that could not fork
        (PermissionError(errno.EACCES, ""), None),
    ],
)
def test_what_the_system_lacks(
    monkeypatch: pytest.MonkeyPatch, error: Exception, scarce: str | None
) -> None:
    def start(*_: object) -> None:
        raise error

    monkeypatch.setattr(Ranks, "_start", start)
    with pytest.raises(type(error) if scarce is None else ArgumentError) as caught:
        Ranks(3)
    assert scarce is None or f"not enough {scarce} for 3 ranks" in str(caught.value)


@pytest.mark.parametrize("free_nbytes, most", [(1 << 50, 1024), (10 << 24, 10), (0, 0)])
def test_so_many_ranks_are_not_started(
    monkeypatch: pytest.MonkeyPatch, free_nbytes: int, most: int
) -> None:
    """One rank is always tried."""
    monkeypatch.setattr(processes, "free_bytes", lambda: free_nbytes)
    monkeypatch.setattr(Ranks, "_start", lambda *_: None)
    assert Ranks(max(1, most)).world_size == max(1, most)
    words = "not started on one host" if most == 1024 else "no memory for so many processes"
    with pytest.raises(ArgumentError, match=words) as caught:
        Ranks(max(1, most) + 1)
    assert f"expected at most {most}, got {max(1, most) + 1}" in str(caught.value)


@pytest.mark.parametrize("alive", [(True, True), (True, False), (False, False)])
def test_ranks_are_alive_if_all_are(alive: tuple[bool, bool]) -> None:
    ranks = object.__new__(Ranks)
    made: Any = [SimpleNamespace(is_alive=lambda value=value: value) for value in alive]
    ranks.processes = made
    assert ranks.alive is all(alive)


@pytest.mark.parametrize("num_cores, threads", [(7, 2), (3, 1), (2, 1)])
def test_cores_are_shared_evenly(
    monkeypatch: pytest.MonkeyPatch, num_cores: int, threads: int
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(processes, "cores", lambda: num_cores)
    monkeypatch.setattr(
        Ranks, "_start", lambda self, main, arguments: started.append(arguments(1, None))
    )
    Ranks(3, backend="gloo")
    Ranks(3, threads=5)
    assert [(call[0][1:3], call[1], call[2]) for call in started] == [
        ((1, 3), "gloo", threads),
        ((1, 3), "gloo", 5),
    ]
