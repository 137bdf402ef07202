"""Device maps such as ``cpu:gloo,cuda:ringcoll``, and options where torch hands them on."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ringcoll import Options, testing
from ringcoll.errors import ArgumentError, TransportError
from ringcoll.runtime.transport import nccl
from ringcoll.training.backend import ProcessGroup
from tests.fakes.second_device import Elsewhere
from tests.programs import device_maps


@pytest.fixture
def world() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def begin(backend: str, **options: Any) -> Any:
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **options)
    return dist.group.WORLD


@pytest.mark.processes
@pytest.mark.parametrize(
    "backend, is_ours",
    [
        ("cpu:gloo,cuda:ringcoll", False),
        ("cuda:ringcoll,cpu:gloo", False),
        ("cpu:ringcoll,cuda:gloo", True),
        ("cpu:ringcoll", True),
        ("CPU:Ringcoll,cuda:ringcoll", True),
    ],
)
def test_each_device_has_the_backend_of_the_map(backend: str, is_ours: bool):
    total = [10.0, 12.0]
    for rank, (results, names, issued, num_bytes) in enumerate(
        testing.ranks(2).run(device_maps.mapped, backend)
    ):
        assert names == [backend.lower() if ":" in backend else backend] * 2
        assert (issued > 0, num_bytes > 0) == (is_ours, is_ours)
        gathered = [0.0, 1.0, 10.0, 11.0]
        assert results == {
            "all_reduce": total,
            "asynchronous": [10.0, 14.0],
            "broadcast": [10.0, 11.0],
            "all_gather": gathered,
            "reduce": total if rank == 0 else "not here",
            "gather": gathered,
            "scatter": [0.0, 3.0 + rank],
            "by name": gathered,
            "objects": [{"rank": 0}, {"rank": 1}],
            "coalesced": [*total, 10.0, 14.0],
            "messages": [10.0, 11.0] if rank == 0 else [0.0, 1.0],
            "beside": total,
        }


@pytest.mark.parametrize(
    "backend, has_gpu, by_device",
    [
        ("ringcoll", False, "cpu:ringcoll"),
        ("ringcoll", True, "cpu:ringcoll,cuda:ringcoll"),
        ("cpu:ringcoll", True, "cpu:ringcoll"),
        ("cpu:ringcoll,cuda:gloo", True, "cpu:ringcoll,cuda:gloo"),
    ],
)
def test_torch_learns_which_devices_a_group_is_for(
    monkeypatch: pytest.MonkeyPatch, world: None, backend: str, has_gpu: bool, by_device: str
):
    """All ways in which torch 2.13 asks: it knows by gloo's name that tensors are on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: has_gpu)
    group = begin(backend)
    has_both = "cuda" in by_device
    assert sorted(c10d._device_capability(group)) == ["cpu", "cuda"][: 1 + has_both]
    assert dist.get_backend_config(group) == by_device
    assert c10d._get_object_coll_device(group) == "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and torch's checkpoints call it
        assert str(c10d._get_pg_default_device(group)) == "cpu"
    assert (group._get_backend_name() == "gloo") == (not has_both)
    assert (str(dist.get_backend(group)), group.name()) == (backend, "ringcoll")
    dist.all_reduce(torch.ones(2))


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:ringcoll", "cpu:ringcoll,cuda:gloo"])
def test_the_default_group_honours_its_map(world: None, backend: str):
    group = begin(backend, pg_options=Options(algorithm="ring"))
    assert type(group).__name__ == "ProcessGroup"
    assert type(group).__module__.startswith("ringcoll.")
    assert (dist.get_backend(), dist.get_backend_config()) == (backend, backend)
    assert group.options.algorithm == "ring"
    by_name = c10d._resolve_process_group(group.group_name)
    assert [by_name, c10d._find_pg_by_ranks_and_tag("", [0])] == [group, group]
    dist.all_reduce(torch.ones(2))
    assert group._get_sequence_number_for_group() == backend.startswith("cpu:ringcoll")
    sizes = [len(table) for table in (c10d._world.pg_map, c10d._world.pg_names)]
    assert sizes == [1, 1]


class Asked:
    """Notes the calls that torch's group gets."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self.calls.append(name)


def test_tensors_of_another_device_go_to_its_backend(world: None):
    group = begin("cpu:ringcoll,cuda:gloo")
    group._native, far = Asked(), torch.zeros(2).as_subclass(Elsewhere)
    group.allreduce([far])
    group.allgather([[far]], [far])
    group.gather([], [far])
    group.all_to_all_single(output=far, input=far)
    group.send([far], 0)
    group.recv([far], 0)
    group.recv_anysource([far])
    options = dist.BarrierOptions()
    options.device = far.device
    group.barrier(options)
    group._start_coalescing(far.device)
    group._end_coalescing(far.device)
    methods = ["allreduce", "allgather", "gather", "all_to_all_single", "send", "recv"]
    ends = ["recv_anysource", "barrier", "_start_coalescing", "_end_coalescing"]
    assert group._native.calls == methods + ends
    assert group._get_sequence_number_for_group() == 0
    with pytest.raises(ArgumentError, match="cannot be split"):
        group.split_group([0])
    assert group.split_group([0], device_types=[torch.device("cpu")]).size() == 1
    group.__dict__.pop("_native")


def test_a_map_without_a_device_refuses_its_tensors(world: None):
    group = begin("cuda:ringcoll")
    for call in (
        lambda: dist.all_reduce(torch.ones(2)),
        lambda: group.recv_anysource([torch.ones(2)]),
        lambda: dist.broadcast(torch.ones(2), 0),
    ):
        with pytest.raises(
            ArgumentError, match=r"made for other devices \(expected cuda, got cpu\)"
        ):
            call()
    assert group._get_sequence_number_for_group() == 0


@pytest.mark.parametrize(
    "backend, reason",
    [
        ("cpu:fake,cuda:ringcoll", "custom backends ringcoll and fake"),
        ("xpu:ringcoll", "does not send tensors on xpu"),
    ],
)
def test_a_map_that_cannot_be_honoured_is_refused(world: None, backend: str, reason: str):
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers "fake"

    with pytest.raises(ArgumentError, match=reason):
        begin(backend)
    assert not dist.is_initialized()
    begin("cpu:gloo")  # what was refused has left nothing behind
    assert type(dist.group.WORLD) is dist.ProcessGroup


def test_a_class_of_nccl_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch):
    class Other:
        class Options:
            pass

        def __init__(self, *_: Any) -> None:
            self.send = self.recv = self.abort = self.shutdown = None

    for other, lack in ((Other, "_start_coalescing"), (object, "Options")):
        monkeypatch.setattr(dist, "ProcessGroupNCCL", other, raising=False)
        with pytest.raises(TransportError, match=f"not the class .*lacks.*{lack}"):
            nccl.private_group(dist.HashStore(), 0, 1, timedelta(seconds=1))


# --- options --------------------------------------------------------------------------


@pytest.mark.processes
def test_meshes_take_options():
    for found in testing.ranks(2).run(device_maps.meshes):
        assert found == [
            ("tuple", "ringcoll", 1800.0, "ring"),
            ("limit", "ringcoll", 7.0, "tree"),
            ("bare", "ringcoll", 1800.0, "ring"),
            ("bare limit", "ringcoll", 7.0, "tree"),
            ("name", "ringcoll", 1800.0, "auto"),
            ("first of two", "ringcoll", 1800.0, "ring"),
            ("second of two", "ringcoll", 7.0, "tree"),
            ("flat", "ringcoll", 7.0, "tree"),
        ]


@pytest.mark.processes
def test_subgroups_take_options():
    for found in testing.ranks(2).run(device_maps.subgroups):
        assert found == ["ring"] * 3 + [("ArgumentError", True)] * 3


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))]
)
def test_options_are_copied_with_their_time_limit(copied: Any):
    options = Options(algorithm={"all_reduce": "ring"}, wire_dtype=torch.bfloat16, share=True)
    options._timeout = timedelta(seconds=3)
    again = copied(options)
    assert (again, again._timeout) == (options, timedelta(seconds=3))
    assert (again.backend, again.share, Options().share) == ("ringcoll", True, False)


def test_options_that_change_later_change_no_group():
    options = Options(wire_dtype=torch.bfloat16)
    group = ProcessGroup(dist.HashStore(), 0, 1, timedelta(seconds=20), options)
    options.wire_dtype, options.algorithm = torch.float16, "nonsense"
    assert group.options == Options(wire_dtype=torch.bfloat16)
    group.shutdown()
