"""``ringcoll verify``: prove algorithms, or a schedule from a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from ringcoll.algorithms import Algorithm, algorithms, on_hosts
from ringcoll.cli import parameters
from ringcoll.cli.command import command
from ringcoll.cli.output import amount, print_json, print_table, print_text, progress, times
from ringcoll.cli.parameters import (
    collective_name,
    complete_algorithms,
    json_option,
    named_algorithms,
    saying_what_would_do,
)
from ringcoll.cli.report import findings
from ringcoll.errors import ScheduleError, UnsupportedWorldSizeError
from ringcoll.formats import schedule_in
from ringcoll.machine import is_schedule_file, read_file, read_schedule, text_of
from ringcoll.schedule import CONTRACTS, Proof, Schedule, as_runs, check_work, contract
from ringcoll.schedule import verify as prove

_EVERY_ROOT = 8  # ranks up to which every root is proved; more would take k times as long

_MOST_HOSTS = 4  # up to which every number is proved

_EXAMPLES = """
  ringcoll verify --world-sizes 1-64
  ringcoll verify ring --collective all_reduce --world-sizes 2,4,1024
  ringcoll show ring all_reduce --text | ringcoll verify --schedule -
  ringcoll verify star.py:star
"""


@dataclass
class _Outcome:
    """The outcome of proving one algorithm.

    ``findings`` are those of the proof for the largest world size: a proof can be big, and
    is not kept.
    """

    collective: str
    algorithm: str
    proved: list[int] = field(default_factory=list)
    unsupported: dict[int, str] = field(default_factory=dict)
    findings: dict[str, Any] | None = None
    wrong_at: int | None = None
    error: ScheduleError | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.error is None


@command(examples=_EXAMPLES)
@click.argument("algorithm", required=False, shell_complete=complete_algorithms)
@click.option("--collective", type=collective_name, metavar="NAME", help="Only this collective.")
@click.option(
    "--world-sizes",
    type=parameters.world_sizes,
    default="1-16",
    show_default=True,
    metavar="SIZES",
    help="Numbers of ranks: numbers and ranges, such as 1-8,13,64.",
)
@click.option(
    "--schedule",
    "file",
    type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
    help="Prove the schedule in this file instead; - is standard input.",
)
@json_option
@click.pass_context
def verify(
    ctx: click.Context,
    algorithm: str | None,
    collective: str | None,
    world_sizes: tuple[int, ...],
    file: Path | None,
    as_json: bool,
) -> None:
    """Prove that ALGORITHM, or every algorithm, does what its collective promises.

    ALGORITHM is a name of `ringcoll list`, or module:algorithm or path/file.py:algorithm, or a
    file of a schedule: MSCCL's XML, a plain plan of MSCCL++, or a text of `ringcoll show --text`.

    Proved is that every output gets every contribution exactly once, that each
    send meets its receive, so that nothing can block, that nothing is overwritten,
    and that no more scratch memory is used than stated; with input and output apart
    and, where allowed, in the same memory. Up to 8 ranks every root is proved,
    above that rank 0 and another rank; for algorithms that need hosts, 1 to 4 hosts.

    Costs are those of the largest world size, in units of the whole data; a factor
    says how many times the lower bound it is. Traffic is what the busiest rank sends
    or receives, added up over the steps, and reduced what it reduces; sent is the most that any rank sends. An
    algorithm that is run in segments approaches the latter as they get more.

    Order is that of the operands of a reduction: left to right, or at least in rank
    order, or fixed, which is some other order but the same on all ranks.

    Exit status: 1 if something is wrong, with the grid, and in it the bad place
    between asterisks.
    """
    if file is not None:
        if any(_was_typed(ctx, name) for name in ("algorithm", "collective", "world_sizes")):
            raise click.UsageError("--schedule goes with no other choice of what to prove")
        outcomes = [_prove_schedule(_read(file))]
    elif algorithm is not None and is_schedule_file(algorithm):
        if any(_was_typed(ctx, name) for name in ("collective", "world_sizes")):
            raise click.UsageError("a file says for which collective and how many ranks it is")
        outcomes = [_prove_schedule(read_schedule(algorithm))]
    else:
        if algorithm is None:
            entries = list(algorithms(collective))
        else:
            entries, _ = named_algorithms(algorithm, collective)
        outcomes = _prove_all(entries, world_sizes)
        if algorithm is not None and not any(outcome.proved for outcome in outcomes):
            for outcome in outcomes:
                for reason in outcome.unsupported.values():
                    raise UnsupportedWorldSizeError(reason)
    if as_json:
        print_json(
            {
                "ok": all(outcome.ok for outcome in outcomes),
                "results": [_as_data(outcome) for outcome in outcomes],
            }
        )
    else:
        _print(outcomes)
    if not all(outcome.ok for outcome in outcomes):
        ctx.exit(1)


def _was_typed(ctx: click.Context, name: str) -> bool:
    default = (click.core.ParameterSource.DEFAULT, click.core.ParameterSource.DEFAULT_MAP)
    return ctx.params[name] is not None and ctx.get_parameter_source(name) not in default


def _roots(entry: Algorithm, world_size: int) -> Sequence[int]:
    """Roots to prove: all of a small world; of a large world rank 0 and a rank in no special place."""
    if not contract(entry.collective).rooted:
        return (0,)
    return range(world_size) if world_size <= _EVERY_ROOT else (0, 2 * world_size // 3)


def _hosts(entry: Algorithm, world_size: int) -> int:
    """The largest number of hosts to prove; 0 if hosts make no difference."""
    return min(world_size, _MOST_HOSTS) if entry.needs_hosts else 0


def _prove_all(entries: Sequence[Algorithm], sizes: Sequence[int]) -> list[_Outcome]:
    outcomes = []
    for entry in entries:
        if supported := [size for size in sizes if not entry.restriction(size)]:
            schedule = entry.schedule(supported[-1])
            with saying_what_would_do(entry, schedule, None):
                check_work(schedule)
    with progress(len(entries) * len(sizes)) as advance:
        for entry in entries:
            advance(f"{entry.collective} {entry.name}", steps=0)
            outcomes.append(_prove_one(entry, sizes, advance))
    return outcomes


def _prove_one(entry: Algorithm, sizes: Sequence[int], advance: Callable[[], object]) -> _Outcome:
    """Prove an algorithm for all sizes, or up to the first size for which it is wrong."""
    outcome = _Outcome(entry.collective, entry.name)
    proof: Proof | None = None
    start = time.perf_counter()
    for size in sizes:
        try:
            for root in reversed(_roots(entry, size)):
                schedule = entry.schedule(size, root)
                proof = None  # two proofs at the same time would need twice the memory
                proof = prove(schedule)
            for num_hosts in range(1, _hosts(entry, size) + 1):
                prove(entry.schedule(size, 0, on_hosts(size, num_hosts)))
            outcome.proved.append(size)
        except UnsupportedWorldSizeError as error:
            outcome.unsupported[size] = str(error)
        except ScheduleError as error:
            outcome.wrong_at, outcome.error = size, error
            break
        advance()
    if proof is not None:
        outcome.findings = _findings(proof)
    outcome.seconds = time.perf_counter() - start
    return outcome


def _read(file: Path) -> Schedule:
    try:
        if str(file) == "-":
            return schedule_in(text_of(sys.stdin.buffer))
        return schedule_in(read_file(file))
    except OSError as error:
        raise ScheduleError(f"{file} cannot be read: {error}") from error


def _prove_schedule(schedule: Schedule) -> _Outcome:
    outcome = _Outcome(contract(schedule.collective).collective, schedule.algorithm)
    start = time.perf_counter()
    try:
        outcome.findings = _findings(prove(schedule))
        outcome.proved.append(schedule.world_size)
    except ScheduleError as error:
        outcome.wrong_at, outcome.error = schedule.world_size, error
    outcome.seconds = time.perf_counter() - start
    return outcome


def _findings(proof: Proof) -> dict[str, Any]:
    return {"world_size": proof.schedule.world_size} | findings(proof)


def _as_data(outcome: _Outcome) -> dict[str, Any]:
    return {
        "collective": outcome.collective,
        "algorithm": outcome.algorithm,
        "ok": outcome.ok,
        "proved": outcome.proved,
        "unsupported": {str(size): reason for size, reason in outcome.unsupported.items()},
        "at": outcome.findings,
        "error": None if outcome.error is None else _error(outcome),
        "seconds": round(outcome.seconds, 3),
    }


def _error(outcome: _Outcome) -> dict[str, Any]:
    places = ("rank", "step", "peer", "chunk")
    return {
        "world_size": outcome.wrong_at,
        "message": getattr(outcome.error, "message", str(outcome.error)),
        **{name: getattr(outcome.error, name, None) for name in places},
        "grid": getattr(outcome.error, "grid", ""),
    }


_COLUMNS = (
    "collective",
    "algorithm",
    "proved for k",
    "at k",
    "rounds",
    "/bound",
    "traffic",
    "/bound",
    "reduced",
    "/bound",
    "sent",
    "in flight",
    "order",
    "s",
)


def _print(outcomes: Sequence[_Outcome]) -> None:
    rows, family = [], ""
    for outcome in sorted(outcomes, key=lambda outcome: list(CONTRACTS).index(outcome.collective)):
        rows.append(("" if outcome.collective == family else outcome.collective, *_row(outcome)))
        family = outcome.collective
    print_table(_COLUMNS, rows, left=3)
    for line in _remarks(outcomes):
        click.echo()
        (click.echo if "\n" in line else print_text)(line)  # a grid is not wrapped


def _row(outcome: _Outcome) -> tuple[str, ...]:
    proved = as_runs(outcome.proved) or "none"
    if outcome.wrong_at is not None:
        proved += f", WRONG at {outcome.wrong_at}"
    seconds, facts = f"{outcome.seconds:.1f}", outcome.findings
    if facts is None:
        return (outcome.algorithm, proved, *[""] * (len(_COLUMNS) - 4), seconds)
    return (
        outcome.algorithm,
        proved,
        str(facts["world_size"]),
        str(facts["rounds"]),
        times(facts["rounds"], facts["rounds_at_least"]),
        amount(facts["traffic"]),
        times(facts["traffic"], facts["traffic_at_least"]),
        amount(facts["reduced"]),
        times(facts["reduced"], facts["reduced_at_least"]),
        amount(facts["sent_max"]),
        str(facts["in_flight"]),
        facts["order"] or "",
        seconds,
    )


def _remarks(outcomes: Sequence[_Outcome]) -> Iterator[str]:
    for outcome in outcomes:
        if outcome.unsupported:
            sizes, reasons = as_runs(outcome.unsupported), list(outcome.unsupported.values())
            yield f"not for k = {sizes}: {reasons[0]}"
    for outcome in outcomes:
        if outcome.error is not None:
            where = f"{outcome.algorithm} {outcome.collective} on {outcome.wrong_at} ranks"
            yield f"{where} is wrong: {outcome.error}"
    wrong = sum(not outcome.ok for outcome in outcomes)
    seconds = sum(outcome.seconds for outcome in outcomes)
    yield f"{len(outcomes) - wrong} proved, {wrong} wrong, in {seconds:.1f} s"
