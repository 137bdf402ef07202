"""Every algorithm through plan and executor, all ranks in one thread.

Messages move when a hostile scheduler likes, and a posted receive holds garbage until
then; so an executor that is right by luck fails here. Each example is one collective on
all ranks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache, partial
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ringcoll.runtime.operation import Layout, Wait, compile_plan
from ringcoll.runtime.operation.executor import (
    Posting,
    _apart,
    _Borrower,
    _by_exchange,
    bind,
    drive,
)
from ringcoll.runtime.operation.instructions import ALIGNMENT, Post
from ringcoll.runtime.reduction import TORCH, Reduction, resolve
from ringcoll.runtime.transport import Hub
from ringcoll.schedules import Proof, Schedule, contract, verify
from ringcoll.schedules.algorithms import Algorithm, schedule_of
from ringcoll.tools.testing import Expected, bits, inputs, mismatch
from tests.cases.algorithms import EVERY, name_of, worlds_of
from tests.cases.calls import USER_OPS, Case, _input
from tests.cases.effort import effort
from tests.cases.reference import reduced
from tests.cases.stepped import RandomHub, run_together, steps

WORLD_SIZES = (1, 2, 3, 4, 5, 7, 8, 13)
ARITHMETIC = ("sum", "avg", "product", "min", "max")
DTYPES = (torch.int64, *inputs.INTEGERS, *inputs.FLOATS, *inputs.COMPLEX, torch.bool)


def operators(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype is torch.bool:
        return ("sum", "product", "min", "max", "band", "bor", "bxor")
    if dtype.is_complex:
        return ("sum", "avg", "product")
    return ARITHMETIC if dtype.is_floating_point else (*ARITHMETIC, "band", "bor", "bxor")


@dataclass(frozen=True)
class Run:
    """One collective on all ranks."""

    algorithm: Algorithm
    world_size: int
    root: int
    lengths: tuple[int, ...]
    segments: int
    in_place: bool
    dtype: torch.dtype
    op: str
    kind: str
    seed: int

    @property
    def schedule(self) -> Schedule:
        return schedule_of(
            self.algorithm.collective, self.algorithm.name, self.world_size, self.root
        )

    @property
    def case(self) -> Case:
        return Case(
            self.algorithm.collective,
            op=self.op,
            dtype=self.dtype,
            lengths=self.lengths,
            kind=self.kind,
            seed=self.seed,
        )

    def data(self, rank: int, block: int) -> Tensor:
        return _input(self.case, rank, block, self.lengths[block])


@st.composite
def runs(draw: st.DrawFn, entries: tuple[Algorithm, ...] = EVERY) -> Run:
    entry = draw(st.sampled_from(entries))
    world_size = draw(st.sampled_from(worlds_of(entry, *WORLD_SIZES)))
    rules = contract(entry.collective)
    blocks = rules.num_blocks(world_size)
    near = [0, 1, world_size - 1, world_size, world_size + 1, 2 * world_size + 1]
    numel = st.one_of(st.sampled_from(near), st.integers(0, 40))
    if entry.collective == "barrier":
        lengths = [1]
    elif entry.equal_blocks:
        lengths = [draw(numel)] * blocks
    elif blocks > 1 and draw(st.booleans()):
        # Uneven blocks, drawn by a generator: there may be many.
        random = Random(draw(st.integers(0, 1 << 16)))
        lengths = [random.choice([0, 1, 2, 5, world_size]) for _ in range(blocks)]
    else:
        lengths = [draw(numel)] * blocks
    dtype = draw(st.sampled_from(DTYPES)) if entry.collective != "barrier" else torch.uint8
    op = draw(st.sampled_from(operators(dtype))) if entry.collective != "barrier" else "bor"
    if op == "avg" and contract(entry.collective).is_prefix:
        op = "sum"  # a call would be refused
    return Run(
        algorithm=entry,
        world_size=world_size,
        root=draw(st.integers(0, world_size - 1)) if rules.rooted else 0,
        lengths=tuple(lengths),
        segments=draw(st.sampled_from([1, 1, 2, 3, 7])) if rules.common_lengths else 1,
        in_place=draw(st.booleans()) if rules.in_place else False,
        dtype=dtype,
        op=op,
        kind=draw(st.sampled_from(["exact", "exact", "rough"])),
        seed=draw(st.integers(0, 1 << 16)),
    )


def layout_of(run: Run, rank: int) -> Layout:
    """What a rank knows: all lengths, or those of its own messages."""
    k, lengths = run.world_size, dict(enumerate(run.lengths))
    if run.algorithm.collective == "all_to_all" and not run.algorithm.equal_blocks:
        lengths = {block: n for block, n in lengths.items() if rank in (block // k, block % k)}
    return Layout(tuple(lengths.items()), in_place=run.in_place)


@dataclass
class Ends:
    """What a rank has before and after."""

    source: Tensor
    target: Tensor
    before: bytes


def ends_of(run: Run, rank: int, reduction: Reduction) -> Ends:
    """A rank's flat input and output; one is part of the other where in place."""
    rules, k = contract(run.algorithm.collective), run.world_size
    mine = list(rules.inputs(rank, k, run.root))
    due = list(rules.outputs(rank, k, run.root))
    shared = run.in_place and bool(mine and due)
    parts = [run.data(rank, block) for block in mine]
    source = reduction.encode(torch.cat(parts) if parts else torch.empty(0, dtype=run.dtype))
    target = torch.full((sum(run.lengths[block] for block in due),), 99).to(source.dtype)
    if shared and len(mine) > len(due):
        start = sum(run.lengths[block] for block in mine if block < due[0])
        target = source[start : start + len(target)]
    elif shared:
        start = sum(run.lengths[block] for block in due if block < mine[0])
        target[start : start + len(source)] = source
        source = target[start : start + len(source)]
    return Ends(source, target, b"" if shared else bits(source))


def plain(dtype: torch.dtype) -> Reduction:
    """For collectives that only move data."""
    combine = resolve("sum", torch.int64).combine
    return Reduction(resolve("sum", torch.int64).operator, dtype, dtype, dtype, combine)


def execute_all(run: Run) -> tuple[list[Ends], Reduction]:
    """Run a collective on all ranks."""
    reduces = contract(run.algorithm.collective).reduces
    op = USER_OPS.get(run.op, run.op)
    reduction = resolve(op, run.dtype) if reduces else plain(run.dtype)
    hub = RandomHub(run.world_size, Random(run.seed))
    ends, executions = [], []
    for rank, transport in enumerate(hub.transports()):
        own = ends_of(run, rank, reduction)
        plan = compile_plan(
            run.schedule,
            rank,
            layout_of(run, rank),
            run.segments,
            posts_early=run.seed % 4 != 0,
        )
        workspace = torch.full((plan.workspace_numel,), 55).to(own.source.dtype)
        instructions = bind(
            plan,
            [own.source],
            [own.target],
            workspace,
            transport,
            reduction=reduction if reduces else None,
        )
        executions.append(steps(instructions.items, 5))
        ends.append(own)
    run_together(hub, executions)
    return ends, reduction


def answer_of(run: Run, block: int, num_ranks: int) -> Expected:
    """What a block has to become, on a rank to which so many ranks contribute."""
    k = run.world_size
    rules = contract(run.algorithm.collective)
    if not rules.reduces:
        return Expected(run.data(rules.owner(block, k, run.root), block))
    tensors = [run.data(rank, block) for rank in range(num_ranks)]
    user = USER_OPS.get(run.op)
    return reduced(
        run.op, tensors, exact=run.kind == "exact", function=user.fn if user is not None else None
    )


def check(run: Run) -> None:
    """Run it, and compare every rank with the reference and with each other."""
    ends, reduction = execute_all(run)
    rules, k = contract(run.algorithm.collective), run.world_size
    answers: dict[tuple[int, int], Expected] = {}
    seen: dict[tuple[int, int], bytes] = {}
    for rank, own in enumerate(ends):
        result, start = reduction.decode(own.target), 0
        for block in rules.outputs(rank, k, run.root):
            piece = result[start : start + run.lengths[block]]
            start += run.lengths[block]
            key = block, rules.contributors(rank, k)
            if key not in answers:
                answers[key] = answer_of(run, *key)
            wrong = mismatch(piece, answers[key], f"rank {rank}, block {block}")
            assert not wrong, wrong
            assert seen.setdefault(key, bits(piece)) == bits(piece), f"rank {rank} differs"
        assert not own.before or bits(own.source) == own.before, f"input of rank {rank} changed"


@pytest.mark.slow
@effort(800)
@given(runs())
def test_every_algorithm_is_right_under_a_hostile_scheduler(run: Run):
    check(run)


@pytest.mark.slow
@effort(150)
@given(runs(tuple(entry for entry in EVERY if entry.collective == "all_reduce")))
def test_every_all_reduce_is_right_under_a_hostile_scheduler(run: Run):
    check(run)


@cache
def proof_of(entry: Algorithm, world_size: int, root: int) -> Proof:
    return verify(entry.schedule(world_size, root))


@effort(120)
@given(
    runs(
        tuple(
            entry
            for entry in EVERY
            if contract(entry.collective).reduces and entry.collective != "barrier"
        )
    )
)
def test_the_verifier_knows_where_an_order_of_operands_is_kept(run: Run):
    """Operators whose result tells the order: right where the proof says so."""
    proof = proof_of(run.algorithm, run.world_size, run.root)
    for op, kept in (("user_affine", proof.rank_order), ("user_skewed", proof.left_fold)):
        if kept:
            check(Run(**{**vars(run), "dtype": torch.int64, "op": op, "kind": "exact"}))


def test_orders_that_are_not_kept_show():
    """The operators above tell orders apart, or the test above would prove nothing."""
    entry = next(e for e in EVERY if (e.collective, e.name) == ("all_reduce", "ring"))
    for op in ("user_affine", "user_skewed"):
        run = Run(entry, 4, 0, (9,), 1, False, torch.int64, op, "exact", 1)
        with pytest.raises(AssertionError, match="is wrong in"):
            check(run)


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_working_memory_of_ring_all_reduce_is_two_chunks(world_size: int):
    """At most 2n/k beyond the user's tensor."""
    numel = 1 << 22
    for in_place in (False, True):
        schedule = next(
            e for e in EVERY if (e.collective, e.name) == ("all_reduce", "ring")
        ).schedule(world_size)
        for rank in range(world_size):
            layout = Layout(((0, numel),), in_place=in_place)
            plan = compile_plan(schedule, rank, layout)
            assert plan.workspace_numel <= 2 * numel / world_size + 256


@effort(100)
@given(runs(tuple(e for e in EVERY if e.collective in ("all_reduce", "all_gather", "broadcast"))))
def test_infinities_and_nan_end_bitwise_equal_on_all_ranks(run: Run):
    """Payloads of NaN and signs of zero depend on the order of operands."""
    dtype = run.dtype if run.dtype.is_floating_point else torch.float32
    op = run.op if run.op in ARITHMETIC else "max"
    run = Run(**{**vars(run), "dtype": dtype, "op": op, "kind": "special"})
    ends, reduction = execute_all(run)
    assert len({bits(reduction.decode(own.target)) for own in ends}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("entry", EVERY, ids=name_of)
def test_every_algorithm_on_every_world_size(entry: Algorithm):
    """No luck of the draw: each pair once, on a length that leaves a tail."""
    dtype, op = (torch.uint8, "bor") if entry.collective == "barrier" else (torch.int64, "sum")
    for world_size in worlds_of(entry, *WORLD_SIZES):
        blocks = contract(entry.collective).num_blocks(world_size)
        numel = 1 if entry.collective == "barrier" else 2 * world_size + 1
        lengths = (numel,) * blocks
        for root in {0, world_size - 1} if contract(entry.collective).rooted else {0}:
            check(Run(entry, world_size, root, lengths, 1, False, dtype, op, "exact", world_size))


def test_a_time_limit_is_for_all_waits_of_an_operation_together():
    limits: list[float] = []

    def wait(handle: object, limit_s: float) -> None:
        limits.append(limit_s)
        time.sleep(0.05)

    waits: Any = [
        Posting(lambda tag: [object()] * 2, [], []),
        *(Wait(message, 1, 0, is_receive=True) for message in range(2)),
    ]
    watch: Any = SimpleNamespace(wait=None)
    drive(waits, 0, wait, time.monotonic() + 10, watch)
    assert limits[1] <= limits[0] - 0.05


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("offset", [0, 1, 63, 64, 129])
def test_working_memory_is_aligned_as_the_users_tensor(dtype: torch.dtype, offset: int):
    memory = torch.empty(1000, dtype=dtype)
    for tensor in (memory[offset:], torch.empty(1000, dtype=torch.float32)[offset:]):
        rest = memory[_apart(tensor, memory) :]
        places = [one.data_ptr() // one.itemsize % ALIGNMENT for one in (tensor, rest)]
        assert places[0] == places[1]
        assert rest.numel() > memory.numel() - ALIGNMENT


def test_messages_of_different_lengths_have_different_tags():
    schedule = schedule_of("broadcast", "linear", 2)
    (transport, _) = Hub(2).transports()
    tags = set()
    for numel in range(1, 1000):
        plan = compile_plan(schedule, 0, Layout(((0, numel),)))
        memory = torch.empty(numel)
        program = bind(plan, [memory], [memory], memory, transport)
        tags |= {
            message.tag
            for item in program.items
            if isinstance(item, Posting)
            for message in item.sends
        }
    assert len(tags) == 999
    assert all(0 <= tag < 1 << 31 for tag in tags)


def test_a_wait_whose_time_is_up_still_looks():
    limits = []
    watch = SimpleNamespace(wait=None)
    item, over = Wait(0, 1, 0, True), Wait(1, 1, 0, False)
    drive(
        [Posting(lambda tag: [object(), None], [], []), item, over],
        0,
        lambda handle, limit_s: limits.append(limit_s),
        time.monotonic() - 5.0,
        watch,
    )
    assert watch.wait is item
    (limit_s,) = limits  # a message that is over has no handle
    assert 0 < limit_s < 0.1


@pytest.mark.parametrize("remote", [(0,), (1,), (0, 2), (0, 1, 2)])
def test_lent_messages_are_read_piece_by_piece(remote: tuple[int, ...]):
    """What no view reaches is read into memory for a piece: of 1.25 MiB, two pieces."""
    numel = 5 << 16
    sources = [torch.arange(numel, dtype=torch.float32) % 1021 * 3**place for place in range(3)]
    sizes: list[int] = []

    def read(source: Tensor, start: int, into: Tensor) -> None:
        sizes.append(into.numel())
        into.copy_(source[start : start + into.numel()])

    released: list[Tensor] = []
    lender: Any = SimpleNamespace(
        view=lambda handle, dtype: None, read=read, release=released.append
    )
    own = [torch.empty(0) if place in remote else source for place, source in enumerate(sources)]
    into = torch.empty(numel)
    add = partial(TORCH.bind, resolve("sum", torch.float32))
    borrower = _Borrower(lender, remote, add, into, own, None, None)
    borrower([sources[place] for place in remote])
    assert torch.equal(into, sources[0] + sources[1] + sources[2])
    assert max(sizes) * into.itemsize <= 1 << 20
    assert sum(sizes) == numel * len(remote)
    assert len(released) == len(remote)


@pytest.mark.parametrize("longest", range(3))
@pytest.mark.parametrize("above", [0, 1])
def test_an_exchange_needs_all_its_messages_to_be_short(longest: int, above: int):
    """The longest message may be the own one or another rank's: all ranks have to decide alike."""
    schedule = schedule_of("all_gather", "direct", 3)
    lengths = [1, 1, 1]
    lengths[longest] = 5 + above
    layout = Layout(tuple(enumerate(lengths)))
    for rank in range(3):
        transport: Any = SimpleNamespace(exchanges_to=5 * 4 + 3)
        plan = compile_plan(schedule, rank, layout)
        arrivals = _by_exchange(plan, transport, torch.float32)
        assert arrivals == ({} if above else {0: (0, 0), 1: (0, 1)})
        transport.exchanges_to = 0
        assert _by_exchange(plan, transport, torch.float32) == {}


@pytest.mark.parametrize("world_size, numbers", [(2, [0, 2]), (3, [4, 5])])
def test_messages_of_a_second_exchange_are_numbered_on(world_size: int, numbers: list[int]):
    """Two ranks exchange twice; three send each other different parts first: two each way."""
    schedule = schedule_of("all_reduce", "two_shot", world_size)
    transport: Any = SimpleNamespace(exchanges_to=64)
    for rank in range(world_size):
        plan = compile_plan(schedule, rank, Layout(((0, 6),)))
        posts = [i for i, item in enumerate(plan.instructions) if isinstance(item, Post)]
        expected = (
            [(posts[0], 0), (posts[1], 0)] if world_size == 2 else [(posts[1], 0), (posts[1], 1)]
        )
        arrivals = _by_exchange(plan, transport, torch.float32)
        assert arrivals == dict(zip(numbers, expected, strict=True))
