"""``ringcoll explain``: which algorithm would be chosen, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from ringcoll.algorithms import Algorithm, find
from ringcoll.cli.command import command
from ringcoll.cli.networks import (
    NETWORKS,
    asked_network,
    network_options,
    network_ranks_option,
    simulated,
)
from ringcoll.cli.output import print_json
from ringcoll.cli.parameters import (
    bytes_option,
    collective_name,
    complete_algorithms,
    json_option,
    named_algorithms,
)
from ringcoll.collectives import Explanation, explain_without_ranks
from ringcoll.cost import in_text, predict
from ringcoll.errors import UnsupportedWorldSizeError
from ringcoll.transport import catalogue

_FACTS = ("collective", "nbytes", "world_size", "algorithm", "segment_bytes", "reason")
_TRANSPORTS = ("auto", *(entry.name for entry in catalogue.entries()))

_EXAMPLES = """
  ringcoll explain all_reduce -k 8 -b 1M
  ringcoll explain all_gather -k 4 -b 64K --transport ucx
  ringcoll explain broadcast -k 64 --hosts 8 -b 16M --json
  ringcoll explain all_reduce --algorithm star.py:star
  ringcoll explain all_reduce -b 1M --graph cluster.txt
"""


@command(examples=_EXAMPLES, terms=NETWORKS)
@click.argument("collective", type=collective_name)
@network_ranks_option
@network_options
@bytes_option()
@click.option("--hosts", type=click.IntRange(1, 1 << 16), default=1, show_default=True,
              help="Number of hosts.")  # fmt: skip
@click.option("--transport", "name", type=click.Choice(_TRANSPORTS), default="auto",
              show_default=True, help="Transport between the ranks.")  # fmt: skip
@click.option("--device", type=click.Choice(["cpu", "cuda"]),
              help="Where the tensors are; cpu, unless the transport carries CUDA tensors only.")  # fmt: skip
@click.option("--algorithm", metavar="NAME",
              shell_complete=complete_algorithms,
              help="Also predict this algorithm, such as star.py:star or best.txt.")  # fmt: skip
@json_option
def explain(
    collective: str,
    nbytes: int,
    hosts: int,
    name: str,
    device: str | None,
    algorithm: str | None,
    as_json: bool,
    **network: Any,
) -> None:
    """Say what algorithm="auto" would choose for COLLECTIVE, and why.

    No ranks are started. The costs of messages are those of `ringcoll tune`, if it has
    run for so many ranks on this machine, and built-in costs otherwise; a group measures
    its own. RINGCOLL_ALGORITHM counts. With a network, the same algorithms are simulated on it.
    """
    transport = catalogue.resolved(device or "cpu") if name == "auto" else name
    if device is None:
        device = "cpu" if transport in catalogue.names("cpu") else "cuda"
    if transport not in catalogue.names(device):
        raise click.BadParameter(
            f"{transport} carries no {device.upper()} tensors", param_hint="--device"
        )
    world_size, topology = asked_network(network, algorithm)
    explanation = explain_without_ranks(collective, nbytes, world_size, transport, hosts, device)
    names = [prediction.algorithm for prediction in explanation.choice.predictions]
    entries = {name: find(collective, name) for name in names}
    if algorithm is not None:
        (own, *_), _ = named_algorithms(algorithm, collective)
        explanation, entries[own.name] = _with(explanation, own), own
    data, lines = simulated(topology, nbytes, [*entries.values()])
    if as_json:
        print_json(_document(explanation) | data)
    else:
        click.echo("\n".join([str(explanation), *lines]))


def _with(explanation: Explanation, entry: Algorithm) -> Explanation:
    """Add the prediction of an algorithm that "auto" does not stand for."""
    choice = explanation.choice
    if reason := entry.restriction(choice.world_size):
        raise UnsupportedWorldSizeError(
            f"{entry.name} cannot run on {choice.world_size} ranks: {reason}"
        )
    if entry.needs_hosts:
        raise click.UsageError(f"{entry.name} depends on hosts, and is not predicted")
    others = [known for known in choice.predictions if known.algorithm != entry.name]
    own = predict(entry, choice.nbytes, choice.world_size, choice.table.parameters)
    predictions = sorted([*others, own], key=lambda prediction: prediction.seconds)
    return replace(explanation, choice=replace(choice, predictions=tuple(predictions)))


def _document(explanation: Explanation) -> dict[str, Any]:
    choice = explanation.choice
    return {
        **{name: getattr(choice, name) for name in _FACTS},
        "transport": choice.table.transport,
        "hosts": choice.table.hosts,
        "costs": choice.table.to_json()["parameters"],
        "source": choice.table.source,
        "device": choice.table.device,
        "forced": in_text(choice.table.forced),
        "predictions": [prediction._asdict() for prediction in choice.predictions],
    }
