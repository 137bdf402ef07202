"""``ringcoll probe``: the network of these ranks, measured."""

from __future__ import annotations

from pathlib import Path

import click

import ringcoll.tools.bench as benchmarks
from ringcoll.lab.simulation import Measurements, links_of, topology_of, topology_text
from ringcoll.runtime.machine import replace_file
from ringcoll.schedules.cost import in_number
from ringcoll.tools.bench import time_in_words
from ringcoll.tools.cli import measuring, options
from ringcoll.tools.cli.app import command
from ringcoll.tools.cli.output import echo, print_table, print_text

_SHOWN_LINKS = 60


@command(
    examples="""
        ringcoll probe -k 4
        torchrun --nnodes 2 --nproc-per-node 4 --rdzv-endpoint host0:29500 \
-m ringcoll probe -o cluster.txt
        mpiexec -n 8 ringcoll probe
        ringcoll probe -k 2 --transport gloo --seconds 5 --json
    """
)
@measuring.ranks_option(4)
@measuring.transport
@click.option("--seconds", type=options.FiniteRange(min=0, min_open=True), default=20,
              show_default=True,
              help="Time to spend.")  # fmt: skip
@options.file_option("-o", "--output", "file",
                     help="Write the network, as --graph of other commands reads it.")  # fmt: skip
@options.json_option
def probe(
    ranks: int | None, transport: str, seconds: float, file: Path | None, as_json: bool
) -> None:
    """Measure all pairs of ranks, and find hosts, their cards, and the links between them.

    Ranks are processes on this machine; under torchrun, mpiexec and srun every rank runs the
    command, and rank 0 writes. The table has each link with its spread: the interquartile range
    over the median. Nothing else should run on these hosts meanwhile.
    """
    measured: Measurements = measuring.on_ranks(
        benchmarks.measurements,
        None,
        seconds,
        world_size=measuring.ranks_to_use(ranks, 4),
        backend="gloo",
    )
    if not measuring.is_first_rank():
        return
    links = links_of(measured)
    if file is not None:
        spreads = {link: f"spread {spread:.0%}" for link, spread in links.items()}
        replace_file(file, topology_text(topology_of(measured), spreads))
    if as_json:
        echo(measured.to_json())
        return
    rows = [
        (
            link.name,
            f"{float(link.bandwidth) / 1e6:.5g}",
            time_in_words(float(link.latency_s)),
            f"{spread:.0%}",
        )
        for link, spread in links.items()
    ]
    sizes = in_number(len(measured.hosts), "rank"), in_number(max(measured.hosts) + 1, "host")
    print_text(f"{' on '.join(sizes)} over {transport}", "")
    print_table(("link", "MB/s", "latency", "spread"), rows[-_SHOWN_LINKS:], left=1)
    if file is not None:
        print_text("", f"Wrote {file}.")
