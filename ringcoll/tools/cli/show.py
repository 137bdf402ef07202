"""``ringcoll show``: draw one algorithm."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from ringcoll.errors import VerificationError
from ringcoll.lab.pictures import (
    film,
    grid_picture,
    moving_picture,
    network_picture,
    player_page,
    steps_picture,
)
from ringcoll.runtime.machine import read_json_file, replace_file
from ringcoll.schedules import (
    Copy,
    Proof,
    Recv,
    RecvReduce,
    Reduce,
    Schedule,
    Send,
    check_work,
    grid,
    primitives,
)
from ringcoll.schedules import verify as prove
from ringcoll.schedules.algorithms import on_hosts
from ringcoll.tools.cli import options
from ringcoll.tools.cli.app import command
from ringcoll.tools.cli.networks import is_network_file, network_in
from ringcoll.tools.cli.output import (
    PICTURES,
    echo,
    on_terminal,
    print_json,
    print_table,
    print_text,
    progress,
    write_gif,
    write_picture,
)
from ringcoll.tools.cli.prove import findings, header, in_words

_LEGEND = {
    Send: ">r:c  send chunk c to rank r",
    Recv: "<r:c  receive chunk c from rank r",
    RecvReduce: "+r:c  receive chunk c from rank r and reduce it with the own",
    Copy: "=c    copy chunk c from the input to the output",
    Reduce: "Sc    reduce several shares of chunk c",
}


@command(
    examples="""
        ringcoll show ring all_reduce -k 4
        ringcoll show tree broadcast -k 8 --root 3
        ringcoll show hierarchical all_reduce -k 8 --hosts 2
        ringcoll show ring all_reduce -k 4 --primitives --rank 1
        ringcoll show ring all_reduce -k 3 --program
        ringcoll show bruck all_gather -k 5 --text > bruck.txt
        ringcoll show ring all_reduce -k 64 --ranks 0-3,63
        ringcoll show star.py:star all_reduce
        ringcoll show ring all_reduce -k 4 -o ring.svg
        ringcoll show ring all_reduce -k 4 --moving -o ring.gif
        ringcoll show ring all_reduce -k 4 --grid -o grid.svg
        ringcoll show ring all_reduce -k 8 --beside tree -o ring-and-tree.html
        ringcoll show cluster.txt -o cluster.svg
    """
)
@options.schedule_options
@click.option("--primitives", "as_primitives", is_flag=True,
              help="Print the program of one rank in NCCL's vocabulary.")  # fmt: skip
@click.option("--program", "as_program", is_flag=True,
              help="Print what one rank does, instruction by instruction, in memory.")  # fmt: skip
@click.option("--rank", type=click.IntRange(min=0),
              help="The rank for --primitives and --program; 0.")  # fmt: skip
@click.option("--ranks", type=options.rank_numbers, metavar="RANKS",
              help="Draw the columns of these ranks only: numbers and ranges, such as "
              "0-3,7.")  # fmt: skip
@click.option("--text", "as_text", is_flag=True,
              help="Print the schedule as text, which `ringcoll verify --schedule` "
              "reads.")  # fmt: skip
@options.file_option("-o", "--output", "output", callback=options.new_file(*PICTURES, ".gif"),
                     help="Draw the steps into this file: .svg, .png or .pdf; .gif moves; .html is "
                     "a page that plays them.")  # fmt: skip
@click.option("--step", type=click.IntRange(min=0),
              help="Only this step, for --output; a page begins there.")  # fmt: skip
@click.option("--moving", is_flag=True,
              help="One step after the other, for --output; a page begins to play.")  # fmt: skip
@click.option("--grid", "as_grid", is_flag=True,
              help="The grid instead of the network, for --output.")  # fmt: skip
@click.option("--beside", metavar="ALGORITHM",
              help="A second algorithm on the same clock, for a page.")  # fmt: skip
@click.option("--trace", "trace_file", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="Measured times for a page: a file of `ringcoll trace`, of the same "
              "algorithm.")  # fmt: skip
@options.json_option
def show(
    as_primitives: bool,
    as_program: bool,
    rank: int | None,
    ranks: tuple[int, ...] | None,
    as_text: bool,
    output: Path | None,
    step: int | None,
    moving: bool,
    as_grid: bool,
    beside: str | None,
    trace_file: Path | None,
    as_json: bool,
    **asked: Any,
) -> None:
    """Draw ALGORITHM for COLLECTIVE (all_reduce), step by step and rank by rank.

    ALGORITHM is a name of `ringcoll list`, or module:algorithm or path/file.py:algorithm, or a
    file of a schedule. Of a file with a network, as --graph of other commands reads it, the links
    are shown.

    The header says what it costs, with the lower bounds behind it, and in which
    order it reduces: that was proved on the schedule, not taken from a formula.
    """
    if is_network_file(asked["algorithm"]):
        _show_network(Path(asked["algorithm"]).expanduser(), output, as_json=as_json)
        return
    ending = "" if output is None else output.suffix.lower()
    of_a_rank = as_primitives or as_program
    printed = of_a_rank or as_text or as_json  # and not the grid
    one_step, of_page = step is not None, bool(beside or trace_file)
    animated = moving or one_step or ending in (".gif", ".html")
    refused = {
        "--text goes with neither --json nor --primitives": as_text and (as_primitives or as_json),
        "--program goes with neither --text nor --primitives":
            as_program and (as_text or as_primitives),
        "--ranks goes with the grid": ranks is not None and printed,
        "--rank goes with --primitives and --program": rank is not None and not of_a_rank,
        "--output goes with --step, --moving or --grid only":
            output is not None and (printed or ranks is not None),
        "--step, --moving and --grid go with --output":
            output is None and (moving or as_grid or one_step),
        "one step does not move": moving and one_step,
        "--beside and --trace go with --output and a file .html": of_page and ending != ".html",
        "a .pdf does not move": ending == ".pdf" and moving,
        "a .gif shows all steps": ending == ".gif" and one_step,
        "--grid draws all steps into a file .svg, .png or .pdf": as_grid and animated,
    }  # fmt: skip
    for reason, applies in refused.items():
        if applies:
            raise click.UsageError(reason)
    entry, schedule, title = options.asked_schedule(**asked)
    if ranks is not None and max(ranks) >= schedule.world_size:
        raise click.UsageError(f"--ranks: rank {max(ranks)} is not in {title}")
    if not as_primitives:
        with options.ranks_that_would_do(entry, schedule, asked["num_hosts"]):
            check_work(schedule)
    if output is not None:
        num_hosts = asked["num_hosts"] or 2
        hosts = on_hosts(schedule.world_size, num_hosts) if entry.needs_hosts else None
        trace = None if trace_file is None else _trace(trace_file)
        films = [film(schedule)]
        if beside is not None:
            second = asked | {"algorithm": beside, "num_hosts": None}
            films.append(film(options.asked_schedule(**second)[1]))
        if step is not None and step > (count := len(films[0].messages)):
            raise click.BadParameter(
                f"there are steps 0 to {count - 1}, and {count}, the end", param_hint="--step"
            )
        if ending == ".html":
            begin = {"at": step or 0, "playing": int(moving)}
            replace_file(output, player_page(*films, hosts=hosts, trace=trace, settings=begin))
        elif as_grid:
            write_picture(output, grid_picture(schedule))
        elif ending == ".gif":
            steps = range(len(films[0].messages) + 1)
            write_gif(output, [steps_picture(films[0], hosts=hosts, step=each) for each in steps])
        elif moving:
            write_picture(output, moving_picture(films[0], hosts=hosts))
        else:
            write_picture(output, steps_picture(films[0], hosts=hosts, step=step))
        echo(output.resolve())
        failures = [str(scenes.failure) for scenes in films if scenes.failure is not None]
        if failures:  # they are drawn as far as they go
            echo("\n".join(["", *failures]))
            raise click.exceptions.Exit(1)
    elif as_text:
        echo(schedule.to_text(), nl=False)
    elif as_primitives:
        _show_primitives(schedule, rank or 0, title, as_json=as_json)
    elif as_program:
        _show_program(schedule, rank or 0, title, as_json=as_json)
    else:
        _show_grid(schedule, title, entry.summary, ranks, as_json=as_json)


def _show_network(path: Path, output: Path | None, *, as_json: bool) -> None:
    if options.typed(click.get_current_context()) - {"algorithm", "output", "as_json"}:
        raise click.UsageError(f"{path} is a network, which goes with --output and --json only")
    if output is not None and output.suffix.lower() == ".gif":
        raise click.UsageError("a network does not move")
    topology = network_in(path)
    links = {
        f"{link.source} {'--' if is_cable else '->'} {link.target}":
            (round(float(link.bandwidth) / 1e9, 9), round(float(link.latency_s) * 1e6, 9))
        for link, is_cable in topology.cables()
    }  # fmt: skip
    if output is not None:
        write_picture(output, network_picture(topology))
    if as_json:
        print_json({"network": topology.name, "world_size": topology.world_size, "links": links})
    elif output is not None:
        echo(output.resolve())
    else:
        rows = [(name, f"{speed:g}", f"{latency:g}") for name, (speed, latency) in links.items()]
        print_table(("link", "GB/s", "us"), rows, left=1)


def _trace(path: Path) -> dict[str, Any]:
    try:
        trace = read_json_file(path)
    except OSError as error:
        raise click.BadParameter(f"{path}: {error}", param_hint="--trace") from None
    except ValueError:  # no JSON
        trace = None
    if not isinstance(trace, dict):
        raise click.BadParameter(f"{path} is not a trace", param_hint="--trace")
    return trace


def _show_primitives(schedule: Schedule, rank: int, title: str, *, as_json: bool) -> None:
    words = primitives(schedule, rank)
    if as_json:
        print_json(header(schedule) | {"rank": rank, "primitives": words})
        return
    echo(f"{title}: rank {rank}\n")
    for number, word in enumerate(words):
        echo(f"{number:4}  {word}")


def _show_program(schedule: Schedule, rank: int, title: str, *, as_json: bool) -> None:
    from ringcoll.runtime.operation import listing  # here, as its file imports torch

    if rank >= schedule.world_size:
        raise click.UsageError(f"--rank: rank {rank} is not in {title}")
    rows = listing(schedule, rank)
    if as_json:
        print_json(header(schedule) | {"rank": rank, "program": [" ".join(row) for row in rows]})
        return
    echo(f"{title}: rank {rank}, each chunk an element\n")
    width = max((len(word) for word, _ in rows), default=0)
    for number, (word, what) in enumerate(rows):
        echo(f"{number:4}  {word:{width}}  {what}")


def _show_grid(
    schedule: Schedule, title: str, summary: str, ranks: Sequence[int] | None, *, as_json: bool
) -> None:
    try:
        with progress(1, f"proving {title}"):
            proof = prove(schedule)
    except VerificationError as error:
        # `verify` is the command that judges; here a wrong algorithm is drawn, marked.
        if as_json:
            print_json(header(schedule) | {"ok": False, "error": str(error)})
        else:
            echo(f"{title} is wrong\n\n{error}")
        raise click.exceptions.Exit(1) from None
    if as_json:
        steps = [
            [[*map(str, step)] for step in schedule.steps(rank)]
            for rank in range(schedule.world_size)
        ]
        facts = header(schedule) | {"summary": summary, "ok": True} | findings(proof)
        print_json(facts | {"steps": steps})
        return
    drawing = grid(schedule, ranks=ranks)
    print_text(title, summary, "", *in_words(proof))
    echo("\n".join(["", *_legend(proof), "", drawing]))
    columns = max(map(len, drawing.splitlines()))
    if ranks is None and on_terminal() and columns > shutil.get_terminal_size().columns:
        print_text("", f"The grid has {columns} columns; --ranks 0-3 draws some of the ranks only.")


def _legend(proof: Proof) -> Iterator[str]:
    """Explain the cells that the grid has."""
    schedule = proof.schedule
    operations = [
        operation
        for rank in range(schedule.world_size)
        for step in schedule.steps(rank)
        for operation in step
    ]
    kinds = set(map(type, operations))
    yield from (text for kind, text in _LEGEND.items() if kind in kinds)
    if any(isinstance(op, RecvReduce | Reduce) and op.final for op in operations):
        yield "!     behind a reduction: it completes the chunk"
