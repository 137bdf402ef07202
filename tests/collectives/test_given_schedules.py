"""``algorithm=Schedule`` and ``algorithm="file.xml"``, in every public function and option."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringcoll
from ringcoll import LocalGroup, Options
from ringcoll.errors import (
    ArgumentError,
    MismatchError,
    ScheduleError,
    UnknownAlgorithmError,
    UnsupportedWorldSizeError,
    VerificationError,
)
from ringcoll.lab.formats import from_msccl, to_msccl
from ringcoll.runtime.collectives import groups
from ringcoll.runtime.launch import Ranks
from ringcoll.schedules import Proof, Schedule, verify
from ringcoll.schedules.algorithms import algorithms, find, passes_on_blocks, schedule_of
from ringcoll.training.backend import ProcessGroup
from tests.cases.algorithms import worlds_of

K = 3
TWO, SIX = torch.ones(2), torch.ones(6)


def foreign(collective: str, name: str, world_size: int = K, root: int = 0) -> str:
    return to_msccl(schedule_of(collective, name, world_size, root))


Call = Callable[..., Any]


def vector(group: LocalGroup) -> torch.Tensor:
    return torch.full((5,), float(10 ** group.rank()))


CALLS: dict[str, tuple[str, Call]] = {
    "all_reduce": ("ring", lambda g, **a: ringcoll.all_reduce(vector(g), group=g, **a)),
    "reduce": ("direct", lambda g, **a: ringcoll.reduce(vector(g), group_dst=0, group=g, **a)),
    "broadcast": ("chain", lambda g, **a: ringcoll.broadcast(vector(g), group_src=0, group=g, **a)),
    "all_gather": (
        "bruck",
        lambda g, **a: ringcoll.all_gather_single(SIX.clone(), TWO.clone(), g, **a),
    ),
    "reduce_scatter": (
        "ring",
        lambda g, **a: ringcoll.reduce_scatter_single(TWO.clone(), SIX.clone(), group=g, **a),
    ),
    "all_to_all": (
        "pairwise",
        lambda g, **a: ringcoll.all_to_all_single(SIX.clone(), SIX.clone(), group=g, **a),
    ),
}


@pytest.mark.parametrize("collective", CALLS)
def test_every_function_takes_a_schedule_and_a_file(collective: str, tmp_path: Path) -> None:
    name, call = CALLS[collective]
    text = foreign(collective, name)
    path = tmp_path / "given.xml"
    path.write_text(text, encoding="utf-8")
    for given in (from_msccl(text), str(path)):
        ringcoll.run_threads(partial(call, algorithm=given), K)


@pytest.mark.parametrize("given", ["schedule", "file"])
def test_the_sum_is_right_also_when_it_is_prepared(given: str, tmp_path: Path) -> None:
    path = tmp_path / "ring.xml"
    path.write_text(foreign("all_reduce", "ring"), encoding="utf-8")
    algorithm = str(path) if given == "file" else from_msccl(path.read_text(encoding="utf-8"))

    def rank_main(group: LocalGroup) -> list[float]:
        tensor = vector(group)
        operation = ringcoll.all_reduce.plan(tensor, group=group, algorithm=algorithm)
        operation()
        return tensor.tolist()

    assert ringcoll.run_threads(rank_main, K) == [[111.0] * 5] * K


def test_gathers_and_scatters_take_a_schedule() -> None:
    gather = from_msccl(foreign("gather", "linear", root=1))
    scatter = from_msccl(foreign("scatter", "linear", root=1))

    def rank_main(group: LocalGroup) -> list[list[float]]:
        lists = [torch.zeros(2) for _ in range(K)] if group.rank() == 1 else None
        ringcoll.gather(vector(group)[:2], lists, group_dst=1, group=group, algorithm=gather)
        back = torch.zeros(2)
        ringcoll.scatter(back, lists, group_src=1, group=group, algorithm=scatter)
        return back.tolist()

    assert ringcoll.run_threads(rank_main, K) == [[1.0] * 2, [10.0] * 2, [100.0] * 2]


def test_a_schedule_is_verified_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(given: Schedule) -> Proof:
        calls.append(given)
        return verify(given)

    monkeypatch.setattr("ringcoll.schedules.algorithms.names.verify", counted)
    text = foreign("all_reduce", "ring").replace('name="ring"', 'name="not seen before"')
    schedule = from_msccl(text)

    def rank_main(group: LocalGroup) -> None:
        for numel in (1, 2, 3):
            ringcoll.all_reduce(torch.zeros(numel), group=group, algorithm=schedule)

    ringcoll.run_threads(rank_main, 3)
    assert 1 <= len(calls) <= 3, "once, but for threads that come at the same time"


def refused(algorithm: Any, error: type[Exception], said: str, world_size: int = 2) -> None:
    """All ranks refuse a call alike, before anything is sent."""

    def rank_main(group: LocalGroup) -> str:
        with pytest.raises(error, match=said) as caught:
            ringcoll.all_reduce(torch.zeros(4), group=group, algorithm=algorithm)
        assert ringcoll.bytes_sent(group) == 0
        return type(caught.value).__name__

    assert len(set(ringcoll.run_threads(rank_main, world_size))) == 1


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    refused(from_msccl(foreign("all_reduce", "ring")), ArgumentError, "world_size 2.*world_size 3")
    refused(from_msccl(foreign("all_gather", "ring", 2)), ArgumentError, "collective all_reduce")
    refused(str(tmp_path / "missing.xml"), ScheduleError, "cannot be read")
    refused(3, ArgumentError, "a name, a file, rules or a Schedule")
    wrong = foreign("all_reduce", "ring", 2).replace('type="rrc"', 'type="r"')
    refused(from_msccl(wrong), VerificationError, "ends wrong")
    (tmp_path / "bad.xml").write_text("<algo/>", encoding="utf-8")
    refused(str(tmp_path / "bad.xml"), ScheduleError, "has no attribute 'coll'")


def test_ranks_with_different_files_are_told(tmp_path: Path) -> None:
    """The description of a call, with which ranks find each other, has a number of the steps."""

    def rank_main(group: LocalGroup) -> bool:
        path = tmp_path / str(group.rank()) / "same.xml"
        path.parent.mkdir()
        name = ("ring", "recursive_doubling")[group.rank()]
        path.write_text(foreign("all_reduce", name, 2), encoding="utf-8")
        with pytest.raises(MismatchError):
            ringcoll.all_reduce(torch.zeros(4), group=group, algorithm=str(path), timeout=5)
        return True

    assert ringcoll.run_threads(rank_main, 2) == [True, True]


# --- the backend's options ---------------------------------------------------------------


def test_the_options_take_a_schedule_or_a_file(tmp_path: Path) -> None:
    schedule = from_msccl(foreign("all_reduce", "ring"))
    path = tmp_path / "ring.xml"
    path.write_text(foreign("all_reduce", "ring"), encoding="utf-8")
    for given in (schedule, str(path)):
        for options in (Options(algorithm=given), Options(algorithm={"all_reduce": given})):
            assert options.algorithm_of("all_reduce", K) == given, "a file is read at each call"
            assert options.algorithm_of("broadcast", K) == "auto"
        for options in (Options(algorithm=given), Options(algorithm={"all_reduce": given})):
            with pytest.raises(UnsupportedWorldSizeError, match="is a schedule for 3"):
                options.algorithm_of("all_reduce", 4)
        with pytest.raises(UnknownAlgorithmError, match="is a schedule for all_reduce, not for"):
            Options(algorithm={"broadcast": given}).algorithm_of("broadcast", K)


def test_a_group_reads_the_file_of_its_options_at_each_call(tmp_path: Path) -> None:
    path, algorithms = tmp_path / "one.txt", {"all_reduce": str(tmp_path / "one.txt")}
    found: list[str] = []
    for name in ("ring", "direct"):
        path.write_text(schedule_of("all_reduce", name, 1).to_text(), encoding="utf-8")
        os.utime(path, ns=(1, 1))
        if not found:
            options = Options(algorithm=algorithms)
            algorithms["all_reduce"] = "direct"  # the options have a mapping of their own
            group = ProcessGroup(dist.HashStore(), 0, 1, timedelta(seconds=20), options)
        group.allreduce([torch.ones(3)]).wait()
        (member,) = groups.members_of(group)
        found.append(str([*member.operations.values()][-1].description))
    ringcoll.close(group)
    assert ["algorithm ring " in found[0], "algorithm direct " in found[1]] == [True, True]


def on_rank(path: str) -> tuple[list[float], list[float]]:
    tensor = torch.full((7,), float(10 ** dist.get_rank()))
    ringcoll.all_reduce(tensor, algorithm=path)
    group = dist.new_group(backend="ringcoll", pg_options=Options(algorithm=path))
    other = torch.full((7,), float(10 ** dist.get_rank()))
    dist.all_reduce(other, group=group)
    return tensor.tolist(), other.tolist()


@pytest.mark.processes
def test_a_file_runs_on_processes(tmp_path: Path) -> None:
    path = tmp_path / "ring.xml"
    path.write_text(foreign("all_reduce", "ring", 2), encoding="utf-8")
    with Ranks(2) as ranks:
        assert ranks.run(on_rank, str(path)) == [([11.0] * 7, [11.0] * 7)] * 2


# --- blocks whose length only their ends know ---------------------------------------------


def test_the_schedule_says_whether_it_passes_on_blocks() -> None:
    for entry in algorithms("all_to_all"):
        for world_size in worlds_of(entry, 2, 3, 4, 5):
            schedule = entry.schedule(world_size)
            assert passes_on_blocks(schedule) <= entry.equal_blocks
            assert passes_on_blocks(from_msccl(to_msccl(schedule))) == passes_on_blocks(schedule)
    assert passes_on_blocks(find("all_to_all", "bruck").schedule(4))


def test_blocks_of_different_lengths_go_over_a_schedule_that_passes_none_on() -> None:
    own = from_msccl(foreign("all_to_all", "pairwise", 2))
    bruck = from_msccl(foreign("all_to_all", "bruck", 4))
    object.__setattr__(bruck, "algorithm", "pairwise")  # the name says nothing

    assert ringcoll.run_threads(uneven(own), 2) == [
        [0.0, 1.0, 1.0],
        [0.0, 0.0, 1.0, 1.0, 1.0],
    ]
    with pytest.raises(ArgumentError, match="equal length"):
        ringcoll.run_threads(uneven(bruck), 4)


def uneven(schedule: Schedule) -> Callable[[LocalGroup], list[float]]:
    """Rank r sends r + s + 1 elements to rank s, so that no two ranks disagree."""

    def rank_main(group: LocalGroup) -> list[float]:
        sizes = [1 + group.rank() + other for other in range(group.size())]
        result = torch.zeros(sum(sizes))
        tensor = torch.full((sum(sizes),), float(group.rank()))
        ringcoll.all_to_all_single(result, tensor, sizes, sizes, group, algorithm=schedule)
        return result.tolist()

    return rank_main
