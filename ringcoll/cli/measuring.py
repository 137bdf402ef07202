"""What the commands that measure share: options, and how ranks are had.

Ranks are either started here, on this machine, or were started by ``torchrun``: then
every one of them runs the command, and only rank 0 prints.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import click
import torch.distributed as dist

from ringcoll import select
from ringcoll.algorithms import algorithms, find
from ringcoll.bench import AUTO, NATIVE, PERSISTENT, Request, Result, measure, on_rank
from ringcoll.bench.environment import default_backend, device
from ringcoll.bench.units import parse_size
from ringcoll.errors import UnsupportedWorldSizeError
from ringcoll.launch import Ranks
from ringcoll.transport.ucx import UcxTransport

__all__ = [
    "NATIVE",
    "chosen",
    "imports",
    "interruptible",
    "known",
    "on_ranks",
    "ranks_option",
    "ranks_to_use",
    "run_here",
    "run_under_torchrun",
    "size",
    "transport",
    "under_torchrun",
]

INTERRUPTED = 130  # what a shell says of a command that ended by Ctrl-C

_OPERATION_S = 300.0  # time limit of one operation
_RUN_S = 7 * 86400.0  # and of the whole: as long as the user is willing to wait


def size(text: str) -> int:
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


ranks_option = click.option(
    "-k",
    "--ranks",
    "--world-size",
    "ranks",
    type=click.IntRange(min=1),
    help="Number of ranks to start; 4.",
)


def _use(ctx: click.Context, param: click.Parameter, name: str | None) -> str:
    """Let the ranks, which get this process's environment, use a transport."""
    if name is not None:
        os.environ[select.TRANSPORT_VARIABLE] = name
    chosen = select.transport(None)
    if chosen == "ucx":
        UcxTransport.check()
    return chosen


transport = click.option(
    "--transport",
    type=click.Choice(["gloo", "ucx"]),
    callback=_use,
    help=f"How CPU tensors travel; gloo, unless {select.TRANSPORT_VARIABLE} says otherwise.",
)

imports = click.option(
    "--import",
    "modules",
    multiple=True,
    metavar="MODULE",
    help="Import this module first: it may register algorithms of your own.",
)


def known(collective: str, names: str, modules: tuple[str, ...], world_size: int) -> list[str]:
    """Read a list of contenders, separated by commas; ``all`` is every algorithm, and native.

    Raises
    ------
    UnknownAlgorithmError
        One of them is none.
    UnsupportedWorldSizeError
        One that was named does not run on so many ranks.
    """
    for module in modules:
        try:
            import_module(module)
        except ImportError as error:
            raise click.BadParameter(str(error), param_hint="--import") from error
    if names.strip() == "all":
        entries = [one for one in algorithms(collective) if not one.restriction(world_size)]
        return [*(one.name for one in entries), NATIVE]
    contenders = [name.strip().replace("-", "_") for name in names.split(",") if name.strip()]
    if not contenders:
        raise click.BadParameter("name at least one", param_hint="--algorithms")
    for name in contenders:
        if name not in (AUTO, NATIVE, PERSISTENT) and (
            reason := find(collective, name).restriction(world_size)
        ):
            raise UnsupportedWorldSizeError(
                f"{name} {collective} cannot run on {world_size} ranks: {reason}"
            )
    return list(dict.fromkeys(contenders))


def chosen(sizes_from: int, sizes_to: int, factor: int, step: int) -> tuple[int, ...]:
    """The sizes between two, by a factor if it is above 1, otherwise by a step."""
    if sizes_to < sizes_from:
        raise click.UsageError("the largest size (-e) is below the smallest (-b)")
    sizes, nbytes = [], sizes_from
    while nbytes <= sizes_to:
        sizes.append(nbytes)
        following = nbytes * factor if factor > 1 else nbytes + step
        if following <= nbytes:  # a factor of nothing
            break
        nbytes = following
    return tuple(sizes)


def under_torchrun() -> bool:
    """Whether this process is one of several ranks that somebody else started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def ranks_to_use(asked: int | None, usual: int) -> int:
    """The number of ranks: as many as asked for, or as ``torchrun`` has started.

    Raises
    ------
    click.BadParameter
        These are two different numbers.
    """
    if not under_torchrun():
        return asked or usual
    started = int(os.environ["WORLD_SIZE"])
    if asked not in (None, started):
        raise click.BadParameter(f"torchrun has started {started}", param_hint="--ranks")
    return started


@contextmanager
def interruptible() -> Iterator[None]:
    """End quietly on Ctrl-C, with the exit status of a command that was interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo("\ninterrupted; all ranks were ended", err=True)
        raise click.exceptions.Exit(INTERRUPTED) from None


def run_here(
    request: Request,
    world_size: int,
    on_start: Callable[[list[dict[str, Any]]], object],
    on_results: Callable[[list[Result]], None],
) -> list[Result]:
    """Start ranks, measure on them, end them.

    Parameters
    ----------
    on_start
        Called with a description of each rank.
    on_results
        Called with the results of each workload.
    """
    backend = default_backend(request.device)
    with Ranks(world_size, backend=backend, timeout_s=_OPERATION_S) as ranks:
        on_start(ranks.run(device, request.device))
        results: list[Result] = ranks.run(on_rank, request, on_report=on_results, timeout_s=_RUN_S)[
            0
        ]
        return results


def run_under_torchrun(
    request: Request,
    on_start: Callable[[list[dict[str, Any]]], object],
    on_results: Callable[[list[Result]], None],
) -> list[Result]:
    """Measure on the ranks that are there; the functions are called on rank 0 only."""
    dist.init_process_group(default_backend(request.device))
    devices: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(devices, device(request.device))
    if dist.get_rank() == 0:
        on_start(devices)
    results = measure(request, on_results)
    dist.barrier()
    dist.destroy_process_group()
    return results


def on_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int,
    backend: str,
    on_report: Callable[[Any], None],
) -> Any:
    """Call a function on ranks that are started here, or on those of ``torchrun``.

    Parameters
    ----------
    function, args
        See `ringcoll.launch.Ranks.run`.
    world_size, backend
        Number of ranks to start; backend of the default group.
    on_report
        Called with what the ranks report; never under ``torchrun``.

    Returns
    -------
    object
        What the function returned on rank 0, or on this one of ``torchrun``'s.
    """
    if under_torchrun():
        dist.init_process_group(backend)
        result = function(*args)
        dist.barrier()
        dist.destroy_process_group()
        return result
    with Ranks(world_size, backend=backend, timeout_s=_OPERATION_S) as ranks:
        return ranks.run(function, *args, on_report=on_report, timeout_s=_RUN_S)[0]
