"""Training that goes on when ranks die, on those that are left.

ringcoll run --resilient -k 3 examples/resilient.py

In this example rank 1 kills itself in step 20. docs/reliability.md says how new ranks join.
"""

import os
import signal

import torch
import torch.distributed as dist

from ringcoll.training import resilient


def main():
    dist.init_process_group("ringcoll")
    started_as = dist.get_rank()
    group = resilient.start()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    parallel = resilient.data_parallel(model, group)  # torch's DistributedDataParallel
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    data = torch.Generator().manual_seed(1 + started_as)  # each rank has batches of its own
    for step in range(51):
        if (started_as, step) == (1, 20):
            os.kill(os.getpid(), signal.SIGKILL)
        inputs = torch.randn(32, 8, generator=data)
        targets = inputs.sum(dim=1, keepdim=True)  # what the model has to learn
        loss = torch.nn.functional.mse_loss(parallel(inputs), targets)
        optimizer.zero_grad()
        loss.backward()  # the average is one over the ranks that are there at its end
        optimizer.step()
        if step % 25 == 0 and group.rank() == 0:
            print(f"step {step}: {group.size()} ranks, loss {loss.item():.4f}")
    group.close()


if __name__ == "__main__":
    main()
