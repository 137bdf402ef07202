"""Which transport carries tensors; what must be so where there is no GPU at all."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist

import ringcoll
from ringcoll.errors import ArgumentError, MissingExtraError, TransportError
from ringcoll.runtime.collectives import groups
from ringcoll.runtime.transport import (
    GlooTransport,
    Hub,
    LocalTransport,
    NcclTransport,
    Transport,
    catalogue,
    meet,
    nccl,
    staged,
    streams,
    ucx,
)
from ringcoll.training.backend import process_group as backend
from tests.fakes.fake_nccl import FakeGroup, World
from tests.fakes.second_device import FIRST, SECOND, Elsewhere
from tests.programs.threads import together

CPU = torch.device("cpu")
ROOT = Path(ringcoll.__file__).parents[1]


class Staged(LocalTransport):
    """In the place of the true one, which needs a GPU as soon as it is made."""

    def __init__(self, below: Transport, device: torch.device) -> None:
        super().__init__(Hub(1), 0)
        self.below, self.device, self.name = below, device, below.name

    def connect(self, timeout_s: float) -> None:
        self.below.connect(timeout_s)


@pytest.fixture
def no_nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    monkeypatch.setattr(staged, "StagedTransport", Staged)
    monkeypatch.delenv("RINGCOLL_CUDA_TRANSPORT", raising=False)
    catalogue._automatic.cache_clear()
    yield
    catalogue._automatic.cache_clear()


def alone() -> backend.ProcessGroup:
    return backend.ProcessGroup(dist.HashStore(), 0, 1, timedelta(seconds=20))


def test_the_environment_overrides_the_program(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RINGCOLL_CUDA_TRANSPORT", raising=False)
    assert catalogue.named("cuda", None) == "auto"
    assert catalogue.named("cuda", "gloo") == "gloo"
    with pytest.raises(
        ArgumentError, match=r"'cuda_transport'.*one of auto, nccl, ucx, gloo, got local"
    ):
        catalogue.named("cuda", "local")
    monkeypatch.setenv("RINGCOLL_CUDA_TRANSPORT", "ucx")
    assert catalogue.named("cuda", None) == catalogue.named("cuda", "gloo") == "ucx"
    assert catalogue.named("cpu", "gloo") == "gloo"
    monkeypatch.setenv("RINGCOLL_CUDA_TRANSPORT", "pigeons")
    with pytest.raises(ArgumentError, match=r"'RINGCOLL_CUDA_TRANSPORT'.*got pigeons"):
        catalogue.named("cuda", "gloo")


@pytest.mark.usefixtures("no_nccl")
def test_cpu_and_cuda_tensors_are_chosen_for_apart(monkeypatch: pytest.MonkeyPatch):
    def missing() -> None:
        raise MissingExtraError("not installed")

    monkeypatch.setattr(ucx, "check", missing)
    group = alone()
    ringcoll.use(group, cuda_transport="gloo")
    ringcoll.use(group, transport="gloo")
    transport = groups.communicator(group, FIRST).transport
    assert isinstance(transport, Staged)
    assert isinstance(transport.below, GlooTransport)
    assert transport.device == FIRST
    groups.communicator(group, FIRST)._words[1] = 1  # as after an operation
    with pytest.raises(ArgumentError, match="the group is in use"):
        ringcoll.use(group, cuda_transport="gloo")
    ringcoll.use(group, transport="gloo")  # there were no operations on CPU tensors yet
    assert isinstance(groups.communicator(group, CPU).transport, GlooTransport)
    groups.communicator(group, CPU)._words[1] = 1
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

    monkeypatch.setattr(ucx, "check", lambda: None)
    monkeypatch.setattr(ucx, "check_device", lambda device: None)
    monkeypatch.setattr(ucx, "UcxTransport", Ucx)
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
    with pytest.raises(ArgumentError, match=r"this torch has no NCCL.*auto, ucx, gloo"):
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

    def make(meeting: dist.Store, rank: int, *_: Any) -> NcclTransport:
        made[rank] = FakeGroup(world, rank)
        return NcclTransport(made[rank], FIRST, meeting, f"GPU {rank}")

    monkeypatch.setattr(staged, "StagedTransport", Staged)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(nccl, "make", make)
    monkeypatch.delenv("RINGCOLL_CUDA_TRANSPORT", raising=False)

    def main(rank: int) -> None:
        options = ringcoll.Options(cuda_transport="nccl" if rank else "gloo")
        group = backend.ProcessGroup(store, rank, 2, timedelta(seconds=20), options)
        groups.communicator(group, FIRST).transport.connect(10.0)

    for rank, error in enumerate(together(2, main)):
        assert isinstance(error, TransportError), error
        names = ["transport nccl", "transport gloo"]
        assert f"rank {rank} came with {names[not rank]}" in str(error)
        assert names[rank] in str(error)
        assert "RINGCOLL_TRANSPORT=gloo" in str(error)
        assert "ringcoll doctor" in str(error)
    assert made[1].calls == []  # nobody has connected


def test_a_rank_that_lacks_what_others_have_says_why(monkeypatch: pytest.MonkeyPatch):
    store = dist.HashStore()
    monkeypatch.setattr(
        "ringcoll.runtime.transport.ucx.check", lambda: refuse("no UCX is installed")
    )

    def main(rank: int) -> None:
        transport: Any = SimpleNamespace(
            rank=rank, world_size=2, name=["gloo", "ucx"][rank], verifies=False
        )
        meet(store, transport, 10, lambda: False)

    lacks, has = map(str, together(2, main))
    assert "rank 0 came with transport gloo" in lacks
    assert "Rank 0 cannot: no UCX is installed. `ringcoll doctor`" in lacks
    assert "rank 1 came with transport ucx" in has
    assert "cannot" not in has


def refuse(text: str) -> NoReturn:
    raise ArgumentError(text)


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


@pytest.mark.processes
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


# --- CPU tensors ----------------------------------------------------------------------


def test_the_environment_overrides_the_program_for_cpu_tensors(monkeypatch: pytest.MonkeyPatch):
    assert catalogue.named("cpu", None) == "auto"
    assert catalogue.named("cpu", "ucx") == "ucx"
    monkeypatch.setenv("RINGCOLL_TRANSPORT", "ucx")
    assert catalogue.named("cpu", None) == catalogue.named("cpu", "gloo") == "ucx"
    monkeypatch.setenv("RINGCOLL_TRANSPORT", "auto")
    assert catalogue.resolved("cpu", "gloo") == "shared"
    monkeypatch.setenv("RINGCOLL_TRANSPORT", "pigeons")
    with pytest.raises(
        ArgumentError, match=r"'RINGCOLL_TRANSPORT'.*expected one of auto, shared, ucx, gloo"
    ):
        catalogue.named("cpu", "gloo")


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_mpi_is_gone(kind: str) -> None:
    what = r"MPI as a transport is gone: ranks that mpiexec or srun has started use any of these"
    with pytest.raises(ArgumentError, match=what + ".*, ucx, gloo, got mpi"):
        catalogue.named(kind, "mpi")
    with pytest.raises(ArgumentError, match=what):
        catalogue.entry("mpi")
