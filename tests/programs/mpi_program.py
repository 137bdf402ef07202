"""What ranks of an MPI program do in tests.

Run as ``mpiexec -n K python -m tests.programs.mpi_program FOLDER PART...``: each rank writes what
is wrong, a list of sentences for each part, to FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ringcoll
from ringcoll.algorithms import algorithms
from ringcoll.collectives import groups
from ringcoll.errors import (
    ArgumentError,
    CollectiveTimeoutError,
    GroupBrokenError,
    MismatchError,
    PeerLostError,
    RingcollError,
    TransportError,
)
from ringcoll.schedule import contract
from ringcoll.testing import inputs as data
from ringcoll.transport import Message, StagedTransport, mpi
from tests.cases.calls import Case, prepare, verdict
from tests.cases.strategies import operators
from tests.fakes.fake_cuda import DEVICE, Looking, fake_cuda
from tests.programs.ranks import AS_GIVEN
from tests.programs.transports import CONFORMANCE, in_pieces

LIMIT_S = 30.0


# --- the transport --------------------------------------------------------------------


def conformance(folder: Path) -> Iterator[str]:
    """Every check of `CONFORMANCE`, each on a group of its own."""
    for name, check in CONFORMANCE.items():
        group = ringcoll.mpi_group(timeout_s=LIMIT_S)
        transport = group.communicator.transport
        transport.connect(LIMIT_S)
        if found := check(transport):
            yield f"{name}: {found}"
        group.close()


def conformance_of_torch_groups(folder: Path) -> Iterator[str]:
    """The same on transports that find the others through a store of torch."""
    _join_torch(folder)
    store = dist.distributed_c10d._get_default_store()
    for name, check in CONFORMANCE.items():
        private = dist.PrefixStore(f"transport {name}", store)
        transport = mpi.MpiTransport(private, dist.get_rank(), dist.get_world_size())
        transport.connect(LIMIT_S)
        if found := check(transport):
            yield f"{name}: {found}"
        transport.close()


def conformance_of_cuda_tensors(folder: Path) -> Iterator[str]:
    """The same with tensors that pass through host memory."""
    for name, check in CONFORMANCE.items():
        group = ringcoll.mpi_group(timeout_s=LIMIT_S)
        transport = in_pieces(group.communicator.transport)
        transport.connect(LIMIT_S)
        if found := check(transport):
            yield f"{name}: {found}"
        transport.close()
        group.close()


def cuda_tensors_of_a_group(folder: Path) -> Iterator[str]:
    """A group's CUDA tensors pass through host memory; on one GPU, and no longer than it lives."""
    for name in ("all_dtypes", "large_messages_both_ways", "abort_wakes_all"):
        group = ringcoll.mpi_group(timeout_s=LIMIT_S)
        with fake_cuda():
            member = groups.communicator(group, DEVICE)
            if not isinstance(member.transport, StagedTransport):
                yield f"over {member.transport}"
            transport = Looking(member.transport)
            transport.connect(LIMIT_S)
            if found := CONFORMANCE[name](transport):
                yield f"{name}: {found}"
            for device in ("cuda:1", "xpu:0"):
                try:
                    groups.communicator(group, torch.device(device))
                    yield f"a tensor on {device} was taken"
                except ArgumentError as error:
                    if error.argument != "tensor" or error.rank != group.rank():
                        yield str(error)
            ringcoll.barrier(group)  # CPU tensors have a way of their own
            group.close()
            try:
                ringcoll.barrier(group)
                yield "a closed group works"
            except GroupBrokenError:
                pass


def lengths(folder: Path) -> Iterator[str]:
    """A message that is longer or shorter than its receive is an error, and never a crash."""
    for sent, expected in ((8, 4), (4, 8)):
        group = ringcoll.mpi_group(timeout_s=LIMIT_S)
        transport = group.communicator.transport
        transport.connect(LIMIT_S)
        arrived = torch.full((16,), -1, dtype=torch.uint8)
        if group.rank() == 0:
            (handle,) = transport.post([Message(1, arrived[:expected], 3)], [])
            try:
                transport.wait(handle, LIMIT_S)
                yield f"no error for {sent} bytes where {expected} were to arrive"
            except TransportError as error:
                if f"{expected} bytes were to arrive" not in str(error):
                    yield str(error)
            if (arrived[expected:] != 255).any():
                yield "written beyond the end"
        elif group.rank() == 1:
            message = Message(0, torch.zeros(sent, dtype=torch.uint8), 3)
            for handle in transport.post([], [message]):
                transport.wait(handle, LIMIT_S)
        group.close()


def pieces(folder: Path) -> Iterator[str]:
    """Messages of more bytes than one may have; here the limit is lowered."""
    with unittest.mock.patch.object(mpi, "_LARGEST", 1000):
        group = ringcoll.mpi_group(timeout_s=LIMIT_S)
        for numel in (0, 249, 250, 251, 1000, 4321):
            tensor = torch.arange(float(numel)) + group.rank()
            ringcoll.all_reduce(tensor, group=group, algorithm="ring")
            k = group.size()
            if not torch.equal(tensor, k * torch.arange(float(numel)) + k * (k - 1) / 2):
                yield f"all_reduce of {numel}"


# --- every collective -----------------------------------------------------------------


def _own(rank: int, numel: int = 12) -> Tensor:
    """A rank's tensor: small integers that differ by rank and index."""
    return (torch.arange(numel) * 3 % 7 + 10.0 * rank).to(torch.float32)


def _coalesced(k: int) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Two tensors of each rank, and their sums over the ranks."""
    every = [[_own(rank), _own(rank + 5, 4)] for rank in range(k)]
    return every, [torch.stack(column).sum(0) for column in zip(*every, strict=True)]


Pairs = list[tuple[Tensor, Tensor]]
"""What came out, and what should have."""


def _calls(group: Any) -> dict[str, Callable[[], Pairs]]:
    """Every collective of the public API, each with torch's arithmetic as its oracle."""
    rank, k = group.rank(), group.size()
    every = [_own(peer) for peer in range(k)]
    total, last = torch.stack(every).sum(0), k - 1
    wide = [_own(peer, 4 * k) for peer in range(k)]
    wide_total = torch.stack(wide).sum(0)
    own_part = wide_total[4 * rank : 4 * rank + 4]

    def all_reduce() -> Pairs:
        tensor = every[rank].clone()
        ringcoll.all_reduce(tensor, group=group)
        largest = every[rank].clone()
        work = ringcoll.all_reduce(largest, "max", group, True)
        assert work is not None
        work.wait()
        return [(tensor, total), (largest, torch.stack(every).amax(0))]

    def all_reduce_coalesced() -> Pairs:
        parts, sums = _coalesced(k)
        ringcoll.all_reduce_coalesced(parts[rank], group=group)
        return list(zip(parts[rank], sums, strict=True))

    def reduce() -> Pairs:
        tensor = every[rank].clone()
        ringcoll.reduce(tensor, last, group=group)
        return [(tensor, total if rank == last else every[rank])]

    def scan() -> Pairs:
        tensor = every[rank].clone()
        ringcoll.scan(tensor, group=group)
        return [(tensor, torch.stack(every[: rank + 1]).sum(0))]

    def exscan() -> Pairs:
        tensor = every[rank].clone()
        ringcoll.exscan(tensor, group=group)
        return [(tensor, torch.stack(every[: max(1, rank)]).sum(0))]

    def broadcast() -> Pairs:
        tensor = every[rank].clone()
        ringcoll.broadcast(tensor, last, group)
        return [(tensor, every[last])]

    def all_gather() -> Pairs:
        found = [torch.zeros(12) for _ in every]
        ringcoll.all_gather(found, every[rank], group)
        return list(zip(found, every, strict=True))

    def all_gather_coalesced() -> Pairs:
        parts, _ = _coalesced(k)
        found = [[torch.zeros(12), torch.zeros(4)] for _ in range(k)]
        ringcoll.all_gather_coalesced(found, parts[rank], group)
        return [
            pair
            for mine, theirs in zip(found, parts, strict=True)
            for pair in zip(mine, theirs, strict=True)
        ]

    def all_gather_single() -> Pairs:
        found = torch.zeros(12 * k)
        ringcoll.all_gather_single(found, every[rank], group)
        return [(found, torch.cat(every))]

    def all_gather_into_tensor() -> Pairs:
        found = torch.zeros(12 * k)
        ringcoll.all_gather_into_tensor(found, every[rank], group)
        return [(found, torch.cat(every))]

    def all_gather_single_coalesced() -> Pairs:
        parts, _ = _coalesced(k)
        found = [torch.zeros(12 * k), torch.zeros(4 * k)]
        ringcoll.all_gather_single_coalesced(found, parts[rank], group)
        wanted = [torch.cat(column) for column in zip(*parts, strict=True)]
        return list(zip(found, wanted, strict=True))

    def gather() -> Pairs:
        found = [torch.zeros(12) for _ in every] if rank == last else None
        ringcoll.gather(every[rank], found, last, group)
        return list(zip(found, every, strict=True)) if found else []

    def scatter() -> Pairs:
        tensor = torch.zeros(4)
        ringcoll.scatter(tensor, list(wide[0].chunk(k)) if rank == 0 else None, 0, group)
        return [(tensor, wide[0][4 * rank : 4 * rank + 4])]

    def reduce_scatter() -> Pairs:
        tensor = torch.zeros(4)
        ringcoll.reduce_scatter(tensor, list(wide[rank].chunk(k)), group=group)
        return [(tensor, own_part)]

    def reduce_scatter_single() -> Pairs:
        tensor = torch.zeros(4)
        ringcoll.reduce_scatter_single(tensor, wide[rank].clone(), group=group)
        return [(tensor, own_part)]

    def reduce_scatter_tensor() -> Pairs:
        tensor = torch.zeros(4)
        ringcoll.reduce_scatter_tensor(tensor, wide[rank].clone(), group=group)
        return [(tensor, own_part)]

    def reduce_scatter_single_coalesced() -> Pairs:
        tensors = [torch.zeros(4), torch.zeros(4)]
        sources = [wide[rank].clone(), 2 * wide[rank]]
        ringcoll.reduce_scatter_single_coalesced(tensors, sources, group=group)
        return [(tensors[0], own_part), (tensors[1], 2 * own_part)]

    def all_to_all() -> Pairs:
        sources = [_own(rank + peer, rank + peer) for peer in range(k)]  # uneven
        found = [torch.zeros(rank + peer) for peer in range(k)]
        ringcoll.all_to_all(found, sources, group)
        return [(found[peer], _own(rank + peer, rank + peer)) for peer in range(k)]

    def all_to_all_single() -> Pairs:
        found = torch.zeros(4 * k)
        ringcoll.all_to_all_single(found, wide[rank].clone(), group=group)
        return [(found, torch.cat([one[4 * rank : 4 * rank + 4] for one in wide]))]

    def barrier() -> Pairs:
        ringcoll.barrier(group)
        return []

    def monitored_barrier() -> Pairs:
        ringcoll.monitored_barrier(group)
        return []

    return {name: call for name, call in locals().items() if name in dir(ringcoll)}


NO_COLLECTIVES = {
    "Explanation", "Faults", "LocalGroup", "MpiGroup", "Options", "UserOp", "Work", "bytes_sent", "close",
    "empty_shared", "explain", "mpi_group", "premul_sum", "probe", "run_threads", "share", "simulate", "trace",
    "use",
}  # fmt: skip


def collectives(folder: Path) -> Iterator[str]:
    """Every collective once, then every algorithm, dtype and operator."""
    group = ringcoll.mpi_group(timeout_s=LIMIT_S)
    calls = _calls(group)
    if missing := set(dir(ringcoll)) - NO_COLLECTIVES - calls.keys():
        yield f"not called: {missing}"
    for name, call in calls.items():
        for found, wanted in call():
            if not torch.equal(found, wanted):
                yield f"{name}: {found.tolist()}, wanted {wanted.tolist()}"
    for case in _cases(group.size()):
        prepared = prepare(case, group.rank(), group.size())
        work = prepared.start(ringcoll, group)
        if work is not None:
            work.wait()
        for wrong in verdict(prepared, group.rank(), group.size()):
            yield f"{case}: {wrong}"


def _cases(k: int) -> Iterator[Case]:
    """Each algorithm at lengths around k, from each root; each dtype with each operator."""
    for entry in algorithms(world_size=k):
        rules = contract(entry.collective)
        for numel in (0, 1, k - 1, k, k + 1, 1000, 20_000):
            for root in range(k) if rules.rooted and numel == k else (0,):
                yield Case(
                    entry.collective,
                    entry.name,
                    lengths=(numel,),
                    root=root,
                    segment_bytes=64 if numel % 2 else None,
                    dtype=torch.float32,
                    kind="rough" if numel < 10 else "exact",  # the oracle takes its time
                    async_op=numel == 1000,
                )
    for dtype in (*data.INTEGERS, *data.FLOATS, *data.COMPLEX, torch.bool):
        for op in operators(dtype):
            yield Case("all_reduce", op=op, dtype=dtype, lengths=(9,))


# --- groups ---------------------------------------------------------------------------


def _join_torch(folder: Path) -> None:
    """Make torch's default group, of gloo, with MPI's ranks in the opposite order."""
    world = mpi.mpi_library().COMM_WORLD
    rank, world_size = world.Get_size() - 1 - world.Get_rank(), world.Get_size()
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)


def torch_groups(folder: Path) -> Iterator[str]:
    """Groups of torch whose tensors travel over MPI; by `ringcoll.use` and the variable."""
    _join_torch(folder)
    rank, k = dist.get_rank(), dist.get_world_size()
    members = {
        "all": list(range(k)),
        "backwards": list(range(k))[::-1],
        "few": [k - 1, 0][: min(k, 2)],
    }
    made = {name: dist.new_group(ranks, **AS_GIVEN) for name, ranks in members.items()}
    for index, (name, group) in enumerate(made.items()):
        if rank not in members[name]:
            continue
        if index == 0:
            os.environ["RINGCOLL_TRANSPORT"] = "mpi"
        else:
            os.environ.pop("RINGCOLL_TRANSPORT", None)
            ringcoll.use(group, transport="mpi")
        tensor = torch.tensor([float(rank + 1)])
        ringcoll.all_reduce(tensor, group=group)
        if tensor.item() != sum(one + 1 for one in members[name]):
            yield f"{name}: {tensor.item()}"
        whose = torch.tensor([rank])
        ringcoll.broadcast(whose, group=group, group_src=0)
        if whose.item() != members[name][0]:
            yield f"{name}: broadcast from {whose.item()}"
        if groups.communicator(group, tensor.device).transport.name != "mpi":
            yield f"{name}: went elsewhere"
    backend = dist.new_group(backend="ringcoll", pg_options=ringcoll.Options(transport="mpi"))
    tensor = torch.tensor([float(rank + 1)])
    dist.all_reduce(tensor, group=backend)
    if tensor.item() != k * (k + 1) / 2:
        yield f"the backend: {tensor.item()}"
    dist.barrier()
    dist.destroy_process_group()


def several_groups(folder: Path) -> Iterator[str]:
    """Groups of parts of the ranks, closed groups, and messages of the program's own."""
    world = mpi.mpi_library().COMM_WORLD
    rank, k = world.Get_rank(), world.Get_size()
    halves = ringcoll.mpi_group(world.Split(rank % 2, -rank), timeout_s=LIMIT_S)
    everybody = ringcoll.mpi_group(timeout_s=LIMIT_S)
    ahead, behind = (rank + 1) % k, (rank - 1) % k
    heard = bytearray(4)
    receive = world.Irecv(heard, behind, 0)
    for _ in range(20):
        first, second = torch.tensor([rank]), torch.tensor([10 * rank])
        works = [
            ringcoll.all_reduce(first, group=halves, async_op=True),
            ringcoll.all_reduce(second, group=everybody, async_op=True),
        ]
        for work in works:
            assert work is not None
            work.wait()
        if first.item() != sum(range(rank % 2, k, 2)) or second.item() != 10 * sum(range(k)):
            yield f"{first.item()}, {second.item()}"
    send = world.Isend(bytes([rank] * 4), ahead, 0)
    mpi.mpi_library().Request.Waitall([send, receive])
    if heard != bytes([behind] * 4):
        yield f"the program's own message: {heard.hex()}"
    mine = sorted(range(rank % 2, k, 2), reverse=True)
    if halves.rank() != mine.index(rank):
        yield f"rank {halves.rank()} of {mine}"
    ringcoll.close(halves)
    try:
        ringcoll.barrier(halves)
        yield "a closed group works"
    except GroupBrokenError:
        pass
    for _ in range(50):
        group = ringcoll.mpi_group(timeout_s=LIMIT_S)
        ringcoll.barrier(group)
        group.close()
    try:
        ringcoll.all_reduce(torch.ones(1, device="meta"), group=everybody)
        yield "a tensor on no CPU was taken"
    except ArgumentError:
        pass


# --- faults ---------------------------------------------------------------------------


def faults(folder: Path) -> Iterator[str]:
    """Ranks that disagree, that do not come, that leave: each gets its error; others work."""
    rank = mpi.mpi_library().COMM_WORLD.Get_rank()
    good = ringcoll.mpi_group(timeout_s=LIMIT_S)

    def call(kind: type[RingcollError], limit_s: float, function: Callable[[Any], object]) -> str:
        group = ringcoll.mpi_group(timeout_s=LIMIT_S)
        ringcoll.barrier(group)
        begin, said = time.monotonic(), "no error"
        try:
            function(group)
        except RingcollError as error:
            said = f"{type(error).__name__}: {error}"
            if isinstance(error, kind) and time.monotonic() - begin < limit_s:
                said = ""
        ringcoll.barrier(good)  # works, and keeps whoever has nothing to wait for
        return said

    def differ(group: Any) -> None:
        ringcoll.all_reduce(torch.ones(5 if rank else 6), group=group, algorithm="ring")

    def late(group: Any) -> None:
        if rank == 0:
            time.sleep(3)
        ringcoll.all_reduce(torch.ones(5), group=group, algorithm="ring", timeout=1.0)

    def fails(group: Any) -> None:
        if rank == 0:
            time.sleep(0.5)
            groups.abort(group)
        ringcoll.all_reduce(torch.ones(5), group=group, algorithm="ring")

    yield call(MismatchError, 10, differ)
    yield call(TransportError, 10, late)
    yield call(TransportError, 10, fails)


def unreceived(folder: Path) -> Iterator[str]:
    """Rank 0 sends what nobody receives, short and long, gives up, and ends like the others."""
    for numel in (4, 1 << 21):
        group = ringcoll.mpi_group(timeout_s=LIMIT_S)
        ringcoll.barrier(group)
        if group.rank() == 0:
            try:
                ringcoll.all_reduce(torch.ones(numel), group=group, algorithm="ring", timeout=0.5)
                yield "no error"
            except (CollectiveTimeoutError, PeerLostError):  # the others may have ended before
                pass


def killed(folder: Path) -> Iterator[str]:
    """A rank is killed while the others wait for it: the program ends."""
    group = ringcoll.mpi_group(timeout_s=LIMIT_S)
    ringcoll.barrier(group)
    if group.rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    ringcoll.all_reduce(torch.ones(1000), group=group, algorithm="ring")
    yield "no error"


def leaving(folder: Path) -> Iterator[str]:
    """Rank 0 ends, in good order; the others, who wait for it, are told."""
    group = ringcoll.mpi_group(timeout_s=LIMIT_S)
    ringcoll.barrier(group)
    if group.rank() == 0:
        return
    begin = time.monotonic()
    try:
        ringcoll.all_reduce(torch.ones(1000), group=group, algorithm="ring")
        yield "no error"
    except PeerLostError as error:
        if time.monotonic() - begin > 10 or "rank 0" not in str(error):
            yield str(error)
    except CollectiveTimeoutError as error:
        yield str(error)


PARTS: dict[str, Callable[[Path], Iterator[str]]] = {
    part.__name__: part
    for part in (
        conformance,
        conformance_of_torch_groups,
        conformance_of_cuda_tensors,
        cuda_tensors_of_a_group,
        lengths,
        pieces,
        collectives,
        torch_groups,
        several_groups,
        faults,
        leaving,
        unreceived,
        killed,
    )
}


def main(folder: Path, parts: list[str]) -> None:
    """Run parts, one after the other, and write what is wrong."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rank = mpi.mpi_library().COMM_WORLD.Get_rank()
    wrong = {}
    for part in parts:
        sys.stderr.write(f"rank {rank}: {part}\n")  # the last one, where a program hangs
        wrong[part] = [sentence for sentence in PARTS[part](folder) if sentence]
    (folder / f"{rank}.json").write_text(json.dumps(wrong), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
