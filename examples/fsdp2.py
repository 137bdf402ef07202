"""Sharded training: torch's FSDP2 (`fully_shard`) on the backend of ringcoll.

torchrun --nproc-per-node 2 examples/fsdp2.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ringcoll  # noqa: F401  # makes the backend known to torch


def main():
    dist.init_process_group("ringcoll")  # was "gloo"
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    for layer in model:
        fully_shard(layer, mesh=mesh)  # each rank keeps a part of the layer
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

    data = torch.Generator().manual_seed(1 + dist.get_rank())  # each rank has batches of its own
    for step in range(51):
        inputs = torch.randn(32, 8, generator=data)
        targets = inputs.sum(dim=1, keepdim=True)  # what the model has to learn
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        dist.all_reduce(loss.detach_(), dist.ReduceOp.AVG)
        if step % 25 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
