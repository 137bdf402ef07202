"""One rank of a program that ends while operations are pending.

Run as ``python -m tests.programs.exits BACKEND CASE RANK WORLD_SIZE STORE``; the store is a
port or a file. With the backend gloo, the operations are calls of ringcoll's functions on a
group of gloo; with ringcoll, they are calls of torch.distributed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import ringcoll
from ringcoll.errors import RingcollError


def wait(work: dist.Work) -> None:
    """Wait for what never comes."""
    with contextlib.suppress(RingcollError):
        work.wait()


def main(backend: str, case: str, rank: int, world_size: int, where: str) -> None:
    """Start operations, and end in one way or another."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    limit = timedelta(seconds=600)  # longer than the test waits
    store: dist.Store
    if where.isdigit():
        store = dist.TCPStore("127.0.0.1", int(where), None, False, timeout=limit)
    else:
        store = dist.FileStore(where, world_size)
    library: Any = dist if backend == "ringcoll" else ringcoll
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    if case != "before the ranks have met":
        library.barrier()
    if case == "nobody waits":
        for _ in range(20):
            library.all_reduce(torch.ones(1000), async_op=True)
    elif case in ("a peer never comes", "before the ranks have met"):
        if rank == 0:
            for _ in range(3):
                library.all_reduce(torch.ones(1000), async_op=True)
            time.sleep(0.5)
        else:
            time.sleep(0.2)  # a call after the loss of this rank would raise an error
    elif case == "after destroy_process_group":
        work = library.all_reduce(torch.ones(1000), async_op=True)
        assert work is not None
        work.wait()
        library.all_reduce(torch.ones(1000), async_op=True)
        dist.destroy_process_group()
    elif case == "a child ends":
        library.all_reduce(torch.ones(20_000))
        if os.fork() == 0:
            sys.exit(0)  # with all that Python does at the end of a process
        assert os.wait()[1] == 0
        library.all_reduce(torch.ones(20_000))
    elif case == "callbacks":
        others = dist.new_group()  # the order of calls and callbacks is another one on each rank
        for _ in range(20):
            future = library.all_reduce(torch.ones(1000), async_op=True).get_future()
            future.then(lambda _: library.all_reduce(torch.ones(10), group=others, async_op=True))
    elif case == "in training":
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(100, 100))
        print("training", flush=True)  # noqa: T201  # the test waits for it
        while True:
            model(torch.ones(10, 100)).sum().backward()
    elif case == "an exception":
        library.all_reduce(torch.ones(1000), async_op=True)
        raise SystemExit(3)
    elif case == "a thread waits":
        if rank == 0:
            work = library.all_reduce(torch.ones(1000), async_op=True)
            assert work is not None
            threading.Thread(target=wait, args=(work,), daemon=True).start()
    else:
        assert case == "all done", case
        library.all_reduce(torch.ones(1000))
    print("the end", flush=True)  # noqa: T201  # looked for by the test


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
