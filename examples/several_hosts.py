"""Ranks on several hosts.

The same command on each host, with the number of the host, 0 or 1, in place of N:

torchrun --nnodes 2 --node-rank N --nproc-per-node 2 --master-addr FIRST_HOST --master-port 29500 examples/several_hosts.py

FIRST_HOST is the name or address of host 0. Ranks of one host talk through shared memory, ranks of
two hosts over UCX if it is installed (`ringcoll[ucx]`), otherwise over gloo.
"""

import os

import torch
import torch.distributed as dist

import ringcoll


def main():
    dist.init_process_group("ringcoll")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((4,), float(rank))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [sum(range(world_size))] * 4
    total = torch.tensor([rank])
    ringcoll.all_reduce(total, algorithm="hierarchical", op="max")  # one exchange between the hosts
    print(
        f"rank {rank} of {world_size}, number {os.environ['LOCAL_RANK']} on its host: "
        f"sum {tensor[0].item():g}, highest rank {total.item()}\n",
        end="",
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
