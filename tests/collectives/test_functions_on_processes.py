"""Every collective on real processes, against torch's own over gloo and the reference.

Batches of calls on several groups, some of them asynchronous and so in flight together.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings

from ringcoll.schedules import contract
from ringcoll.schedules.algorithms import algorithms
from ringcoll.tools.testing import inputs as data
from tests.cases.batches import OFTEN_FLAT, Batch, batches, check_batch
from tests.cases.calls import Case
from tests.cases.effort import effort
from tests.cases.strategies import cases, operators
from tests.programs.ranks import accepted_by_gloo

pytestmark = pytest.mark.processes


def check(
    pool, world_size: int, batch: Batch, *, native: bool = True, transport: str = "gloo"
) -> None:
    check_batch(pool(world_size, transport=transport), batch, native=native)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("transport", ["gloo", "ucx", "shared"])
def test_batches_of_calls_on_several_groups(pool, transport: str, world_size: int):
    @effort(60 if transport == "gloo" else 40, shrink=False)
    @given(batches(world_size))
    def tried(batch: Batch) -> None:
        check(pool, world_size, batch, transport=transport)

    tried()


@pytest.mark.parametrize("world_size", [3, 4])
@pytest.mark.parametrize("collective", ["all_reduce", "reduce", "reduce_scatter"])
def test_every_operator_and_dtype(pool, collective: str, world_size: int):
    """No luck of the draw: each pair once, in one batch."""
    batch = [
        ("world", Case(collective, op=op, dtype=dtype, lengths=(7,), kind=kind, root=1, seed=seed))
        for seed, dtype in enumerate((*data.INTEGERS, *data.FLOATS, *data.COMPLEX, torch.bool))
        for op in operators(dtype)
        for kind in ("exact", "rough")
    ]
    check(pool, world_size, batch)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_algorithm_in_pieces_through_shared_memory(pool, world_size: int):
    """Segments that travel in places for pieces, are lent, and go to several ranks; on 2 cores some ranks are late."""
    numel = 60_000 + world_size  # 480 KB; a segment is longer than what travels in an entry
    batch = [
        (
            "world",
            Case(
                entry.collective,
                entry.name,
                lengths=(numel,),
                root=world_size - 1 if contract(entry.collective).rooted else 0,
                segment_bytes=segment_bytes,
                async_op=segment_bytes is None,
            ),
        )
        for entry in algorithms(world_size=world_size)
        for segment_bytes in (50_000, 90_000, None)
    ]
    check(pool, world_size, batch, native=False, transport="shared")


@pytest.mark.parametrize(
    "transport, world_size",
    [("gloo", 3), ("ucx", 3), ("shared", 2), ("shared", 4)],
)
def test_every_algorithm_at_every_length(pool, transport: str, world_size: int):
    """Each algorithm in and out of place, from every root, up to a length that is cut."""
    near: tuple[int, ...] = (0, 1, world_size - 1, world_size, world_size + 1, 1000)
    if transport != "gloo":  # the plans are those over gloo
        near = near[-2:]
    batch = [
        (
            "world",
            Case(
                entry.collective,
                entry.name,
                lengths=(numel,),
                root=root,
                in_place=in_place,
                segment_bytes=64 if numel % 2 else None,
                dtype=torch.float32,
                kind="rough",
                async_op=numel == 1000,
            ),
        )
        for entry in algorithms(world_size=world_size)
        for rules in (contract(entry.collective),)
        for numel in near
        for root in (range(world_size) if rules.rooted and numel == world_size + 1 else (0,))
        for in_place in sorted({False, rules.in_place})
    ]
    for start in range(0, len(batch), 100):
        check(pool, world_size, batch[start : start + 100], transport=transport)


def test_long_vectors(pool):
    """Above the limits at which algorithms change, and many segments in flight."""
    batch = [
        (
            "world",
            Case(
                collective,
                name,
                lengths=(300_001,) if contract(collective).num_blocks(4) == 1 else (70_001,),
                dtype=torch.float32,
                segment_bytes=segment_bytes,
            ),
        )
        for collective in ("all_reduce", "broadcast", "all_gather", "reduce_scatter", "reduce")
        for name in ("auto", "ring", "double_tree", "chain")
        if name == "auto" or name in [entry.name for entry in algorithms(collective)]
        for segment_bytes in (None, 1 << 16)
    ]
    # The reference of so many sums takes longer than the sums.
    moved = [item for item in batch if not contract(item[1].collective).reduces]
    summed = [
        (name, Case(**{**vars(case), "dtype": torch.int64}))
        for name, case in batch
        if contract(case.collective).reduces
    ]
    check(pool, 4, [*moved, *summed])


# --- the usual defects of small implementations ----------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_defect_the_tail_is_dropped(pool, world_size: int):
    """numel // k: lengths that k does not divide, down to one element."""
    batch = [
        ("world", Case("all_reduce", entry.name, lengths=(numel,)))
        for entry in algorithms("all_reduce", world_size)
        for numel in range(1, 2 * world_size + 2)
    ]
    check(pool, world_size, batch)


@pytest.mark.parametrize("op", ["max", "min", "product", "band"])
def test_defect_zeros_are_padded(pool, op: str):
    """Zero is not neutral: MAX of negative numbers, MIN of positive ones, PRODUCT, BAND."""
    batch = [
        ("world", Case("all_reduce", entry.name, op=op, lengths=(numel,), dtype=dtype, seed=seed))
        for entry in algorithms("all_reduce", 4)
        for seed, (numel, dtype) in enumerate(
            [(1, torch.int32), (3, torch.uint8), (5, torch.int32)]
        )
    ]
    check(pool, 4, batch)
    assert pool(4).run(reduce_one_sign, op) == [[]] * 4


def reduce_one_sign(op: str) -> list[str]:
    """Numbers of one sign only, so that a zero of padding would win."""
    import torch.distributed as dist

    import ringcoll

    wrong = []
    sign = -1 if op == "max" else 1
    for entry in algorithms("all_reduce", 4):
        for numel in (1, 2, 3, 5, 6, 7):
            tensor = sign * (torch.arange(numel) + dist.get_rank() + 1)
            every = torch.stack([sign * (torch.arange(numel) + rank + 1) for rank in range(4)])
            ringcoll.all_reduce(tensor, op, algorithm=entry.name)
            if op == "band":
                wanted = every[0] & every[1] & every[2] & every[3]
            else:
                wanted = {"max": every.amax(0), "min": every.amin(0), "product": every.prod(0)}[op]
            if not torch.equal(tensor, wanted):
                wrong.append(f"{entry.name}, {numel}: {tensor.tolist()}, {wanted.tolist()}")
    return wrong


@pytest.mark.parametrize("world_size", [3, 4])
def test_defect_every_rank_sends_first_and_blocks(pool, world_size: int):
    """16 MiB: far more than a socket takes before the peer reads. Three ranks where four cannot."""
    for entry in algorithms("all_reduce", world_size):
        if world_size == 3 and not entry.restriction(4):
            continue
        results = pool(world_size).run(sum_of_many, entry.name, 4 << 20)
        assert results == [True] * world_size, entry.name


def sum_of_many(algorithm: str, numel: int) -> bool:
    import torch.distributed as dist

    import ringcoll

    tensor = torch.full((numel,), float(dist.get_rank() + 1))
    ringcoll.all_reduce(tensor, algorithm=algorithm)
    k = dist.get_world_size()
    return bool((tensor == k * (k + 1) / 2).all())


def test_defect_the_buffer_that_is_sent_is_received_into(pool):
    """send_buf = recv_buf: every rank's data are different, and so is every element."""
    batch = [
        (
            "world",
            Case(
                collective, entry.name, lengths=(1001,), in_place=in_place, seed=seed, form="single"
            ),
        )
        for collective in ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
        for entry in algorithms(collective, 4)
        for in_place in (False, True)
        for seed in (0, 1)
    ]
    check(pool, 4, batch)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_defect_the_whole_tensor_circulates(pool, world_size: int):
    """The ring sends 2 (k - 1) / k of the bytes, counted where they leave the library."""
    numel, k = 1200, world_size
    for sent, messages in pool(k).run(count_sends, "ring", numel):
        assert sent == 2 * (k - 1) * numel // k
        assert messages == 2 * (k - 1)


def count_sends(algorithm: str, numel: int) -> tuple[int, int]:
    import torch.distributed as dist

    import ringcoll
    from ringcoll.runtime.transport import GlooTransport

    ringcoll.all_reduce(torch.ones(numel), algorithm=algorithm)  # it may send more
    counts = Counter[str]()
    bind = GlooTransport.bind

    def counting(self, receives, sends):
        counts["messages"] += len(sends)
        counts["elements"] += sum(message.tensor.numel() for message in sends)
        return bind(self, receives, sends)

    GlooTransport.bind = counting  # type: ignore[method-assign]
    try:
        ringcoll.all_reduce(torch.full((numel,), dist.get_rank()), algorithm=algorithm)
    finally:
        GlooTransport.bind = bind  # type: ignore[method-assign]
    return counts["elements"], counts["messages"]


def test_defect_an_even_number_of_ranks_only(pool):
    batch = [
        (
            name,
            Case(
                entry.collective,
                entry.name,
                lengths=(4,) if entry.collective != "barrier" else (1,),
            ),
        )
        for entry in algorithms(world_size=3)
        for name in ("world", "mixed")
    ]
    assert {entry.collective for entry in algorithms()} == {case.collective for _, case in batch}
    check(pool, 3, batch)


@pytest.mark.parametrize("world_size", [3, 4])
def test_defect_torch_chunk_gives_fewer_chunks_than_ranks(pool, world_size: int):
    """5 elements in 4 chunks are 2 + 2 + 1 by torch.chunk, 9 in 4 are 3 + 3 + 3."""
    lengths = [n for n in range(1, 12) if len(torch.zeros(n).chunk(world_size)) < world_size]
    assert lengths
    batch = [
        ("world", Case("all_reduce", entry.name, lengths=(numel,)))
        for entry in algorithms("all_reduce", world_size)
        for numel in lengths
    ]
    check(pool, world_size, batch)


def test_the_oracle_is_asked_often_enough():
    """Most of the cases that are drawn above are compared with torch's own collective."""
    asked = Counter[bool]()

    @settings(max_examples=450)  # a sixth of them are prefixes, which torch has not
    @given(cases(4, styles=OFTEN_FLAT))
    def count(case: Case) -> None:
        asked[accepted_by_gloo(case, 4)] += 1

    count()
    assert asked[True] > 60, asked
