"""The orders are what the papers say, and no rank waits for ever."""

from __future__ import annotations

import ast
from fractions import Fraction
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

from ringcoll.errors import ScheduleError
from ringcoll.training import (
    SCHEDULES,
    Action,
    Kind,
    PipelineSchedule,
    bubble,
    gpipe,
    grid,
    one_f_one_b,
    peak_activations,
    timed_actions,
)
from ringcoll.training.pipeline import pipeline_schedule

WORLDS = (1, 2, 3, 4, 5, 8)
MICROBATCHES = (1, 2, 3, 4, 5, 7, 8, 12, 16)
SIZES = [(p, m) for p in WORLDS for m in MICROBATCHES]


def programs(schedule: PipelineSchedule) -> list[tuple[Action, ...]]:
    return [schedule.program(rank) for rank in range(schedule.world_size)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_rank_does_all_its_work_once_and_the_orders_can_be_kept(name: str):
    for p, m in SIZES:
        schedule = SCHEDULES[name](p, m)
        assert (schedule.name, schedule.world_size, schedule.num_microbatches) == (name, p, m)
        before: dict[Action, set[Action]] = {}
        for rank, program in enumerate(programs(schedule)):
            assert len(program) == 2 * m
            assert {*program} == {Action(kind, rank, i) for kind in Kind for i in range(m)}
            for kind in Kind:  # the runner numbers messages by this order
                assert [a.microbatch for a in program if a.kind is kind] == list(range(m))
            for action in program:
                is_forward = action.kind is Kind.FORWARD
                source = Action(
                    action.kind, rank - 1 if is_forward else rank + 1, action.microbatch
                )
                needed = before[action] = {source} if 0 <= source.stage < p else set()
                if not is_forward:
                    needed.add(Action(Kind.FORWARD, rank, action.microbatch))
            for first, second in pairwise(program):
                before[second].add(first)
        TopologicalSorter(before).prepare()  # raises CycleError if a rank waits for ever


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_activations_that_a_rank_keeps(name: str):
    for p, m in SIZES:
        schedule = SCHEDULES[name](p, m)
        for program, peak in zip(programs(schedule), peak_activations(schedule), strict=True):
            kept = [0]
            for action in program:
                kept.append(kept[-1] + (1 if action.kind is Kind.FORWARD else -1))
            assert max(kept) == peak
        assert peak_activations(gpipe(p, m)) == (m,) * p
        assert peak_activations(one_f_one_b(p, m)) == tuple(min(m, p - r) for r in range(p))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_drawing_shows_every_action_and_all_idle_time(name: str):
    for p, m in SIZES:
        schedule = SCHEDULES[name](p, m)
        lines = [line.split()[2:] for line in grid(schedule).splitlines()]
        (length,) = {len(line) for line in lines}
        idle = sum(line.count(".") for line in lines)
        assert Fraction(idle, length * p) == bubble(schedule) == Fraction(p - 1, m + p - 1)
        for line, program in zip(lines, programs(schedule), strict=True):
            assert [cell for cell in line if cell not in ".-"] == list(map(str, program))
            assert len(line) - line.count(".") == 3 * m


@pytest.mark.parametrize("name", SCHEDULES)
def test_an_action_begins_when_its_rank_and_what_it_needs_are_ready(name: str):
    for p, m in SIZES:
        schedule = SCHEDULES[name](p, m)
        timed = list(timed_actions(schedule))
        own = [
            (rank, action) for rank, program in enumerate(programs(schedule)) for action in program
        ]
        assert [(rank, action) for rank, action, _, _ in timed] == own
        ends = {action: end for _, action, _, end in timed}
        free = [0] * p
        for rank, action, begin, end in timed:
            is_forward = action.kind is Kind.FORWARD
            source = Action(action.kind, rank - 1 if is_forward else rank + 1, action.microbatch)
            assert begin == max(free[rank], ends.get(source, 0))
            assert end - begin == (1 if is_forward else 2)
            free[rank] = end


@pytest.mark.parametrize("make", [*SCHEDULES.values(), gpipe, one_f_one_b])
def test_numbers_that_are_not_positive(make):
    for sizes in ((0, 1), (1, 0)):
        with pytest.raises(ScheduleError, match=r"must be positive .expected at least 1, got 0"):
            make(*sizes)


def test_an_order_that_is_not_there():
    with pytest.raises(ScheduleError, match="'2f2b' is none of gpipe, 1f1b"):
        PipelineSchedule("2f2b", 2, 2)


def test_it_needs_no_torch():
    tree = ast.parse(Path(pipeline_schedule.__file__).read_text("utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    used = {name for name in modules if name and name.startswith(("ringcoll", "torch"))}
    assert used == {"ringcoll.errors"}
