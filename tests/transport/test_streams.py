"""Operations on CUDA tensors are ordered by streams: looked at with a stand-in for CUDA.

See `tests.fakes.fake_streams`: a wait that is missing shows as a race, whatever the results are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringcoll
from ringcoll import LocalGroup
from ringcoll.errors import CaptureError, MismatchError
from ringcoll.runtime.collectives.calls import Deferred
from ringcoll.runtime.transport import Message, NcclTransport, streams
from tests.fakes.fake_nccl import World
from tests.fakes.fake_streams import FakeCuda, StreamedGroup, in_place, run
from tests.programs.stream_program import expected_results, stream_program

CPU = torch.device("cpu")


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with in_place() as stand_in:
        yield stand_in


# --- the stand-in sees what it is there to see --------------------------------------------


def test_a_missing_wait_is_a_race(cuda: FakeCuda):
    one, two = cuda.Stream(), cuda.Stream()
    with cuda.watching():
        tensor = torch.zeros(4)
        event = cuda.current_stream().record_event()
        with cuda.stream(one):
            one.wait_event(event)
            tensor.add_(1)
            written = one.record_event()
        assert not cuda.races
        with cuda.stream(two):
            two.wait_event(event)
            copy = tensor[2:].clone()  # sees the zeros, but perhaps not the addition
        assert len(cuda.races) == 1
        assert "clone" in cuda.races[0]
        with cuda.stream(two):
            two.wait_event(written)
            tensor[:2].clone()
            copy.add_(tensor[2:])
        assert len(cuda.races) == 1
        with cuda.stream(one):
            tensor[:1].zero_()  # two may still read it
        assert len(cuda.races) == 2
        two.synchronize()
        with cuda.stream(cuda.Stream()):
            tensor[1:].zero_()  # the host has waited for two, and two for one
            assert len(cuda.races) == 2
            tensor[:1].zero_()  # but not for what one did last
        assert len(cuda.races) == 3


def test_memory_of_another_stream_has_to_be_recorded(cuda: FakeCuda):
    with cuda.watching():
        tensor = torch.zeros(4)
        other = cuda.Stream()
        other.wait_event(cuda.current_stream().record_event())
        with cuda.stream(other):
            tensor.add_(1)
        assert len(cuda.unrecorded()) == 1
        cuda.record_stream(tensor, other)
        assert not cuda.unrecorded()


def test_the_rules_of_captures(cuda: FakeCuda):
    before, other = cuda.current_stream().record_event(), cuda.Stream()
    with cuda.graph():
        origin = cuda.current_stream()
        assert cuda.is_current_stream_capturing()
        with pytest.raises(RuntimeError, match="Isolation"):
            origin.wait_event(before)
        event = origin.record_event()
        with pytest.raises(RuntimeError, match="CapturedEvent"):
            event.query()
        with pytest.raises(RuntimeError, match="the host waits"):
            event.synchronize()
        other.wait_event(event)
        assert other.capturing()
        origin.wait_event(other.record_event())
    assert not other.capturing()
    with pytest.raises(RuntimeError, match="CapturedEvent"):
        other.wait_event(event)

    def without_joining() -> None:
        with cuda.graph():
            other.wait_event(cuda.current_stream().record_event())
            with cuda.stream(other):
                torch.zeros(1)

    with pytest.raises(RuntimeError, match="Unjoined"):
        without_joining()


# --- operations ---------------------------------------------------------------------------


@pytest.mark.parametrize("on_host", [False, True], ids=["nccl", "host"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_everything_is_ordered(cuda: FakeCuda, world_size: int, on_host: bool):
    results = run(cuda, world_size, lambda group: stream_program(group, cuda), on_host=on_host)
    assert results == [expected_results(world_size)] * world_size
    assert cuda.races == []
    assert cuda.unrecorded() == []


@pytest.mark.parametrize("on_host", [False, True], ids=["nccl", "host"])
def test_results_that_nobody_has_waited_for(cuda: FakeCuda, on_host: bool):
    """Over the host's transport they may not even be there; here it has time."""

    def main(group: LocalGroup) -> None:
        tensor = torch.ones(4)
        work = ringcoll.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        while not work.done:
            threading.Event().wait(0.01)
        tensor.clone()

    assert run(cuda, 2, main, on_host=on_host) == [None, None]
    assert any("clone" in race for race in cuda.races)


def _do_nothing(*_: Any, **__: Any) -> None:
    """In the place of what is left out on purpose."""


@pytest.mark.parametrize("on_host", [False, True], ids=["nccl", "host"])
@pytest.mark.parametrize("left_out", [(streams.Streams, "follow"), (streams.Mark, "join")])
def test_without_one_of_the_waits_there_are_races(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, left_out: tuple[type, str], on_host: bool
):
    monkeypatch.setattr(*left_out, _do_nothing)
    run(cuda, 2, lambda group: stream_program(group, cuda), on_host=on_host)
    assert cuda.races


def test_without_telling_the_allocator_memory_is_at_risk(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(streams.Lane, "use", _do_nothing)
    run(cuda, 2, lambda group: stream_program(group, cuda))
    assert cuda.unrecorded()


def test_over_nccl_no_thread_is_needed_and_the_host_does_not_wait(cuda: FakeCuda):
    def main(group: LocalGroup) -> tuple[bool, bool, list[Any]]:
        cuda.gpu.hold()
        tensor = torch.ones(4) + 1
        work = ringcoll.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        before = work.is_completed(), work.is_success()
        cuda.gpu.hold(is_held=False)
        work.wait()
        assert tensor[0].item() == 2
        assert work.is_completed()
        assert work.is_success()
        return (*before, group.communicator._queue.threads)

    (found,) = run(cuda, 1, main)
    assert found == (False, False, [])
    waits = cuda.waits_of_host

    def others(group: LocalGroup) -> list[Any]:
        for _ in range(3):
            work = ringcoll.all_reduce(torch.ones(4), group=group, async_op=True)
            assert work is not None
            work.wait()
        return group.communicator._queue.threads

    assert run(cuda, 2, others) == [[], []]
    assert cuda.waits_of_host == waits


@pytest.mark.parametrize("async_op", [False, True])
def test_a_barrier_is_one_for_the_host_too(cuda: FakeCuda, async_op: bool):
    def main(group: LocalGroup) -> list[int]:
        found = [cuda.waits_of_host]
        work = ringcoll.barrier(group, async_op)
        if work is not None:
            work.wait()
        return [*found, cuda.waits_of_host]

    ((before, after),) = run(cuda, 1, main)
    assert after == before + 1


@pytest.mark.parametrize("on_host", [False, True], ids=["nccl", "host"])
def test_what_a_future_gives_is_ordered(cuda: FakeCuda, on_host: bool):
    def main(group: LocalGroup) -> list[float]:
        tensor = torch.full((4,), float(group.rank()))
        work = ringcoll.all_reduce(tensor, group=group, async_op=True, algorithm="ring")
        assert work is not None
        (result,) = work.get_future().wait()
        work.wait()
        cuda.current_stream().synchronize()
        found: list[float] = result.tolist()
        return found

    assert run(cuda, 2, main, on_host=on_host) == [[1.0] * 4] * 2
    assert cuda.futures == [[CPU], [CPU]]
    assert cuda.races == []


def test_a_future_that_does_not_wait_is_a_race(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch):
    def main(group: LocalGroup) -> None:
        tensor = torch.full((4,), float(group.rank()))
        work = ringcoll.all_reduce(tensor, group=group, async_op=True, algorithm="ring")
        assert work is not None
        with monkeypatch.context() as patched:
            patched.setattr(streams.Mark, "join", _do_nothing)
            work.get_future().wait()

    run(cuda, 1, main)
    assert any("callback" in race for race in cuda.races)


def test_errors_of_asynchronous_operations_are_told_by_their_work(cuda: FakeCuda):
    def main(group: LocalGroup) -> str:
        work = ringcoll.all_reduce(
            torch.ones(4 + group.rank()), group=group, async_op=True, algorithm="ring"
        )
        assert work is not None
        with pytest.raises(MismatchError, match="5 elements"):
            work.wait()
        return str(work.exception())

    for told in run(cuda, 2, main):
        assert "4 elements" in told


@pytest.mark.parametrize("async_op", [False, True])
def test_persistent_operations_from_several_streams(cuda: FakeCuda, async_op: bool):
    """What they keep belongs to one stream; on another it is made anew."""

    def main(group: LocalGroup) -> list[float]:
        tensor = cuda.looked_after(torch.zeros(50, dtype=torch.bfloat16))
        operation = ringcoll.all_reduce.plan(
            tensor,
            group=group,
            async_op=async_op,
            algorithm="rabenseifner",
            wire_dtype=torch.bfloat16,
        )
        found, other = [], cuda.Stream()
        ends = [cuda.current_stream().record_event()]
        for turn in range(6):
            with cuda.stream([cuda.current_stream(), other][turn // 2 % 2]):
                cuda.current_stream().wait_event(ends[-1])
                tensor.fill_(turn + group.rank())
                work = operation()
                if work is not None:
                    work.wait()
                found.append(tensor[7].item())
                ends.append(cuda.current_stream().record_event())
                if turn == 3:  # more memory for all that follow
                    ringcoll.all_reduce(torch.ones(500), group=group)
                    ends.append(cuda.current_stream().record_event())
        return found

    results = run(cuda, 1, main)
    assert results == [[float(turn) for turn in range(6)]]
    results = run(cuda, 2, main)
    assert results == [[2.0 * turn + 1 for turn in range(6)]] * 2
    assert cuda.races == []
    assert cuda.unrecorded() == []


# --- CUDA graphs --------------------------------------------------------------------------


def shared(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_operations_in_a_graph(cuda: FakeCuda, world_size: int, prepared: bool):
    total = world_size * (world_size - 1) / 2

    def main(group: LocalGroup) -> list[float]:
        tensor = cuda.looked_after(torch.empty(40, dtype=torch.bfloat16))
        keywords: dict[str, Any] = {
            "group": group,
            "algorithm": "rabenseifner",
            "wire_dtype": torch.bfloat16,
        }
        functions = [
            lambda: ringcoll.all_reduce(tensor, **keywords),
            lambda: ringcoll.all_reduce(tensor, async_op=True, **keywords),
        ]
        if prepared:
            functions = [
                ringcoll.all_reduce.plan(tensor, **keywords),
                ringcoll.all_reduce.plan(tensor, async_op=True, **keywords),
            ]

        def both() -> list[torch.Tensor]:
            found = []
            for function in functions:
                tensor.fill_(group.rank())
                work = function()
                if work is not None:
                    work.wait()
                found.append(cuda.looked_after(tensor[11].clone()))
            return found

        found = both()
        member = group.communicator
        compared, waits = len(member._comparison.known), cuda.waits_of_host
        kept = {shared(one) for one in member.memory.tensors.values()}
        with cuda.graph() as graph:
            found += both()
        assert (len(member._comparison.known), cuda.waits_of_host) == (compared, waits)
        assert kept.isdisjoint(graph.touched)
        assert {shared(one) for one in member.memory.tensors.values()} == kept
        captured = set(graph.touched) - {shared(tensor)}
        found += both()
        # Nothing of the capture's is used again.
        later = torch.zeros(40)
        ringcoll.all_reduce(later, group=group)
        assert captured.isdisjoint(shared(one) for one in member.memory.tensors.values())
        return [one.item() for one in found]

    results = run(cuda, world_size, main)
    assert results == [[total] * 6] * world_size
    assert cuda.races == []
    assert cuda.unrecorded() == []


def test_a_work_that_is_not_waited_for_does_not_join_the_capture(cuda: FakeCuda):
    def main(group: LocalGroup) -> None:
        tensor = torch.ones(4)
        ringcoll.all_reduce(tensor, group=group)
        with cuda.graph():
            work = ringcoll.all_reduce(tensor, group=group, async_op=True)
            assert work is not None
            assert work.is_completed()  # no event may be asked

    for error in run(cuda, 2, main):
        assert "Unjoined" in str(error)


@pytest.mark.parametrize("async_op", [False, True])
def test_what_cannot_be_captured_is_refused_and_does_no_harm(cuda: FakeCuda, async_op: bool):
    def main(group: LocalGroup) -> list[Any]:
        told: list[str] = []

        def refused(*tensors: torch.Tensor, algorithm: str = "auto") -> None:
            how: Any = {"group": group, "async_op": async_op, "algorithm": algorithm}
            with cuda.graph() as graph, pytest.raises(CaptureError) as caught:
                ringcoll.all_reduce_coalesced([*tensors], **how)
            told.append(str(caught.value))
            assert not {shared(one) for one in tensors} & graph.touched

        small, large = torch.ones(4, dtype=torch.int16), torch.ones(1 << 16)
        refused(small)
        assert not group.communicator._has_met
        ringcoll.all_reduce(small, group=group)
        refused(large)
        refused(large, algorithm="ring")  # it is known how it would be run
        refused(small, large)
        with cuda.graph():
            ringcoll.all_reduce(small, group=group)
        ringcoll.all_reduce(large, group=group)
        return [*told, small[0].item(), large[0].item()]

    for rank, (*told, small, large) in enumerate(run(cuda, 2, main)):
        assert (small, large) == (4, 2.0)
        assert len(told) == 4
        for text in told:
            assert f"rank {rank}: all_reduce cannot be captured" in text
            assert "Run it once before" in text


def test_over_the_host_nothing_can_be_captured(cuda: FakeCuda):
    both = threading.Barrier(2)  # what one rank does would end the other one's capture

    def main(group: LocalGroup) -> str:
        tensor = torch.ones(4)
        ringcoll.all_reduce(tensor, group=group)
        both.wait(30)
        with cuda.graph(), pytest.raises(CaptureError) as caught:
            ringcoll.all_reduce(tensor, group=group)
        both.wait(30)
        ringcoll.all_reduce(tensor, group=group)
        return f"{caught.value} {tensor[0].item()}"

    for told in run(cuda, 2, main, on_host=True):
        assert "over local the host takes part in it" in told
        assert 'cuda_transport="nccl"' in told
        assert told.endswith(" 4.0")


def test_sparse_tensors_cannot_be_captured(cuda: FakeCuda):
    def main(group: LocalGroup) -> None:
        tensor = torch.ones(4)
        ringcoll.all_reduce(tensor, group=group)
        call: Any = ringcoll.all_reduce(tensor, group=Deferred(group))
        call.following = iter(())
        with cuda.graph(), pytest.raises(CaptureError, match="depends on what it has received"):
            call()

    assert run(cuda, 1, main) == [None]


# --- messages ------------------------------------------------------------------------------


def test_all_dtypes_travel_as_bytes(cuda: FakeCuda):
    """NCCL knows few of torch's dtypes."""
    seen = []

    class Bytes(StreamedGroup):
        def _add(self, is_send: bool, tensors: list[torch.Tensor], peer: int) -> None:
            seen.append(tensors[0].dtype)
            super()._add(is_send, tensors, peer)

    world = World(2)
    one, two = (NcclTransport(Bytes(world, rank, cuda), CPU, dist.HashStore()) for rank in (0, 1))
    for dtype in (torch.int16, torch.bool, torch.complex64, torch.float8_e5m2, torch.uint64):
        own, arrived = torch.ones(5).to(dtype), torch.zeros(5).to(dtype)
        (sending,) = one.post([], [Message(1, own, 0)])
        (receiving,) = two.post([Message(0, arrived, 0)], [])
        one.wait(sending, 1.0)
        two.wait(receiving, 1.0)
        cuda.current_stream().synchronize()
        assert arrived.view(torch.uint8).tolist() == own.view(torch.uint8).tolist()
    assert set(seen) == {torch.uint8}
