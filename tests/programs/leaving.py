"""Three ranks of which rank 0 holds the store, and ends before the others use groups made before.

Run as ``python -m tests.programs.leaving RANK FOLDER``; FOLDER is shared. Prints what the rank has got.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ringcoll.runtime.machine import process_state
from ringcoll.runtime.rendezvous import serve_store

_LIMIT = timedelta(seconds=30)


def wait_for(file: Path) -> str:
    """The text of a file, once it is there."""
    end = time.monotonic() + 60
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.01)
    return file.read_text()


def write(file: Path, text: str) -> None:
    """Write a file as a whole."""
    draft = file.with_suffix(".new")
    draft.write_text(text)
    draft.replace(file)


def main(rank: int, folder: Path) -> None:
    """Make groups; rank 0 ends, and the others use theirs for the first time."""
    torch.set_num_threads(1)
    store: dist.Store
    if rank == 0:
        store = serve_store()
        write(folder / "rank 0", f"{store.port} {os.getpid()}")
    else:
        port = int(wait_for(folder / "rank 0").split()[0])
        store = dist.TCPStore("127.0.0.1", port, None, False, timeout=_LIMIT)
    dist.init_process_group("ringcoll", store=store, rank=rank, world_size=3, timeout=_LIMIT)
    others, reversed_ = dist.new_group([1, 2]), dist.new_group([1, 2])
    dist.barrier()
    if rank == 0:
        os._exit(0)
    process = int((folder / "rank 0").read_text().split()[1])
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            if process_state(process).state in "ZX":
                break
        except (FileNotFoundError, ProcessLookupError):
            break
        time.sleep(0.01)
    # The first use of one group may come before that of the other, on each rank another way round.
    tensors = {group: torch.tensor([10.0 * rank]) for group in (others, reversed_)}
    works = [
        dist.all_reduce(tensors[group], group=group, async_op=True)
        for group in ((others, reversed_) if rank == 1 else (reversed_, others))
    ]
    for work in works:
        work.wait()
    message = torch.tensor([7.0 if rank == 1 else 0.0])
    if rank == 1:
        dist.send(message, 2, group=others)
    else:
        dist.recv(message, 1, group=others)
    dist.barrier(group=others)
    print([tensor.item() for tensor in tensors.values()], message.item(), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
