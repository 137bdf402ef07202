"""One rank of a program that uses groups while it ends, whatever was registered first.

Run as ``python -m tests.programs.late BACKEND RANK STORE``; the store is a port. What the program prints is
compared by the test.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

backend, rank, port = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
groups: dict[str, Any] = {}


@contextlib.contextmanager
def says(what: str) -> Iterator[list[float]]:
    """Print what was computed, or the error."""
    results: list[float] = []
    try:
        yield results
        print(f"{what}: {results}", flush=True)  # noqa: T201
    except RuntimeError as error:
        print(f"{what}: {type(error).__name__}", flush=True)  # noqa: T201


def compute(what: str, group: str) -> None:
    """Use a group in all the ways in which it is used by programs."""
    with says(what) as results:
        keywords = {"group": groups[group]}
        tensor = torch.tensor([rank + 1.0])
        library.all_reduce(tensor, **keywords)
        work = library.all_reduce(tensor, async_op=True, **keywords)
        assert work is not None
        work.wait()
        library.all_reduce(tensor, async_op=True, **keywords)  # nobody waits
        future = library.all_reduce(tensor, async_op=True, **keywords).get_future()
        future.then(lambda _: results.append(tensor.item())).wait()


class Collected:
    """Deleted when Python has ended its threads, as it is in a circle."""

    def __init__(self) -> None:
        self.own = self

    def __del__(self) -> None:
        if not sys.is_finalizing():  # the next one is for later
            Collected()
            return
        compute("deleted, a group in use", "used")
        compute("deleted, a new group", "never used")


class Owner:
    """What a finalizer is registered for."""


def go_on() -> None:
    """Go on with a group of its own until the group is closed."""
    with contextlib.suppress(RuntimeError):
        while True:
            library.all_reduce(torch.ones(3), group=groups["a thread's"])


# Before anything of torch or the library.
owner = Owner()
weakref.finalize(owner, compute, "finalized", "used")
atexit.register(compute, "at exit, a new group", "new")
atexit.register(compute, "at exit", "used")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import ringcoll  # noqa: E402

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
torch.set_num_threads(1)
store = dist.TCPStore("127.0.0.1", port, None, False)
dist.init_process_group(
    backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
)
library: Any = ringcoll if backend == "gloo" else dist
for each in ("used", "new", "never used", "a thread's"):
    groups[each] = dist.new_group([0, 1])
compute("first", "used")
thread = threading.Thread(target=go_on, daemon=True)
thread.start()
Collected()
