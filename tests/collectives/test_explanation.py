"""An explanation of what is chosen, with the alternatives."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringcoll
from ringcoll import UserOp
from ringcoll.errors import ArgumentError, RingcollError, UnknownAlgorithmError
from ringcoll.lab.formats import to_msccl
from ringcoll.runtime.collectives import groups
from ringcoll.schedules.algorithms import algorithms, schedule_of
from ringcoll.training.backend import process_group as backend
from tests.programs.threads import together


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ALGORITHM", "DEBUG", "TRANSPORT"):
        monkeypatch.delenv(f"RINGCOLL_{name}", raising=False)


def test_an_explanation_shows_the_alternatives() -> None:
    found = ringcoll.run_threads(lambda group: ringcoll.explain("all_reduce", 4096, group), 4)
    assert len({str(one) for one in found}) == 1
    text = str(found[0])
    head, _, chosen = text.splitlines()[0].rpartition(" ")
    assert head == "all_reduce of 4096 bytes on 4 ranks, 1 host, local:"
    assert "why: the least predicted time (costs: built-in)" in text
    every = algorithms("all_reduce", 4, variants=True)
    names = {entry.name for entry in every if not entry.needs_hosts}
    rows = [line.split() for line in text.splitlines()[4:-4]]
    assert {row[-6] for row in rows} == names
    waits = {row[-6]: int(row[-4]) for row in rows}
    assert (waits["direct"], waits["recursive_doubling"], waits["ring"]) == (1, 2, 6)
    assert [row[0] for row in rows].index("*") == 0
    assert [row[1] for row in rows if row[0] == "*"] == [chosen]
    times = [float(row[-3]) for row in rows]
    assert times == sorted(times)


def test_an_explanation_minds_the_operator_and_refuses_nonsense() -> None:
    def main(group: ringcoll.LocalGroup) -> Any:
        own = UserOp(lambda x, y: x)
        told = ringcoll.explain("reduce_scatter", 1 << 20, group, op=own).algorithm
        for bad in (-1, "4K", None, True):
            with pytest.raises(ArgumentError):
                ringcoll.explain("all_reduce", bad, group)  # type: ignore[arg-type]
        with pytest.raises(RingcollError):
            ringcoll.explain("all_sum", 4, group)
        return told

    assert ringcoll.run_threads(main, 3) == ["direct"] * 3


# --- what runs is what is explained ---------------------------------------------------


def ran(group: Any) -> tuple[int, str]:
    """Number of the last call, from 1, and its algorithm."""
    for member in groups.members_of(group):
        for number, words in reversed(member.monitor.progress.recent(1)):
            named = re.search(r"algorithm (\w+)", words.description or "")
            assert named is not None
            return number + 1, named[1]
    raise AssertionError("nothing has run")


RULES = "all_reduce:0-12K:ring;all_reduce:12K-inf:rabenseifner"


@pytest.mark.parametrize("rules", ["", RULES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16, torch.bool])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"algorithm": "tree"},
        {"algorithm": "double_tree", "segment_bytes": 512},
        {"reproducible": True},
        {"wire_dtype": torch.bfloat16},
    ],
)
def test_what_is_explained_runs(
    monkeypatch: pytest.MonkeyPatch, rules: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """4,096 elements of 16 bits are sent as float32, which is more than 12 KiB."""
    monkeypatch.setenv("RINGCOLL_ALGORITHM", rules)
    if options.get("wire_dtype") and not dtype.is_floating_point:
        pytest.skip("a wire dtype is for floating-point tensors")

    def main(group: ringcoll.LocalGroup) -> None:
        tensor = torch.ones(4096, dtype=dtype)
        op = "max" if dtype is torch.bool else "sum"
        ringcoll.barrier(group)
        told = ringcoll.explain("all_reduce", tensor, group, op=op, **options)
        ringcoll.all_reduce(tensor, op, group, **options)
        number, algorithm = ran(group)
        last = ringcoll.explain("all_reduce", "last", group)
        assert told.algorithm == last.algorithm == algorithm
        assert told.choice.nbytes == last.choice.nbytes
        assert told.choice.segment_bytes == last.choice.segment_bytes
        assert f"Call {number} of the group was all_reduce(" in str(last)
        assert ("asked for" in told.choice.reason) == ("algorithm" in options)

    ringcoll.run_threads(main, 4)


def test_a_file_counts(tmp_path: Path) -> None:
    file = tmp_path / "mine.xml"
    file.write_text(to_msccl(schedule_of("all_reduce", "ring", 3)))

    def main(group: ringcoll.LocalGroup) -> None:
        tensor = torch.ones(4)
        for algorithm in (str(file), schedule_of("all_reduce", "ring", 3)):
            told = ringcoll.explain("all_reduce", tensor, group, algorithm=algorithm)
            ringcoll.all_reduce(tensor, group=group, algorithm=algorithm)
            last = ringcoll.explain("all_reduce", "last", group)
            assert told.algorithm == last.algorithm == ran(group)[1] == "ring"
        with pytest.raises(UnknownAlgorithmError):
            ringcoll.explain("broadcast", tensor, group, algorithm="rong")

    ringcoll.run_threads(main, 3)


@pytest.mark.parametrize(
    "options",
    [
        ringcoll.Options(),
        ringcoll.Options(algorithm="ring"),
        ringcoll.Options(algorithm={"all_reduce": "tree"}),
        ringcoll.Options(algorithm="double_tree", segment_bytes=1024),
        ringcoll.Options(wire_dtype=torch.bfloat16),
        ringcoll.Options(reproducible=True),
    ],
)
def test_the_options_of_a_group_count(options: Any) -> None:
    store = dist.HashStore()

    def main(rank: int) -> None:
        group = backend.ProcessGroup(store, rank, 2, timedelta(seconds=60), options)
        tensor = torch.ones(3000)
        for collective, run in (
            ("all_reduce", lambda: group.allreduce([tensor])),
            ("broadcast", lambda: group.broadcast([tensor], 0)),
        ):
            group.barrier().wait()
            told = ringcoll.explain(collective, tensor, group)
            run().wait()
            last = ringcoll.explain(collective, "last", group)
            assert told.algorithm == last.algorithm == ran(group)[1]
            assert told.choice.nbytes == last.choice.nbytes
            named = options.algorithm_of(collective, 2) != "auto"
            assert ("by the options of the group" in told.choice.reason) == named
        assert (
            ringcoll.explain("all_reduce", tensor, group, algorithm="direct").algorithm == "direct"
        )
        ringcoll.close(group)

    assert together(2, main) == [None, None]


def test_nothing_has_run_yet() -> None:
    def main(group: ringcoll.LocalGroup) -> None:
        ringcoll.all_reduce(torch.ones(2), group=group)
        with pytest.raises(ArgumentError, match="no broadcast has run in the group"):
            ringcoll.explain("broadcast", "last", group)
        with pytest.raises(RingcollError):
            ringcoll.explain("all_sum", "last", group)

    ringcoll.run_threads(main, 2)
