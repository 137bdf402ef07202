"""Programs that are killed, and started again with the store that they had: four lives each.

Run as ``python -m tests.programs.restarts KIND SEED PROGRAMS WORLD_SIZE``. KIND is ``tcp`` (this process
holds the store, as torchrun's agent does) or ``file``; ranks are forked. Of each of the first three
lives a rank is killed at a random moment, and then the others. With ``torchrun`` as KIND,
``torchrun --max-restarts 3`` starts the ranks, one of which kills itself.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import ringcoll.training.resilient  # what is imported is there when ranks are forked
from ringcoll.runtime.launch import rendezvous
from ringcoll.runtime.rendezvous import serve_store

STEPS = 30
KILLED_WITHIN_S = 0.5
LIVES = 4
_LIMIT = timedelta(seconds=20)


def train(folder: Path, store: dist.Store | None, rank: int, world_size: int) -> None:
    """Train on from the last step that was saved, with all that may meet keys of an earlier life."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "ringcoll", store=store, rank=rank, world_size=world_size, timeout=_LIMIT
    )
    two, every = dist.new_group([0, 1]), dist.new_group()
    resilient = ringcoll.training.resilient.start()
    saved = folder / "step"
    begin = torch.tensor([float(saved.read_text()) if not rank and saved.exists() else 0.0])
    dist.broadcast(begin, 0)
    for step in range(int(begin), STEPS):
        gradient = torch.full((1000,), float(rank + step))
        dist.all_reduce(gradient)
        assert gradient[-1] == sum(range(world_size)) + world_size * step
        for group, ranks in ((two, 2), (every, world_size)):
            if rank < ranks:
                number = torch.tensor([rank + 1.0])
                dist.all_reduce(number, group=group)
                assert number == ranks * (ranks + 1) / 2
        number = torch.tensor([rank + 2.0])
        ringcoll.all_reduce(number, group=resilient)
        assert number == world_size * (world_size + 3) / 2
        message = torch.tensor([float(step)])
        if rank == 0:
            dist.send(message, 1)
        elif rank == 1:
            dist.recv(message.zero_(), 0)
            assert message == step
        if rank == 0:
            draft = saved.with_suffix(".new")
            draft.write_text(str(step + 1))
            draft.replace(saved)
    resilient.close()
    dist.barrier()


def again_and_again() -> list[float]:
    """Make the default group of a pool's ranks anew, with the store and the name that it had."""
    store, rank, world_size = rendezvous()
    results = []
    for life in range(3):
        dist.destroy_process_group()
        time.sleep(0.1 * (rank == life))  # who is late finds what the others have written
        dist.init_process_group(
            "ringcoll", store=store, rank=rank, world_size=world_size, timeout=_LIMIT
        )
        number = torch.tensor([float(rank + life)])
        dist.all_reduce(number)
        results.append(number.item())
    return results


def start(folder: Path, where: str, rank: int, world_size: int) -> int:
    """Fork a rank; return its number as a process."""
    if (process := os.fork()) == 0:
        code = 1
        try:
            store: dist.Store
            if where.isdigit():
                store = dist.TCPStore("127.0.0.1", int(where), None, False, timeout=_LIMIT)
            else:
                store = dist.FileStore(where, world_size)
            train(folder, store, rank, world_size)
            code = 0
        except BaseException:  # noqa: BLE001  # it is a process of its own, which only ends
            traceback.print_exc()
        finally:
            os._exit(code)
    return process


def live(folder: Path, where: str, world_size: int, kill: tuple[int, float] | None) -> list[int]:
    """Run all ranks, until one is killed, or to their end; return how each has ended."""
    processes = [start(folder, where, rank, world_size) for rank in range(world_size)]
    if kill is not None:
        time.sleep(kill[1])
        os.kill(processes[kill[0]], signal.SIGKILL)
        for process in processes:
            os.kill(process, signal.SIGKILL)  # nobody has waited for it, so that it is there
    return [os.waitpid(process, 0)[1] for process in processes]


def under_torchrun() -> None:
    """Be a rank of torchrun; one is killed in each life but the last."""
    folder, seed = Path(sys.argv[2]), sys.argv[3]
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    chance = random.Random(f"{seed}/{life}")
    if life < LIVES - 1 and chance.randrange(world_size) == rank:
        signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.001, KILLED_WITHIN_S))
    train(folder, None, rank, world_size)


def main(kind: str, seed: int, programs: int, world_size: int) -> int:
    """Run programs; return how many did not come to their end."""
    failures = 0
    for program in range(programs):
        chance = random.Random(f"{seed}/{program}")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if kind == "torchrun":
                torchrun = "torch.distributed.run --standalone --max-restarts 3 --nproc-per-node"
                own = f"{world_size} -m tests.programs.restarts rank {folder} {seed}/{program}"
                command = [sys.executable, "-m", *torchrun.split(), *own.split()]
                codes = [subprocess.run(command, check=False, timeout=100).returncode]
            else:
                store = serve_store() if kind == "tcp" else None
                where = str(folder / "store") if store is None else str(store.port)
                for _ in range(LIVES - 1):
                    kill = chance.randrange(world_size), chance.uniform(0, KILLED_WITHIN_S)
                    live(folder, where, world_size, kill)
                codes = live(folder, where, world_size, None)
            saved = folder / "step"
            step = saved.read_text() if saved.exists() else "none"
            if any(codes) or step != str(STEPS):
                failures += 1
                print(f"program {program}: ended with {codes}, step {step}", flush=True)  # noqa: T201
    print(f"{failures} of {programs} programs failed", flush=True)  # noqa: T201
    return failures


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        under_torchrun()
    else:
        sys.exit(main(sys.argv[1], *map(int, sys.argv[2:5])))
