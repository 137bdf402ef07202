"""A program in which rank 2 dies in step 3, as ``torchrun`` or a test starts it.

Run as ``python -m tests.programs.dying HOW``: the gradients of DistributedDataParallel, or blocking
calls.
"""

import os
import signal
import sys

import torch
import torch.distributed as dist

import ringcoll  # noqa: F401  # its backend


def main(how: str) -> None:
    """Train, or sum up."""
    torch.set_num_threads(1)
    dist.init_process_group("ringcoll")
    rank = dist.get_rank()
    model: torch.nn.Module = torch.nn.Linear(64, 8)
    if how == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    for step in range(5):
        if rank == 2 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "ddp":
            model(torch.full((4, 64), float(rank + step))).sum().backward()
        else:
            dist.all_reduce(torch.ones(5))


if __name__ == "__main__":
    main(sys.argv[1])
