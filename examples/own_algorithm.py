"""An algorithm of one's own: proved, then run by its name.

torchrun --nproc-per-node 4 examples/own_algorithm.py

`ringcoll new all_reduce star` writes a file like this one, with its test.
`ringcoll show examples/own_algorithm.py:star all_reduce` draws the steps.
"""

import torch
import torch.distributed as dist

import ringcoll
from ringcoll.schedules import (
    Step,
    inp,
    out,
    recv,
    recv_reduce,
    register,
    schedule_of,
    send,
    verify,
)


@register("all_reduce", "star")
def star(rank, world_size):
    """Star all-reduce: rank 0 adds up all vectors, and sends everyone the sum."""
    if rank == 0:
        others = range(1, world_size)
        local = [inp(0), *[out(0)] * (world_size - 2)]  # the first addition reads the own vector
        yield Step(
            *(recv_reduce(peer, out(0), own) for peer, own in zip(others, local, strict=True))
        )
        yield Step(*(send(peer, out(0)) for peer in others))
    else:
        yield Step(send(0, inp(0)))
        yield Step(recv(0, out(0)))


def main():
    dist.init_process_group("ringcoll")
    proof = verify(
        schedule_of("all_reduce", "star", dist.get_world_size())
    )  # raises if it is wrong
    tensor = torch.arange(3.0) * (dist.get_rank() + 1)
    ringcoll.all_reduce(tensor, algorithm="star")
    if dist.get_rank() == 0:
        print(f"proved: {proof.rounds} rounds")
        print(f"sum: {tensor.tolist()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
