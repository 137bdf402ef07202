"""``ringcoll explain``: the choice of ``"auto"``, without ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from ringcoll.errors import UnsupportedWorldSizeError
from ringcoll.runtime.transport import catalogue
from ringcoll.schedules.algorithms import Algorithm, find
from ringcoll.schedules.cost import Choice, in_text, predict
from ringcoll.tools.cli import networks, options
from ringcoll.tools.cli.app import command
from ringcoll.tools.cli.output import echo, print_json


@command(
    examples="""
        ringcoll explain all_reduce -k 8 -b 1M
        ringcoll explain all_gather -k 4 -b 64K --transport ucx
        ringcoll explain broadcast -k 64 --hosts 8 -b 16M --json
        ringcoll explain all_reduce --algorithm star.py:star
        ringcoll explain all_reduce -b 1M --graph cluster.txt
    """,
    terms=networks.NETWORKS,
)
@options.collective_argument
@networks.network_ranks_option
@networks.network_options
@options.bytes_option()
@click.option("--hosts", type=click.IntRange(1, 1 << 16), default=1, show_default=True,
              help="Number of hosts.")  # fmt: skip
@click.option("--transport", "name",
              type=options.OneOf(("auto", *(entry.name for entry in catalogue.entries()))),
              default="auto", show_default=True, help="Transport between the ranks.")  # fmt: skip
@click.option("--device", type=options.OneOf(["cpu", "cuda"]),
              help="Where the tensors are; cpu, unless the transport carries CUDA tensors "
              "only.")  # fmt: skip
@click.option("--algorithm", metavar="NAME", shell_complete=options.complete_algorithms,
              help="Also predict this algorithm, such as star.py:star or best.txt.")  # fmt: skip
@options.json_option
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
    from ringcoll.runtime.collectives import explain_without_ranks

    transport = catalogue.resolved(device or "cpu") if name == "auto" else name
    if device is None:
        device = "cpu" if transport in catalogue.names("cpu") else "cuda"
    if transport not in catalogue.names(device):
        raise click.BadParameter(
            f"{transport} carries no {device.upper()} tensors", param_hint="--device"
        )
    world_size, topology = networks.asked_network(network, algorithm)
    explanation = explain_without_ranks(collective, nbytes, world_size, transport, hosts, device)
    names = [prediction.algorithm for prediction in explanation.choice.predictions]
    entries = {name: find(collective, name) for name in names}
    if algorithm is not None:
        (own, *_), _ = options.named_algorithms(algorithm, collective)
        explanation = replace(explanation, choice=_with_prediction(explanation.choice, own))
        entries[own.name] = own
    data, lines = networks.simulated(topology, nbytes, [*entries.values()])
    if as_json:
        print_json(_as_data(explanation.choice) | data)
    else:
        echo("\n".join([str(explanation), *lines]))


def _with_prediction(choice: Choice, entry: Algorithm) -> Choice:
    """Add the prediction of an algorithm that "auto" does not stand for."""
    if reason := entry.restriction(choice.world_size):
        raise UnsupportedWorldSizeError(
            f"{entry.name} cannot run on {choice.world_size} ranks: {reason}"
        )
    if entry.needs_hosts:
        raise click.UsageError(f"{entry.name} depends on hosts, and is not predicted")
    others = [known for known in choice.predictions if known.algorithm != entry.name]
    own = predict(entry, choice.nbytes, choice.world_size, choice.table.parameters)
    predictions = sorted([*others, own], key=lambda prediction: prediction.seconds)
    return replace(choice, predictions=tuple(predictions))


def _as_data(choice: Choice) -> dict[str, Any]:
    names = ("collective", "nbytes", "world_size", "algorithm", "segment_bytes", "reason")
    return {
        **{name: getattr(choice, name) for name in names},
        "transport": choice.table.transport,
        "hosts": choice.table.hosts,
        "costs": choice.table.to_json()["parameters"],
        "source": choice.table.source,
        "device": choice.table.device,
        "forced": in_text(choice.table.forced),
        "predictions": [prediction._asdict() for prediction in choice.predictions],
    }
