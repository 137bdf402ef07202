"""Which transport carries CUDA tensors; and what must be so where there is no GPU at all."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import ringcoll
from ringcoll import LocalGroup, api, backend, groups, select, streams
from ringcoll.communicator import Communicator
from ringcoll.errors import ArgumentError, PeerLostError, TransportError
from ringcoll.point_to_point import PointToPointWork
from ringcoll.transport.base import Transport
from ringcoll.transport.gloo import GlooTransport
from ringcoll.transport.local import Hub, LocalTransport
from ringcoll.transport.nccl import NcclTransport
from tests.support import fake_nccl
from tests.support.fake_nccl import FakeGroup, World
from tests.support.threads import together

CPU = torch.device("cpu")
FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
ROOT = Path(ringcoll.__file__).parents[1]


class Staged(LocalTransport):
    """In the place of the true one, which needs a GPU as soon as it is made."""

    def __init__(self, below: Transport, device: torch.device) -> None:
        super().__init__(Hub(1), 0)
        self.below, self.device, self.name = below, device, below.name

    def connect(self, timeout_s: float) -> None:
        self.below.connect(timeout_s)


@pytest.fixture
def no_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    monkeypatch.setattr(groups, "StagedTransport", Staged)
    monkeypatch.delenv(select.CUDA_TRANSPORT_VARIABLE, raising=False)


def alone() -> backend.ProcessGroup:
    return backend.ProcessGroup(dist.HashStore(), 0, 1, timedelta(seconds=20))


def test_the_environment_overrides_the_program(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(select.CUDA_TRANSPORT_VARIABLE, raising=False)
    assert select.cuda_transport(None) == "auto"
    assert select.cuda_transport("gloo") == "gloo"
    with pytest.raises(
        ArgumentError, match=r"'cuda_transport'.*one of auto, nccl, ucx, gloo, mpi, got local"
    ):
        select.cuda_transport("local")
    monkeypatch.setenv("RINGCOLL_CUDA_TRANSPORT", "ucx")
    assert select.cuda_transport(None) == select.cuda_transport("gloo") == "ucx"
    assert select.transport("gloo") == "gloo"
    monkeypatch.setenv("RINGCOLL_CUDA_TRANSPORT", "pigeons")
    with pytest.raises(ArgumentError, match=r"'RINGCOLL_CUDA_TRANSPORT'.*got pigeons"):
        select.cuda_transport("gloo")


@pytest.mark.usefixtures("no_nccl")
def test_cpu_and_cuda_tensors_are_chosen_for_apart(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(groups, "_installed", lambda name: "gloo" if name == "auto" else name)
    group = alone()
    ringcoll.use(group, cuda_transport="gloo")
    ringcoll.use(group, transport="gloo")
    transport = groups.communicator(group, FIRST).transport
    assert isinstance(transport, Staged)
    assert isinstance(transport.below, GlooTransport)
    assert transport.device == FIRST
    with pytest.raises(ArgumentError, match="the group is in use"):
        ringcoll.use(group, cuda_transport="gloo")
    ringcoll.use(group, transport="gloo")  # there were no operations on CPU tensors yet
    assert isinstance(groups.communicator(group, CPU).transport, GlooTransport)
    with pytest.raises(ArgumentError, match="the group is in use"):
        ringcoll.use(group, transport="gloo")
    ringcoll.close(group)
    ringcoll.use(group, transport="gloo", cuda_transport="auto")
    assert isinstance(groups.communicator(group, FIRST).transport, Staged)  # no NCCL, no UCX
    ringcoll.close(group)


@pytest.mark.usefixtures("no_nccl")
def test_ucx_is_told_the_device(monkeypatch: pytest.MonkeyPatch):
    class Ucx(LocalTransport):
        def __init__(self, store: dist.Store, rank: int, size: int, device: torch.device) -> None:
            super().__init__(Hub(size), rank)
            self.device = device

        @staticmethod
        def check() -> None:
            """It is there."""

    monkeypatch.setattr(groups, "UcxTransport", Ucx)
    group = alone()
    ringcoll.use(group, cuda_transport="auto")  # no NCCL
    transport = groups.communicator(group, SECOND).transport
    assert isinstance(transport, Ucx)
    assert transport.device == SECOND
    ringcoll.close(group)


@pytest.mark.usefixtures("no_nccl")
def test_choices_that_cannot_be():
    group = alone()
    with pytest.raises(ArgumentError, match="nothing was chosen"):
        ringcoll.use(group)
    for name in ("pigeons", ""):
        with pytest.raises(ArgumentError, match=r"^rank 0: argument 'cuda_transport': no such"):
            ringcoll.use(group, cuda_transport=name)
        with pytest.raises(ArgumentError, match="'cuda_transport': no such transport"):
            ringcoll.Options(cuda_transport=name)
        with pytest.raises(ArgumentError, match="'transport': no such transport"):
            ringcoll.Options(transport=name)
    with pytest.raises(ArgumentError, match=r"this torch has no NCCL.*auto, ucx, gloo or mpi"):
        ringcoll.use(group, cuda_transport="nccl")
    with pytest.raises(ArgumentError, match=r"^rank 0: argument 'tensor': tensors on this device"):
        groups.communicator(group, torch.device("xpu", 0))


@pytest.mark.usefixtures("no_nccl")
def test_what_cannot_be_names_who_asked_for_it(monkeypatch: pytest.MonkeyPatch):
    """The program's own words are read where the environment has the last one, too."""
    group = alone()
    monkeypatch.setenv("RINGCOLL_CUDA_TRANSPORT", "nccl")
    with pytest.raises(ArgumentError, match="'RINGCOLL_CUDA_TRANSPORT': this torch has no NCCL"):
        ringcoll.use(group, cuda_transport="gloo")
    monkeypatch.setenv("RINGCOLL_CUDA_TRANSPORT", "gloo")
    with pytest.raises(ArgumentError, match=r"'cuda_transport': no such.*got pigeons"):
        ringcoll.use(group, cuda_transport="pigeons")


@pytest.mark.usefixtures("no_nccl")
@pytest.mark.filterwarnings("ignore")  # quantized tensors are deprecated, nested ones a prototype
def test_a_call_that_is_refused_leaves_the_group_as_new():
    """Above all without a device that it would then be tied to."""
    group, far = alone(), torch.zeros(3).as_subclass(Elsewhere)
    wrong: list[tuple[Any, ...]] = [(far, torch.zeros(3)), (torch.zeros(3), far)]
    for tensor, out in wrong:
        with pytest.raises(ArgumentError, match="on one device"):
            ringcoll.all_reduce(tensor, group=group, out=out)
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(3)])
    for tensor in (quantized, nested, torch.ones(3, device="meta"), 3):
        with pytest.raises(ArgumentError, match=r"^rank 0: argument 'tensor'"):
            ringcoll.all_reduce(tensor, group=group)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="can be added up only"):
        ringcoll.all_reduce(torch.eye(3).to_sparse(), "max", group)
    ringcoll.use(group, transport="gloo", cuda_transport="gloo")
    assert groups.communicator(group, FIRST).device == FIRST
    ringcoll.close(group)


@pytest.mark.usefixtures("no_nccl")
def test_the_tensors_of_a_group_are_on_one_gpu(monkeypatch: pytest.MonkeyPatch):
    group = alone()
    ringcoll.use(group, cuda_transport="gloo")
    assert groups.communicator(group, SECOND) is groups.communicator(group, SECOND)
    with pytest.raises(ArgumentError, match=r"one device.*expected cuda:1, got cuda:0"):
        groups.communicator(group, FIRST)
    assert groups.communicator(group, CPU).device is None
    any_gpu = torch.device("cuda")
    assert groups.communicator(group, any_gpu).device == SECOND
    ringcoll.close(group)
    monkeypatch.setattr(streams, "current_device", lambda: 0)
    assert groups.communicator(group, any_gpu).device == FIRST
    ringcoll.close(group)


def test_ranks_with_different_transports_are_told(monkeypatch: pytest.MonkeyPatch):
    """Also where one of them is only a way to another."""
    world, store = World(2), dist.HashStore()
    made = {}

    def nccl(meeting: dist.Store, rank: int, *_: Any) -> NcclTransport:
        made[rank] = FakeGroup(world, rank)
        return NcclTransport(made[rank], FIRST, meeting, f"GPU {rank}")

    monkeypatch.setattr(groups, "StagedTransport", Staged)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(groups, "_nccl", nccl)
    monkeypatch.delenv(select.CUDA_TRANSPORT_VARIABLE, raising=False)

    def main(rank: int) -> None:
        options = ringcoll.Options(cuda_transport="nccl" if rank else "gloo")
        group = backend.ProcessGroup(store, rank, 2, timedelta(seconds=20), options)
        groups.communicator(group, FIRST).transport.connect(10.0)

    for rank, error in enumerate(together(2, main)):
        assert isinstance(error, TransportError), error
        names = ["transport nccl", "transport gloo"]
        assert f"rank {rank} came with {names[not rank]}" in str(error)
        assert names[rank] in str(error)
    assert made[1].calls == []  # nobody has connected


# --- ranks that share a GPU -----------------------------------------------------------------


def connected(gpus: list[str | None]) -> tuple[list[Any], list[list[str]]]:
    """Connect ranks with these GPUs: what comes of it, and what NCCL was asked for."""
    world, store = World(len(gpus)), dist.HashStore()
    ends = [FakeGroup(world, rank) for rank in range(len(gpus))]
    transports = [NcclTransport(end, CPU, store, gpu) for end, gpu in zip(ends, gpus, strict=True)]
    results = together(len(gpus), lambda rank: transports[rank].connect(10.0))
    return results, [end.calls for end in ends]


def test_ranks_that_share_a_gpu_are_named_before_nccl_is_asked():
    results, calls = connected(["one", "two", "one"])
    for rank, error in enumerate(results):
        assert isinstance(error, TransportError), error
        text = str(error)
        assert text.startswith(f"rank {rank}: ranks 0, 2 share one GPU (one)")
        assert 'cuda_transport="ucx" or "gloo"' in text
    assert calls == [[], [], []]


def test_an_operation_of_ranks_that_share_a_gpu_says_so():
    """As what it is, and not as the death of a peer."""
    world, store = World(2), dist.HashStore()

    def main(rank: int) -> None:
        transport = NcclTransport(FakeGroup(world, rank), CPU, store, "one")
        member = Communicator(transport, dist.PrefixStore("monitor", store), 20.0)
        try:
            ringcoll.all_reduce(torch.ones(3), group=LocalGroup(member))
        finally:
            member.close()

    for error in together(2, main):
        assert type(error) is TransportError
        assert "ranks 0, 1 share one GPU (one)" in str(error)
        assert "all_reduce" in str(error)


@pytest.mark.parametrize("gpus", [["one", "two", "three"], [None, None, None], ["one"]])
def test_ranks_that_may_be_where_they_are(gpus: list[str | None]):
    results, calls = connected(gpus)
    assert results == [None] * len(gpus)
    assert calls == [["connect"]] * len(gpus)


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_what_nccl_says_against_it_is_a_typed_error(kind: type[Exception]):
    class Refusing(FakeGroup):
        def eager_connect_single_device(self, device: torch.device) -> None:
            raise kind("ncclInvalidUsage")

    transport = NcclTransport(Refusing(World(1), 0), CPU, dist.HashStore())
    with pytest.raises(TransportError, match=r"rank 0 could not connect.*ncclInvalidUsage"):
        transport.connect(5.0)


def test_newer_versions_of_nccl_may_be_told_to_allow_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    assert not select.ranks_may_share_gpus((2, 30, 1))
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert select.ranks_may_share_gpus((2, 30, 1))
    assert not select.ranks_may_share_gpus((2, 29, 7))
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "0")
    assert not select.ranks_may_share_gpus((2, 31, 0))


# --- the user's sends and receives ------------------------------------------------------------


class Channel(FakeGroup):
    """Takes single messages, too: each waits for the one before it, as on NCCL's stream."""

    def __init__(self, world: World, rank: int, options: Any) -> None:
        super().__init__(world, rank)
        self.timeout = options._timeout

    def _add(self, is_send: bool, tensors: list[torch.Tensor], peer: int) -> Any:
        if self._open is not None:
            return super()._add(is_send, tensors, peer)
        self._start_coalescing()
        super()._add(is_send, tensors, peer)
        return self._end_coalescing()

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return self._add(True, tensors, peer)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return self._add(False, tensors, peer)

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout


@pytest.fixture
def channels(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, Channel]]:
    """The NCCL groups that groups of the backend make for their users' messages, by rank."""
    found: dict[int, Channel] = {}
    worlds: dict[int, World] = {}

    class Nccl:
        class Options:
            _timeout = timedelta(0)

        def __new__(cls, store: dist.Store, rank: int, world_size: int, options: Any) -> Channel:  # type: ignore[misc]
            assert rank not in found
            world = worlds.setdefault(world_size, World(world_size))
            found[rank] = Channel(world, rank, options)
            return found[rank]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    known = c10d._world.pg_group_ranks
    before = set(known)
    yield found
    for group in set(known) - before:
        del known[group]


def around_a_ring(rank: int, world_size: int, store: dist.Store, in_a_batch: bool) -> list[float]:
    """What a rank gets from the one before it, if all send first."""
    group = backend.ProcessGroup(store, rank, world_size, timedelta(seconds=20))
    ahead, behind = (rank + 1) % world_size, (rank - 1) % world_size
    sent, got = torch.full((3,), float(rank)), torch.zeros(3)
    device = [one.as_subclass(Elsewhere) for one in (sent, got)]
    c10d._world.pg_group_ranks[group] = {peer: peer for peer in range(world_size)}
    works: list[Any]
    if in_a_batch:
        messages = [
            dist.P2POp(dist.isend, device[0], ahead, group),
            dist.P2POp(dist.irecv, device[1], behind, group),
        ]
        works = dist.batch_isend_irecv(messages)
    else:
        works = [dist.isend(device[0], ahead, group), dist.irecv(device[1], behind, group)]
    for work in works:
        work.wait()
    return got.tolist()


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_batch_is_one_operation_over_nccl(channels: dict[int, Channel], world_size: int):
    store = dist.HashStore()
    results = together(world_size, lambda rank: around_a_ring(rank, world_size, store, True))
    assert results == [[float((rank - 1) % world_size)] * 3 for rank in range(world_size)]
    for rank, channel in channels.items():
        ahead, behind = (rank + 1) % world_size, (rank - 1) % world_size
        assert channel.calls == ["start", f"send {ahead}", f"recv {behind}", "end"]


def test_one_by_one_they_would_hang(channels: dict[int, Channel], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fake_nccl, "LIMIT_S", 0.5)
    store = dist.HashStore()
    for error in together(3, lambda rank: around_a_ring(rank, 3, store, False)):
        assert isinstance(error, PeerLostError), error
        assert "NCCL hangs" in str(error)


def test_a_batch_that_fails_leaves_no_group_open(channels: dict[int, Channel]):
    group, far = alone(), torch.zeros(3).as_subclass(Elsewhere)
    c10d._world.pg_group_ranks[group] = {0: 0}
    messages = [
        dist.P2POp(dist.isend, far, 0, group),
        dist.P2POp(dist.irecv, torch.zeros(3).to("meta"), 0, group),
    ]
    with pytest.raises(ArgumentError, match="cannot be sent"):
        dist.batch_isend_irecv(messages)
    assert channels[0].calls == ["start", "send 0", "end"]


def test_nccl_is_made_when_the_first_message_comes(channels: dict[int, Channel]):
    """And not by what torch does for a ``device_id``."""
    group, far = alone(), torch.zeros(3).as_subclass(Elsewhere)
    group._get_backend(FIRST).eager_connect_single_device(FIRST)
    group.set_timeout(timedelta(seconds=30))
    assert not channels
    group.send([far], 0)
    group.recv([far], 0)
    assert channels[0].timeout == timedelta(seconds=30)
    group.set_timeout(timedelta(seconds=40))
    assert channels[0].timeout == timedelta(seconds=40)


@pytest.mark.parametrize("end", ["shutdown", "abort"])
def test_nccl_ends_with_its_group(channels: dict[int, Channel], end: str):
    group = alone()
    getattr(group, end)()  # nothing has been made yet
    group.send([torch.zeros(3).as_subclass(Elsewhere)], 0)
    getattr(group, end)()
    assert channels[0].calls[-1] == end


class Asked:
    """A work of torch's."""

    waits = 0

    def wait(self, timeout: timedelta) -> bool:
        self.waits += 1
        return True

    def is_completed(self) -> bool:
        return False


@pytest.mark.parametrize("device, waits, completed", [(CPU, 1, True), (FIRST, 2, False)])
def test_waits_order_each_stream(device: torch.device, waits: int, completed: bool):
    """A work of NCCL's is asked each time; one of gloo's hangs if it is asked twice."""
    asked: Any = Asked()
    message = PointToPointWork(asked, "lost", None, device)
    assert not message.is_completed()
    assert message.wait()
    assert message.wait()
    assert asked.waits == waits
    assert (message.is_completed(), message.is_success()) == (completed, completed)


# --- arguments --------------------------------------------------------------------------------


class Elsewhere(torch.Tensor):
    """A tensor that says that it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return SECOND


def test_tensors_of_one_call_are_on_one_device():
    def main(group: LocalGroup) -> None:
        far = torch.zeros(3).as_subclass(Elsewhere)
        with pytest.raises(ArgumentError, match=r"on one device.*expected cpu, got cuda:1"):
            ringcoll.all_reduce(torch.zeros(3), group=group, out=far)
        with pytest.raises(ArgumentError, match=r"on one device.*expected cuda:1, got cpu"):
            ringcoll.all_gather([torch.zeros(3)], far, group=group)

    ringcoll.run_threads(main, 1)


def test_tensors_of_a_coalesced_call_are_on_one_device(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RINGCOLL_REDUCTION", "torch")

    def main(group: LocalGroup) -> None:
        near, far = torch.zeros(3), torch.zeros(3).as_subclass(Elsewhere)
        for tensors, said in (([near, far], "cpu, got cuda:1"), ([far, near], "cuda:1, got cpu")):
            with pytest.raises(ArgumentError, match=f"on one device.*expected {said}"):
                ringcoll.all_reduce_coalesced(tensors, group=group)
        factor = torch.ones(1).as_subclass(Elsewhere)
        with pytest.raises(ArgumentError, match=r"factor.*expected cpu, got cuda:1"):
            ringcoll.all_reduce(near, ringcoll.premul_sum(factor), group=group)
        ringcoll.all_reduce(near, group=group)  # and the group is as it was

    ringcoll.run_threads(main, 1)


@pytest.mark.parametrize("given, wanted", [("cpu", None), ("cuda", [3]), ("cuda:1", [1])])
def test_a_barrier_uses_the_device_that_torch_names(
    monkeypatch: pytest.MonkeyPatch, given: str, wanted: list[int] | None
):
    asked = []

    def barrier(**keywords: Any) -> None:
        asked.append(keywords["device_ids"])

    monkeypatch.setattr(api, "barrier", barrier)
    monkeypatch.setattr(streams, "current_device", lambda: 3)
    group, options = alone(), dist.BarrierOptions()
    options.device = torch.device(given)
    group.barrier(options).wait()
    assert asked == [wanted]


# --- without a GPU ------------------------------------------------------------------------------

PROGRAM = """
import torch, ringcoll
import torch.distributed as dist

def main(group):
    tensor = torch.ones(100)
    ringcoll.all_reduce(tensor, group=group)
    work = ringcoll.all_reduce(tensor, group=group, async_op=True)
    work.get_future().wait()
    ringcoll.barrier(group)
    return tensor[0].item()

assert ringcoll.run_threads(main, 2) == [4.0, 4.0]
dist.init_process_group("ringcoll", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
dist.destroy_process_group()
print("initialised:", torch.cuda.is_initialized())
"""


def test_cpu_tensors_never_touch_cuda():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "initialised: False", "")
