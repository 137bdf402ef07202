"""Data-parallel training: torch's DistributedDataParallel on the backend of ringcoll.

torchrun --nproc-per-node 2 examples/plain_ddp.py
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ringcoll  # noqa: F401  # makes the backend known to torch


def main():
    dist.init_process_group("ringcoll")  # was "gloo"
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    data = torch.Generator().manual_seed(1 + dist.get_rank())  # each rank has batches of its own
    for step in range(51):
        inputs = torch.randn(32, 8, generator=data)
        targets = inputs.sum(dim=1, keepdim=True)  # what the model has to learn
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # the gradients of all ranks are averaged meanwhile
        optimizer.step()

        dist.all_reduce(loss.detach_(), dist.ReduceOp.AVG)
        if step % 25 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
