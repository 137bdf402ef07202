"""Tensors in shared memory: what moves, what is refused, and that nothing is left or read too late."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import ringcoll
from ringcoll.errors import ArgumentError, SharingError
from ringcoll.runtime.launch import RankError, Ranks
from ringcoll.runtime.transport import SharedMemory
from ringcoll.runtime.transport.shared import tensors as shared_tensors
from ringcoll.runtime.transport.shared.memory import identity
from ringcoll.runtime.transport.shared.tensors import PeerRegions, region_of, regions_now
from tests.programs import shared_tensors as program


def region(tensor: torch.Tensor) -> shared_tensors.SharedRegion | None:
    return region_of(tensor.data_ptr(), tensor.nbytes)


class TestEmptyShared:
    @pytest.mark.parametrize("size", [(3,), (2, 3), ((4, 5),), (torch.Size([1, 2, 3]),), ((),)])
    def test_shapes_are_those_of_torch(self, size: tuple[Any, ...]):
        tensor = ringcoll.empty_shared(*size)
        assert tensor.shape == torch.empty(*size).shape
        assert tensor.is_contiguous()
        assert tensor.count_nonzero() == 0

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool, torch.complex64])
    def test_dtypes(self, dtype: torch.dtype):
        assert ringcoll.empty_shared(3, dtype=dtype).dtype is dtype
        with torch.device("meta"):
            assert ringcoll.empty_shared(3, dtype=dtype).device.type == "cpu"

    @pytest.mark.filterwarnings("ignore")  # quantized tensors are deprecated
    @pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32, torch.quint4x2])
    def test_quantized_dtypes_are_refused(self, dtype: torch.dtype):
        before = regions_now()
        with pytest.raises(ArgumentError, match="no quantized"):
            ringcoll.empty_shared(3, dtype=dtype)
        assert regions_now() is before

    @pytest.mark.parametrize("size", [(0,), (2, 0, 3)])
    def test_nothing_needs_no_memory(self, size: tuple[int, ...]):
        before = regions_now()
        assert ringcoll.empty_shared(*size).shape == size
        assert regions_now() is before

    def test_wrong_sizes_are_torch_errors(self):
        with pytest.raises(RuntimeError, match="negative"):
            ringcoll.empty_shared(-1)
        with pytest.raises(TypeError):
            ringcoll.empty_shared("x")

    def test_views_are_in_the_region_and_neighbours_are_not(self):
        tensor = ringcoll.empty_shared(10_000)
        found = region(tensor)
        assert found is not None
        assert region(tensor[17:9000]) is found
        assert region_of(tensor.data_ptr() - 1, 4) is None
        assert region_of(tensor.data_ptr() + tensor.nbytes - 2, 4) is None
        assert region(torch.zeros(10_000)) is None

    def test_memory_ends_with_the_last_view(self):
        tensor = ringcoll.empty_shared(10_000)
        view, address = tensor[9_000:], tensor.data_ptr()
        found = region(tensor)
        assert found is not None
        del tensor
        assert region(view) is found
        before = regions_now()
        del view
        assert regions_now() is not before
        assert region_of(address, 4) is None
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(found.descriptor)

    def test_a_region_that_has_ended_takes_no_memory_and_can_still_be_read(self):
        tensor = ringcoll.empty_shared(10_000).fill_(1)
        found = region(tensor)
        assert found is not None
        mapped = SharedMemory.open(os.getpid(), found.descriptor, found.identity, is_written=False)
        assert mapped.data[:4] == tensor[:1].numpy().tobytes()
        again = os.dup(found.descriptor)
        assert os.fstat(again).st_blocks >= 40_000 // 512
        del tensor
        assert os.fstat(again).st_blocks == 0
        os.close(again)
        assert mapped.data[:4] == bytes(4)

    def test_too_much_memory(self, monkeypatch: pytest.MonkeyPatch):
        with pytest.raises(SharingError, match=r"1152921504606846976 bytes .* are free; use torch"):
            ringcoll.empty_shared(1 << 58)
        monkeypatch.setattr(shared_tensors, "free_bytes", lambda: 1000)
        with pytest.raises(SharingError, match=r"4096 bytes .* only 1000 bytes are free"):
            ringcoll.empty_shared(1024)
        assert ringcoll.empty_shared(200).nbytes == 800

    def test_too_many_files(self, monkeypatch: pytest.MonkeyPatch):
        def refuse(*arguments: object) -> int:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(os, "memfd_create", refuse)
        with pytest.raises(SharingError, match="Too many open files"):
            ringcoll.empty_shared(1024)

    def test_a_machine_without_such_memory(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.delattr(os, "memfd_create")
        with pytest.raises(SharingError, match=r"use torch\.empty"):
            ringcoll.empty_shared(1024)


class TestLastingZeros:
    def test_long_memory_is_shared(self):
        cpu = torch.device("cpu")
        long, short = (shared_tensors.lasting_zeros(n, torch.float64, cpu) for n in (4096, 4095))
        assert long.shape == (4096,)
        assert long.count_nonzero() == short.count_nonzero() == 0
        assert region(long) is not None
        assert region(short) is None
        assert shared_tensors.lasting_zeros(4096, torch.int8, torch.device("meta")).is_meta

    @pytest.mark.parametrize("cause", ["files", "memory"])
    def test_it_is_ordinary_where_too_little_is_left(
        self, cause: str, monkeypatch: pytest.MonkeyPatch
    ):
        held = [ringcoll.empty_shared(1) for _ in range(5)]
        if cause == "files":
            monkeypatch.setattr(resource, "getrlimit", lambda which: (4 * len(held), 1 << 20))
        else:
            monkeypatch.setattr(shared_tensors, "free_bytes", lambda: 1000)
        tensor = shared_tensors.lasting_zeros(100_000, torch.float32, torch.device("cpu"))
        assert region(tensor) is None
        assert tensor.count_nonzero() == 0


class TestShare:
    def test_all_views_move(self):
        base = torch.arange(30_000.0)
        view, flat = base[100:], base.view(100, 300)
        result = ringcoll.share(view)
        assert result is view
        assert region(base) is region(view) is region(flat) is not None
        base[200] = -1
        assert view[100] == flat[0, 200] == -1
        assert torch.equal(base[201:], torch.arange(201.0, 30_000.0))

    def test_what_is_shared_stays(self):
        tensor = ringcoll.share(torch.zeros(10_000))
        before = regions_now()
        ringcoll.share(tensor)
        ringcoll.share(ringcoll.share(tensor[5:]))
        assert regions_now() is before
        own = ringcoll.empty_shared(10_000)
        address = own.data_ptr()
        assert ringcoll.share(own).data_ptr() == address

    def test_what_torch_has_shared_becomes_known(self):
        tensor = torch.ones(10_000).share_memory_()
        assert region(tensor) is None
        assert region(ringcoll.share(tensor)) is not None
        assert tensor.sum() == 10_000

    def test_memory_ends_with_the_tensor(self):
        tensor = ringcoll.share(torch.zeros(10_000))
        address = tensor.data_ptr()
        found = region(tensor)
        assert found is not None
        del tensor
        assert not found.is_here()
        assert region_of(address, 4) is None
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(found.descriptor)

    def test_what_torch_moves_again_is_no_region_any_more(self):
        tensor = ringcoll.share(torch.zeros(10_000))
        address = tensor.data_ptr()
        tensor.untyped_storage()._share_filename_cpu_()  # as with torch's other way of sharing
        assert tensor.data_ptr() != address
        assert region_of(address, 40_000) is None
        assert region(ringcoll.share(tensor)) is not None

    def test_modules(self):
        model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.BatchNorm1d(20_000))
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model[0].weight.grad = torch.ones(100, 100)
        assert ringcoll.share(model) is model
        shared = {name for name, tensor in model.state_dict().items() if region(tensor)}
        assert shared == {"0.weight", "1.weight", "1.bias", "1.running_mean", "1.running_var"}
        assert region(model[0].weight.grad) is not None
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name]), name
        loss = (model[0](torch.ones(3, 100)) ** 2).sum()
        loss.backward()
        assert model[0].weight.grad.shape == (100, 100)

    @pytest.mark.slow
    def test_a_module_of_many_tensors_takes_one_file(self):
        layers = [torch.nn.Linear(100, 100, bias=False) for _ in range(300)]
        for number, layer in enumerate(layers):
            torch.nn.init.constant_(layer.weight, number)
        views = [layer.weight.detach()[1:, 2] for layer in layers]
        before, files = regions_now(), len([*Path("/proc/self/fd").iterdir()])
        ringcoll.share(torch.nn.Sequential(*layers))
        assert len([*Path("/proc/self/fd").iterdir()]) == files + 1
        found = [region(layer.weight) for layer in layers]
        assert len({*found}) == 1
        assert len({layer.weight.data_ptr() for layer in layers}) == len(layers)
        for number, (layer, view) in enumerate(zip(layers, views, strict=True)):
            layer.weight.data[5] = -1
            assert layer.weight.sum() == 9900 * number - 100
            assert view.tolist() == [*[number] * 4, -1, *[number] * 94]
        ringcoll.share(torch.nn.Sequential(*layers[:2]))  # they are there
        assert found[0] is not None
        descriptor = found[0].descriptor
        del view, views, layer, layers[1:]
        assert layers[0].weight.sum() == -100
        del layers
        assert regions_now() is not before
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)

    def test_after_a_fork_no_process_takes_memory_of_the_same_file(self):
        pairs = [[torch.nn.Linear(100, 100, bias=False) for _ in range(2)] for _ in range(3)]
        descriptors = []
        for number, pair in enumerate(pairs):
            if number == 2:
                shared_tensors._count_fork()  # as the hook of a fork does, for both processes
            ringcoll.share(torch.nn.Sequential(*pair))
            found = region(pair[0].weight)
            assert found is not None
            descriptors.append(found.descriptor)
        assert descriptors[0] == descriptors[1] != descriptors[2]

    def test_a_quarter_of_the_files_may_be_such_memory(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(shared_tensors._regions, "known", set())  # other tests may hold some
        held = [ringcoll.empty_shared(1) for _ in range(5)]
        monkeypatch.setattr(resource, "getrlimit", lambda which: (4 * len(held), 1 << 20))
        text = r"5 of the 20 files that this process may open .* `ulimit -n`"
        makes: list[Any] = [
            lambda: ringcoll.empty_shared(1),
            lambda: ringcoll.share(torch.zeros(10_000)),
            lambda: ringcoll.share(torch.nn.Linear(100, 100).requires_grad_()),
        ]
        for make in makes:
            with pytest.raises(SharingError, match=text):
                make()
        ringcoll.share(torch.zeros(10_000).share_memory_())  # torch has opened it already

    def test_tied_parameters_stay_tied(self):
        one, two = torch.nn.Linear(100, 100), torch.nn.Linear(100, 100)
        two.weight = one.weight
        ringcoll.share(torch.nn.Sequential(one, two))
        assert two.weight is one.weight
        assert region(one.weight) is not None

    @pytest.mark.parametrize(
        "what,text",
        [
            (torch.from_numpy(np.zeros(10_000)), r"numpy, or of another library: clone\(\) it"),
            (torch.frombuffer(bytearray(40_000), dtype=torch.uint8), r"of another library"),
            (torch.zeros(10_000, device="meta"), r"on the CPU, got torch.strided on meta"),
            (torch.zeros(100, 100).to_sparse(), r"got torch.sparse_coo on cpu"),
            ([torch.zeros(10_000)], r"a tensor or a module, got list"),
            (None, r"a tensor or a module, got NoneType"),
        ],
        ids=["numpy", "buffer", "meta", "sparse", "list", "none"],
    )
    def test_refusals(self, what: object, text: str):
        with pytest.raises(ArgumentError, match=text):
            ringcoll.share(what)  # type: ignore[type-var]

    def test_what_a_name_shares_does_not_move(self):
        before = torch.multiprocessing.get_sharing_strategy()
        torch.multiprocessing.set_sharing_strategy("file_system")
        try:
            tensor = torch.zeros(10_000).share_memory_()
            with pytest.raises(ArgumentError, match="shared by a file's name"):
                ringcoll.share(tensor)
        finally:
            torch.multiprocessing.set_sharing_strategy(before)

    def test_a_file_that_is_mapped_does_not_move(self, tmp_path: Path):
        (tmp_path / "file").write_bytes(bytes(40_000))
        tensor = torch.from_file(str(tmp_path / "file"), shared=True, size=10_000)
        with pytest.raises(ArgumentError, match=r"by a file's name, got such memory: clone\(\) it"):
            ringcoll.share(tensor)

    def test_a_copy_of_a_file_does_not_move(self, tmp_path: Path):
        (tmp_path / "data").write_bytes(bytes(range(200)) * 1000)
        mapped = torch.from_file(str(tmp_path / "data"), False, 200_000, dtype=torch.uint8)
        module = torch.nn.Linear(100, 100)
        module.register_buffer("mapped", mapped)
        before = module.weight.data_ptr()
        both: tuple[Any, ...] = (mapped, module)
        for what in both:
            with pytest.raises(ArgumentError, match=r"got a file that is mapped: clone\(\) it"):
                ringcoll.share(what)
        assert module.weight.data_ptr() == before, "nothing moves"
        assert ringcoll.share(mapped.clone()).tolist() == mapped.tolist()

    def test_memory_that_numpy_looks_at_does_not_move(self):
        tensor = torch.zeros(10_000)
        array = tensor.numpy()
        with pytest.raises(ArgumentError, match="numpy"):
            ringcoll.share(tensor)
        tensor[0] = 5
        assert array[0] == 5

    def test_a_module_is_refused_as_a_whole(self):
        model = torch.nn.Linear(100, 100)
        model.register_buffer("foreign", torch.from_numpy(np.zeros(10_000)))
        with pytest.raises(ArgumentError):
            ringcoll.share(model)
        assert region(model.weight) is None

    def test_too_little_room(self, monkeypatch: pytest.MonkeyPatch):
        class Usage(NamedTuple):
            free: int = 50_000

        monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage())
        model = torch.nn.Linear(100, 1000)
        with pytest.raises(SharingError, match=r"400000 bytes of /dev/shm are needed, 50000 are"):
            ringcoll.share(model)
        assert region(model.weight) is None
        ringcoll.share(torch.zeros(10_000))
        monkeypatch.setattr(shared_tensors, "free_bytes", lambda: 30_000)
        with pytest.raises(SharingError, match=r"40000 bytes of memory are needed, 30000 are free"):
            ringcoll.share(torch.zeros(10_000))

    def test_too_many_files(self, monkeypatch: pytest.MonkeyPatch):
        def refuse(*arguments: object) -> tuple[int, int]:
            raise RuntimeError("Too many open files (24)")

        monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", refuse)
        with pytest.raises(SharingError, match=r"Too many .*ringcoll\.empty_shared"):
            ringcoll.share(torch.zeros(10_000))


class TestPeerRegions:
    def test_regions_that_have_ended_are_let_go(self):
        peer = PeerRegions(os.getpid())
        held = [ringcoll.empty_shared(2000) for _ in range(5)]
        for number in range(200):
            tensor = (
                ringcoll.empty_shared(2000) if number % 2 else ringcoll.share(torch.zeros(2000))
            )
            found = region(tensor)
            assert found is not None
            mapped = peer.map(found.descriptor, found.identity)
            assert peer.map(found.descriptor, found.identity) is mapped
            for other in held:
                found = region(other)
                assert found is not None
                peer.map(found.descriptor, found.identity)
        assert 6 <= len(peer._mapped) <= 17

    def test_two_groups_map_a_region_once(self):
        tensor = ringcoll.empty_shared(2000)
        found = region(tensor)
        assert found is not None
        one, two = PeerRegions(os.getpid()), PeerRegions(os.getpid())
        assert one.map(found.descriptor, found.identity) is two.map(
            found.descriptor, found.identity
        )

    def test_another_file_under_the_same_number_is_not_opened(self, tmp_path):
        tensor = ringcoll.empty_shared(2000)
        found = region(tensor)
        assert found is not None
        other = tmp_path / "other"
        other.write_bytes(bytes(8000))
        with other.open("rb") as file:
            assert identity(file.fileno()).nbytes == found.nbytes
            with pytest.raises(OSError, match="other memory"):
                PeerRegions(os.getpid()).map(file.fileno(), found.identity)


@pytest.mark.processes
class TestMessages:
    @pytest.mark.parametrize("transport", ["shared", "shared, in pieces"])
    @pytest.mark.parametrize("world_size", [2, 3])
    def test_random_regions(self, pool, transport: str, world_size: int):
        wrong = pool(world_size).run(program.random_regions, transport, 3, 1000)
        assert wrong == [[]] * world_size

    @pytest.mark.parametrize("world_size", [2, 3])
    def test_collectives(self, world_size: int):
        # New ranks, forked off one process, so that they have made as many regions each.
        with Ranks(world_size, timeout_s=60.0) as ranks:
            assert ranks.run(program.collectives, world_size) == [[]] * world_size

    @pytest.mark.parametrize("world_size", [1, 2])
    def test_buckets_of_torch(self, pool, world_size: int):
        found = pool(world_size).run(program.data_parallel)
        assert found == [[True, True, True, True, True, False, True]] * world_size

    def test_ranks_may_differ_in_what_can_be_shared(self, pool):
        assert pool(3).run(program.differing_memory) == [[True] * 6] * 3

    def test_a_rank_without_room_does_not_hold_up_the_others(self, pool):
        found = pool(3).run(program.too_little_room_on_one_rank)
        assert found == [([6.0], True), ([6.0], False), ([6.0], True)]

    def test_nothing_grows(self, pool):
        for (mapped, descriptors), later in pool(2).run(program.come_and_go, 60):
            assert mapped <= 40
            assert later[0] <= mapped + 10
            assert later[1] <= descriptors

    def test_what_cannot_be_mapped_is_read_remotely_or_refused(self, pool):
        assert pool(2).run(program.refused, True) == ["sent", "[3.0]"]
        told = pool(2).run(program.refused, False)
        assert told[1] == (
            "the shared tensor of rank 0 cannot be mapped: [Errno 1] Operation not permitted"
        )
        assert "broken" in told[0]

    def test_a_death_with_a_loan(self):
        reports: list[tuple[bool, int, float]] = []
        with Ranks(2, timeout_s=60.0) as ranks, pytest.raises(RankError):
            ranks.run(program.dies_with_a_mapped_loan, on_report=reports.append)
        ((is_readable, peer, seconds),) = reports
        assert is_readable
        assert peer == 1
        assert seconds < 2

    def test_a_fork_keeps_the_memory(self, pool):
        assert pool(1).run(program.forked) == [(True, True)]

    def test_a_process_that_is_forked_off_has_no_group(self, pool):
        for told, total in pool(2).run(program.forked_rank):
            assert "this process was forked off a rank; it needs a group of its own" in told
            assert total == 4
