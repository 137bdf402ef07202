"""What the commands that measure share: options, and where the ranks come from.

Ranks are either started here, on this machine, or were started by ``torchrun``: then
every rank runs the command, and only rank 0 prints.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from click.core import ParameterSource

from ringcoll.algorithms import algorithms
from ringcoll.bench import AUTO, DTYPES, NATIVE, OVER, PERSISTENT, SHARED
from ringcoll.bench.environment import device
from ringcoll.bench.plot import suffixes
from ringcoll.bench.units import as_size, parse_size
from ringcoll.cli.parameters import named_algorithms, new_file
from ringcoll.errors import UnsupportedWorldSizeError
from ringcoll.launch.processes import Ranks, reports_to
from ringcoll.machine.facts import free_bytes
from ringcoll.machine.schedule_files import is_schedule_file
from ringcoll.machine.settings import TRANSPORT_VARIABLES, forced_transport
from ringcoll.machine.user_modules import UserModule, is_reference
from ringcoll.reduction import OPERATORS, operator_named
from ringcoll.schedule.contracts import LARGEST_WORLD
from ringcoll.transport import catalogue

__all__ = [
    "NATIVE",
    "NCCL_DTYPES",
    "NCCL_OPERATORS",
    "check_memory",
    "chosen",
    "contenders",
    "cuda_transport",
    "dtype",
    "dtypes",
    "is_first_rank",
    "nbytes_of",
    "new_picture",
    "on_ranks",
    "operator",
    "operators",
    "ranks_option",
    "ranks_to_use",
    "refuse_unused_transport",
    "there",
    "transport",
    "under_torchrun",
]

_MOST_SIZES = 10_000
_OPERATION_S = 300.0  # time limit of one operation
_RUN_S = 7 * 86400.0  # and of the whole: as long as the user is willing to wait


def nbytes_of(text: str) -> int:
    """Read a number of bytes, such as 64K.

    Raises
    ------
    click.BadParameter
        The text is something else.
    """
    try:
        return parse_size(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


nbytes_of.__name__ = "size"  # as pages of help show the type


NCCL_OPERATORS, NCCL_DTYPES = 6, 12
"""How many names, the first ones, ``all`` stands for."""
_TORCHS_DTYPES = {str(dtype): name for name, dtype in DTYPES.items()}
_TORCHS_OPERATORS = {name: short for short, name in OPERATORS.items()}


def operator(ctx: click.Context, param: click.Parameter, text: str) -> str:
    """Read the name of an operator in any spelling; return that of nccl-tests."""
    name = operator_named(text)
    if name is None:
        raise click.BadParameter(f"{text!r} is none of {', '.join(OPERATORS)}")
    return _TORCHS_OPERATORS[name]


def dtype(ctx: click.Context, param: click.Parameter, text: str) -> str:
    """Read the name of a dtype, as nccl-tests or torch spell it; return that of nccl-tests."""
    name = _TORCHS_DTYPES.get(f"torch.{text.removeprefix('torch.')}", text)
    if name not in DTYPES:
        raise click.BadParameter(f"{text!r} is none of {', '.join(DTYPES)}")
    return name


def operators(ctx: click.Context, param: click.Parameter, text: str) -> tuple[str, ...]:
    """Read the name of an operator, or ``all``."""
    return tuple(OPERATORS)[:NCCL_OPERATORS] if text == "all" else (operator(ctx, param, text),)


def dtypes(ctx: click.Context, param: click.Parameter, text: str) -> tuple[str, ...]:
    """Read the name of a dtype, or ``all``."""
    return tuple(DTYPES)[:NCCL_DTYPES] if text == "all" else (dtype(ctx, param, text),)


def ranks_option(usual: int) -> Callable[..., Any]:
    """Make the option for the number of ranks, with the number that is used without it."""
    return click.option(
        "-k",
        "--ranks",
        "--world-size",
        "ranks",
        type=click.IntRange(1, LARGEST_WORLD),
        help=f"Number of ranks to start; {usual}.",
    )


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


def _use(ctx: click.Context, param: click.Parameter, asked: str | None) -> str:
    """Let the ranks use a transport for the tensors that the option is for; name it."""
    kind = "cpu" if param.name == "transport" else "cuda"
    if (asked or forced_transport(kind)) == "mpi":
        raise click.BadParameter(
            "this command starts its ranks itself, and ranks that use MPI are started by "
            "mpiexec: write a program that calls ringcoll.mpi_group(), and start it with "
            "`mpiexec -n 4 python program.py`"
        )
    if asked is not None:
        ctx.with_resource(_variable(TRANSPORT_VARIABLES[kind], asked))
    return catalogue.resolved(kind) if kind == "cpu" else catalogue.named(kind, None)


def _transport_option(kind: str, option: str) -> Callable[..., Any]:
    return click.option(
        option,
        type=click.Choice(("auto", *catalogue.names(kind))),
        callback=_use,
        help=f"Transport of {kind.upper()} tensors; auto, or that of "
        f"{TRANSPORT_VARIABLES[kind]}. `ringcoll doctor` names it.",
    )


transport = _transport_option("cpu", "--transport")
cuda_transport = _transport_option("cuda", "--cuda-transport")


def there(ctx: click.Context, param: click.Parameter, device: str) -> str:
    """Make sure that there is a device of the type that an option names."""
    if device == "cuda" and not torch.cuda.is_available():
        raise click.BadParameter("torch finds no GPU here")
    return device


def refuse_unused_transport(ctx: click.Context, device: str) -> None:
    """Refuse the transport of tensors that are on the other type of device.

    Raises
    ------
    click.UsageError
        The command line names one.
    """
    unused = "transport" if device == "cuda" else "cuda_transport"
    if ctx.get_parameter_source(unused) is ParameterSource.COMMANDLINE:
        option = f"--{unused.replace('_', '-')}"
        raise click.UsageError(f"{option} says nothing about tensors with --device {device}")


def new_picture(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Make sure, before anything is measured, that a picture can be drawn and written."""
    return None if path is None else new_file(*suffixes())(ctx, param, path)


def contenders(
    collective: str, text: str, world_size: int
) -> tuple[tuple[str, ...], tuple[UserModule, ...]]:
    """Read a list of contenders, separated by commas; ``all`` is every algorithm, and native.

    Returns
    -------
    tuple
        Names of contenders, and the modules of the user to import on every rank.

    Raises
    ------
    UnknownAlgorithmError
        There is no such algorithm.
    UnsupportedWorldSizeError
        An algorithm that was named does not run on so many ranks.
    click.BadParameter
        No contender is named, or one is to go over another transport than all of the run.
    """
    names: list[str] = []
    modules: list[UserModule] = []
    for word in filter(None, map(str.strip, text.split(","))):
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
            entries, own = named_algorithms(word, collective)
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
    if not names:
        raise click.BadParameter("name at least one", param_hint="--algorithms")
    return tuple(dict.fromkeys(names)), tuple(dict.fromkeys(modules))


def chosen(sizes_from: int, sizes_to: int, factor: int, step: int) -> tuple[int, ...]:
    """The sizes between two, by a factor if it is above 1, otherwise by a step."""
    if sizes_to < sizes_from:
        raise click.UsageError("the largest size (-e) is below the smallest (-b)")
    if factor <= 1 and step and (sizes_to - sizes_from) // step >= _MOST_SIZES:
        raise click.UsageError(
            f"there are more than {_MOST_SIZES} sizes: take a larger step (-i), or -f 2"
        )
    sizes, nbytes = [], sizes_from
    while nbytes <= sizes_to:
        sizes.append(nbytes)
        following = nbytes * factor if factor > 1 else nbytes + step
        if following <= nbytes:  # a factor of nothing
            break
        nbytes = following
    return tuple(sizes)


def check_memory(nbytes: int, world_size: int, device: str = "cpu") -> None:
    """Refuse sizes for which the ranks of this machine have no memory: input, output, and what is expected.

    Raises
    ------
    click.UsageError
        The message says which size would do.
    """
    if (
        device == "cpu"
        and not under_torchrun()
        and 3 * nbytes * world_size > (free := free_bytes())
    ):
        raise click.UsageError(
            f"{as_size(nbytes)} on {world_size} ranks need more memory than the {as_size(int(free))} that "
            f"are free here; {as_size(int(free) // (3 * world_size))} would do"
        )


def under_torchrun() -> bool:
    """Whether this process is one of several ranks that somebody else started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first_rank() -> bool:
    """Whether this process is the rank that prints; without ``torchrun`` it always is."""
    return os.environ["RANK"] == "0" if under_torchrun() else True


def ranks_to_use(asked: int | None, usual: int) -> int:
    """The number of ranks: as many as asked for, or as ``torchrun`` has started.

    Raises
    ------
    click.BadParameter
        These are two different numbers.
    """
    if not under_torchrun():
        return asked or usual
    try:
        started = int(os.environ["WORLD_SIZE"])
    except ValueError as error:
        raise click.UsageError(f"WORLD_SIZE is no number of ranks: {error}") from error
    if asked not in (None, started):
        raise click.BadParameter(f"torchrun has started {started}", param_hint="--ranks")
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
    """Call a function on ranks that are started here, or on those of ``torchrun``.

    Parameters
    ----------
    function, args
        See `ringcoll.launch.processes.Ranks.run`.
    world_size, backend
        Number of ranks to start; backend of the default group.
    on_report
        Called with what the ranks report; under ``torchrun`` on rank 0, with its reports.
    on_start
        Called with a description of each rank, before the function runs; on rank 0.
    kind
        Where the tensors are, for the description: ``"cpu"`` or ``"cuda"``.

    Returns
    -------
    object
        What the function returned on rank 0; under ``torchrun`` on this rank.
    """
    if under_torchrun():
        dist.init_process_group(backend)
        devices: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(devices, device(kind))
        if dist.get_rank() == 0 and on_start is not None:
            on_start(devices)
        with reports_to(on_report):
            result = function(*args)
        dist.barrier()
        dist.destroy_process_group()
        return result
    with Ranks(world_size, backend=backend, timeout_s=_OPERATION_S) as ranks:
        if on_start is not None:
            on_start(ranks.run(device, kind))
        return ranks.run(function, *args, on_report=on_report, timeout_s=_RUN_S)[0]
