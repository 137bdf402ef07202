"""Plan and executor against an interpreter, on random schedules and a hostile scheduler.

The algorithms of the library never write what the same step reads, or what a send in
flight still has to read, in all the ways that a schedule may: a planner without the waits
that this takes passed every test with algorithms alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ringcoll.errors import TransportError
from ringcoll.runtime.operation import Layout, Region
from ringcoll.runtime.operation import plan as plan_module
from ringcoll.runtime.operation.executor import bind
from ringcoll.runtime.operation.instructions import Combine, Instruction, Move, Post, Wait, loans
from ringcoll.runtime.operation.plan import _Compiler, compile_plan
from ringcoll.runtime.reduction import Operator, Reduction, resolve
from ringcoll.runtime.transport import NarrowTransport
from ringcoll.runtime.transport.narrow import _Arriving
from ringcoll.schedules import Buffer, Copy, Schedule, Step, contract, inp, out, recv, send
from ringcoll.schedules.algorithms import algorithms, find
from tests.cases.effort import effort
from tests.cases.schedules import Size, random_schedule
from tests.cases.stepped import RandomHub, Waiting, run_together, steps
from tests.fakes.interpreter import Memory, interpret

PRIME = 1_000_003
UNWRITTEN = -1


def combine(left: int, right: int) -> int:
    """Neither commutative nor associative, so that any other order shows."""
    return (3 * left + 5 * right + 1) % PRIME


def finish(value: int) -> int:
    return (7 * value + 11) % PRIME


def combine_tensors(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
    return out.copy_((3 * left + 5 * right + 1) % PRIME)


def finish_tensor(tensor: Tensor, world_size: int) -> Tensor:
    return tensor.copy_((7 * tensor + 11) % PRIME)


REDUCTION = Reduction(
    Operator("user"), torch.int64, torch.int64, torch.int64, combine_tensors, finish=finish_tensor
)


def parts(numel: int, count: int) -> list[int]:
    """Lengths of a balanced division, the first ones longer."""
    return [numel // count + (index < numel % count) for index in range(count)]


def chunk_lengths(lengths: list[int], per_block: int) -> list[int]:
    return [part for numel in lengths for part in parts(numel, per_block)]


def tensors_of(
    schedule: Schedule, lengths: list[int], *, in_place: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Each rank's input, and its output: one is part of the other if ``in_place``."""
    rules, world_size = contract(schedule.collective), schedule.world_size
    inputs, outputs = [], []
    for rank in range(world_size):
        mine, due = rules.inputs(rank, world_size, 0), rules.outputs(rank, world_size, 0)
        data = [torch.arange(lengths[block]) * 31 + rank * 1009 + block * 101 + 1 for block in mine]
        source = torch.cat(data)
        target = torch.full((sum(lengths[block] for block in due),), UNWRITTEN)
        if in_place and len(mine) > len(due):
            start = sum(lengths[block] for block in mine if block < due[0])
            target = source[start : start + len(target)]
        elif in_place:
            start = sum(lengths[block] for block in due if block < mine[0])
            target[start : start + len(source)] = source
            source = target[start : start + len(source)]
        inputs.append(source)
        outputs.append(target)
    return inputs, outputs


def memory_of(
    schedule: Schedule, rank: int, chunks: list[int], source: Tensor, target: Tensor, in_place: bool
) -> Memory:
    """The same as the interpreter sees it."""
    rules, world_size = contract(schedule.collective), schedule.world_size
    per_block = rules.chunks_per_block(schedule.num_chunks, world_size)
    memory: Memory = {}
    blocks = {
        Buffer.INPUT: (rules.inputs(rank, world_size, 0), source),
        Buffer.OUTPUT: (rules.outputs(rank, world_size, 0), target),
    }
    for buffer, (held, tensor) in blocks.items():
        numbers, start = tensor.tolist(), 0
        for block in held:
            for chunk in range(block * per_block, (block + 1) * per_block):
                memory[buffer, chunk] = numbers[start : start + chunks[chunk]]
                start += chunks[chunk]
    if in_place:
        for buffer, chunk in list(memory):
            if buffer is Buffer.INPUT and (Buffer.OUTPUT, chunk) in memory:
                del memory[buffer, chunk]
    return memory


def widened(execution: Iterator[Waiting]) -> Iterator[Waiting]:
    """The waits of an execution over a narrow transport, as the scheduler below knows them."""
    for item in execution:
        if isinstance(item.handle, _Arriving):
            yield item._replace(handle=item.handle.handle)
            item.handle.into.copy_(item.handle.narrow)
        else:
            yield item


def outcome(
    schedule: Schedule,
    lengths: list[int],
    segments: int,
    seed: int,
    *,
    in_place: bool,
    wire_dtype: torch.dtype = torch.int64,
) -> str:
    """Run a schedule both ways; what differs, in words, or nothing."""
    per_block = schedule.num_chunks // len(lengths)
    chunks = chunk_lengths(lengths, per_block)
    inputs, outputs = tensors_of(schedule, lengths, in_place=in_place)
    ranks = range(schedule.world_size)
    memory = [
        memory_of(schedule, rank, chunks, inputs[rank], outputs[rank], in_place) for rank in ranks
    ]
    interpret(schedule, memory, combine, finish, in_place=in_place)
    hub = RandomHub(schedule.world_size, Random(seed))
    executions = []
    for rank, transport in zip(ranks, hub.transports(), strict=True):
        layout = Layout(tuple(enumerate(lengths)), in_place=in_place)
        plan = compile_plan(schedule, rank, layout, segments, posts_early=seed % 4 != 0)
        workspace = torch.full((plan.workspace_numel,), -7)
        ends = [inputs[rank]], [outputs[rank]]
        reduction = replace(REDUCTION, wire_dtype=wire_dtype)
        narrows = wire_dtype is not torch.int64
        over = NarrowTransport(transport, wire_dtype) if narrows else transport
        bound = bind(plan, *ends, workspace, over, reduction=reduction)
        executions.append(widened(steps(bound.items, 0)))
    run_together(hub, executions)
    for rank in ranks:
        got = memory_of(schedule, rank, chunks, inputs[rank], outputs[rank], in_place)
        for (buffer, chunk), numbers in got.items():
            if numbers != memory[rank][buffer, chunk]:
                wanted = memory[rank][buffer, chunk]
                return f"rank {rank} {buffer}[{chunk}]: {numbers}, expected {wanted}"
    return ""


@st.composite
def runs(draw: st.DrawFn) -> tuple[Schedule, list[int], int, int, bool]:
    collective = draw(st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]))
    size = Size(
        world_size=draw(st.integers(1, 5)),
        steps=draw(st.integers(1, 6)),
        chunks_per_block=draw(st.integers(1, 3)),
        slots=draw(st.integers(0, 3)),
        messages=draw(st.integers(0, 10)),
        locals=draw(st.integers(0, 3)),
    )
    blocks = contract(collective).num_blocks(size.world_size)
    # Scratch slots of 64 elements lie without a gap.
    numel = st.one_of(st.integers(0, 9), st.sampled_from([64, 128]))
    lengths = draw(st.lists(numel, min_size=blocks, max_size=blocks))
    segments = draw(st.sampled_from([1, 1, 2, 3, 5]))
    in_place, seed = draw(st.booleans()), draw(st.integers(0, 1 << 32))
    schedule = random_schedule(Random(seed), size, collective, in_place=in_place)
    return schedule, lengths, segments, seed, in_place


@pytest.mark.slow
@effort(1200)
@given(runs())
def test_executor_and_interpreter_agree(run):
    schedule, lengths, segments, seed, in_place = run
    wrong = outcome(schedule, lengths, segments, seed, in_place=in_place)
    assert not wrong, f"{wrong}\nlengths {lengths}, {segments} segments\n{schedule.to_text()}"


@pytest.mark.slow
@effort(500)
@given(runs())
def test_narrow_messages_are_those_of_wide_ones(run):
    """All numbers are below a million: 32 bits hold them."""
    schedule, lengths, segments, seed, in_place = run
    wrong = outcome(schedule, lengths, segments, seed, in_place=in_place, wire_dtype=torch.int32)
    assert not wrong, f"{wrong}\nlengths {lengths}, {segments} segments\n{schedule.to_text()}"


FILL = "copy tmp0[0] = in[0] ; copy tmp1[1] = in[1] ; copy tmp2[0] = in[0] ; copy tmp3[1] = in[1]"

# What random schedules have found, as small as it gets. Rank 1 sends, rank 0 does the rest.
HAZARDS = {
    "a later chunk of a recv-reduce reads the place of an earlier one": """
        copy tmp0[0] = in[0] ; copy tmp1[0] = in[0]
        recv_reduce tmp0[0] out[0] = tmp0[0] tmp0[0] + recv from 1
        ---
        -
        send in[0] in[0] to 0""",
    "an accumulation, by one message, onto a result that is held back": """
        copy out[0] = in[0] ; copy out[1] = in[1]
        recv_reduce out[0] out[1] = out[0] out[1] + recv from 1 ; """
    """recv_reduce tmp0[0] = out[0] + recv from 1 ; """
    """recv_reduce out[0] out[1] = recv + out[0] out[1] from 1
        ---
        -
        send in[0] in[1] to 0 ; send in[0] to 0 ; send in[0] in[1] to 0""",
    "finishing where it stands what is being sent": """
        copy out[0] = in[0]
        reduce out[0] = out[0] final ; send out[0] to 1
        ---
        -
        recv out[0] from 0""",
    "adjacent scratch slots, shifted by one": f"""
        {FILL}
        copy tmp1[0] = tmp2[0] ; copy tmp2[1] = tmp3[1]
        recv_reduce tmp0[0] tmp1[1] = tmp1[0] tmp2[1] + recv from 1
        copy out[0] = tmp0[0] ; copy out[1] = tmp1[1]
        ---
        -
        -
        send in[0] in[1] to 0
        -""",
    "recursive doubling: what is sent is reduced into": """
        copy out[0] = in[0] ; copy out[1] = in[1]
        send out[0] out[1] to 1 ; recv_reduce out[0] out[1] = out[0] out[1] + recv from 1 final
        ---
        copy out[0] = in[0] ; copy out[1] = in[1]
        send out[0] out[1] to 0 ; recv_reduce out[0] out[1] = recv + out[0] out[1] from 0 final""",
    "an exchange of two places": """
        copy out[0] = in[0] ; copy tmp0[0] = in[0] ; copy tmp1[0] = in[0]
        copy out[0] = tmp0[0] ; copy tmp0[0] = out[0] ; reduce tmp1[0] = out[0] + tmp0[0] + tmp1[0]
        ---
        -
        -""",
    "a reduction into its own third operand": """
        copy tmp0[0] = in[0] ; copy tmp1[0] = in[0] ; reduce out[0] = in[0] + in[0]
        reduce out[0] = tmp0[0] + tmp1[0] + out[0] + tmp0[0] final
        ---
        -
        -""",
}


def written(text: str, num_slots: int = 4) -> Schedule:
    """A schedule of two ranks from the steps of both."""
    header = f"schedule all_reduce written world_size=2 num_chunks=2 num_slots={num_slots} root=0"
    steps = [line.strip() for line in text.strip().splitlines()]
    lines = ["rank 1" if step == "---" else f"  {step}" for step in steps]
    return Schedule.from_text("\n".join([header, "rank 0", *lines]) + "\n")


@pytest.mark.parametrize("hazard", HAZARDS)
@pytest.mark.parametrize("segments", [1, 2])
@pytest.mark.parametrize("in_place", [False, True])
def test_hazard(hazard: str, segments: int, in_place: bool):
    # Chunks of 64 elements, so that slots of scratch lie without a gap.
    schedule = written(HAZARDS[hazard])
    for seed in range(20):
        assert not outcome(schedule, [128 * segments], segments, seed, in_place=in_place)


def test_shifted_slots_are_not_added_as_one():
    # torch.add refuses operands that overlap the result in part.
    schedule = written(HAZARDS["adjacent scratch slots, shifted by one"])
    inputs, outputs = tensors_of(schedule, [128], in_place=False)
    hub = RandomHub(2, Random(0))
    executions = []
    for rank, transport in enumerate(hub.transports()):
        plan = compile_plan(schedule, rank, Layout(((0, 128),)))
        workspace = torch.zeros(plan.workspace_numel, dtype=torch.int64)
        ends = [inputs[rank]], [outputs[rank]]
        reduction = resolve("sum", torch.int64)
        bound = bind(plan, *ends, workspace, transport, reduction=reduction)
        executions.append(steps(bound.items, 0))
    run_together(hub, executions)
    assert torch.equal(outputs[0], inputs[0] + inputs[1])


def fails_somewhere(tries: int, wire_dtype: torch.dtype = torch.int64) -> bool:
    """Whether some of the random schedules comes out wrong."""
    size = Size(world_size=3, steps=5, chunks_per_block=2, slots=2, messages=6, locals=2)
    for seed in range(tries):
        in_place, segments = bool(seed % 2), 1 + seed % 3
        schedule = random_schedule(Random(seed), size, "all_reduce", in_place=in_place)
        if outcome(schedule, [7], segments, seed, in_place=in_place, wire_dtype=wire_dtype):
            return True
    return False


def test_nothing_fails_before_anything_is_broken():
    assert not fails_somewhere(100)


def test_without_the_guard_of_sends_some_schedule_fails(monkeypatch: pytest.MonkeyPatch):
    def guard(self: _Compiler, written: Region) -> None:
        pass

    monkeypatch.setattr(_Compiler, "guard", guard)
    assert fails_somewhere(100)


def test_without_deferred_writes_some_schedule_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_Compiler, "read_later", lambda *arguments: False)
    assert fails_somewhere(100)


def test_receives_posted_early_into_memory_in_use_fail(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ringcoll.runtime.operation.plan._touched", lambda operation: ())
    assert fails_somewhere(100)


def test_without_staged_receives_some_schedule_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_Compiler, "reads", lambda *arguments: [])
    assert fails_somewhere(100)


@pytest.mark.slow
def test_totals_that_are_rounded_too_early_fail(monkeypatch: pytest.MonkeyPatch):
    assert not fails_somewhere(100, torch.int32)

    def all_of_them(instructions: list[Instruction], regions: object) -> frozenset[int]:
        found = (i for i, one in enumerate(instructions) if isinstance(one, Combine))
        return frozenset(found)

    monkeypatch.setattr("ringcoll.runtime.operation.plan.departing", all_of_them)
    assert fails_somewhere(300, torch.int32)


def test_lent_messages_are_read_in_place():
    """Two-shot all-reduce: what arrives in its first step is read once, by the reduction."""
    schedule = find("all_reduce", "two_shot").schedule(3)
    plan = compile_plan(schedule, 1, Layout(((0, 300),)))
    ((index, sources),) = plan.lent.items()
    combine = plan.instructions[index]
    assert isinstance(combine, Combine)
    assert len(combine.sources) == 3
    assert sorted(sources) == [0, 2]  # rank 1's own share is in between
    assert not compile_plan(
        find("all_gather", "ring").schedule(3), 0, Layout(((0, 5), (1, 5), (2, 5)))
    ).lent


def test_in_segments_what_has_come_is_reduced_in_its_wave():
    """So it is lent, as no send is posted before; the total leaves with the next wave."""
    schedule = find("all_reduce", "two_shot").schedule(3)
    plan = compile_plan(schedule, 1, Layout(((0, 9000),)), segments=4)
    assert len(plan.waves) == 2 + 4 - 1
    assert [len(sources) for sources in plan.lent.values()] == [2] * 4
    for begin, end in pairwise([*plan.waves, len(plan.instructions)]):
        kinds = [type(item) for item in plan.instructions[begin:end]]
        assert kinds.count(Post) == 1
        assert Combine not in kinds[: kinds.index(Post)]


def test_a_step_is_local_if_it_is_on_all_ranks():
    """Rank 0 copies in step 1, in which the others send: its step keeps its wave, or messages would not match."""
    here, there = Copy(out(0), inp(0)), Copy(out(1), inp(1))

    def schedule(last: Step) -> Schedule:
        programs = [
            [Step(send(1, inp(0))), Step(here), Step(send(1, inp(1)))],
            [Step(recv(0, out(0))), last, Step(recv(0, out(1)))],
        ]
        return Schedule("all_reduce", "local", 2, 2, 0, program=programs.__getitem__)

    for last, waves in ((Step(), 2), (Step(there), 2), (Step(send(0, inp(0))), 3)):
        steps = [len(compile_plan(schedule(last), 0, Layout(((0, 8),)), segments).waves)
                 for segments in (1, 2)]  # fmt: skip
        assert steps == [3, waves + 1]


def exchanges(collective: str, algorithm: str, world_size: int, segments: int = 1) -> list[bool]:
    """Whether the posts of each rank are exchanges, if that is the same on all ranks."""
    schedule = find(collective, algorithm).schedule(world_size)
    blocks = range(contract(collective).num_blocks(world_size))
    layout = Layout(tuple((block, 60 + block) for block in blocks))
    found = [
        [item.is_exchange for item in compile_plan(schedule, rank, layout, segments).instructions
         if isinstance(item, Post)]
        for rank in range(world_size)
    ]  # fmt: skip
    assert found == found[:1] * world_size
    return found[0]


def test_a_message_of_each_rank_to_all_others_is_an_exchange():
    assert exchanges("all_reduce", "direct", 5) == [True]
    assert exchanges("all_gather", "direct", 5) == [True]
    assert exchanges("all_reduce", "two_shot", 5) == [False, True]
    assert exchanges("all_reduce", "recursive_doubling", 2) == [True]
    assert exchanges("all_reduce", "recursive_doubling", 4) == [False, False]
    assert exchanges("all_reduce", "direct", 16) == [True]
    assert exchanges("all_reduce", "direct", 17) == [False], "too many programs to read"
    assert exchanges("all_reduce", "direct", 5, segments=2) == [False, False]


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
def test_exchanges_are_in_the_same_steps_of_all_ranks(world_size: int):
    """Of every algorithm, with empty chunks, too; also where some rank could post receives early."""
    num_found = 0
    for entry in algorithms(world_size=world_size):
        schedule = entry.schedule(world_size)
        num_blocks = contract(entry.collective).num_blocks(world_size)
        for numel in (1, world_size - 1, 100):
            layout = Layout(tuple((block, numel) for block in range(num_blocks)))
            found = []
            for rank in range(world_size):
                plan = compile_plan(schedule, rank, layout)
                waits = [item for item in plan.instructions if isinstance(item, Wait)]
                step_of = {wait.message: wait.step for wait in waits}
                steps, number = [], 0
                for item in plan.instructions:
                    if isinstance(item, Post):
                        if item.is_exchange:
                            assert len(item.receives) == len(item.sends) == world_size - 1
                            steps.append(step_of[number])
                        number += len(item.receives) + len(item.sends)
                found.append(steps)
            assert found == found[:1] * world_size, f"{entry.collective} {entry.name}, {numel}"
            num_found += len(found[0])
    assert num_found > 5


def test_one_rank_that_sends_to_fewer_makes_it_no_exchange():
    def program(rank: int) -> list[Step]:
        others = [peer for peer in range(3) if peer != rank]
        sends = [send(peer, inp(rank or peer)) for peer in others]
        return [Step(*sends, *(recv(peer, out(peer or rank)) for peer in others))]

    schedule = Schedule("all_reduce", "unlike", 3, 3, 0, program=program)
    for rank in range(3):
        plan = compile_plan(schedule, rank, Layout(((0, 30),)))
        assert [item.is_exchange for item in plan.instructions if isinstance(item, Post)] == [False]


def test_nothing_is_done_with_empty_chunks():
    """Two elements in four chunks: what is moved, combined or sent has elements."""
    for algorithm in ("ring", "two_shot", "rabenseifner"):
        schedule = find("all_reduce", algorithm).schedule(4)
        for rank in range(4):
            plan = compile_plan(schedule, rank, Layout(((0, 2),)))
            written = [
                plan.regions[item.into]
                for item in plan.instructions
                if isinstance(item, (Move, Combine))
            ]
            assert all(region.numel for region in written)
            posts = [item for item in plan.instructions if isinstance(item, Post)]
            messages = [one for post in posts for part in post[:2] for one in part]
            assert messages
            assert all(numel for _, _, numel in messages)


def test_what_arrives_at_its_place_needs_no_other():
    schedule = find("all_gather", "ring").schedule(3)
    plan = compile_plan(schedule, 0, Layout(((0, 5), (1, 5), (2, 5))))
    assert plan.arriving_numel == plan.workspace_numel == 0


@pytest.mark.slow
def test_lending_without_its_rule_ends_in_a_deadlock(monkeypatch: pytest.MonkeyPatch):
    """As if nobody ever waited for anything between a message's arrival and its reduction."""
    rule = loans

    def careless(instructions, regions, waves):
        free = [
            item._replace(message=-1, is_receive=True)
            if isinstance(item, Wait) and not item.is_receive
            else item
            for item in instructions
        ]
        return rule(free, regions, (0,))

    monkeypatch.setattr(plan_module, "loans", careless)
    with pytest.raises(TransportError, match=r"deadlock: rank \d waits for rank \d in step \d"):
        fails_somewhere(400)
