"""What torch's dispatch modes and its profiler see of calls: the same as of gloo's."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import ringcoll
from ringcoll.errors import ArgumentError
from ringcoll.runtime.process import observers
from ringcoll.training.backend import process_group
from tests.programs.threads import together


@pytest.fixture(params=["gloo", "ringcoll"])
def group(request: pytest.FixtureRequest) -> Iterator[Any]:
    dist.init_process_group(request.param, store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


class Seen(TorchDispatchMode):
    """Notes c10d's operators, and the sizes of their first tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func._overloadpacket._qualified_op_name.removeprefix("c10d::"))
        return func(*args, **(kwargs or {}))


def all_calls() -> list[str]:
    """One call of each kind; c10d's operators for them."""
    one, two = torch.arange(6.0).view(2, 3), torch.ones(2, 3)
    dist.all_reduce(one)
    dist.broadcast(one, 0)
    dist.reduce(one, 0)
    dist.all_gather([two], one)
    dist.all_gather_single(two, one)
    dist.gather(one, [two], 0)
    dist.scatter(two, [one], 0)
    dist.reduce_scatter(two, [one])
    dist.reduce_scatter_single(two, one)
    dist.all_to_all([two], [one])
    dist.all_to_all_single(two, one)
    with dist._coalescing_manager():
        dist.all_reduce(one)
        dist.all_reduce(two)
    with dist._coalescing_manager():
        dist.all_gather_single(two, one)
    with dist._coalescing_manager():
        dist.reduce_scatter_single(two, one)
    work = dist.all_reduce(one, async_op=True)
    assert work is not None
    work.wait()
    dist.barrier()
    assert one.equal(torch.arange(6.0).view(2, 3))
    assert two.equal(one)
    return [
        *["allreduce_", "broadcast_", "reduce_", "allgather_", "_allgather_base_", "gather_"],
        *["scatter_", "reduce_scatter_", "_reduce_scatter_base_", "alltoall_", "alltoall_base_"],
        *["allreduce_coalesced_", "allgather_into_tensor_coalesced_"],
        *["reduce_scatter_tensor_coalesced_", "allreduce_", "barrier"],
    ]


def test_dispatch_modes_see_every_collective_once(group: Any):
    with Seen() as outer, CommDebugMode() as counts, Seen() as inner:
        names = all_calls()
    assert outer.names == inner.names == names
    assert counts.get_total_counts() == len(names) - 1  # it does not count barriers
    assert counts.get_comm_counts()[torch.ops.c10d.allreduce_] == 2
    assert not _get_current_dispatch_mode_stack()


def test_the_profiler_draws_names_sizes_and_dtypes(group: Any, tmp_path: Path):
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
        names = all_calls()
    drawn = [
        event.name.removeprefix("c10d::") for event in profiled.events() if "c10d::" in event.name
    ]
    assert drawn == names
    profiled.export_chrome_trace(str(path := tmp_path / "trace.json"))
    events = json.loads(path.read_text())["traceEvents"]
    own = [e["args"] for e in events if re.fullmatch("(gloo|ringcoll):all_reduce", e["name"])]
    # gloo calls a coalesced all-reduce so, too, and draws what two of its threads have done in any order
    assert ([[2, 3]], ["float"]) in [(args["Input Dims"], args["Input type"]) for args in own]
    (operator, *_) = [event for event in events if event["name"] == "c10d::allreduce_"]
    assert operator["args"]["Input Dims"][0] == [[2, 3]]
    assert operator["args"]["Input type"][0] == "TensorList"


def test_the_profiler_draws_the_functions_of_the_library():
    def main(local: ringcoll.LocalGroup) -> list[tuple[str, list[list[int]]]]:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
            ringcoll.all_reduce(torch.ones(4), group=local)
            work = ringcoll.broadcast(torch.ones(2, 2), 0, local, async_op=True)
            assert work is not None
            work.wait()
        events = profiled.events()
        return [(e.name, e.input_shapes) for e in events if e.name.startswith("ringcoll:")]

    wanted = [("ringcoll:all_reduce", [[4]]), ("ringcoll:broadcast", [[2, 2]])]
    assert ringcoll.run_threads(main, 1) == [wanted]


def test_two_ranks_that_are_watched_get_right_results_and_messages():
    store = dist.HashStore()

    def main(rank: int) -> tuple[list[str], list[float]]:
        group = process_group.ProcessGroup(store, rank, 2, timedelta(seconds=30))
        with Seen() as seen:
            group.allreduce([total := torch.tensor([rank + 1.0])]).wait()
            group.barrier().wait()
            got = torch.zeros(1)
            if rank:
                group.send([torch.tensor([5.0])], 0).wait()
                group.recv([got], 0).wait()
            else:
                group.recv_anysource([got]).wait()
                group.send([torch.tensor([7.0])], 1).wait()
        group.shutdown()
        return seen.names, [total.item(), got.item()]

    first, second = together(2, main)
    assert first == (["allreduce_", "barrier", "recv_any_source_", "send"], [3.0, 5.0])
    assert second == (["allreduce_", "barrier", "send", "recv_"], [3.0, 7.0])


def test_an_error_is_the_same_when_somebody_looks(group: Any):
    if group.name() == "gloo":
        return
    with Seen(), pytest.raises(ArgumentError, match="wrong number of elements"):
        dist.all_gather_single(torch.ones(3), torch.ones(2))
    with Seen() as seen:
        group.allreduce(tensors=torch.ones(2), op=dist.ReduceOp.MAX)  # a form that torch lacks
    assert not seen.names
    dist.all_reduce(one := torch.ones(2))
    assert one.equal(torch.ones(2))


@pytest.mark.parametrize("begins", ["before the group", "after"])
def test_an_execution_trace_observer_alone_sees_operators(begins: str, tmp_path: Path):
    """As of gloo: of each call its operator, and what runs for it."""
    path = tmp_path / "trace.json"
    seen = {}
    for backend in ("gloo", "ringcoll"):
        observer = ExecutionTraceObserver()
        observer.register_callback(str(path))
        if begins != "after":
            observer.start()
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        if begins == "after":
            dist.all_reduce(torch.ones(7))
            observer.start()
        names = all_calls()
        observer.stop()
        dist.all_reduce(torch.ones(5))
        observer.unregister_callback()
        dist.destroy_process_group()
        nodes = json.loads(path.read_text())["nodes"]
        seen[backend] = [
            (node["name"].removeprefix("c10d::"), node["inputs"]["shapes"])
            for node in sorted(nodes, key=lambda node: node["id"])
            if node["name"].startswith("c10d::")
        ]
        assert [name for name, _ in seen[backend]] == names
        drawn = [node["inputs"]["shapes"] for node in nodes if node["name"] == f"{backend}:reduce"]
        assert drawn == [[[2, 3]]]
    assert seen["ringcoll"] == seen["gloo"]
    assert not observers


class Answers(TorchDispatchMode):
    """Answers by itself: no collective runs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        c10d: Any = torch._C._distributed_c10d
        return args[0], c10d._create_work_from_future(future).boxed()


def test_a_mode_may_answer_by_itself(group: Any):
    before = group._get_sequence_number_for_group()
    with Answers():
        dist.all_reduce(torch.ones(2))
    assert group._get_sequence_number_for_group() == before
