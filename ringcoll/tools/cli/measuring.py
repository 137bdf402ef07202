"""The options that the commands that measure share, and the ranks that they start.

Ranks are either started here, on this machine, or were started by a launcher: then
every rank runs the command, and only rank 0 prints.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

import ringcoll.tools.bench as benchmarks
from ringcoll.errors import UnsupportedWorldSizeError
from ringcoll.runtime import launch
from ringcoll.runtime.launch import adopt_ranks
from ringcoll.runtime.machine import TRANSPORT_VARIABLES, forced_transport, free_bytes
from ringcoll.runtime.reduction import OPERATORS, operator_named
from ringcoll.runtime.transport import catalogue
from ringcoll.runtime.user_files import UserModule, is_reference, is_schedule_file
from ringcoll.schedules.algorithms import algorithms
from ringcoll.tools.bench import AUTO, DTYPE_NAMES, NATIVE, OVER, PERSISTENT, SHARED, as_size
from ringcoll.tools.cli import options
from ringcoll.tools.cli.app import did_you_mean
from ringcoll.tools.cli.output import progress

RUN_S = 7 * 86400.0  # time limit of ranks: as long as the user is willing to wait
_OPERATION_S = 300.0  # and of one operation
NCCL_OPERATORS, NCCL_DTYPES = 6, 12  # how many names, the first ones, ``all`` stands for
_NCCL_NAMES = {name: short for short, name in OPERATORS.items()}


def operator(ctx: click.Context, param: click.Parameter, text: str) -> str:
    """Read the name of an operator in any spelling; return that of nccl-tests."""
    name = operator_named(text)
    if name is None:
        raise click.BadParameter(
            f"{text!r} is none of {', '.join(OPERATORS)}{did_you_mean(text, OPERATORS)}"
        )
    return _NCCL_NAMES[name]


def dtype(ctx: click.Context, param: click.Parameter, text: str) -> str:
    """Read the name of a dtype, as nccl-tests or torch spell it; return that of nccl-tests."""
    of_torch = {str(dtype): name for name, dtype in benchmarks.DTYPES.items()}
    name = of_torch.get(f"torch.{text.removeprefix('torch.')}", text)
    if name not in DTYPE_NAMES:
        raise click.BadParameter(
            f"{text!r} is none of {', '.join(DTYPE_NAMES)}{did_you_mean(text, DTYPE_NAMES)}"
        )
    return name


def operators(ctx: click.Context, param: click.Parameter, text: str) -> tuple[str, ...]:
    """Read the name of an operator, or ``all``."""
    return tuple(OPERATORS)[:NCCL_OPERATORS] if text == "all" else (operator(ctx, param, text),)


def dtypes(ctx: click.Context, param: click.Parameter, text: str) -> tuple[str, ...]:
    """Read the name of a dtype, or ``all``."""
    return tuple(DTYPE_NAMES)[:NCCL_DTYPES] if text == "all" else (dtype(ctx, param, text),)


def ranks_option(usual: int) -> options.Decorator:
    """Make the option for the number of ranks, with the number that is used without it."""
    return options.ranks_option(f"Number of ranks to start; {usual}.")


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set a variable of the environment, which the ranks inherit, until the command ends."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)  # whoever runs the command may have restored it
        os.environ |= {} if before is None else {name: before}


def _chosen_transport(ctx: click.Context, param: click.Parameter, asked: str | None) -> str:
    """Let the ranks use a transport for the tensors that the option is for; name it."""
    kind = "cpu" if param.name == "transport" else "cuda"
    if asked is not None:
        ctx.with_resource(_variable(TRANSPORT_VARIABLES[kind], asked))
    return catalogue.resolved(kind) if kind == "cpu" else catalogue.named(kind, None)


def _transport_option(kind: str, option: str) -> options.Decorator:
    return click.option(
        option,
        type=options.OneOf(("auto", *catalogue.names(kind))),
        callback=_chosen_transport,
        help=f"Transport of {kind.upper()} tensors; auto, or that of "
        f"{TRANSPORT_VARIABLES[kind]}. `ringcoll doctor` names it.",
    )


transport = _transport_option("cpu", "--transport")
cuda_transport = _transport_option("cuda", "--cuda-transport")


def _existing_device(ctx: click.Context, param: click.Parameter, device: str) -> str:
    """Make sure that there is a device of the type that an option names."""
    import torch  # here, as pages of help need no torch

    if device == "cuda" and not torch.cuda.is_available():
        raise click.BadParameter("torch finds no GPU here")
    return device


device_option = click.option(
    "--device", type=options.OneOf(["cpu", "cuda"]), default="cpu", show_default=True,
    callback=_existing_device,
    help="Where the tensors are. Ranks share GPUs where there are fewer of these.",
)  # fmt: skip
segments_option = options.size_option(
    "--segment-bytes", help="Size of the pieces in which chunks are pipelined."
)


def refuse_unused_transport(ctx: click.Context, device: str) -> None:
    """Refuse the transport of tensors that are on the other type of device."""
    unused = "transport" if device == "cuda" else "cuda_transport"
    if unused in options.typed(ctx):
        option = f"--{unused.replace('_', '-')}"
        raise click.UsageError(f"{option} says nothing about tensors with --device {device}")


def contenders(
    collective: str, text: str, world_size: int
) -> tuple[tuple[str, ...], tuple[UserModule, ...]]:
    """Read a list of contenders, separated by commas; ``all`` is every algorithm, and native.

    The names are returned, and the modules of the user to import on every rank.
    """
    names: list[str] = []
    modules: list[UserModule] = []
    for word in options.names_in(text, "--algorithms"):
        name, over, transport = word.partition(OVER)
        if over and not is_reference(word):
            catalogue.named("cpu", transport)
            forced = forced_transport("cpu")
            if forced not in (None, transport):
                raise click.BadParameter(
                    f"{word}: all of this run goes over {forced}: leave --transport and "
                    f"{TRANSPORT_VARIABLES['cpu']} away",
                    param_hint="--algorithms",
                )
            named, own = contenders(collective, name, world_size)
            names += [f"{each}{OVER}{transport}" for each in named if each != NATIVE]
            modules += own
        elif word == "all":
            entries = list(algorithms(collective, world_size))
            names += [*(entry.name for entry in entries), NATIVE]
        elif word in (AUTO, NATIVE, PERSISTENT, SHARED):
            names.append(word)
        else:
            entries, own = options.named_algorithms(word, collective)
            modules += own
            for entry in entries:
                if reason := entry.restriction(world_size):
                    raise UnsupportedWorldSizeError(
                        f"{entry.name} {collective} cannot run on {world_size} ranks: {reason}"
                    )
                if is_schedule_file(word):
                    names.append(str(Path(word).expanduser().absolute()))  # every rank reads it
                else:
                    names.append(entry.name if is_reference(word) else word.replace("-", "_"))
    if not names:  # torch's own over another transport is none
        raise click.BadParameter("name at least one", param_hint="--algorithms")
    return tuple(dict.fromkeys(names)), tuple(dict.fromkeys(modules))


def check_memory(nbytes: int, world_size: int, device: str = "cpu") -> None:
    """Refuse sizes for which the ranks here have no memory: input, output, and what is expected."""
    if device != "cpu" or adopt_ranks():
        return
    free = free_bytes()
    if 3 * nbytes * world_size > free:
        raise click.UsageError(
            f"{as_size(nbytes)} on {world_size} ranks need more memory than the "
            f"{as_size(int(free))} that are free here; "
            f"{as_size(int(free) // (3 * world_size))} would do"
        )


def is_first_rank() -> bool:
    """Whether this process is the rank that prints; without a launcher it always is."""
    return os.environ["RANK"] == "0" if adopt_ranks() else True


def ranks_to_use(asked: int | None, usual: int) -> int:
    """The number of ranks: as many as asked for, or as a launcher has started."""
    if not adopt_ranks():
        return asked or usual
    try:
        started = int(os.environ["WORLD_SIZE"])
    except ValueError as error:
        raise click.UsageError(f"WORLD_SIZE is no number of ranks: {error}") from error
    if asked not in (None, started):
        raise click.BadParameter(f"{started} have been started", param_hint="--ranks")
    return started


def on_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int,
    backend: str,
    on_report: Callable[[Any], object] = lambda item: None,
    on_start: Callable[[list[dict[str, Any]]], object] | None = None,
    kind: str = "cpu",
) -> Any:
    """Call a function on ranks that are started here, or on those that a launcher has started.

    ``on_report`` is called with what the ranks report, ``on_start`` before that with a description
    of each rank and its device of a kind, ``"cpu"`` or ``"cuda"``; under a launcher both on rank
    0. The value of the function on rank 0 is returned, under a launcher on this rank.
    """
    if adopt_ranks():
        import torch.distributed as dist

        dist.init_process_group(backend)
        devices: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(devices, benchmarks.device(kind))
        if dist.get_rank() == 0 and on_start is not None:
            on_start(devices)
        with launch.reports_to(on_report):
            result = function(*args)
        dist.barrier()
        dist.destroy_process_group()
        return result
    with launch.Ranks(world_size, backend=backend, timeout_s=_OPERATION_S) as ranks:
        if on_start is not None:
            on_start(ranks.run(benchmarks.device, kind))
        return ranks.run(function, *args, on_report=on_report, timeout_s=RUN_S)[0]


def measured(
    request: benchmarks.BenchRequest,
    world_size: int,
    advance_text: Callable[[list[benchmarks.Result]], str],
    *,
    first_text: str | None = None,
    shown: bool = True,
    on_report: Callable[[list[benchmarks.Result]], object] = lambda results: None,
    on_start: Callable[[list[dict[str, Any]]], object] | None = None,
) -> list[benchmarks.Result]:
    """Measure a request on ranks, with a clock on the terminal that says what was measured last."""
    first_text = first_text or f"starting ranks, then {as_size(request.nbytes[0])}"
    with progress(len(request.workloads), first_text, shown=shown) as advance:

        def reported(results: list[benchmarks.Result]) -> None:
            advance(advance_text(results))
            on_report(results)

        results: list[benchmarks.Result] = on_ranks(
            benchmarks.on_rank,
            request,
            world_size=world_size,
            backend=benchmarks.default_backend(request.device),
            on_report=reported,
            on_start=on_start,
            kind=request.device,
        )
    return results
