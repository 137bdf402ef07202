"""``ringcoll explain``: which algorithm would be chosen, and why."""

from __future__ import annotations

from typing import Any

import click

from ringcoll.choice.explanation import Explanation, explain_without_ranks
from ringcoll.choice.rules import in_text
from ringcoll.cli import measuring
from ringcoll.cli.output import print_json
from ringcoll.cli.parameters import collective_name, json_option
from ringcoll.select import CUDA_TRANSPORTS, TRANSPORTS, transport

__all__ = ["explain"]

_TRANSPORTS = tuple(dict.fromkeys((*TRANSPORTS, *CUDA_TRANSPORTS)))

_EXAMPLES = """\b
Examples:
  ringcoll explain all_reduce -k 8 -b 1M
  ringcoll explain all_gather -k 4 -b 64K --transport ucx
  ringcoll explain broadcast -k 64 --hosts 8 -b 16M --json
"""


@click.command(epilog=_EXAMPLES)
@click.argument("collective", type=collective_name)
@click.option("-k", "--ranks", "--world-size", "ranks", type=click.IntRange(min=1), default=4,
              show_default=True, help="Number of ranks.")  # fmt: skip
@click.option("-b", "--bytes", "nbytes", type=measuring.size, default="1M", show_default=True,
              help="Size of the vector, or of all blocks of a rank.")  # fmt: skip
@click.option("--hosts", type=click.IntRange(min=1), default=1, show_default=True,
              help="Number of hosts.")  # fmt: skip
@click.option("--transport", "name", type=click.Choice(_TRANSPORTS), help="gloo.")
@json_option
def explain(
    collective: str, ranks: int, nbytes: int, hosts: int, name: str | None, as_json: bool
) -> None:
    """Say what algorithm="auto" would choose for COLLECTIVE, and why.

    No ranks are started. The costs of messages are those of `ringcoll tune`, if it has
    run for so many ranks on this machine, and built-in ones otherwise; a group measures
    its own. RINGCOLL_ALGORITHM counts.
    """
    found = explain_without_ranks(collective, nbytes, ranks, name or transport(None), hosts)
    if as_json:
        print_json(_document(found))
    else:
        click.echo(str(found))


def _document(found: Explanation) -> dict[str, Any]:
    choice = found.choice
    return {
        "collective": choice.collective,
        "nbytes": choice.nbytes,
        "world_size": choice.world_size,
        "transport": choice.table.transport,
        "hosts": choice.table.hosts,
        "algorithm": choice.algorithm,
        "segment_bytes": choice.segment_bytes,
        "reason": choice.reason,
        "costs": choice.table.to_json()["parameters"],
        "source": choice.table.source,
        "forced": in_text(choice.table.forced),
        "predictions": [one._asdict() for one in choice.predictions],
    }
