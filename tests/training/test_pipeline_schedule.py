"""The schedules are what the papers say, and a wrong schedule does not pass."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from graphlib import CycleError, TopologicalSorter
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from ringcoll.errors import ScheduleError, VerificationError
from ringcoll.training import (
    SCHEDULES,
    UNIT_COSTS,
    Action,
    Kind,
    PipelineSchedule,
    bubble,
    check,
    gpipe,
    grid,
    interleaved,
    one_f_one_b,
    peak_activations,
    zero_bubble,
)
from ringcoll.training.pipeline import pipeline_schedule
from ringcoll.training.pipeline.pipeline_schedule import Transfer, consumed, produced

WORLDS = (1, 2, 3, 4, 5, 8)
MICROBATCHES = (1, 2, 3, 4, 5, 7, 8, 12, 16)
SIZES = [(p, m) for p in WORLDS for m in MICROBATCHES]
SMALL = [
    gpipe(2, 2),
    gpipe(3, 2),
    one_f_one_b(2, 3),
    one_f_one_b(3, 3),
    interleaved(2, 2),
    interleaved(2, 3),
    zero_bubble(2, 3),
    zero_bubble(3, 3),
]


def programs_with(schedule: PipelineSchedule, rank: int, program: Any) -> PipelineSchedule:
    programs = list(schedule.programs)
    programs[rank] = tuple(program)
    return replace(schedule, programs=tuple(programs))


def places(schedule: PipelineSchedule) -> Iterator[tuple[int, int, Action]]:
    for rank, program in enumerate(schedule.programs):
        for place, action in enumerate(program):
            yield rank, place, action


class TestGenerators:
    @pytest.mark.parametrize("name", SCHEDULES)
    def test_all_sizes_are_right_and_read_back(self, name):
        for p, m in SIZES:
            schedule = SCHEDULES[name](p, m)
            check(schedule)
            assert schedule.name == name
            assert (schedule.world_size, schedule.num_microbatches) == (p, m)
            assert PipelineSchedule.parse(str(schedule)) == schedule

    def test_the_idle_share_is_that_of_the_papers(self):
        for p, m in SIZES:
            expected = Fraction(p - 1, m + p - 1)
            assert bubble(gpipe(p, m)) == bubble(one_f_one_b(p, m)) == expected
            for v in (1, 2, 3):
                if m % p == 0:
                    of_stages = interleaved(p, m, stages_per_rank=v)
                    assert bubble(of_stages) == Fraction(p - 1, v * m + p - 1)
            assert bubble(zero_bubble(p, m)) <= expected
            if m >= p:
                assert bubble(zero_bubble(p, m)) == Fraction(p - 1, 3 * m + p - 1)

    def test_the_idle_share_follows_the_costs(self):
        slow = {Kind.FORWARD: 2, Kind.BACKWARD: 5, Kind.BACKWARD_INPUTS: 2}
        assert bubble(one_f_one_b(4, 6), slow) == Fraction(3, 9), "all stages alike: no change"
        # By hand: rank 0 waits for the forward, the I and nothing else of rank 1.
        costs = {Kind.FORWARD: 2, Kind.BACKWARD_INPUTS: 3, Kind.BACKWARD_WEIGHTS: 1}
        assert bubble(zero_bubble(2, 1), costs) == Fraction(2 * 5, 2 * (2 + 2 + 3 + 3 + 1))

    def test_the_peaks_are_those_of_the_papers(self):
        for p, m in SIZES:
            assert peak_activations(gpipe(p, m)) == (m,) * p
            assert peak_activations(one_f_one_b(p, m)) == tuple(min(m, p - r) for r in range(p))
            assert peak_activations(zero_bubble(p, m)) == (min(m, p),) * p
            whole = m % p == 0
            for v in (1, 2, 3):
                schedule = interleaved(p, m, stages_per_rank=v)
                bounds = [min(m * v, (v - 1) * p + 2 * (p - r - 1) + 1) for r in range(p)]
                assert list(schedule.activations) == bounds
                for peak, bound in zip(peak_activations(schedule), bounds, strict=True):
                    assert peak == bound if whole else peak <= bound

    @pytest.mark.parametrize("name", SCHEDULES)
    def test_numbers_that_are_not_positive(self, name):
        for sizes in ((0, 1), (1, 0)):
            with pytest.raises(
                ScheduleError, match=r"must be positive .expected at least 1, got 0"
            ):
                SCHEDULES[name](*sizes)
        with pytest.raises(ScheduleError, match="stages_per_rank must be positive"):
            interleaved(2, 2, stages_per_rank=0)


class TestData:
    def test_the_text_of_an_action(self):
        for kind in Kind:
            action = Action(kind, 10, 21)
            assert Action.parse(str(action)) == action
        for wrong in ("", "F", "0F", "F3", "0X3", "0F3 ", "-1F0", "0f3"):
            with pytest.raises(ScheduleError, match="is not an action"):
                Action.parse(wrong)

    def test_a_text_that_is_no_schedule(self):
        text = str(gpipe(2, 2))
        for wrong in ("", "gpipe", text.replace("stages", "ranks"), text.replace("=2,2", "=")):
            with pytest.raises(ScheduleError, match="does not begin a schedule"):
                PipelineSchedule.parse(wrong)
        with pytest.raises(ScheduleError, match="'0G0' is not an action"):
            PipelineSchedule.parse(text.replace("0F0", "0G0"))

    def test_a_transfer_is_sent_once_and_received_once(self):
        for schedule in SMALL:
            actions = [action for _, _, action in places(schedule)]
            for ends in (produced, consumed):
                transfers = [ends(action, schedule.num_stages) for action in actions]
                real = [transfer for transfer in transfers if transfer is not None]
                assert sorted(real) == [
                    Transfer(boundary, microbatch, is_gradient)
                    for boundary in range(schedule.num_stages - 1)
                    for microbatch in range(schedule.num_microbatches)
                    for is_gradient in (False, True)
                ]

    def test_the_drawing_shows_every_action_and_all_idle_time(self):
        for schedule in SMALL:
            lines = [line.split()[2:] for line in grid(schedule).splitlines()]
            length = max(map(len, lines))
            # A line ends with its last action: rstrip cuts spaces, not dots.
            assert {len(line) for line in lines} == {length}
            idle = sum(line.count(".") for line in lines)
            assert Fraction(idle, length * len(lines)) == bubble(schedule)
            for line, program in zip(lines, schedule.programs, strict=True):
                assert [cell for cell in line if cell not in ".-"] == list(map(str, program))
                units = sum(UNIT_COSTS[action.kind] for action in program)
                assert len(line) - line.count(".") == units

    def test_it_needs_no_torch(self):
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


def can_run(schedule: PipelineSchedule) -> bool:
    """Whether the orders of the ranks and of the data can be kept at once; another proof."""
    before: dict[Action, set[Action]] = {action: set() for _, _, action in places(schedule)}
    senders = {produced(action, schedule.num_stages): action for action in before}
    for program in schedule.programs:
        for first, second in pairwise(program):
            before[second].add(first)
    for action, needed in before.items():
        arriving = consumed(action, schedule.num_stages)
        if arriving is not None:
            needed.add(senders[arriving])
        if action.kind is Kind.BACKWARD_WEIGHTS:
            needed.add(replace(action, kind=Kind.BACKWARD_INPUTS))
        elif action.kind is not Kind.FORWARD:
            needed.add(replace(action, kind=Kind.FORWARD))
    try:
        TopologicalSorter(before).prepare()
    except CycleError:
        return False
    return True


class TestMutations:
    @pytest.mark.parametrize("schedule", SMALL, ids=lambda s: f"{s.name}-{s.world_size}")
    def test_a_lost_action(self, schedule):
        for rank, place, action in places(schedule):
            program = schedule.programs[rank]
            mutant = programs_with(schedule, rank, program[:place] + program[place + 1 :])
            with pytest.raises(VerificationError, match="is incomplete") as caught:
                check(mutant)
            assert caught.value.rank == rank
            where = f"{action.stage}F{action.microbatch} on micro-batch {action.microbatch}:"
            assert where in str(caught.value)

    @pytest.mark.parametrize("schedule", SMALL, ids=lambda s: f"{s.name}-{s.world_size}")
    def test_a_repeated_action(self, schedule):
        for rank, _, action in places(schedule):
            program = schedule.programs[rank]
            for at in range(len(program) + 1):
                mutant = programs_with(schedule, rank, (*program[:at], action, *program[at:]))
                with pytest.raises(VerificationError, match=f"{action} .* occurs twice") as caught:
                    check(mutant)
                assert caught.value.rank == rank

    @pytest.mark.parametrize("schedule", SMALL, ids=lambda s: f"{s.name}-{s.world_size}")
    def test_an_action_of_another_rank_stage_or_microbatch(self, schedule):
        for rank, place, action in places(schedule):
            for wrong in (
                replace(action, stage=action.stage + 1),
                replace(action, stage=schedule.num_stages + rank),
                replace(action, microbatch=schedule.num_microbatches),
            ):
                program = list(schedule.programs[rank])
                program[place] = wrong
                with pytest.raises(VerificationError, match="is not work of this rank") as caught:
                    check(programs_with(schedule, rank, program))
                assert caught.value.rank == rank
                assert f"action {wrong} on micro-batch {wrong.microbatch}" in str(caught.value)

    @pytest.mark.parametrize("schedule", SMALL, ids=lambda s: f"{s.name}-{s.world_size}")
    def test_an_action_of_another_kind(self, schedule):
        for rank, place, action in places(schedule):
            for kind in set(Kind) - {action.kind}:
                program = list(schedule.programs[rank])
                program[place] = replace(action, kind=kind)
                with pytest.raises(VerificationError, match=r"is incomplete|occurs twice"):
                    check(programs_with(schedule, rank, program))

    @pytest.mark.parametrize("schedule", SMALL, ids=lambda s: f"{s.name}-{s.world_size}")
    def test_two_actions_in_the_wrong_order(self, schedule):
        """A swap passes if and only if all orders can be kept and no rank keeps too many."""
        verdicts = set()
        for rank, program in enumerate(schedule.programs):
            for first, second in combinations(range(len(program)), 2):
                swapped = list(program)
                swapped[first], swapped[second] = swapped[second], swapped[first]
                mutant = programs_with(schedule, rank, swapped)
                peaks = zip(peak_activations(mutant), schedule.activations, strict=True)
                is_right = can_run(mutant) and all(peak <= bound for peak, bound in peaks)
                verdicts.add(is_right)
                if is_right:
                    check(mutant)
                    continue
                with pytest.raises(
                    VerificationError, match=r"never comes|keeps too many"
                ) as caught:
                    check(mutant)
                assert caught.value.rank is not None
        assert verdicts == {True, False}

    def test_too_many_activations(self):
        schedule = one_f_one_b(3, 4)
        stated = replace(schedule, activations=(3, 1, 1))
        with pytest.raises(VerificationError, match="keeps too many") as caught:
            check(stated)
        assert str(caught.value).startswith("rank 1: action 1F1 on micro-batch 1:")
        assert (caught.value.expected, caught.value.got) == ("at most 1", 2)
        with pytest.raises(VerificationError, match=r"other ranks .expected 3 numbers, got 2"):
            check(replace(schedule, activations=(3, 2)))

    def test_the_cause_of_a_deadlock_is_named_by_the_drawing_too(self):
        text = str(one_f_one_b(2, 2)).replace("1F0 1B0", "1B0 1F0")
        for read in (check, grid, bubble):
            with pytest.raises(VerificationError) as caught:
                read(PipelineSchedule.parse(text))
            assert str(caught.value) == (
                "rank 1: action 1B0 on micro-batch 0: waits for 1F0, which never comes"
            )
        text = str(gpipe(2, 2)).replace("0F1 0B0", "0B0 0F1").replace("1F1 1B0", "1B0 1F1")
        check(PipelineSchedule.parse(text))
        with pytest.raises(VerificationError) as caught:
            check(PipelineSchedule.parse(text.replace("1B0 1F1", "1F1 1B0")))
        assert str(caught.value) == (
            "rank 0: action 0B0 on micro-batch 0: waits for the gradient of micro-batch 0 from "
            "stage 1, which never comes"
        )

    def test_nothing_to_do(self):
        with pytest.raises(ScheduleError, match="num_microbatches must be positive"):
            check(replace(gpipe(1, 1), num_microbatches=0))
