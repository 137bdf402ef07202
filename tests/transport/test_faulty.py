"""Faults on purpose, and the checksums that find them."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringcoll
from ringcoll import Faults, LocalGroup, run_threads
from ringcoll.errors import (
    ArgumentError,
    CollectiveTimeoutError,
    CorruptMessageError,
    RingcollError,
    TransportError,
)
from ringcoll.runtime.transport import (
    AroundTransport,
    Handle,
    Hub,
    LocalTransport,
    Message,
    as_asked,
)
from ringcoll.runtime.transport.faulty import FaultyTransport
from ringcoll.schedules.algorithms import algorithms
from tests.cases.calls import Case, prepare, verdict
from tests.cases.effort import effort
from tests.cases.strategies import cases
from tests.programs import corrupt
from tests.programs.threads import run_case, together
from tests.programs.transports import CONFORMANCE

LIMIT_S = 20.0
DISORDER = Faults(delay=0.3, reorder=0.4, longest_s=0.001)
PROCESSES = ("gloo", "shared", "ucx")


class Mixed(AroundTransport):
    """Something is mixed into all tags, as in those of operations: only such messages have faults."""

    def bind(
        self, receives: Sequence[Message], sends: Sequence[Message]
    ) -> Callable[[int], list[Handle]]:
        start = self.below.bind(receives, sends)
        return lambda mixed: start(mixed ^ 1)

    def wait(self, handle: Handle, timeout_s: float) -> None:
        self.below.wait(handle, timeout_s)


def ends(world_size: int, faults: Faults | None, *, verify_messages: bool) -> list[Any]:
    """A transport for each of some threads."""
    return [
        Mixed(as_asked(end, verify_messages=verify_messages, faults=faults))
        for end in Hub(world_size).transports()
    ]


def injected(caplog: pytest.LogCaptureFixture, kind: str) -> list[str]:
    """The faults of a kind that were logged, in an order that does not depend on threads."""
    return sorted(text for text in caplog.messages if f": {kind} of a message" in text)


# --- the transports -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFORMANCE)
@pytest.mark.parametrize(
    "faults, verify_messages", [(None, True), (DISORDER, True), (DISORDER, False)]
)
def test_without_harm_they_do_what_every_transport_does(
    name: str, faults: Faults | None, verify_messages: bool
):
    transports = ends(3, faults, verify_messages=verify_messages)

    def main(rank: int) -> str:
        transports[rank].connect(10)
        return CONFORMANCE[name](transports[rank])

    assert together(3, main) == [""] * 3


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("seed", range(5))
def test_every_flip_is_found_and_nothing_else(
    caplog: pytest.LogCaptureFixture, dtype: torch.dtype, seed: int
):
    """Message by message: as many errors as flips, and each other message is right."""
    caplog.set_level(logging.INFO, logger="ringcoll")
    count = 200
    first, second = ends(2, Faults(seed=seed, flip=0.2), verify_messages=True)
    data = torch.randint(0, 2, (count, 37)).to(dtype)
    arrived = torch.zeros_like(data)
    handles = second.post([Message(0, row, 7) for row in arrived], [])
    errors: list[CorruptMessageError] = []
    flipped = 0
    for handle, row, right in zip(handles, arrived, data, strict=True):
        caplog.clear()
        first.post([], [Message(1, right, 7)])
        flipped += bool(injected(caplog, "flip"))  # the message, its checksum, or both
        try:
            second.wait(handle, LIMIT_S)
        except CorruptMessageError as error:
            errors.append(error)
        else:
            assert torch.equal(row, right)
        assert len(errors) == flipped
        second.wait(handle, LIMIT_S)  # it is over
    assert flipped > count // 10
    assert {error.peer for error in errors} == {0}
    assert all("rank 1 got a message" in str(error) for error in errors)


@pytest.mark.parametrize("faults", [Faults(drop=1, most=2), Faults(duplicate=1, most=2)])
def test_a_message_is_lost_or_doubled_and_its_checksum_too(faults: Faults):
    """What comes in its place fits its own checksum, and was right; the number tells."""
    first, second = ends(2, faults, verify_messages=True)
    data, arrived = torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.zeros(2, 3, dtype=torch.int64)
    handles = second.post([Message(0, row, 7) for row in arrived], [])
    for row in data:
        first.post([], [Message(1, row, 7)])
    if faults.duplicate:
        second.wait(handles.pop(0), LIMIT_S)
    with pytest.raises(CorruptMessageError, match="it was changed, lost or doubled on its way"):
        second.wait(handles.pop(0), LIMIT_S)


def test_each_seed_and_each_rank_has_its_own_faults(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="ringcoll")
    runs = []
    for seed in (1, 1, 2):
        caplog.clear()
        run_case(Case("all_reduce", "ring", lengths=(30,)), 3, faults=Faults(seed=seed, delay=0.3))
        runs.append(injected(caplog, "delay"))
    assert runs[0] == runs[1] != runs[2]
    by_rank = [[text[6:] for text in runs[0] if text.startswith(f"rank {r}")] for r in range(3)]
    assert by_rank[0] != by_rank[1] or by_rank[1] != by_rank[2]


def test_order_within_a_tag_is_kept_and_no_other():
    """Over many posts: what was reordered, and what was not."""
    order: list[tuple[int, int]] = []

    class Noting(LocalTransport):
        def bind(self, receives: Sequence[Message], sends: Sequence[Message]) -> Any:
            order.extend((message.tag, int(message.tensor)) for message in sends)
            return super().bind(receives, sends)

    first = FaultyTransport(Noting(Hub(2), 0), Faults(reorder=0.5))
    tensors = [torch.tensor(number) for number in range(60)]
    post = first.bind([], [Message(1, tensor, number % 3) for number, tensor in enumerate(tensors)])
    post(1 << 10)
    assert len(order) < len(tensors), "some are held back"
    with pytest.raises(CollectiveTimeoutError):
        first.wait(first.below.post([Message(1, torch.zeros(1), 0)], [])[0], 0.01)
    assert [number for _, number in order] != sorted(number for _, number in order)
    for tag in range(3):
        assert [n for t, n in order if t == tag ^ 1 << 10] == [*range(tag, 60, 3)]


@pytest.mark.parametrize("text", ["flip", "flip=much", "flop=1", "seed=0.5", "flip=2", "drop=-1"])
def test_what_are_no_faults_is_refused(text: str):
    with pytest.raises(ArgumentError):
        Faults.parse(text)


def test_faults_are_read():
    assert Faults.parse("seed=3, flip=0.5,most=1") == Faults(seed=3, flip=0.5, most=1)


def test_messages_that_the_host_does_not_see_are_refused():
    class Streamed(LocalTransport):
        waits_on_host = False

    end = Streamed(Hub(1), 0)
    assert as_asked(end) is end
    for options in ({"verify_messages": True}, {"faults": Faults()}):
        with pytest.raises(ArgumentError, match="over local the host does not see the messages"):
            as_asked(end, **options)


def test_the_variable_comes_first(monkeypatch: pytest.MonkeyPatch):
    for text, asked, verifies in (("1", False, True), ("0", True, False), ("", True, True)):
        monkeypatch.setenv("RINGCOLL_VERIFY_MESSAGES", text)
        assert as_asked(LocalTransport(Hub(1), 0), verify_messages=asked).verifies is verifies
    monkeypatch.setenv("RINGCOLL_VERIFY_MESSAGES", "yes")
    with pytest.raises(ArgumentError, match="expected 0 or 1, got yes"):
        as_asked(LocalTransport(Hub(1), 0))


# --- collectives over threads ----------------------------------------------------------


def outcomes(
    calls: Sequence[Case], world_size: int, **options: Any
) -> list[list[RingcollError | list[str]]]:
    """Of each rank: what is wrong after each call, until an error ends its run."""

    def main(group: LocalGroup) -> list[RingcollError | list[str]]:
        met: list[RingcollError | list[str]] = []
        for case in calls:
            prepared = prepare(case, group.rank(), world_size)
            try:
                work = prepared.start(ringcoll, group)
                if work is not None:
                    work.wait()
            except RingcollError as error:
                return [*met, error]
            met.append(verdict(prepared, group.rank(), world_size))
        return met

    return run_threads(main, world_size, **options)


def calls_on(world_size: int) -> st.SearchStrategy[tuple[list[Case], int]]:
    calls = st.lists(cases(world_size, styles=["flat"]), min_size=1, max_size=3)
    return st.tuples(calls, st.just(world_size))


SEVERAL = st.sampled_from([2, 3, 4, 5]).flatmap(calls_on)
_odds = st.sampled_from([0.0, 0.0, 0.02, 0.1])
FAULTS = st.builds(
    Faults,
    seed=st.integers(0, 1 << 16),
    delay=_odds,
    reorder=_odds,
    drop=st.sampled_from([0.0, 0.0, 0.0, 0.02]),  # half a second each
    duplicate=_odds,
    truncate=_odds,
    flip=_odds,
    longest_s=st.just(0.001),
)


@pytest.mark.slow
@effort(80)
@given(SEVERAL, FAULTS)
def test_with_checksums_all_is_right_or_an_error_is_raised(
    drawn: tuple[list[Case], int], faults: Faults
):
    begin = time.monotonic()
    for met in outcomes(*drawn, faults=faults, verify_messages=True, timeout_s=0.4):
        *before, last = met
        assert not any(before), "a wrong value"
        assert isinstance(last, TransportError) or last == [], last
    assert time.monotonic() - begin < LIMIT_S


@pytest.mark.slow
@effort(60)
@given(SEVERAL, st.integers(0, 1 << 16), st.booleans())
def test_delays_and_another_order_change_nothing(
    drawn: tuple[list[Case], int], seed: int, verify_messages: bool
):
    faults = Faults(seed=seed, delay=0.2, reorder=0.5, longest_s=0.001)
    for met in outcomes(*drawn, faults=faults, verify_messages=verify_messages):
        assert met == [[]] * len(drawn[0])


RING = Case("all_reduce", "ring", lengths=(24,))


def test_without_checksums_flips_are_wrong_values():
    """The test above can fail."""
    wrong = [
        met
        for seed in range(10)
        for met in outcomes([RING], 3, faults=Faults(seed=seed, flip=0.3))
        if met[-1]
    ]
    assert wrong
    assert not any(isinstance(met[-1], RingcollError) for met in wrong)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_one_flip_is_one_error_on_all_ranks(caplog: pytest.LogCaptureFixture, world_size: int):
    """For every algorithm: a run with a flip fails on each rank that still has something to do."""
    caplog.set_level(logging.INFO, logger="ringcoll")
    num_flips = 0
    for collective in ("all_reduce", "all_gather", "broadcast", "all_to_all"):
        for seed, entry in enumerate(algorithms(collective, world_size)):
            caplog.clear()
            faults = Faults(seed=seed, flip=0.4, most=1)
            numel = 24 if collective != "all_to_all" else 6
            case = Case(collective, entry.name, lengths=(numel,))
            found = outcomes([case], world_size, faults=faults, verify_messages=True)
            errors = [met[-1] for met in found if isinstance(met[-1], RingcollError)]
            flips = injected(caplog, "flip")
            assert bool(errors) == bool(flips), (entry.name, flips, found)
            assert all(met[-1] == [] for met in found if met[-1] not in errors)
            assert all(type(error) is CorruptMessageError for error in errors)
            num_flips += len(flips)
    assert num_flips > 10


def test_the_error_names_sender_receiver_operation_and_step():
    faults = Faults(seed=1, flip=0.5)
    names = re.compile(
        r"rank (\d) got a message of 64 bytes from rank (\d) with the checksum 0x[0-9a-f]{8} instead "
        r"of -?0x[0-9a-f]+: it was changed, lost or doubled on its way, in "
        r"call 1 of the group \(all_reduce\(sum, int64, 24 elements, algorithm ring\)\), step \d"
    )
    found = outcomes([RING], 3, faults=faults, verify_messages=True)
    for rank, met in enumerate(found):
        error = met[-1]
        assert type(error) is CorruptMessageError
        named = names.search(str(error))
        assert named is not None, error
        receiver, sender = map(int, named.groups())
        assert sender == (receiver - 1) % 3 == error.peer
        assert str(error).startswith(
            (f"rank {rank} got", f"rank {rank} stops: rank {receiver} got")
        )
    texts = [str(met[-1]) for met in found]
    assert any("stops: " in text for text in texts), "others know it from the receiver"


def test_without_checksums_no_message_is_added(monkeypatch: pytest.MonkeyPatch):
    posted: list[int] = []
    post = Hub.post

    def counting(hub: Hub, rank: int, receives: Any, sends: Any) -> Any:
        posted.append(len(sends))
        return post(hub, rank, receives, sends)

    monkeypatch.setattr(Hub, "post", counting)
    run_case(RING, 3)
    plain = sum(posted)
    run_case(RING, 3, verify_messages=True)
    assert sum(posted) == 3 * plain > 0


# --- processes --------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.parametrize("numel", [4, 50_000])
@pytest.mark.parametrize("transport", PROCESSES)
def test_a_flip_between_processes(pool, transport: str, numel: int):
    if transport == "ucx":
        pytest.importorskip("ucxx")
    faults = "flip=0.3,most=1"
    for caught, right in pool(2).run(corrupt.corrupted, transport, numel, faults, LIMIT_S):
        assert caught.kind == "CorruptMessageError", caught
        assert "rank 1 got a message" in caught.text
        assert re.search(r"from rank 0 .*call \d of the group \(all_reduce\(.*step \d", caught.text)
        assert caught.seconds < 10
        assert all(right)


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["truncate", "drop", "duplicate"])
@pytest.mark.parametrize("transport", PROCESSES)
def test_other_faults_between_processes(pool, transport: str, kind: str):
    if transport == "ucx":
        pytest.importorskip("ucxx")
    for caught, right in pool(2).run(corrupt.corrupted, transport, 4, f"{kind}=1", 2.0):
        known = ("CorruptMessageError", "CollectiveTimeoutError", "PeerLostError", "TransportError")
        assert caught.kind in known, caught
        # A message that has come before it is asked for is found too short before any step waits.
        assert re.search(r"rank [01] .*call \d of the group \(all_reduce\(", caught.text), (
            caught.text
        )
        assert caught.seconds < LIMIT_S
        assert all(right)


@pytest.mark.processes
@pytest.mark.parametrize("transport", PROCESSES)
def test_checksums_change_nothing(pool, transport: str):
    if transport == "ucx":
        pytest.importorskip("ucxx")
    for numel in (4, 100_000):
        faults = "delay=0.2,reorder=0.5"
        for right in pool(2).run(corrupt.undisturbed, transport, numel, faults):
            assert right == [True] * 7


@pytest.mark.processes
@pytest.mark.parametrize("by_variable", [False, True])
@pytest.mark.parametrize("transport", ["gloo", "shared"])
def test_ranks_that_do_not_all_verify_are_told(pool, transport: str, by_variable: bool):
    for caught, late in pool(2).run(corrupt.differently, transport, by_variable):
        assert caught.kind == "TransportError"
        assert f"transport {transport} with verify_messages of ringcoll" in caught.text
        assert f"transport {transport} of ringcoll" in caught.text
        assert caught.seconds < 5
        assert late.kind == "ArgumentError"
        assert "the group is in use" in late.text
