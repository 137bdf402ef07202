"""What is used here, and why: ``ringcoll doctor``, ``ringcoll explain`` and ``ringcoll info``.

They tell the transports, the algorithm behind ``"auto"``, and the software with its versions.
Nothing is measured. torch is imported as late as it can be.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click

from ringcoll._version import __version__
from ringcoll.algorithms import Algorithm, find
from ringcoll.bench import as_size, time_in_words
from ringcoll.cli import networks, options
from ringcoll.cli.app import command
from ringcoll.cli.output import echo, print_json, print_table, print_text
from ringcoll.cost import BUILT_IN, Choice, Parameters, Table, in_text, predict
from ringcoll.errors import RingcollError, UnsupportedWorldSizeError
from ringcoll.machine import TRANSPORT_VARIABLES, cores, forced_transport
from ringcoll.transport import catalogue

_SIZES = (4, 64 << 10, 16 << 20)  # bytes: a message's cost counts, then both, then each byte's


@command(
    examples="""
        ringcoll doctor -k 4
        ringcoll doctor -k 8 --json
    """
)
@options.ranks_option("Number of ranks that are meant to run here.", 2)
@options.json_option
@click.pass_context
def doctor(ctx: click.Context, ranks: int, as_json: bool) -> None:
    """Say which transports will be used on this machine, why, and what to expect.

    The same transports are used by the commands, by the functions, and by the backend of
    torch.distributed, unless a program or an option asks for others. Nothing is measured:
    times are predicted, from the costs that `ringcoll tune` has measured, or a group in the last
    hours, which are shown; otherwise from built-in costs.

    Exit status: 1 if something stands in the way.
    """
    transports = {kind: _transport(kind) for kind in ("cpu", "cuda")}
    problems = [facts["problem"] for facts in transports.values() if facts["problem"]]
    expected: list[dict[str, Any]] = []
    table: Table | None = None
    if not problems:
        try:
            expected, table = _expected(transports["cpu"]["transport"], ranks)
        except RingcollError as error:
            problems.append(str(error))
    facts = {
        "transports": transports,
        "ranks": ranks,
        "cores": cores(),
        "expected": expected,
        "costs": "" if table is None else table.source,
        "measured": None if table is None or table.source == BUILT_IN else asdict(table.parameters),
        "problems": problems,
    }
    if as_json:
        print_json(facts)
    else:
        _print(facts, table)
    if problems:
        ctx.exit(1)


def _transport(kind: str) -> dict[str, Any]:
    """The transport for tensors on a type of device, and the reason for it."""
    facts: dict[str, Any] = {"transport": None, "why": "", "problem": None}
    if kind == "cuda":
        import torch

        if not torch.cuda.is_available():
            return facts | {"why": "torch finds no GPU"}
    installed, missing = [], []
    for entry in catalogue.entries():
        if entry.automatic and entry.carries(kind):
            try:
                entry.check_automatic()
                installed.append(entry.name)
            except RingcollError as error:
                missing.append(f"{entry.name} is not installed: {error}")
    reasons = [f"the first that is installed of {', '.join(installed)}", *missing]
    if forced_transport(kind) not in (None, "auto"):
        reasons = [f"{TRANSPORT_VARIABLES[kind]} asks for it"]
    try:
        name = catalogue.resolved(kind)
    except RingcollError as error:
        return facts | {"why": "; ".join(reasons), "problem": str(error)}
    why = "; ".join(filter(None, [*reasons, catalogue.entry(name).remark]))
    return facts | {"transport": name, "why": why}


def _expected(transport: str, ranks: int) -> tuple[list[dict[str, Any]], Table]:
    """The choice of "auto" for all-reduce at some sizes, and the table of costs and rules."""
    from ringcoll.collectives import explain_without_ranks

    rows = []
    for nbytes in _SIZES:
        choice = explain_without_ranks("all_reduce", nbytes, ranks, transport).choice
        seconds = None if choice.predicted is None else choice.predicted.seconds
        rows.append({"nbytes": nbytes, "algorithm": choice.algorithm, "predicted_s": seconds})
    return rows, choice.table


def _print(facts: dict[str, Any], table: Table | None) -> None:
    from ringcoll.bench import oversubscribed

    for kind, transport in facts["transports"].items():
        name = transport["transport"] or "none"
        print_text(f"{kind.upper()} tensors: {name} ({transport['problem'] or transport['why']})")
    ranks, available = facts["ranks"], facts["cores"]
    if ranks > available:
        print_text(*oversubscribed(ranks))
    else:
        print_text(f"{ranks} ranks, {available} cores: each rank has a core of its own")
    if facts["expected"]:
        print_text("", f'all_reduce with algorithm="auto"; costs: {facts["costs"]}')
        rows = [
            (
                as_size(row["nbytes"]),
                row["algorithm"],
                "-" if row["predicted_s"] is None else time_in_words(row["predicted_s"]),
            )
            for row in facts["expected"]
        ]
        print_table(("size", "algorithm", "predicted"), rows, left=2)
    if table is not None and table.source != BUILT_IN:
        print_costs(table.parameters)
    elif table is not None:
        print_text("", f"`ringcoll tune -k {ranks}` measures the costs of this machine.")
    for problem in facts["problems"]:
        print_text("", f"PROBLEM: {problem}")


def print_costs(costs: Parameters) -> None:
    """Print what messages were measured to cost, and which way they go."""
    words = [
        f"a message takes {time_in_words(costs.alpha_s)}, and "
        f"{time_in_words(costs.crowded_alpha_s)} if all ranks send at once",
        f"1 MiB takes {time_in_words(costs.beta_s_per_byte * 2**20)} and "
        f"{time_in_words(costs.crowded_beta_s_per_byte * 2**20)} more, and to add it "
        f"{time_in_words(costs.gamma_s_per_byte * 2**20)}",
    ]
    if 0 < costs.direct_from < sys.maxsize:
        words.append(f"from {as_size(costs.direct_from)} on it is read in its sender's memory")
    if costs.slice_bytes:
        words.append(f"operations on long data run in slices of {as_size(costs.slice_bytes)}")
    print_text("", *words)


# --- explain ----------------------------------------------------------------------------


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
    from ringcoll.collectives import explain_without_ranks

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
        explanation = replace(explanation, choice=_with(explanation.choice, own))
        entries[own.name] = own
    data, lines = networks.simulated(topology, nbytes, [*entries.values()])
    if as_json:
        print_json(_as_data(explanation.choice) | data)
    else:
        echo("\n".join([str(explanation), *lines]))


def _with(choice: Choice, entry: Algorithm) -> Choice:
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


# --- info -------------------------------------------------------------------------------


@command(examples="ringcoll info")
@options.json_option
def info(as_json: bool) -> None:
    """Print versions and machine, for a bug report."""
    facts = _environment()
    if as_json:
        print_json(facts)
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        text = ", ".join(value) if isinstance(value, list) else value
        unit = " GiB" if name == "memory" and value is not None else ""
        echo(f"{name:{width}}  {'-' if text in (None, '') else text}{unit}")


def _environment() -> dict[str, object]:
    """Software and machine, for JSON; ``None`` is a fact that is unknown, or does not apply."""
    import torch
    import torch.distributed as dist

    gpus = torch.cuda.device_count()
    backends = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
    }
    return {
        "ringcoll": __version__,
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "torch": torch.__version__,
        "numpy": _version("numpy"),
        "cupy": _version("cupy", "cupy-cuda12x", "cupy-cuda13x"),
        "ucxx": _if_there(ucxx),
        "ucx": _if_there(ucx),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": cores(),  # that this process may use
        "memory": _memory_gib(),
        "torch_threads": torch.get_num_threads(),
        "backends": [name for name, available in backends.items() if available],
        "cuda": torch.version.cuda,
        "driver": _if_there(driver),
        "nccl": _if_there(nccl),
        "devices": [torch.cuda.get_device_name(index) for index in range(gpus)],
        "gpu_reduction": _gpu_reduction() if gpus else None,
        "transport": _automatic("cpu"),
        "cuda_transport": _automatic("cuda") if gpus else None,
    }


def _version(*distributions: str) -> str | None:
    """Version of the first distribution that is installed."""
    for name in distributions:
        with suppress(PackageNotFoundError):
            return version(name)
    return None


def _if_there(version_of: Callable[[], str]) -> str | None:
    try:
        return version_of()
    except Exception:  # noqa: BLE001  # libraries raise anything on machines without GPU
        return None


def _automatic(kind: str) -> str:
    """The transport that "auto" stands for, or the reason why there is no transport."""
    try:
        return catalogue.resolved(kind, "auto")
    except RingcollError as error:  # belongs into a bug report, too
        return str(error)


def _gpu_reduction() -> str:
    """The engine that reduces CUDA tensors, and the reason for it."""
    from ringcoll.machine import settings
    from ringcoll.reduction import gpu

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the reason is in the answer
        try:
            engine = gpu.engine(settings.reduction())
        except RingcollError as error:
            return str(error)
    return f"{engine.name}: {engine.reason}"


def _memory_gib() -> float | None:
    with suppress(AttributeError, ValueError, OSError):
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return None


# --- versions of the software beside the package; a function raises if its software is missing


def output_of(*command: str, folder: str | None = None) -> str:
    """Output of a command, without white space around it."""
    done = subprocess.run(  # noqa: S603  # commands of this library
        command, capture_output=True, text=True, timeout=30, check=True, cwd=folder
    )
    return done.stdout.strip()


def ask_driver(fields: str) -> str:
    """Values of some fields of ``nvidia-smi --query-gpu``, for the first GPU."""
    return output_of(
        "nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", "--id=0"
    )


def driver() -> str:
    """Version of the GPU's driver."""
    return ask_driver("driver_version")


def nccl() -> str:
    """Version of torch's NCCL."""
    from ringcoll.transport import nccl_version  # it imports torch

    return ".".join(map(str, nccl_version()))


def ucxx() -> str:
    """Name and version of the installed package of ucxx."""
    for name in ("ucxx-cu13", "ucxx-cu12", "ucxx"):
        with suppress(PackageNotFoundError):
            return f"{name} {version(name)}"
    raise RuntimeError("it is not installed")


def ucx() -> str:
    """Version of the UCX that ucxx uses."""
    module: Any = import_module("ucxx")
    return ".".join(map(str, module.get_ucx_version()))
