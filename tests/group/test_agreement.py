"""The ranks agree on one table, by which ``"auto"`` chooses."""

from __future__ import annotations

import inspect
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ringcoll
from ringcoll import UserOp
from ringcoll.errors import (
    CollectiveTimeoutError,
    PeerLostError,
    RulesError,
    TransportError,
    TuningFileError,
)
from ringcoll.runtime.group import Communicator, agreement, message_costs
from ringcoll.runtime.group.agreement import agree
from ringcoll.runtime.group.message_costs import measure
from ringcoll.runtime.machine import settings
from ringcoll.runtime.reduction import resolve
from ringcoll.runtime.transport import Hub, LocalTransport, costs_of
from ringcoll.runtime.user_files import Tuned, forced_rules, update_tables
from ringcoll.schedules import OperandOrder
from ringcoll.schedules.cost import (
    Parameters,
    Table,
    built_in,
    choose,
    crowded_parameters,
    parse_rules,
)
from tests.programs.threads import together

SIZES = (0, 4, 1 << 10, 1 << 16, 1 << 20, 1 << 26)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variables, no file of this user, nothing measured before or afterwards."""
    for name in ("ALGORITHM", "DEBUG", "TRANSPORT"):
        monkeypatch.delenv(f"RINGCOLL_{name}", raising=False)
    monkeypatch.setenv("RINGCOLL_TUNING", "off")
    monkeypatch.setattr(agreement, "_measured", {})


def table(world_size: int, **more: Any) -> Table:
    found = crowded_parameters(costs_of("gloo"), world_size, cores=world_size)
    return Table(transport="gloo", world_size=world_size, parameters=found, **more)


# --- agreeing -------------------------------------------------------------------------


def on_ranks(world_size: int, function: Callable[[int, Any, dist.Store], Any]) -> list[Any]:
    """Call a function on threads; what it returned or raised on each."""
    hub, store = Hub(world_size), dist.HashStore()
    return together(world_size, lambda rank: function(rank, hub.transports()[rank], store))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_all_ranks_have_rank_0s_table(world_size: int) -> None:
    start = time.perf_counter()
    found = on_ranks(world_size, lambda rank, t, s: agree(t, s, 30.0, measurable=True))
    assert time.perf_counter() - start < 20  # the machine may be busy with other things
    assert len({one.dumps() for one in found}) == 1
    assert found[0].source == ("measured" if world_size > 1 else "built-in")
    assert [one.announces for one in found] == [rank == 0 for rank in range(world_size)]
    for nbytes in SIZES:
        chosen = {choose("all_reduce", nbytes, world_size, one).algorithm for one in found}
        assert len(chosen) == 1


def test_what_other_ranks_measure_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(transport: Any, timeout_s: float, **more: Any) -> Parameters:
        found = measure(transport, timeout_s, **more)
        values = dict.fromkeys(found.__slots__, 10.0 ** (-(3 + transport.rank)))
        return Parameters(**values)

    monkeypatch.setattr(agreement, "measure", odd)
    found = on_ranks(4, lambda rank, t, s: agree(t, s, 30.0, measurable=True))
    assert {one.parameters.alpha_s for one in found} == {1e-3}


def test_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(transport: Any, timeout_s: float, **more: Any) -> Parameters:
        calls.append(transport.rank)
        return measure(transport, timeout_s, **more)

    monkeypatch.setattr(agreement, "measure", counted)
    first = on_ranks(3, lambda rank, t, s: agree(t, s, 30.0, measurable=True))
    second = on_ranks(3, lambda rank, t, s: agree(t, s, 30.0, measurable=True))
    assert sorted(calls) == [0, 1, 2]
    assert first[0].parameters == second[2].parameters
    on_ranks(2, lambda rank, t, s: agree(t, s, 30.0, measurable=True))
    assert sorted(calls) == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    "name,ordered,verifies,source",
    [
        ("gloo", False, False, "measured"),
        ("gloo", True, False, "built-in"),
        ("gloo", False, True, "built-in"),
        ("local", False, False, "built-in"),
    ],
    ids=["plain", "without tags", "with checksums", "in one process"],
)
def test_only_a_plain_transport_between_processes_is_measured(
    name: str, ordered: bool, verifies: bool, source: str
) -> None:
    class Some(LocalTransport):
        pass

    Some.name, Some.ordered, Some.verifies = name, ordered, verifies
    found = on_ranks(3, lambda rank, t, s: agree(Some(t.hub, rank), s, 30.0))
    assert {one.source for one in found} == {source}


def test_not_measured_where_it_is_not_worth_it() -> None:
    found = on_ranks(3, lambda rank, t, s: agree(t, s, 30.0))
    assert {one.source for one in found} == {"built-in"}
    assert found[0].tuned == built_in("local", costs_of("local"), 3).tuned


def test_built_in_costs_choose() -> None:
    for transport, algorithm in (("gloo", "rabenseifner"), ("nccl", "direct")):
        choice = choose("all_reduce", 1 << 24, 2, built_in(transport, costs_of(transport), 2))
        assert choice.algorithm == algorithm
        assert choice.reason.startswith("the least predicted time (costs: built-in)")
    (rule,) = built_in("nccl", costs_of("nccl"), 4, hosts=2).tuned
    assert (rule.algorithm, str(rule)) == (
        "hierarchical",
        "all_reduce:32K-inf:hierarchical:hosts=2-inf",
    )


def test_measured_costs_make_sense() -> None:
    (found, *_) = on_ranks(4, lambda rank, t, s: measure(t, 30.0))
    assert 0 < found.alpha_s <= found.crowded_alpha_s < 1
    assert 0 < found.gamma_s_per_byte <= found.beta_s_per_byte <= found.crowded_beta_s_per_byte
    assert found.overhead_s <= found.alpha_s


@pytest.mark.parametrize(
    "world_size,more,crowd",
    [
        (4, {}, 1.0),
        (4, {"cores": 2}, 2.0),
        (4, {"cores": 2, "hosts": 2}, 1.0),
        (4, {"cores": 1, "hosts": 3}, 2.0),
        (3, {"cores": 2}, 1.5),
        (2, {"cores": 4}, 1.0),
    ],
)
def test_ranks_that_share_cores_add_as_much_slower(
    world_size: int, more: dict[str, Any], crowd: float
) -> None:
    (found, *_) = on_ranks(world_size, lambda rank, t, s: measure(t, 30.0, **more))
    assert found.crowded_gamma_s_per_byte == pytest.approx(crowd * found.gamma_s_per_byte)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """CPU tensors are taken for CUDA tensors; returns how often streams were waited for."""
    settled: list[str] = []
    monkeypatch.setattr(message_costs, "_is_gpu", lambda device: True)
    monkeypatch.setattr(message_costs, "settle", lambda devices: settled.extend(map(str, devices)))
    return settled


def test_on_a_gpu_no_message_is_read_while_time_runs(
    gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams are waited for in every step, and ping-pong has as many rounds as all know."""
    running = threading.local()

    def timed(function: Callable[[], object]) -> float:
        running.now = True
        seconds = time_of(function)
        running.now = False
        return seconds

    def hear(exchange: Any) -> int:
        assert not getattr(running, "now", False)
        return read(exchange)

    time_of, read = message_costs._timed, message_costs._Exchange.hear
    monkeypatch.setattr(message_costs, "_timed", timed)
    monkeypatch.setattr(message_costs._Exchange, "hear", hear)
    for world_size in (2, 3):
        gpu.clear()
        found = on_ranks(world_size, lambda rank, t, s: measure(t, 30.0))
        assert all(isinstance(costs, Parameters) for costs in found)
        assert 0 < found[0].alpha_s <= found[0].crowded_alpha_s < 1
        round_trips, shifts = 3 * 3, 2 * 3
        steps = 2 * 2 * round_trips + world_size * shifts
        assert len(gpu) >= steps + 2 * world_size * message_costs._ADDITIONS


def test_how_costs_of_a_gpu_are_made_of_times(
    gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An addition takes the launch and its bytes; half of the ranks' additions are disturbed."""
    short, long = message_costs._ADDED, message_costs._ADDED_ON_GPU
    numbers = iter(range(10_000))

    def timed(function: Callable[[], object]) -> float:
        function()
        if function.__name__ == "there_and_back":
            return 4e-4
        if function.__name__ != "add":
            return 5e-4
        nbytes = inspect.getclosurevars(function).nonlocals["left"].nbytes
        slower = 1.0 if next(numbers) % 4 == 0 else 2.0
        return 1e-5 if nbytes == short else 1e-5 + slower * 1e-9 * (long - short)

    monkeypatch.setattr(message_costs, "_timed", timed)
    found = message_costs._adding(torch.device("cpu"), 3.0)
    assert found == pytest.approx((1e-9, 2e-9))
    (costs, *_) = on_ranks(2, lambda rank, t, s: measure(t, 30.0))
    assert costs.alpha_s == 2e-4
    assert costs.beta_s_per_byte == costs.gamma_s_per_byte == pytest.approx(1e-9)
    assert costs.crowded_gamma_s_per_byte == pytest.approx(2e-9)


def agreed_on(device: torch.device | None, rank: int, transport: Any, store: dist.Store) -> Table:
    return agree(transport, store, 30.0, measurable=True, device=device)


def test_what_was_measured_for_one_kind_of_device_is_not_used_for_another(
    gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[str] = []

    def noted(transport: Any, timeout_s: float, **more: Any) -> Parameters:
        devices.append(str(more.pop("device")))
        return measure(transport, timeout_s, **more)

    monkeypatch.setattr(agreement, "measure", noted)
    for device in (torch.device("cuda", 0), None, torch.device("cuda", 0)):
        kind = "cpu" if device is None else "cuda"
        for found in on_ranks(2, partial(agreed_on, device)):
            assert (found.device, found.source) == (kind, "measured")
            assert found.origin == f"measured with {kind.upper()} tensors"
    assert devices == ["cuda:0"] * 2 + ["cpu"] * 2, "and each is measured once"


def test_built_in_costs_are_of_the_groups_device() -> None:
    device = torch.device("cuda", 0)
    for found in on_ranks(2, lambda rank, t, s: agree(t, s, 30.0, device=device)):
        assert (found.device, found.source) == ("cuda", "built-in")


def test_how_costs_are_made_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message takes half a round trip, and in a crowd what the median rank's step takes."""
    seconds = iter(range(10_000))

    def timed(function: Callable[[], object]) -> float:
        function()
        if function.__name__ == "there_and_back":
            return 4e-4
        return 1e-3 if next(seconds) % 8 == 7 else 5e-4

    monkeypatch.setattr(message_costs, "_timed", timed)
    (found, *_) = on_ranks(2, lambda rank, t, s: measure(t, 30.0))
    assert found.alpha_s == 2e-4
    assert found.crowded_alpha_s == 5e-4
    assert found.overhead_s == 0


@pytest.mark.parametrize(
    "further_s,overhead_s", [(1e-5, 1e-5), (-1e-5, 0.0), (1e-3, 2e-4)], ids=["less", "none", "more"]
)
def test_each_further_message_costs_its_part_of_what_several_take_longer(
    monkeypatch: pytest.MonkeyPatch, further_s: float, overhead_s: float
) -> None:
    def message_s(exchange: Any, nbytes: int, most: int, number: int = 1) -> float:
        return 2e-4 + (number - 1) * further_s

    def crowded_s(exchange: Any, distances: Any, nbytes: int, most: int, number: int = 1) -> float:
        return 3e-4 + (number - 1) * crowded_further_s

    monkeypatch.setattr(message_costs, "_message_s", message_s)
    monkeypatch.setattr(message_costs, "_crowded_s", crowded_s)
    cases = ((2e-3, overhead_s), (4e-6, min(overhead_s, 4e-6 / 1.5)))
    for crowded_further_s, expected_s in cases:  # noqa: B007  # read above
        (found, *_) = on_ranks(3, lambda rank, t, s: measure(t, 30.0, cores=2))
        assert found.alpha_s == 2e-4
        assert found.overhead_s == pytest.approx(expected_s), "of two, or of all that share cores"


def test_a_byte_costs_its_part_of_what_long_messages_take_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def message_s(exchange: Any, nbytes: int, most: int, number: int = 1) -> float:
        return 2e-4 if nbytes == 8 else 2e-4 + 1e-9 * nbytes * number

    def crowded_s(exchange: Any, distances: Any, nbytes: int, most: int, number: int = 1) -> float:
        return 5e-4 if nbytes == 8 else 5e-4 + 4e-9 * nbytes * number

    monkeypatch.setattr(message_costs, "_message_s", message_s)
    monkeypatch.setattr(message_costs, "_crowded_s", crowded_s)
    monkeypatch.setattr(message_costs, "_adding", lambda device, crowd: (1e-10, 2e-10))
    (found, *_) = on_ranks(3, lambda rank, t, s: measure(t, 30.0))
    assert found.beta_s_per_byte == pytest.approx(1e-9)
    assert found.crowded_beta_s_per_byte == pytest.approx(4e-9)
    assert (found.gamma_s_per_byte, found.crowded_gamma_s_per_byte) == (1e-10, 2e-10)
    monkeypatch.setattr(message_costs, "_adding", lambda device, crowd: (2e-9, 5e-9))
    (found, *_) = on_ranks(3, lambda rank, t, s: measure(t, 30.0))
    assert found.beta_s_per_byte == 2e-9, "a message reads and writes each byte, as adding does"
    assert found.crowded_beta_s_per_byte == pytest.approx(4e-9)


class TwoWays(LocalTransport):
    """A transport with two ways for a long message."""

    direct_from: int | None = 1 << 20


@pytest.mark.parametrize(
    "kibibytes,expected",
    [((), 512), ((512,), 512), ((512, 256), 256), ((512, 256, 128, 64), 64), ((256, 128, 64), 512)],
    ids=["never", "long", "longer than half", "always", "but for the longest"],
)  # fmt: skip
def test_the_quicker_way_of_a_long_message(
    monkeypatch: pytest.MonkeyPatch, kibibytes: tuple[int, ...], expected: int
) -> None:
    def swap_s(exchange: Any, nbytes: int) -> float:
        is_read = exchange.transport.direct_from <= nbytes
        return 1e-4 if is_read == (nbytes >> 10 in kibibytes) else 2e-4

    monkeypatch.setattr(message_costs, "_swap_s", swap_s)
    found = on_ranks(3, lambda rank, t, s: measure(TwoWays(t.hub, rank), 30.0))
    never = 512 not in kibibytes  # a byte more than the longest that was copied sooner
    assert {one.direct_from for one in found} == {(expected << 10) + never}
    assert {one.slice_bytes for one in found} == {0}
    # Of several hosts it would say how quick the links between them are.
    found = on_ranks(3, lambda rank, t, s: measure(TwoWays(t.hub, rank), 30.0, hosts=2))
    assert {one.direct_from for one in found} == {0}
    found = on_ranks(3, lambda rank, t, s: measure(t, 30.0))
    assert {one.direct_from for one in found} == {0}


class InSlices(TwoWays):
    """A transport that moves long messages best in slices of 512 KiB, or less."""

    slice_bytes: int | None = 512 << 10


@pytest.mark.parametrize(
    "whole_s,half_s,expected",
    [(2.0, 2.0, 512), (2.0, 0.9, 256), (0.8, 2.0, 512), (0.7, 2.0, 0)],
    ids=["slices", "shorter slices", "whole messages are hardly quicker", "whole messages"],
)
def test_slices_are_as_long_as_is_quickest(
    monkeypatch: pytest.MonkeyPatch, whole_s: float, half_s: float, expected: int
) -> None:
    """Ranks 1 and 2 measure otherwise, and follow rank 0."""

    def swap_s(exchange: Any, nbytes: int, number: int = 1) -> float:
        assert nbytes * number == 2 << 20 or number == 1
        of_slices = {2 << 20: whole_s, 512 << 10: 1.0, 256 << 10: half_s}.get(nbytes, 1.0)
        return 1.0 / of_slices if exchange.rank else of_slices

    monkeypatch.setattr(message_costs, "_swap_s", swap_s)
    found = on_ranks(3, lambda rank, t, s: measure(InSlices(t.hub, rank), 30.0))
    assert {one.slice_bytes for one in found} == {expected << 10}
    for costs in found:
        is_cut = expected > 0
        assert (costs.direct_from > 512 << 10) or not is_cut, "slices are copied"
        assert (costs.cached_beta_s_per_byte > 0) == is_cut
        assert costs.crowded_cached_beta_s_per_byte >= costs.cached_beta_s_per_byte


class Slow(LocalTransport):
    """A transport on which each message takes the sender 2 ms."""

    def bind(self, receives: Any, sends: Any) -> Any:
        start = super().bind(receives, sends)

        def slowly(number: int) -> Any:
            time.sleep(2e-3 * len(sends))
            return start(number)

        return slowly


def test_messages_are_bound_once_and_several_are_under_way_at_once() -> None:
    (found, *_) = on_ranks(3, lambda rank, t, s: measure(Slow(t.hub, rank), 30.0))
    assert found.alpha_s >= 2e-3
    assert 1e-3 < found.overhead_s <= found.alpha_s
    assert found.crowded_alpha_s >= 2e-3


def test_ranks_that_agree_log_as_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RINGCOLL_DEBUG", "loud")
    on_ranks(1, lambda rank, t, s: agree(t, s, 30.0))
    (record,) = caplog.records
    assert record.getMessage().startswith("RINGCOLL_DEBUG is 'loud'")


def forced_on(monkeypatch: pytest.MonkeyPatch, texts: dict[int, str]) -> None:
    """Let ranks, which here are threads, have variables of their own."""
    monkeypatch.setattr(
        settings, "forced_text", lambda: texts.get(int(threading.current_thread().name), "")
    )


def on_named_ranks(world_size: int, timeout_s: float = 30.0) -> list[Any]:
    def main(rank: int, transport: Any, store: dist.Store) -> Any:
        threading.current_thread().name = str(rank)
        return agree(transport, store, timeout_s)

    return on_ranks(world_size, main)


def test_rank_0s_variable_counts_for_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forced_on(monkeypatch, {0: "ring", 1: "tree", 2: "ring"})
    found = on_named_ranks(3)
    for one in found:
        assert choose("all_reduce", 4, 3, one).algorithm == "ring"
    warnings = [item.getMessage() for item in caplog.records if item.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "rank 1: RINGCOLL_ALGORITHM is 'tree' here and 'ring' on rank 0" in warnings[0]


def test_a_rank_reads_no_files_that_only_rank_0_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """To read rules runs the files that they name (docs/security.md)."""
    forced_on(monkeypatch, {0: "ring", 1: "ring", 2: "tree"})
    readers = list[tuple[str, str]]()

    def noted(text: str) -> Any:
        readers.append((threading.current_thread().name, text))
        return forced_rules(text)

    monkeypatch.setattr(agreement, "forced_rules", noted)
    on_named_ranks(3)
    assert sorted(readers) == [("0", "ring"), ("1", "ring")]


def test_bad_rules_on_rank_0_are_an_error_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    forced_on(monkeypatch, {0: "rong"})
    for error in on_named_ranks(3):
        assert isinstance(error, RulesError)
        assert "RINGCOLL_ALGORITHM: no such algorithm" in str(error)


def test_bad_rules_elsewhere_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    forced_on(monkeypatch, {1: "rong"})
    assert all(isinstance(one, Table) for one in on_named_ranks(3))


def test_a_file_is_used_and_nothing_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "tuning.json"
    own = replace(table(3, tuned=parse_rules("all_reduce:*:direct:k=3")), transport="local")
    update_tables(path, Tuned.now(own))
    monkeypatch.setenv("RINGCOLL_TUNING", str(path))
    monkeypatch.setattr(agreement, "measure", None)
    found = on_ranks(3, lambda rank, t, s: agree(t, s, 30.0, measurable=True))
    assert {one.source for one in found} == {str(path)}
    assert choose("all_reduce", 1 << 26, 3, found[2]).algorithm == "direct"


def test_a_broken_file_is_an_error_on_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_text("{")
    monkeypatch.setenv("RINGCOLL_TUNING", str(path))
    for error in on_ranks(2, lambda rank, t, s: agree(t, s, 30.0)):
        assert isinstance(error, TuningFileError)
        assert str(path) in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_rank_that_does_not_come_is_named(missing: int) -> None:
    def main(rank: int, transport: Any, store: dist.Store) -> Any:
        return None if rank == missing else agree(transport, store, 1.0, measurable=True)

    start = time.perf_counter()
    found = on_ranks(3, main)
    assert time.perf_counter() - start < 20
    assert found.pop(missing) is None
    waited_for = []
    for error in found:
        assert isinstance(error, CollectiveTimeoutError)
        waited_for.append(error.peer)
    # Rank 0 knows who is missing; the others wait for rank 0.
    assert waited_for == ([missing, 0] if missing else [0, 0])


def test_a_rank_that_leaves_during_the_measurement() -> None:
    def main(rank: int, transport: Any, store: dist.Store) -> Any:
        if rank == 2:
            time.sleep(0.05)
            transport.abort()
            return None
        return measure(transport, 5.0)

    found = on_ranks(3, main)
    assert all(isinstance(error, PeerLostError) for error in found[:2])


class Ordered(LocalTransport):
    """A transport that ignores tags, as NCCL does: nothing may be sent before ranks agree."""

    ordered = True

    def post(self, receives: Any, sends: Any) -> Any:
        raise AssertionError("something was sent")


def test_without_tags_nothing_is_sent() -> None:
    def main(rank: int, transport: LocalTransport, store: dist.Store) -> Any:
        # Without rank 0 the others look in vain.
        return agree(Ordered(transport.hub, rank), store, 0.5) if rank != absent else None

    absent = 3
    assert len({one.dumps() for one in on_ranks(3, main)}) == 1
    absent = 0
    for error in on_ranks(3, main)[1:]:
        assert isinstance(error, CollectiveTimeoutError)
        assert error.peer == 0


def test_a_rank_that_leaves_before_all_agree() -> None:
    def main(rank: int, transport: LocalTransport, store: dist.Store) -> Any:
        if rank == 1:
            transport.abort()
            return None
        return agree(transport, store, 30.0, measurable=True)

    start = time.perf_counter()
    found = on_ranks(3, main)
    assert time.perf_counter() - start < 20
    assert isinstance(found[0], PeerLostError)
    assert isinstance(found[2], PeerLostError)


def test_a_measurement_that_nobody_joins_ends() -> None:
    def main(rank: int, transport: Any, store: dist.Store) -> Any:
        return measure(transport, 0.2) if rank == 0 else None

    start = time.perf_counter()
    error = on_ranks(2, main)[0]
    assert isinstance(error, TransportError)
    assert isinstance(error, CollectiveTimeoutError)
    assert time.perf_counter() - start < 10


# --- hosts ----------------------------------------------------------------------------


def test_ranks_that_share_hosts_reduce_hierarchically() -> None:
    """Where a network connects hosts of several ranks, and the operator allows any order."""

    def chosen(world_size: int, hosts: int, nbytes: int, operator: Any = None) -> str:
        table = built_in("gloo", costs_of("gloo"), world_size, hosts=hosts)
        return choose(
            "all_reduce",
            nbytes,
            world_size,
            table,
            operator.order if operator else OperandOrder.ANY,
        ).algorithm

    assert chosen(4, 2, 1 << 20) == "hierarchical"
    assert chosen(4, 2, 1 << 10) != "hierarchical"
    assert chosen(4, 1, 1 << 20) != "hierarchical"
    assert chosen(2, 2, 1 << 20) != "hierarchical"  # nobody shares a host
    ordered = resolve(UserOp(lambda x, y: x, commutative=False), torch.float32).operator
    assert chosen(4, 2, 1 << 20, ordered) != "hierarchical"


def test_auto_knows_who_is_on_which_host() -> None:
    hosts = (0, 1, 0, 1)

    def main(rank: int, transport: LocalTransport, store: dist.Store) -> tuple[str, list[float]]:
        member = Communicator(transport, store, 20.0)
        tensor = torch.arange(20_000.0) * (rank + 1)
        ringcoll.all_reduce(tensor, group=ringcoll.LocalGroup(member))
        assert member.table is not None
        algorithm = choose("all_reduce", tensor.nbytes, 4, member.table).algorithm
        member.close()
        return algorithm, tensor[:3].tolist()

    hub = Hub(4, hosts=hosts)
    store = dist.HashStore()
    with ThreadPoolExecutor(4) as threads:
        ends = zip(range(4), hub.transports(), strict=True)
        works = [threads.submit(main, rank, transport, store) for rank, transport in ends]
        assert [work.result(30) for work in works] == [("hierarchical", [0.0, 10.0, 20.0])] * 4


@pytest.mark.parametrize("crowd", [1.0, 2.0])
@pytest.mark.parametrize("is_copied_sooner", [True, False])
def test_what_is_not_cut_is_copied_where_that_is_quicker_and_ranks_have_cores(
    monkeypatch: pytest.MonkeyPatch, crowd: float, is_copied_sooner: bool
) -> None:
    """On ranks that share cores each piece may wait for its turn."""

    def swap_s(exchange: Any, nbytes: int, number: int = 1) -> float:
        if nbytes != 2 << 20:
            return 1.0
        is_copied = exchange.transport.direct_from > nbytes
        return 1.5 if is_copied == is_copied_sooner else 2.0

    monkeypatch.setattr(message_costs, "_swap_s", swap_s)
    monkeypatch.setattr(message_costs, "_agreed", lambda exchange, value: value)
    transport: Any = SimpleNamespace(slice_bytes=512 << 10, direct_from=None)
    exchange: Any = SimpleNamespace(transport=transport, rank=0)
    ways = message_costs._ways(exchange, crowd)
    is_ever_read = crowd > 1 or not is_copied_sooner
    assert ways == ((512 << 10) + 1 if is_ever_read else sys.maxsize, 512 << 10)
