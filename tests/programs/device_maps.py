"""Groups whose devices have backends of their own, and groups of device meshes with options."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ringcoll
from tests.programs.faults import catch

__all__ = ["mapped", "meshes", "subgroups"]


def mapped(backend: str) -> tuple[dict[str, object], list[str], int, int]:
    """Results of all kinds of calls on two ranks, the group's names, and what this library has run."""
    group: Any = dist.new_group(backend=backend)
    rank = dist.get_rank()
    results: dict[str, object] = {}

    def mine(factor: float = 1.0) -> torch.Tensor:
        return torch.arange(2.0) * factor + 10 * rank

    dist.all_reduce(total := mine(), group=group)
    results["all_reduce"] = total.tolist()
    work = dist.all_reduce(total := mine(2), group=group, async_op=True)
    assert work is not None
    work.wait()
    results["asynchronous"] = total.tolist()
    dist.broadcast(sent := mine(), 1, group=group)
    results["broadcast"] = sent.tolist()
    parts = [torch.zeros(2), torch.zeros(2)]
    dist.all_gather(parts, mine(), group=group)
    results["all_gather"] = torch.cat(parts).tolist()
    dist.reduce(total := mine(), 0, group=group)
    results["reduce"] = total.tolist() if rank == 0 else "not here"
    dist.gather(mine(), parts if rank == 0 else None, 0, group=group)
    results["gather"] = torch.cat(parts).tolist()
    dist.scatter(got := torch.zeros(2), [mine(3), mine(4)] if rank == 0 else None, 0, group=group)
    results["scatter"] = got.tolist()
    group.allgather([parts], [mine()]).wait()
    results["by name"] = torch.cat(parts).tolist()
    objects: list[object] = [None, None]
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    results["objects"] = objects
    with dist._coalescing_manager(group):
        dist.all_reduce(total := mine(), group=group)
        dist.all_reduce(second := mine(2), group=group)
    results["coalesced"] = [*total.tolist(), *second.tolist()]
    messages = [
        dist.P2POp(dist.isend, mine(), 1 - rank, group),
        dist.P2POp(dist.irecv, got, 1 - rank, group),
    ]
    for message in dist.batch_isend_irecv(messages):
        message.wait()
    results["messages"] = got.tolist()
    dist.barrier(group)
    group.set_timeout(timedelta(seconds=30))
    names = [str(dist.get_backend(group)), dist.get_backend_config(group)]
    issued, sent_bytes = group._get_sequence_number_for_group(), ringcoll.bytes_sent(group)
    dist.all_reduce(again := mine(), group=dist.new_group(backend=backend))  # beside the first
    results["beside"] = again.tolist()
    dist.destroy_process_group(group)
    return results, names, issued, sent_bytes


def meshes() -> list[tuple[str, str, float, str]]:
    """The backend, the time limit and the algorithm of the groups of meshes, by kind of options."""
    options = ringcoll.Options(algorithm="ring")
    limited = ringcoll.Options(algorithm="tree")
    limited._timeout = timedelta(seconds=7)
    found = []

    def note(name: str, group: Any) -> None:
        dist.all_reduce(total := torch.ones(1), group=group)
        assert total.item() == group.size()
        limit_s = group.timeout.total_seconds()
        found.append((name, group.name(), limit_s, group.options.algorithm))

    def mesh(**by_name: Any) -> Any:
        overrides: Any = by_name
        names = ("dp", "tp")
        return init_device_mesh("cpu", (2, 1), mesh_dim_names=names, backend_override=overrides)

    note("tuple", mesh(dp=("ringcoll", options)).get_group("dp"))
    note("limit", mesh(dp=("ringcoll", limited)).get_group("dp"))
    note("bare", mesh(dp=options).get_group("dp"))
    note("bare limit", mesh(dp=limited).get_group("dp"))
    note("name", mesh(dp="ringcoll").get_group("dp"))
    both = mesh(dp=options, tp=("ringcoll", limited))
    note("first of two", both.get_group("dp"))
    note("second of two", both.get_group("tp"))
    flat = mesh(dp=options)._flatten("all", backend_override=("ringcoll", limited))
    note("flat", flat.get_group())
    return found


def subgroups() -> list[object]:
    """Groups that are made from options otherwise, and what is refused."""
    options, rank = ringcoll.Options(algorithm="ring"), dist.get_rank()
    ours, _ = dist.new_subgroups(1, pg_options=options)
    enumerated, _ = dist.new_subgroups_by_enumeration([[0], [1]], pg_options=options)
    split: Any = dist.group.WORLD
    split = split.split_group([0, 1], opts=options)
    found: list[object] = [group.options.algorithm for group in (ours, enumerated, split)]
    gloo: Any = dist.ProcessGroupGloo
    for wrong in (gloo._Options(), {"algorithm": "ring"}, "ring"):
        error = catch(partial(dist.new_group, [rank], pg_options=wrong, **_LOCAL))
        found.append((error.kind, "pg_options" in error.text))
    dist.barrier()  # the other rank may be connecting still, to groups that end here
    return found


_LOCAL: dict[str, Any] = {"use_local_synchronization": True}
