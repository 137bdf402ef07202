"""The process group behind ``init_process_group("ringcoll")``: names, forms, options."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringcoll import Options, testing
from ringcoll.errors import (
    ArgumentError,
    RulesError,
    UnknownAlgorithmError,
    UnsupportedWorldSizeError,
)
from ringcoll.runtime.group import Work
from ringcoll.schedules.algorithms import algorithms
from ringcoll.training.backend import process_group as backend
from ringcoll.training.backend.process_group import ProcessGroup, _CoalescedWork
from tests.programs import backend_calls
from tests.programs.threads import together

# --- forms of calls -------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("name", backend_calls.SHORT_FORMS)
def test_calls_without_options(name: str):
    for world_size in (2, 3):
        for got, wanted in testing.ranks(world_size).run(backend_calls.short_form, name):
            assert got == wanted


@pytest.mark.processes
def test_a_world_of_one():
    assert testing.ranks(1).run(backend_calls.alone) == [[[0.0, 1.0, 2.0]] * 3]


@pytest.mark.processes
def test_collectives_are_counted():
    assert testing.ranks(3).run(backend_calls.sequence_numbers) == [(0, 2)] * 3


# --- options --------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize(
    "options, wanted",
    [
        (Options(algorithm="ring"), ["ring", "ring", "ring", "dissemination"]),
        (
            Options(algorithm={"all_reduce": "rabenseifner", "all_gather": "ring"}),
            ["rabenseifner", "rabenseifner", "ring", "dissemination"],
        ),
        (None, None),  # what is measured decides
    ],
)
def test_options_choose_algorithms(options: Options | None, wanted: list[str] | None):
    collectives = ["all_reduce", "all_reduce", "all_gather", "barrier"]
    ranks = testing.ranks(3).run(backend_calls.with_options, options)
    for found in ranks:
        assert [name for name, _, _ in found] == collectives
        chosen = [algorithm for _, algorithm, _ in found]
        assert chosen == (wanted or [algorithm for _, algorithm, _ in ranks[0]])
        for collective, algorithm in zip(collectives, chosen, strict=True):
            assert algorithm in {one.name for one in algorithms(collective)}


@pytest.mark.processes
def test_options_choose_what_travels():
    options = Options(wire_dtype=torch.bfloat16)
    for found in testing.ranks(2).run(backend_calls.with_options, options):
        dtypes = [dtype for _, _, dtype in found]
        assert dtypes == [torch.bfloat16, torch.int64, torch.float32, torch.uint8]


@pytest.mark.processes
@pytest.mark.parametrize("level", [True, "any_world_size"])
@pytest.mark.parametrize("by_hook", [False, True], ids=["group", "hook"])
def test_training_has_the_same_bits_over_every_transport(level: Any, by_hook: bool) -> None:
    runs = {
        transport: testing.ranks(3).run(backend_calls.trained, transport, level, by_hook)
        for transport in ("gloo", "shared")
    }
    for losses, parameters in runs["gloo"]:
        assert len(losses) == 4
        assert parameters == runs["gloo"][0][1]
        assert len(set(losses)) == 4
    assert runs["gloo"] == runs["shared"]


@pytest.mark.processes
def test_options_for_reproducible_results() -> None:
    for text, integer in testing.ranks(3).run(backend_calls.not_in_order):
        assert "reproducible sum is not associative" in text
        assert integer == 6


@pytest.mark.processes
@pytest.mark.parametrize(
    "options, kind, part",
    [
        (Options(algorithm="rnig"), "UnknownAlgorithmError", "rnig"),
        (Options(algorithm={"barrier": "ring"}), "UnknownAlgorithmError", "ring"),
        ({"algorithm": "ring"}, "ArgumentError", "pg_options"),
    ],
)
def test_bad_options_are_refused(options: object, kind: str, part: str):
    for got, text in testing.ranks(3).run(backend_calls.refused, options):
        assert got == kind
        assert part in text


def test_an_algorithm_that_cannot_run_on_so_many_ranks():
    with pytest.raises(UnknownAlgorithmError, match="rnig"):
        Options(algorithm="rnig").algorithm_of("all_reduce", 4)
    assert Options(algorithm="ring").algorithm_of("all_to_all", 4) == "auto"
    with pytest.raises(ArgumentError, match="no such level"):
        Options(reproducible="exact")  # type: ignore[arg-type]
    assert UnsupportedWorldSizeError.__mro__.index(ValueError)


# --- works ----------------------------------------------------------------------------


def test_several_works_are_complete_when_all_are():
    first, second = Work("first", []), Work("second", [])
    both = _CoalescedWork([first, second])
    first.complete(None)
    assert not both.is_completed()
    second.complete(None)
    assert both.is_completed()


def test_each_of_several_calls_at_once_is_counted():
    group = ProcessGroup(dist.HashStore(), 0, 1, timedelta(seconds=20))
    group._start_coalescing(torch.device("cpu"))
    for _ in range(2):
        group.allreduce([torch.ones(3)])
    group._end_coalescing(torch.device("cpu")).wait()
    assert group._get_sequence_number_for_group() == 2
    group.shutdown()


def test_a_shutdown_waits_for_what_was_issued():
    store = dist.HashStore()

    def main(rank: int) -> list[float]:
        group = ProcessGroup(store, rank, 2, timedelta(seconds=20))
        group.barrier().wait()
        tensor = torch.ones(3)
        if rank:
            time.sleep(0.3)
        work = group.allreduce([tensor])
        group.shutdown()
        assert work.is_completed()
        assert work.exception() is None
        return tensor.tolist()

    assert together(2, main) == [[2.0] * 3] * 2


# --- a group of one rank, in this process ---------------------------------------------


@pytest.mark.parametrize("ranks", [[], [0, 0], [1], [0, 1], [-1]])
def test_a_split_takes_ranks_of_the_group_each_once(ranks: list[int]) -> None:
    group = ProcessGroup(dist.HashStore(), 0, 1, timedelta(seconds=30))
    with pytest.raises(ArgumentError, match="not ranks of this group") as caught:
        group.split_group(ranks)
    assert f"got {ranks}" in str(caught.value)
    part = group.split_group([0])
    assert part is not None
    assert part.size() == 1


def test_each_of_several_tensors_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the options ask for, and of all-reduce alone: other results are not sent on."""
    shared: list[torch.Tensor] = []
    monkeypatch.setattr(backend, "share_for", lambda group, tensor: shared.append(tensor))
    tensors = [torch.ones(3), torch.ones(4), torch.ones(5)]
    for options in (Options(share=True), Options()):
        group = ProcessGroup(dist.HashStore(), 0, 1, timedelta(seconds=20), options)
        group.allreduce_coalesced(tensors).wait()
        assert [one is other for one, other in zip(shared, tensors, strict=False)] == [True] * len(
            shared
        )
        assert len(shared) == (3 if options.share else 0)
        shared.clear()
        group.broadcast([torch.ones(6)]).wait()
        assert shared == []
        group.shutdown()


def test_rules_are_read_when_a_group_is_made() -> None:
    """Not at the first call, when some ranks may be in it already."""
    options = Options(algorithm={"all_reduce": "*:0-4K:ring", "all_gather": "*:0-4K:rnig"})
    assert options.algorithm_of("all_reduce", 4) == "*:0-4K:ring"
    with pytest.raises(RulesError, match="rnig"):
        options.algorithm_of("all_gather", 4)


def test_several_works_are_all_waited_for():
    works = [Work(name, []) for name in ("first", "second", "third")]
    works[0].complete(None)
    works[1].complete(None)
    works[2].complete(ArgumentError("the last has failed"))
    with pytest.raises(ArgumentError, match="the last has failed"):
        _CoalescedWork(works).wait()
    assert _CoalescedWork(works[:2]).wait() is True
