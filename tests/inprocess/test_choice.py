"""What ``"auto"`` stands for: rules, the model, and one table for all ranks."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import ringcoll
from ringcoll import UserOp, select
from ringcoll.algorithms import algorithms, schedule_of
from ringcoll.choice import measured
from ringcoll.choice.measured import agree, measure
from ringcoll.choice.predict import Parameters, predictions
from ringcoll.choice.rules import parse_rules
from ringcoll.choice.table import Table, built_in, built_in_parameters
from ringcoll.choice.tuning import Tuned, update
from ringcoll.communicator import Communicator
from ringcoll.contracts import CONTRACTS, contract
from ringcoll.errors import (
    ArgumentError,
    CollectiveTimeoutError,
    PeerLostError,
    RingcollError,
    RulesError,
    TransportError,
    TuningFileError,
)
from ringcoll.reduction import as_operator, resolve
from ringcoll.transport.local import Hub, LocalTransport
from ringcoll.verify import verify
from tests.support.threads import together

SIZES = (0, 4, 1 << 10, 1 << 16, 1 << 20, 1 << 26)
IN_ORDER = as_operator(UserOp(lambda x, y: x, name="first"))
LEFT = as_operator(UserOp(lambda x, y: x, associative=False, name="fold"))


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variables, no file of this user, nothing measured before or afterwards."""
    for name in ("ALGORITHM", "DEBUG", "TRANSPORT"):
        monkeypatch.delenv(f"RINGCOLL_{name}", raising=False)
    monkeypatch.setenv("RINGCOLL_TUNING", "off")
    monkeypatch.setattr(measured, "_measured", {})
    log = logging.getLogger("ringcoll")
    level, handlers = log.level, list(log.handlers)
    yield
    log.setLevel(level)
    log.handlers[:] = handlers


def table(world_size: int, **more: Any) -> Table:
    found = built_in_parameters("gloo", world_size, cores=world_size)
    return Table(transport="gloo", world_size=world_size, parameters=found, **more)


# --- choosing -------------------------------------------------------------------------


@given(st.sampled_from(sorted(CONTRACTS)), st.sampled_from(SIZES), st.sampled_from([1, 2, 3, 5, 8]))
def test_without_rules_the_least_predicted_time_is_chosen(
    collective: str, nbytes: int, world_size: int
) -> None:
    own = table(world_size)
    choice = select.choose(collective, nbytes, world_size, None, own)
    best = predictions(collective, nbytes, world_size, own.parameters)[0]
    assert (choice.algorithm, choice.predicted) == (best.algorithm, best)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 6, 8])
@pytest.mark.parametrize("operator", [IN_ORDER, LEFT], ids=str)
def test_operators_that_need_an_order_get_it(operator: Any, world_size: int) -> None:
    forced = parse_rules("ring;double_tree")  # neither keeps it
    for collective in ("all_reduce", "reduce_scatter", "reduce"):
        for nbytes in SIZES:
            for own in (None, table(world_size), table(world_size, forced=forced)):
                choice = select.choose(collective, nbytes, world_size, operator, own)
                for root in range(world_size) if collective == "reduce" else (0,):
                    # Raises if the order is another one.
                    select.checked_schedule(
                        collective, choice.algorithm, world_size, root, operator, 0
                    )


def test_what_is_taken_for_in_order_is_so_everywhere() -> None:
    for collective, names in select._IN_ORDER.items():
        for name in names:
            for world_size in (1, 2, 3, 4, 5, 6, 7, 8, 11, 16):
                roots = range(world_size) if contract(collective).rooted else (0,)
                for root in roots:
                    assert verify(schedule_of(collective, name, world_size, root)).rank_order


def test_and_the_test_would_find_one_that_is_not() -> None:
    assert not verify(schedule_of("all_reduce", "ring", 4)).rank_order
    assert not verify(schedule_of("reduce", "binomial_tree", 4, 1)).rank_order


def test_forced_rules_come_before_tuned_ones() -> None:
    own = table(
        4,
        forced=parse_rules("all_reduce:0-1K:auto;all_reduce:0-64K:direct"),
        tuned=parse_rules("all_reduce:*:ring"),
        source="tuning.json",
    )
    choices = [select.choose("all_reduce", n, 4, None, own) for n in (4, 4096, 1 << 20)]
    assert [choice.algorithm for choice in choices] == ["ring", "direct", "ring"]
    assert "RINGCOLL_ALGORITHM" in choices[1].reason
    assert "tuning.json" in choices[2].reason


def test_all_to_all_is_not_to_be_forced() -> None:
    own = table(4, forced=parse_rules("all_to_all:*:bruck"))
    assert select.choose("all_to_all", 64, 4, None, own).algorithm == "pairwise"


def test_segments_of_a_rule() -> None:
    def of(text: str) -> int | None:
        own = table(8, tuned=parse_rules(text), source="tuning.json")
        return select.choose("all_reduce", 64 << 20, 8, None, own).segment_bytes

    assert of("double_tree@256K") == 256 << 10
    assert of("ring@256K") == 256 << 10
    assert of("ring") is None
    entry = next(one for one in table_predictions() if one.algorithm == "double_tree")
    assert of("double_tree") == entry.segment_bytes


def table_predictions() -> tuple[Any, ...]:
    return predictions("all_reduce", 64 << 20, 8, table(8).parameters)


@pytest.mark.parametrize("collective", sorted(CONTRACTS))
def test_built_in_rules_cover_everything(collective: str) -> None:
    for world_size in (1, 2, 3, 8):
        for nbytes in SIZES:
            choice = select.choose(collective, nbytes, world_size)
            assert "least predicted" not in choice.reason
            assert choice.algorithm in {one.name for one in algorithms(collective)}


def test_a_table_survives_json() -> None:
    own = table(4, forced=parse_rules("ring"), tuned=parse_rules("all_reduce:0-3:direct"))
    again = Table.from_json(json.loads(own.dumps()))
    assert again.to_json() == own.to_json()
    assert again.parameters == own.parameters


@pytest.mark.parametrize(
    "change",
    [
        {"transport": 3},
        {"world_size": 0},
        {"hosts": "1"},
        {"parameters": {}},
        {"parameters": {"alpha_s": 1}},
        {"tuned": "all_reduce:4"},
        {"tuned": None},
    ],
    ids=str,
)
def test_other_things_are_no_tables(change: dict[str, Any]) -> None:
    with pytest.raises(TuningFileError, match="not a table"):
        Table.from_json(table(4).to_json() | change)


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
        chosen = {
            select.choose("all_reduce", nbytes, world_size, None, one).algorithm for one in found
        }
        assert len(chosen) == 1


def test_what_other_ranks_measure_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(transport: Any, timeout_s: float, **more: Any) -> Parameters:
        found = measure(transport, timeout_s, **more)
        values = dict.fromkeys(found.__slots__, 10.0 ** (-(3 + transport.rank)))
        return Parameters(**values)

    monkeypatch.setattr(measured, "measure", odd)
    found = on_ranks(4, lambda rank, t, s: agree(t, s, 30.0, measurable=True))
    assert {one.parameters.alpha_s for one in found} == {1e-3}


def test_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(transport: Any, timeout_s: float, **more: Any) -> Parameters:
        calls.append(transport.rank)
        return measure(transport, timeout_s, **more)

    monkeypatch.setattr(measured, "measure", counted)
    first = on_ranks(3, lambda rank, t, s: agree(t, s, 30.0, measurable=True))
    second = on_ranks(3, lambda rank, t, s: agree(t, s, 30.0, measurable=True))
    assert sorted(calls) == [0, 1, 2]
    assert first[0].parameters == second[2].parameters
    on_ranks(2, lambda rank, t, s: agree(t, s, 30.0, measurable=True))
    assert sorted(calls) == [0, 0, 1, 1, 2]


def test_not_measured_where_it_is_not_worth_it() -> None:
    found = on_ranks(3, lambda rank, t, s: agree(t, s, 30.0))
    assert {one.source for one in found} == {"built-in"}
    assert found[0].tuned == built_in("local", 3).tuned


def test_over_nccl_built_in_costs_choose() -> None:
    """The built-in rules were measured over gloo."""
    for transport, algorithm, reason in (
        ("gloo", "binomial_tree", "by the rule"),
        ("nccl", "direct", "the least predicted time (costs: built-in)"),
    ):
        choice = select.choose("all_reduce", 1 << 20, 2, None, built_in(transport, 2))
        assert choice.algorithm == algorithm
        assert choice.reason.startswith(reason)
    assert [rule.algorithm for rule in built_in("nccl", 4, hosts=2).tuned] == ["hierarchical"]


def test_measured_costs_make_sense() -> None:
    (found, *_) = on_ranks(4, lambda rank, t, s: measure(t, 30.0))
    assert 0 < found.alpha_s <= found.crowded_alpha_s < 1
    assert 0 < found.gamma_s_per_byte <= found.beta_s_per_byte <= found.crowded_beta_s_per_byte
    assert found.overhead_s <= found.alpha_s


def forced_on(monkeypatch: pytest.MonkeyPatch, texts: dict[int, str]) -> None:
    """Let ranks, which here are threads, have variables of their own."""
    monkeypatch.setattr(
        select, "forced_text", lambda: texts.get(int(threading.current_thread().name), "")
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
        assert select.choose("all_reduce", 4, 3, None, one).algorithm == "ring"
    warnings = [item.getMessage() for item in caplog.records if item.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "rank 1: RINGCOLL_ALGORITHM is 'tree' here and 'ring' on rank 0" in warnings[0]


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
    update(path, Tuned.now(own))
    monkeypatch.setenv("RINGCOLL_TUNING", str(path))
    monkeypatch.setattr(measured, "measure", None)
    found = on_ranks(3, lambda rank, t, s: agree(t, s, 30.0, measurable=True))
    assert {one.source for one in found} == {str(path)}
    assert select.choose("all_reduce", 1 << 26, 3, None, found[2]).algorithm == "direct"


def test_a_broken_file_is_an_error_on_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_text("{")
    monkeypatch.setenv("RINGCOLL_TUNING", str(path))
    for error in on_ranks(2, lambda rank, t, s: agree(t, s, 30.0)):
        assert isinstance(error, TuningFileError)
        assert str(path) in str(error)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_rank_that_does_not_come_is_named(missing: int) -> None:
    def main(rank: int, transport: Any, store: dist.Store) -> Any:
        return None if rank == missing else agree(transport, store, 0.3, measurable=True)

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
        return agree(transport, store, 30.0)

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


# --- variables, explanations ----------------------------------------------------------


def test_where_the_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert select.tuning_file() == (None, True)
    monkeypatch.setenv("RINGCOLL_TUNING", str(tmp_path / "own.json"))
    assert select.tuning_file() == (tmp_path / "own.json", True)
    monkeypatch.delenv("RINGCOLL_TUNING")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert select.tuning_file() == (tmp_path / "ringcoll" / "tuning.json", False)
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert select.tuning_file() == (tmp_path / ".cache" / "ringcoll" / "tuning.json", False)


@pytest.mark.parametrize("level, told", [("info", 1), ("debug", 2), ("", 0)])
def test_each_decision_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, level: str, told: int
) -> None:
    monkeypatch.setenv("RINGCOLL_DEBUG", level)
    select.log_as_asked()
    first, second = table(4), table(4, announces=False)
    for _ in range(3):
        for own in (first, second):
            select.choose("all_reduce", 12345, 4, None, own)
    lines = [item.getMessage() for item in caplog.records]
    assert len(lines) == told
    for line in lines:
        assert line.startswith("all_reduce of 12345 bytes on 4 ranks over gloo: ")
        assert "the least predicted time" in line


def test_an_unknown_level(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RINGCOLL_DEBUG", "loud")
    select.log_as_asked()
    assert [item.getMessage() for item in caplog.records] == [
        "RINGCOLL_DEBUG is 'loud', and not info or debug"
    ]


def test_an_explanation_shows_the_alternatives() -> None:
    found = ringcoll.run_threads(lambda group: ringcoll.explain("all_reduce", 4096, group), 4)
    assert len({str(one) for one in found}) == 1
    text = str(found[0])
    assert text.startswith("all_reduce of 4096 bytes on 4 ranks, 1 host, local: binomial_tree\n")
    assert "why: by the rule all_reduce:0-4M:binomial_tree (built-in)" in text
    names = {one.name for one in algorithms("all_reduce") if not one.needs_hosts}
    rows = [line.split() for line in text.splitlines()[4:-3]]
    assert {row[-5] for row in rows} == names
    assert [row[1] for row in rows if row[0] == "*"] == ["binomial_tree"]
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


def test_only_one_module_reads_the_librarys_variables() -> None:
    root = Path(ringcoll.__file__).parent
    reading = re.compile(r"os\.environ\.get\(|os\.getenv\(|os\.environ\[[^]]*\](?! =)")
    readers = {
        path.name
        for path in root.rglob("*.py")
        if "RINGCOLL_" in (text := path.read_text(encoding="utf-8")) and reading.search(text)
    }
    assert readers == {"select.py"}


def test_ranks_that_share_hosts_reduce_hierarchically() -> None:
    """Where a network connects hosts of several ranks, and the operator allows any order."""

    def chosen(world_size: int, hosts: int, nbytes: int, operator: Any = None) -> str:
        table = built_in("gloo", world_size, hosts=hosts)
        return select.choose("all_reduce", nbytes, world_size, operator, table).algorithm

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
        algorithm = select.choose("all_reduce", tensor.nbytes, 4, None, member.table).algorithm
        member.close()
        return algorithm, tensor[:3].tolist()

    hub = Hub(4, hosts=hosts)
    store = dist.HashStore()
    with ThreadPoolExecutor(4) as threads:
        ends = zip(range(4), hub.transports(), strict=True)
        works = [threads.submit(main, rank, transport, store) for rank, transport in ends]
        assert [work.result(30) for work in works] == [("hierarchical", [0.0, 10.0, 20.0])] * 4
