"""``ringcoll verify``: algorithms are proved, and files of schedules."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click

from ringcoll.errors import ScheduleError, UnsupportedWorldSizeError
from ringcoll.runtime.machine import read_file, text_of
from ringcoll.runtime.user_files import is_schedule_file, read_schedule
from ringcoll.schedules import CONTRACTS, Proof, Schedule, as_runs, check_work, contract
from ringcoll.schedules import verify as prove
from ringcoll.schedules.algorithms import Algorithm, algorithms, on_hosts
from ringcoll.tools.cli import options
from ringcoll.tools.cli.app import command
from ringcoll.tools.cli.order import print_order
from ringcoll.tools.cli.output import (
    amount,
    echo,
    grouped,
    print_json,
    print_table,
    print_text,
    progress,
)
from ringcoll.tools.cli.prove import cost_cells, findings_at

_EVERY_ROOT = 8  # ranks up to which every root is proved; more would take k times as long
_MOST_HOSTS = 4  # up to which every number is proved
_ORDER_OPTIONS = {"root": "--root", "num_hosts": "--hosts", "chunk": "--chunk", "numel": "--size"}


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


@command(
    examples="""
        ringcoll verify --world-sizes 1-64
        ringcoll verify ring --collective all_reduce --world-sizes 2,4,1024
        ringcoll show ring all_reduce --text | ringcoll verify --schedule -
        ringcoll verify star.py:star
        ringcoll verify ring --order -k 5 --size 1000
        ringcoll verify tree -c reduce --order -k 8 --root 3
        ringcoll verify ring --order -k 64 --chunk 63
    """
)
@click.argument("algorithm", required=False, shell_complete=options.complete_algorithms)
@click.option(
    "-c", "--collective", type=options.collective_name, metavar="NAME", help="Only this collective."
)
@click.option("-k", "--world-sizes", "--world-size", "sizes", type=options.world_sizes,
              default="1-16", show_default=True, metavar="SIZES",
              help="Numbers of ranks: numbers and ranges, such as 1-8,13,64.")  # fmt: skip
@click.option("--schedule", "file",
              type=click.Path(dir_okay=False, allow_dash=True, path_type=Path),
              help="Prove the schedule in this file instead; - is standard input.")  # fmt: skip
@click.option("--order", is_flag=True,
              help="Print in which order ALGORITHM sums each element instead.")  # fmt: skip
@click.option("--chunk", type=click.IntRange(min=0), help="With --order: only this chunk.")
@click.option(
    "--size", "numel", type=click.IntRange(0, 10**18), metavar="ELEMENTS",
    help="With --order: elements of the input of a rank, to see which of them each sum is for.",
)  # fmt: skip
@options.root_option
@options.hosts_option
@options.json_option
@click.pass_context
def verify(
    ctx: click.Context,
    /,
    algorithm: str | None,
    collective: str | None,
    sizes: tuple[int, ...],
    file: Path | None,
    order: bool,
    as_json: bool,
    **of_order: int | None,
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
    or receives, added up over the steps, and reduced what it reduces; sent is the most that any
    rank sends. An algorithm that is run in segments approaches the latter as they get more.

    Order is that of the operands of a reduction: left to right, or at least in rank
    order, or fixed, which is some other order but the same on all ranks.

    With --order it is printed as sums, for COLLECTIVE (all_reduce) on 4 ranks, or those of
    a file: xr is the element of rank r. A sum of floats depends on its order, which is the same
    in every call: it does not depend on the transport, on segments, or on the time at
    which messages arrive. Chunks with the same order share a line.

    Exit status: 1 if something is wrong, with the grid, and in it the bad place
    between asterisks.
    """
    if order:
        if algorithm is None or file is not None:
            raise click.UsageError("--order goes with ALGORITHM, a file or a name")
        if "sizes" in options.typed(ctx) and len(sizes) > 1:
            raise click.UsageError("--order is for one number of ranks")
        world_size = sizes[0] if "sizes" in options.typed(ctx) else None
        print_order(algorithm, collective or "all_reduce", world_size, as_json=as_json, **of_order)
        return
    for name in options.typed(ctx) & _ORDER_OPTIONS.keys():
        raise click.UsageError(f"{_ORDER_OPTIONS[name]} goes with --order")
    if file is not None:
        if options.typed(ctx) & {"algorithm", "collective", "sizes"}:
            raise click.UsageError("--schedule goes with no other choice of what to prove")
        outcomes = [_prove_schedule(_read(file))]
    elif algorithm is not None and is_schedule_file(algorithm):
        if options.typed(ctx) & {"collective", "sizes"}:
            raise click.UsageError("a file says for which collective and how many ranks it is")
        outcomes = [_prove_schedule(read_schedule(algorithm))]
    else:
        entries = list(algorithms(collective))
        if algorithm is not None:
            entries, _ = options.named_algorithms(algorithm, collective)
        outcomes = _prove_all(entries, sizes)
        if algorithm is not None and not any(outcome.proved for outcome in outcomes):
            for reason in (text for each in outcomes for text in each.unsupported.values()):
                raise UnsupportedWorldSizeError(reason)
    ok = all(outcome.error is None for outcome in outcomes)
    if as_json:
        print_json({"ok": ok, "results": [*map(_as_data, outcomes)]})
    else:
        _print(outcomes)
    if not ok:
        ctx.exit(1)


def _prove_all(entries: Sequence[Algorithm], sizes: Sequence[int]) -> list[_Outcome]:
    for entry in entries:
        if supported := [size for size in sizes if not entry.restriction(size)]:
            schedule = entry.schedule(supported[-1])
            with options.ranks_that_would_do(entry, schedule, None):
                check_work(schedule)
    outcomes = []
    with progress(len(entries) * len(sizes)) as advance:
        for entry in entries:
            advance(f"{entry.collective} {entry.name}", steps=0)
            outcome = _Outcome(entry.collective, entry.name)
            schedules, others = partial(_schedules, entry), partial(_on_hosts, entry)
            outcomes.append(_prove(outcome, sizes, schedules, others, advance))
    return outcomes


def _prove_schedule(schedule: Schedule) -> _Outcome:
    outcome = _Outcome(contract(schedule.collective).collective, schedule.algorithm)
    with progress(1, f"proving {schedule.algorithm}") as advance:
        sizes = [schedule.world_size]
        return _prove(outcome, sizes, lambda size: [schedule], lambda size: [], advance)


def _schedules(entry: Algorithm, world_size: int) -> Iterator[Schedule]:
    """The schedules to prove, for all roots; the last one has root 0."""
    roots: Sequence[int] = (0,)
    if contract(entry.collective).rooted:  # in a large world a rank in no special place, too
        roots = range(world_size) if world_size <= _EVERY_ROOT else (0, 2 * world_size // 3)
    for root in reversed(roots):
        yield entry.schedule(world_size, root)


def _on_hosts(entry: Algorithm, world_size: int) -> Iterator[Schedule]:
    """More schedules to prove, for numbers of hosts."""
    most_hosts = min(world_size, _MOST_HOSTS) if entry.needs_hosts else 0
    for num_hosts in range(1, most_hosts + 1):
        yield entry.schedule(world_size, 0, on_hosts(world_size, num_hosts))


def _prove(
    outcome: _Outcome,
    sizes: Sequence[int],
    schedules: Callable[[int], Iterable[Schedule]],
    others: Callable[[int], Iterable[Schedule]],
    advance: Callable[[], object],
) -> _Outcome:
    """Prove the schedules for all sizes, or up to the first size for which one is wrong.

    The findings are those of the last of ``schedules`` for a size.
    """
    proof: Proof | None = None
    start = time.perf_counter()
    for size in sizes:
        try:
            for schedule in schedules(size):
                proof = None  # two proofs at the same time would need twice the memory
                proof = prove(schedule)
            for schedule in others(size):
                prove(schedule)
            outcome.proved.append(size)
        except UnsupportedWorldSizeError as error:
            outcome.unsupported[size] = str(error)
        except ScheduleError as error:
            outcome.wrong_at, outcome.error = size, error
            break
        advance()
    if proof is not None:
        outcome.findings = findings_at(proof)
    outcome.seconds = time.perf_counter() - start
    return outcome


def _read(file: Path) -> Schedule:
    from ringcoll.lab.formats import schedule_in

    try:
        return schedule_in(text_of(sys.stdin.buffer) if str(file) == "-" else read_file(file))
    except OSError as error:
        raise ScheduleError(f"{file} cannot be read: {error}") from error


def _as_data(outcome: _Outcome) -> dict[str, Any]:
    error, described = outcome.error, None
    if error is not None:
        places = ("rank", "step", "peer", "chunk")
        described = {
            "world_size": outcome.wrong_at,
            "message": getattr(error, "message", str(error)),
            **{name: getattr(error, name, None) for name in places},
            "grid": getattr(error, "grid", ""),
        }
    return {
        "collective": outcome.collective,
        "algorithm": outcome.algorithm,
        "ok": error is None,
        "proved": outcome.proved,
        "unsupported": {str(size): reason for size, reason in outcome.unsupported.items()},
        "at": outcome.findings,
        "error": described,
        "seconds": round(outcome.seconds, 3),
    }


_COLUMNS = (
    *("collective", "algorithm", "proved for k", "at k", "rounds", "/bound", "traffic", "/bound"),
    *("reduced", "/bound", "sent", "in flight", "order", "s"),
)


def _print(outcomes: Sequence[_Outcome]) -> None:
    ordered = sorted(outcomes, key=lambda outcome: list(CONTRACTS).index(outcome.collective))
    print_table(_COLUMNS, grouped(map(_row, ordered), apart=False), left=3)
    for line in _remarks(outcomes):
        echo()
        (echo if "\n" in line else print_text)(line)  # a grid is not wrapped


def _row(outcome: _Outcome) -> tuple[str, ...]:
    worlds = as_runs(outcome.proved) or "none"
    if outcome.wrong_at is not None:
        worlds += f", WRONG at {outcome.wrong_at}"
    cells: Sequence[str] = [""] * (len(_COLUMNS) - 4)
    if facts := outcome.findings:
        sent, in_flight = amount(facts["sent_max"]), str(facts["in_flight"])
        cells = (*cost_cells(facts, "reduced"), sent, in_flight, facts["order"] or "")
    return (outcome.collective, outcome.algorithm, worlds, *cells, f"{outcome.seconds:.1f}")


def _remarks(outcomes: Sequence[_Outcome]) -> Iterator[str]:
    for outcome in outcomes:
        if outcome.unsupported:
            reason, *_ = outcome.unsupported.values()
            yield f"not for k = {as_runs(outcome.unsupported)}: {reason}"
    for outcome in outcomes:
        if outcome.error is not None:
            where = f"{outcome.algorithm} {outcome.collective} on {outcome.wrong_at} ranks"
            yield f"{where} is wrong: {outcome.error}"
    wrong = sum(outcome.error is not None for outcome in outcomes)
    seconds = sum(outcome.seconds for outcome in outcomes)
    yield f"{len(outcomes) - wrong} proved, {wrong} wrong, in {seconds:.1f} s"
