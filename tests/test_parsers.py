"""Whatever a text holds, who reads it gets a value, or the error that is documented.

The texts come from files, from variables of the environment, from the command line, from the store
at which ranks meet, and from other ranks. A test tries any text, and right texts with changes.
"""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import click
import pytest
import torch.distributed as dist
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from ringcoll.errors import (
    ArgumentError,
    RingcollError,
    RulesError,
    ScheduleError,
    TraceError,
    TransportError,
    TuningFileError,
    UnknownAlgorithmError,
    VerificationError,
)
from ringcoll.lab.formats import (
    from_msccl,
    from_mscclpp,
    schedule_in,
    to_msccl,
    to_mscclpp,
    topology_in,
)
from ringcoll.runtime.group import agreement
from ringcoll.runtime.machine import place, settings
from ringcoll.runtime.operation import Turn, Wait
from ringcoll.runtime.rendezvous import read_json, read_text
from ringcoll.runtime.transport import Faults, catalogue, costs_of, gloo, meet
from ringcoll.runtime.transport.shared import transport as shared
from ringcoll.runtime.user_files import algorithms_named, forced_rules, tuning
from ringcoll.runtime.watch import Lives, Monitor, Process, Running, read_record, related, report
from ringcoll.schedules import Schedule, verify
from ringcoll.schedules.algorithms import schedule_of
from ringcoll.schedules.cost import FORCED, Table, built_in, choose, in_text, parse_rules
from ringcoll.tools.cli import cli, measuring
from ringcoll.tools.cli.options import nbytes_of, rank_numbers, world_sizes
from ringcoll.tools.tracing import MessageEnd, Records, Span, TracedOperation
from ringcoll.training import find_trainer
from ringcoll.training.resilient import Member, Record, View
from tests.cases.effort import effort
from tests.cases.malformed import documents, words

Result = TypeVar("Result")
Error = TypeVar("Error", bound=Exception)


def outcome(kind: type[Error], read: Callable[..., Result], *texts: Any) -> Result | Error:
    """What a parser returns, or its error of the documented kind; any other error is raised."""
    try:
        return read(*texts)
    except kind as error:
        assert str(error)  # it can be shown  # noqa: PT017
        return error


# --- schedules ------------------------------------------------------------------------

SCHEDULES = tuple(
    schedule_of(collective, name, world_size).to_text()
    for collective, name, world_size in (
        ("all_reduce", "ring", 2),
        ("all_reduce", "recursive_doubling", 4),
        ("all_gather", "bruck", 3),
        ("all_to_all", "pairwise", 2),
        ("barrier", "dissemination", 3),
    )
)


@pytest.mark.slow
@effort(150)
@given(words(*SCHEDULES))
def test_a_schedule(text: str) -> None:
    schedule = outcome(ScheduleError, Schedule.from_text, text)
    if isinstance(schedule, ScheduleError):
        return
    proof = outcome(ScheduleError, verify, schedule)
    if not isinstance(proof, ScheduleError):
        assert Schedule.from_text(schedule.to_text()) == schedule


@effort(40)
@given(words(*SCHEDULES))
def test_the_command_that_reads_a_schedule(text: str) -> None:
    result = CliRunner().invoke(cli, ["verify", "--schedule", "-"], input=text)
    assert result.exit_code in (0, 1, 2), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)


FOREIGN_XML = tuple(
    to_msccl(schedule_of(collective, name, world_size))
    for collective, name, world_size in (
        ("all_reduce", "ring", 2),
        ("all_reduce", "recursive_doubling", 2),
        ("reduce", "binomial_tree", 3),
        ("all_to_all", "pairwise", 2),
    )
)
FOREIGN_PLANS = tuple(
    json.loads(to_mscclpp(schedule_of(collective, name, 2)))
    for collective, name in (("all_reduce", "ring"), ("all_gather", "direct"))
)


@effort(250)
@given(
    st.one_of(
        words(*FOREIGN_XML), documents(*FOREIGN_PLANS), words(*map(json.dumps, FOREIGN_PLANS))
    )
)
def test_a_schedule_of_another_system(text: str) -> None:
    for read in (from_msccl, from_mscclpp, schedule_in):
        schedule = outcome(ScheduleError, read, text)
        if isinstance(schedule, Schedule):
            outcome(ScheduleError, verify, schedule)


NETWORKS = tuple(
    path.read_text() for path in sorted((Path(__file__).parent / "formats" / "networks").iterdir())
)


@effort(60)
@given(words("0 -- 1 50 0.5\n1 -> a 2 1\na -> 1 2 1\nranks 0 1.5 0.05\n", *NETWORKS))
def test_a_network(text: str) -> None:
    topology = outcome(ArgumentError, topology_in, text)
    if not isinstance(topology, ArgumentError):
        assert topology.world_size > 0
        assert all(link.bandwidth > 0 for link in topology.links)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "schedule.txt"
    file.write_bytes(b"schedule \xff")
    result = CliRunner().invoke(cli, ["verify", "--schedule", str(file)])
    assert result.exit_code == 2
    assert "it is no text" in result.output


HEADER = "schedule {} x world_size={} num_chunks={} num_slots={} root=0\n"
ALONE = HEADER.format("all_reduce", 1, 1, 1) + "rank 0\n"


@pytest.mark.parametrize("number", ["9" * 19, "9" * 5000])
@pytest.mark.parametrize(
    "text",
    [
        HEADER.format("all_reduce", "{}", 1, 0),
        HEADER.format("all_reduce", 1, "{}", 0) + "rank 0\n",
        HEADER.format("all_reduce", 1, 1, "{}") + "rank 0\n",
        ALONE + "  copy out[0] = in[{}]\n",
        ALONE + "  copy tmp{}[0] = in[0]\n",
        ALONE + "  send in[0] to {}\n",
        ALONE + "  recv_reduce out[0] = in[0] + recv from {}\n",
    ],
)
def test_a_number_that_is_too_long(text: str, number: str) -> None:
    """Python refuses to read numbers of more than 4300 digits, with an error of its own."""
    with pytest.raises(ScheduleError, match=r"line \d"):
        Schedule.from_text(text.format(number))


@pytest.mark.parametrize("collective", ["all_reduce", "gather", "all_to_all"])
def test_more_chunks_or_slots_than_the_steps_can_name(collective: str) -> None:
    """The verifier would take memory for each of them."""
    steps = "".join(f"rank {rank}\n  -\n" for rank in range(64))
    number = 4096 * 10**9
    for chunks, slots, name in ((number, 0, "num_chunks"), (4096, number, "num_slots")):
        with pytest.raises(ScheduleError, match=f"line 1: {name}={number} is too large"):
            Schedule.from_text(HEADER.format(collective, 64, chunks, slots) + steps)
    few = Schedule.from_text(HEADER.format(collective, 64, 4096, 8) + steps)
    with pytest.raises(VerificationError, match="ends wrong"):
        verify(few)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("first", [" = ", " from 1", "9"])
@pytest.mark.parametrize("last", [" + ", " to 9", " = + recv from 1", " final"])
def test_a_long_line_is_read_in_time_that_grows_with_its_length(first: str, last: str) -> None:
    begin = time.process_time()
    for operation in ("recv_reduce ", "reduce out[0] = ", "send ", "recv ", "copy "):
        line = f"  {operation}{first * 10_000}{last * 10_000} ."
        outcome(ScheduleError, Schedule.from_text, f"{ALONE}{line}\n")
    assert time.process_time() - begin < 5


DOUBLED = "  copy tmp0[0] = in[0]\n" + 90 * "  reduce tmp0[0] = tmp0[0] + tmp0[0]{final}\n"


@pytest.mark.timeout(30)
def test_an_order_of_reduction_that_is_never_written_out() -> None:
    """It doubles with each step, so that its text would be 2**90 words long."""
    text = ALONE + DOUBLED.format(final=" final") + "  copy out[0] = tmp0[0]\n"
    with pytest.raises(VerificationError, match=r"ranks 0 \(many times\)"):
        verify(Schedule.from_text(text))
    doubled = DOUBLED.partition("\n")[2].format(final="") + "  copy out[0] = tmp0[0]\n"
    barrier = (
        HEADER.format("barrier", 2, 1, 1)
        + "rank 0\n  send in[0] to 1 ; recv_reduce tmp0[0] = in[0] + recv from 1\n"
        + doubled
        + "rank 1\n  send in[0] to 0 ; recv_reduce tmp0[0] = recv + in[0] from 0\n  -\n"
        + doubled
    )
    proof = verify(Schedule.from_text(barrier))  # contributions may count twice here
    assert proof.same_everywhere
    assert not proof.rank_order
    assert not proof.left_fold


# --- rules, tables and the tuning file -------------------------------------------------

RULES = (
    "all_reduce:0-64K:recursive_doubling:k=4-8;all_reduce:*:ring@1M",
    "*:1G-inf:auto:hosts=2-inf:k=3;tree",
)


@effort(200)
@given(words(*RULES), st.booleans())
def test_rules(text: str, known_only: bool) -> None:
    read = partial(parse_rules, known_only=known_only)
    rules = outcome(RulesError, read, text)
    if isinstance(rules, RulesError):
        assert rules.text == text
        assert 0 <= rules.start <= rules.start + rules.length <= len(text)
    else:
        assert read(in_text(rules)) == rules


TABLES = (
    built_in("gloo", costs_of("gloo"), 4).to_json(),
    built_in("ucx", costs_of("ucx"), 8, hosts=2).to_json(),
)
FILES = tuple({"format": "ringcoll tuning", "version": 1, "tables": [table]} for table in TABLES)


def usable(table: Table) -> None:
    """A table that was taken chooses; however large its numbers are."""
    assert choose("all_reduce", 1 << 40, 4, table).algorithm
    assert choose("broadcast", 0, 3, table).algorithm
    assert Table.from_json(json.loads(table.dumps())).to_json() == table.to_json()


@effort(60)
@given(documents(*TABLES))
def test_a_table(text: str) -> None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return
    table = outcome(TuningFileError, Table.from_json, value)
    if isinstance(table, Table):
        usable(table)


@pytest.mark.parametrize("cost", [10**400, 1e308, float("inf"), float("nan"), -1, True, "1", None])
def test_a_cost_that_cannot_be_computed_with(cost: Any) -> None:
    """`10**400` is finite, but no float."""
    wrong = {**TABLES[0], "parameters": {**TABLES[0]["parameters"], "alpha_s": cost}}
    with pytest.raises(TuningFileError):
        Table.from_json(wrong)
    usable(Table.from_json({**wrong, "parameters": dict.fromkeys(TABLES[0]["parameters"], 1e100)}))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tmp_path_factory.mktemp("tuning") / "tuning.json")


@effort(100)
@given(text=documents(*FILES))
def test_a_tuning_file(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
    entries = outcome(TuningFileError, tuning.read_tables, file)
    if isinstance(entries, TuningFileError):
        assert entries.path == str(file)
        assert tuning.find_table(file, "gloo", 4, 1, asked=False) is None
        with pytest.raises(TuningFileError):
            tuning.find_table(file, "gloo", 4, 1, asked=True)
        return
    for entry in entries:
        usable(entry.table)
        tuning.update_tables(file, entry)


@effort(30)
@given(content=st.binary(max_size=50))
def test_a_tuning_file_of_bytes(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(TuningFileError):
        tuning.read_tables(file)


def test_a_tuning_file_of_nothing_but_brackets(file: Path) -> None:
    file.write_text("[" * 200_000)
    with pytest.raises(TuningFileError, match="cannot be read: maximum recursion depth"):
        tuning.read_tables(file)


# --- variables of the environment ------------------------------------------------------

# A variable holds neither a null byte nor half of a pair of surrogates.
VARIABLES = words("auto", "gloo", "ucx", "off", "cupy", "detail", "~/tuning.json", *RULES).map(
    lambda text: text.replace("\0", "")
)


@pytest.mark.slow
@effort(150)
@given(st.one_of(VARIABLES, words("seed=1", "flip=0.5", ",", "delay=nan", "drop=1e999", "0", "1")))
def test_faults_and_checksums(text: str) -> None:
    everywhere = dict.fromkeys([settings.FAULTS, settings.VERIFY_MESSAGES], text.replace("\0", ""))
    with mock.patch.dict(os.environ, everywhere):
        asked = outcome(ArgumentError, settings.verifies_messages)
        assert isinstance(asked, ArgumentError) or asked in (None, False, True)
        faults = outcome(ArgumentError, Faults.parse, settings.faults())
        if isinstance(faults, Faults):
            limits = [
                getattr(faults, field.name) for field in fields(Faults) if field.name != "seed"
            ]
            assert all(limit >= 0 for limit in limits)
            assert max(*faults.odds, faults.longest_s) < math.inf


@pytest.mark.slow
@effort(150)
@given(VARIABLES)
def test_variables(text: str) -> None:
    names = [*settings.TRANSPORT_VARIABLES.values(), settings._REDUCTION, settings._TUNING]
    everywhere = dict.fromkeys([*names, settings._DEBUG, FORCED], text)
    with mock.patch.dict(os.environ, everywhere), mock.patch.object(settings._log, "setLevel"):
        for kind in settings.TRANSPORT_VARIABLES:
            name = outcome(ArgumentError, catalogue.named, kind, "auto")
            assert isinstance(name, ArgumentError) or name in ("auto", *catalogue.names(kind))
        engine = outcome(ArgumentError, settings.reduction)
        assert isinstance(engine, ArgumentError) or engine in ("auto", "cupy", "torch")
        rules = outcome(RingcollError, forced_rules, settings.forced_text())
        assert not isinstance(rules, RulesError) or rules.source == FORCED
        path = outcome(TuningFileError, settings.tuning_file)
        if not isinstance(path, TuningFileError):
            find = partial(tuning.find_table, asked=path[1])
            found = outcome(TuningFileError, find, path[0], "gloo", 4, 1)
            assert found is None or isinstance(found, TuningFileError)
        with mock.patch.object(settings._log, "hasHandlers", return_value=True):
            settings.log_as_asked()


def test_a_tuning_file_of_a_user_who_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGCOLL_TUNING", "~nobody_of_that_name/tuning.json")
    with pytest.raises(TuningFileError, match="RINGCOLL_TUNING"):
        settings.tuning_file()


@pytest.mark.parametrize("text", ["", "two", "9" * 5000, "0x2"])
def test_a_number_of_ranks_from_who_starts_them(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", text)
    with pytest.raises(click.UsageError, match="WORLD_SIZE is no number of ranks"):
        measuring.ranks_to_use(None, 4)


# --- the command line --------------------------------------------------------------------


@effort(200)
@given(words("64K", "16 MiB", "1-8,13,64"))
def test_sizes_and_numbers_of_ranks(text: str) -> None:
    nbytes = outcome(click.BadParameter, nbytes_of, text)
    assert isinstance(nbytes, click.BadParameter) or 0 <= nbytes < 10**18 << 40
    for read in (world_sizes, rank_numbers):
        numbers = outcome(click.BadParameter, read, text)
        assert isinstance(numbers, click.BadParameter) or max(numbers) <= 1 << 16


@pytest.mark.parametrize("text", ["1\u212a", "9" * 5000, "\u0661K"])
def test_a_size_that_only_looks_like_one(text: str) -> None:
    """The sign for kelvin is a K to who ignores case."""
    with pytest.raises(click.BadParameter, match="is not a size"):
        nbytes_of(text)


@effort(100)
@given(words("3d:2x2x2", "pipeline:1f1b"))
def test_a_trainer(text: str) -> None:
    found = outcome(ArgumentError, find_trainer, text)
    assert found[1] in text if isinstance(found, tuple) else found.got == text


@effort(100)
@given(words("no.where:star", "./nowhere.py:star", "~/nowhere.py:star", ".:", "..no.where:x"))
def test_a_reference_to_an_algorithm(text: str) -> None:
    with pytest.raises(ScheduleError):  # an `UnknownAlgorithmError` is one
        algorithms_named(f"nowhere{text}")
    with pytest.raises(UnknownAlgorithmError):
        algorithms_named(f"~nobody_of_that_name/{text}")


@pytest.mark.parametrize(
    "reference",
    [":", ".:x", "..:x", "sys:exit", "\0:x", "a\0.py:x", "sys.x:y", "a" * 5000 + ".py:x"],
)
def test_a_reference_to_what_is_no_file(reference: str) -> None:
    with pytest.raises(UnknownAlgorithmError):
        algorithms_named(reference)


def test_a_package_that_fails_before_the_module_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *os.sys.path])  # type: ignore[attr-defined]
    (tmp_path / "failing_package").mkdir()
    (tmp_path / "failing_package" / "__init__.py").write_text("1 / 0")
    with pytest.raises(ScheduleError, match="ZeroDivisionError: division by zero"):
        algorithms_named("failing_package.star:star")


# --- what ranks tell each other through the store --------------------------------------


def store_with(key: str, value: str | bytes) -> dist.Store:
    store = dist.HashStore()
    store.set(key, value)  # type: ignore[arg-type]  # bytes are taken as well
    return store


@effort(100)
@given(st.binary(max_size=40))
def test_bytes_in_the_store(value: bytes) -> None:
    store = store_with("key", value)
    assert isinstance(read_text(store, "key"), str)
    with pytest.raises(TransportError, match="no rank writes what the store has under 'key'"):
        read_json(store, "key", View.of)


_WAITS = {"number": 3, "call": "all_reduce", "meets": False, "step": 4, "peer": 1,
          "is_receive": True, "chunks": [2]}  # fmt: skip
_GROUP = {"group": "dp", "transport": "shared", "rank": 0, "world_size": 3, "ranks": [4, 0, 6],
          "operations": [{"number": 3, "call": "all_reduce", "complete": False}], "running": _WAITS, "queued": [{"number": 4, "call": "barrier", "complete": False}],
          "failure": None, "pids": {"1": 2}, "elsewhere": [2]}  # fmt: skip
RECORD = {"version": 1, "host": "oak", "pid": 1, "command": "train.py",
          "threads": {"MainThread": "train.py:9 in main"}, "groups": [_GROUP]}  # fmt: skip


@effort(300)
@given(documents(RECORD))
def test_records_of_processes(text: str) -> None:
    record = outcome(ArgumentError, read_record, text)
    if isinstance(record, dict):
        related([record], {1})
        assert all(isinstance(line, str) for line in report([record]))


@effort(60)
@given(words(f"transport gloo of ringcoll 0.1.0\n{place()}"))
def test_the_transport_and_the_host_of_a_rank(text: str) -> None:
    store = store_with("here/1", text)
    transport = gloo.GlooTransport(store, 0, 2)
    hosts = outcome(TransportError, meet, store, transport, 1.0, lambda: False)
    assert "rank 1 with" in str(hosts) if isinstance(hosts, TransportError) else len(hosts) == 2


PROCESS = (os.getppid(), "1", place(), None)
FAR = (1, "1", "another kernel", ("192.0.2.1", 4711))
MEMBER = ["a0", "127.0.0.1", 4711, 4712, [*PROCESS]]
VIEW = [3, 17, [MEMBER, ["b1", "127.0.0.1", 4713, 4714, [1, "", "", None]]]]


RIGHT: tuple[tuple[Callable[[Any], Any], Any], ...] = (
    (Process.of, PROCESS),
    (Process.of, FAR),
    (Member.of, MEMBER),
    (View.of, VIEW),
    (Record.of, [VIEW, 17, 1, 0, VIEW, False]),
    (Record.of, [VIEW, 17, -1, -1, None, True]),
    (shared._About.of, [1, 3, [1, 5, 4096], 9, 1 << 46, 1024]),
    (agreement._Decision._make, ["no such file", False, 1, "", None]),
)
WRONG = (
    "",
    "no JSON",
    "5",
    "null",
    "[]",
    "[1]",
    "[[[]]]",
    "{}",
    '{"1": 2}',
    '"a word"',
    "[" * 100_000,
)


ENDED, NAMELESS = [1 << 30, 17, place(), None], [["a0"], *MEMBER[1:]]
WRONG_VALUES: tuple[tuple[Callable[[Any], Any], Any], ...] = (
    (Process.of, ENDED),
    (Process.of, ["1", *PROCESS[1:]]),
    (Process.of, [*PROCESS[:2], None, None]),
    *((Process.of, [*FAR[:3], address]) for address in ([], "ab", ["192.0.2.1", "4711"])),
    *(
        (Process.of, [*FAR[:3], address])
        for address in (["a\0b", 1], ["\u00e9..b", 1], ["a", 1 << 16])
    ),
    (Member.of, NAMELESS),
    (Member.of, [*MEMBER[:2], math.inf, *MEMBER[3:]]),
    (Member.of, [*MEMBER[:3], -1, MEMBER[4]]),
    (Member.of, [*MEMBER[:4], ENDED]),
    (View.of, [3, 17, []]),
    (View.of, ["3", 17, VIEW[2]]),
    (View.of, [3, 17, [NAMELESS]]),
    (Record.of, [["3", 17, VIEW[2]], 17, 1, 0, None, False]),
    (Record.of, [VIEW, 17, "1", 0, None, False]),
    (Record.of, [VIEW, 17, 1, 0, [], False]),
    (Record.of, [VIEW, 17, 1, 0, None, None]),
)


@pytest.mark.parametrize("parse, value", RIGHT)
def test_what_ranks_tell_is_read(parse: Callable[[Any], Any], value: Any) -> None:
    told = read_json(store_with("key", json.dumps(value)), "key", parse)
    assert json.loads(json.dumps(told)) == json.loads(json.dumps(value)), "nothing is left out"


@pytest.mark.parametrize("parse", {parse: None for parse, _ in RIGHT})
@pytest.mark.parametrize("text", WRONG)
def test_what_no_rank_tells(parse: Callable[[Any], Any], text: str) -> None:
    with pytest.raises(TransportError, match="no rank writes what the store has under 'key/1'"):
        read_json(store_with("key/1", text), "key/1", parse)


@pytest.mark.parametrize("parse, value", WRONG_VALUES)
def test_what_has_the_form_of_what_ranks_tell(parse: Callable[[Any], Any], value: Any) -> None:
    with pytest.raises(TransportError, match="no rank writes what the store has under 'key'"):
        read_json(store_with("key", json.dumps(value)), "key", parse)


@pytest.mark.parametrize("text", [*WRONG[1:], json.dumps(ENDED)])
def test_a_rank_whose_process_cannot_be_read(text: str) -> None:
    lives = Lives(store_with("ringcoll/process/1", text), 0, 2)
    assert lives.ended() == set()
    assert lives.processes == {}


@pytest.mark.parametrize("text", ["", "no JSON", "[" * 100_000])
def test_notices_that_cannot_be_read(text: str) -> None:
    watching, _ = monitor(store_with("verdict", text))
    watching.notices.store.set("state/1", text)
    watching.notices.store.set("left/1", text)
    assert watching.notices.verdict() is watching.notices.state(1) is None
    assert watching.notices.last_of(1) is None


def monitor(store: dist.Store) -> tuple[Monitor, Running]:
    """The monitor of rank 0, which waits for rank 1 in the group's first call."""
    watching = Monitor(store, 0, 3, lambda: None, Lives(store, 0, 3))
    call = Turn("all_reduce(sum)", lambda: None)
    call.words.lengths = {1: 3, 2: 5}
    watching.progress.last = (0, call)
    watching.progress.begin_run((-1, None))
    return watching, Running(0, call, Wait(0, 1, 0, is_receive=True))


STATES: tuple[dict[str, Any], ...] = (
    {
        "calls": {
            "0": ["all_reduce(sum)", {"1": 3, "2": 4}, ""],
            "1": ["barrier", None, " at a:1"],
        },
        "waits": [0, 2],
        "barrier": None,
    },
    {"calls": {}, "waits": None, "barrier": [1, 0, "train.py:14"]},
)
STATES_READ: tuple[dict[str, Any], ...] = (
    {
        "calls": {0: ("all_reduce(sum)", {1: 3, 2: 4}, ""), 1: ("barrier", {}, " at a:1")},
        "waits": (0, 2),
        "barrier": None,
    },
    {"calls": {}, "waits": None, "barrier": (1, 0, "train.py:14")},
)
VERDICTS = (
    {"kind": "mismatch", "calls": [[1, "all_reduce", ""], [2, "barrier", " at a:1"]], "number": 3},
    {"kind": "lost", "peer": 2, "text": "rank 2 is gone"},
    {"kind": "timeout", "peer": None, "text": "late"},
)


def test_what_monitors_write_is_read() -> None:
    """Not to be refused by who reads it with care."""
    for verdict in VERDICTS:
        watching, _ = monitor(store_with("verdict", json.dumps(verdict)))
        assert watching.notices.verdict() == verdict
    for state, read in zip(STATES, STATES_READ, strict=True):
        watching, _ = monitor(store_with("state/1", json.dumps(state)))
        assert watching.notices.state(1) == read
    watching, _ = monitor(store_with("state/1", json.dumps(STATES[0])))
    assert (watching.diagnosis.disagreement() or {})["calls"] == [
        (0, "all_reduce(sum) with 5 elements from rank 0 to rank 2", ""),
        (1, "all_reduce(sum) with 4 elements from rank 0 to rank 2", ""),
    ]


def but(value: dict[str, Any], **others: Any) -> str:
    return json.dumps(value | others)


@pytest.mark.parametrize(
    "text",
    [
        *WRONG,
        but(VERDICTS[0], calls=[[1, "barrier", ""]]),
        but(VERDICTS[0], calls=[[1, "barrier", ""], [2, "barrier", ""]]),
        but(VERDICTS[0], calls=[[1, "all_reduce", ""], [1, "barrier", ""]]),
        but(VERDICTS[0], number="first"),
        but(VERDICTS[1], kind="nothing of the kind"),
        but(VERDICTS[1], peer="two"),
        '{"kind": "lost"}',
        but(STATES[0], calls={"x": 3}),
        but(STATES[0], calls=[1]),
        but(STATES[0], calls={"0": ["barrier", [1], ""]}),
        but(STATES[0], waits=[0]),
        but(STATES[0], waits="no"),
        but(STATES[1], barrier=[1, 0]),
    ],
)
def test_what_no_monitor_writes_is_as_if_nobody_had_written_it(text: str) -> None:
    for key in ("verdict", "state/1"):
        watching, _ = monitor(store_with(key, text))
        assert watching.notices.verdict() is None
        assert watching.notices.state(1) is None
        assert watching.diagnosis.disagreement() is None


# --- what ranks send each other for a trace ---------------------------------------------

RECORDS = Records(0, 2, "gloo", groups=[[0, 1]])
RECORDS.operations.append(
    TracedOperation(
        0, "all_reduce", "all_reduce", "ring", 1, 5, 9,
        messages=[MessageEnd(True, 1, 0, 4, 7, 5, 6)], spans=[Span("wait", 6, 8, 0, 0)],
    )
)  # fmt: skip


@effort(100)
@given(st.one_of(st.binary(max_size=50), documents(asdict(RECORDS)).map(str.encode)))
def test_the_notes_of_a_rank(data: bytes) -> None:
    for packed in (data, zlib.compress(data), zlib.compress(data)[:-3]):
        notes = outcome(TraceError, Records.unpacked, packed)
        assert isinstance(notes, Records) or "not the notes of a rank" in str(notes)


def test_notes_come_back_and_grow_by_a_factor_at_most() -> None:
    assert Records.unpacked(RECORDS.packed()) == RECORDS
    whole = 1 << 24
    assert whole / len(zlib.compress(bytes(whole), 9)) < 1032
