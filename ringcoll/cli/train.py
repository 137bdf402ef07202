"""``ringcoll train``: a small real training run, against torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import click

from ringcoll.bench.contenders import NATIVE as NATIVE_ALGORITHM
from ringcoll.bench.environment import environment, oversubscribed, ran_on
from ringcoll.bench.findings import label
from ringcoll.bench.summary import FEW_SAMPLES, spread_in_words
from ringcoll.bench.training import (
    NATIVE,
    SPLIT,
    TRAINERS,
    WIRE_DTYPES,
    Contender,
    Epoch,
    TrainingRequest,
    TrainingResult,
    check_split,
    on_rank,
    tolerances,
)
from ringcoll.bench.units import as_size, time_in_words
from ringcoll.cli import measuring
from ringcoll.cli.command import command
from ringcoll.cli.output import print_json, print_table, print_text, progress
from ringcoll.cli.parameters import json_option
from ringcoll.training.data import Digits, batches, load_digits

__all__ = ["train"]

_EXAMPLES = """
  ringcoll train
  ringcoll train -k 4 --epochs 20 --wire bfloat16
  ringcoll train --trainer per-parameter,bucketed,torch-ddp-hook
  ringcoll train --trainer bucketed --backend gloo
  ringcoll train --algorithms ring,star.py:star
  ringcoll train --trainer bucketed,tensor,pipeline:1f1b
  torchrun --nproc-per-node 2 -m ringcoll.cli train
"""


def _trainers(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> tuple[str, ...]:
    """Read names that are separated by commas, or by repeating the option."""
    names = list(filter(None, map(str.strip, ",".join(values).split(","))))
    if not names:
        raise click.BadParameter("name at least one")
    for name in names:
        if name not in TRAINERS:
            raise click.BadParameter(f"{name!r} is none of {', '.join(TRAINERS)}")
    return tuple(dict.fromkeys(names))


_TERMS = {
    "Trainers": {
        "per-parameter": "an all-reduce for each parameter, after backward",
        "bucketed": "an all-reduce for each bucket, while backward goes on",
        "torch-ddp": "DistributedDataParallel on a group of --backend",
        "torch-ddp-hook": "DistributedDataParallel that calls ringcoll in a hook",
        "tensor": "each layer is split over the ranks; all see the pictures of all",
        "pipeline:NAME": "the layers are shared out; a batch passes in 4 micro-batches",
    }
}


@command(examples=_EXAMPLES, terms=_TERMS)
@click.option("--trainer", "trainers", multiple=True, default=["bucketed,torch-ddp"], show_default=True,
              callback=_trainers, metavar="NAMES",
              help=f"Any of {', '.join(TRAINERS)}; separated by commas, or repeated.")  # fmt: skip
@click.option("--algorithm", "--algorithms", "names", metavar="NAMES", default="ring,tree",
              show_default=True,
              help="Names from `ringcoll list`, auto, or algorithms of your own, such as "
              "star.py:star.")  # fmt: skip
@click.option("--backend", type=click.Choice(["gloo", "ringcoll"]), default="ringcoll",
              show_default=True, help="Backend of the process group.")  # fmt: skip
@measuring.ranks_option(2)
@measuring.transport
@click.option("--epochs", type=click.IntRange(min=1), default=TrainingRequest.epochs, show_default=True,
              help="Times that each picture is seen.")  # fmt: skip
@click.option("--batch", type=click.IntRange(min=1), default=TrainingRequest.batch, show_default=True,
              help="Pictures in a step of one rank.")  # fmt: skip
@click.option("--layers", type=click.IntRange(min=1), default=TrainingRequest.layers, show_default=True,
              help="Linear layers of the model.")  # fmt: skip
@click.option("--width", type=click.IntRange(min=1), default=TrainingRequest.width, show_default=True,
              help="Neurons between two layers.")  # fmt: skip
@click.option("--bucket-bytes", type=measuring.nbytes_of, default=as_size(TrainingRequest.bucket_bytes),
              show_default=True, help="Size of the buckets, for trainers that have buckets.")  # fmt: skip
@click.option("--wire", type=click.Choice(list(WIRE_DTYPES)),
              help="Send gradients in 16 bits, except natively.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=TrainingRequest.seed, show_default=True,
              help="Seed of the weights and of the order of the pictures.")  # fmt: skip
@click.option("--lr", type=click.FloatRange(min=0, min_open=True), default=TrainingRequest.lr,
              show_default=True, help="Learning rate.")  # fmt: skip
@json_option
@click.pass_context
def train(
    ctx: click.Context,
    /,
    trainers: tuple[str, ...],
    names: str,
    backend: str,
    ranks: int | None,
    transport: str,
    as_json: bool,
    **settings: Any,
) -> None:
    """Train on handwritten digits, with every trainer and algorithm, and natively.

    Ranks are processes on this machine. All contenders start from the same weights,
    see the same pictures, and take turns epoch by epoch; native is torch's
    DistributedDataParallel on gloo.

    Loss and accuracy are those on the test set. Times are medians, of the slowest rank;
    the spread is the interquartile range over the median. Overlap is the share of the
    communication that was hidden behind backward.

    Exit status: 1 if ranks ended with different parameters, or if a contender's
    parameters differ from those of native: after the first step by more than rounding; at
    the end by more than a tenth of the way that the parameters have gone, a quarter of it
    with --wire float16, half of it with bfloat16.
    """
    world_size = measuring.ranks_to_use(ranks, 2)
    algorithms, modules = measuring.contenders("all_reduce", names, world_size)
    if NATIVE_ALGORITHM in algorithms and names.strip() != "all":
        raise click.BadParameter("native takes part in any case", param_hint="--algorithm")
    request = TrainingRequest(
        tuple(_contenders(trainers, algorithms, backend)),
        backend=backend,
        modules=modules,
        **settings,
    )
    digits = load_digits()
    batches(len(digits.train_targets), request.batch, 0, 0, world_size)  # complains where it must
    check_split(request, world_size)
    facts = environment(world_size) | {"transport": transport}
    printing = measuring.is_first_rank()
    if printing and not as_json:
        _announce(request, digits, facts)
    results = _run(request, digits, world_size)
    wrong = list(_complaints(request, results))
    if printing and as_json:
        print_json(_document(request, facts, results, wrong))
    elif printing:
        _print(request, results, wrong, facts)
    if wrong:
        ctx.exit(1)


def _contenders(
    trainers: tuple[str, ...], names: tuple[str, ...], backend: str
) -> Iterator[Contender]:
    for trainer in trainers:
        if trainer == "torch-ddp" and backend == "gloo":
            yield NATIVE
            continue
        if trainer in SPLIT:
            yield Contender(trainer, "auto")
            continue
        yield from (Contender(trainer, name) for name in names if name != NATIVE_ALGORITHM)


def _announce(request: TrainingRequest, digits: Digits, facts: dict[str, Any]) -> None:
    sizes = [64, *[request.width] * (request.layers - 1), 10]
    pictures, world_size = len(digits.train_targets), facts["world_size"]
    print_text(
        f"{'-'.join(map(str, sizes))} perceptron on {pictures} pictures of digits, "
        f"{pictures // (world_size * request.batch)} steps an epoch of "
        f"{world_size} x {request.batch}",
        f"{request.backend}: {ran_on(facts)}",
        "",
    )


def _run(request: TrainingRequest, digits: Digits, world_size: int) -> list[TrainingResult]:
    total = request.epochs * len({*request.contenders, NATIVE})
    with progress(total, "starting ranks", shown=measuring.is_first_rank()) as advance:
        results: list[TrainingResult] = measuring.on_ranks(
            on_rank,
            request,
            digits,
            world_size=world_size,
            backend=request.backend,
            on_report=lambda epoch: advance(
                f"epoch {epoch.number}: {_name(epoch.contender)} {_quality(epoch)}"
            ),
        )
    return results


def _name(contender: Contender) -> str:
    trainer, algorithm = contender
    if trainer in SPLIT:
        return trainer
    return "native" if algorithm is None else f"{trainer}, {label(algorithm)}"


def _quality(epoch: Epoch) -> str:
    return f"{epoch.loss:.4f} {100 * epoch.accuracy:.1f}%"


_COLUMNS = (
    ("trainer", ""),
    ("test", "loss"),
    ("test", "accuracy"),
    ("step", "(ms)"),
    ("", "spread"),
    ("all-reduced", "a step"),
    ("overlap", ""),
    ("between", "ranks"),
    ("from", "native"),
)


def _print(
    request: TrainingRequest, results: list[TrainingResult], wrong: list[str], facts: dict[str, Any]
) -> None:
    names = [_name(result.contender) for result in results]
    lines = zip(*(result.epochs for result in results), strict=True)
    rows = [(str(line[0].number), *map(_quality, line)) for line in lines]
    print_table(["epoch", *names], rows, left=1)
    click.echo()
    print_table([f"{above}\n{below}" for above, below in _COLUMNS], map(_row, results), left=1)
    if any(result.summary.few for result in results):
        print_text(f"~ median and spread are {FEW_SAMPLES}")
    print_text("", *oversubscribed(facts["world_size"]))
    print_text("", *(wrong or _findings(request, results)))


def _row(result: TrainingResult) -> tuple[str, ...]:
    summary, last = result.summary, result.epochs[-1]
    return (
        _name(result.contender),
        f"{last.loss:.6f}",
        f"{100 * last.accuracy:.2f}%",
        f"{summary.p50_s * 1e3:.2f}",
        spread_in_words(summary),
        as_size(result.nbytes) if result.nbytes else "-",
        "-" if result.overlap is None else f"{100 * result.overlap:.0f}%",
        f"{result.between_ranks:.2g}",
        "-" if result.contender == NATIVE else f"{result.end.from_native:.2g}",
    )


def _findings(request: TrainingRequest, results: list[TrainingResult]) -> Iterator[str]:
    losses = [result.epochs[-1].loss for result in results]
    fastest = min(results, key=lambda result: result.summary.p50_s)
    yield "Parameters are the same on all ranks, to the last bit, for every contender."
    if len(results) > 1:
        ours = [result for result in results if result.contender != NATIVE]
        worst = max(result.end.from_native for result in ours)
        if worst == 0:
            yield "Every contender ends with the parameters of native, to the last bit."
        else:
            limit = min(tolerances(request, result)[1] for result in ours)
            yield (
                f"Largest difference from native: {worst:.2g}, allowed {limit:.2g}; "
                f"losses differ by {max(losses) - min(losses):.2g} at most."
            )
        took = time_in_words(fastest.summary.p50_s)
        yield f"Lowest median of a step: {_name(fastest.contender)}, {took}."


def _complaints(request: TrainingRequest, results: list[TrainingResult]) -> Iterator[str]:
    """Sentences on what is wrong; a difference of NaN is wrong."""
    for result in results:
        name = _name(result.contender)
        if result.between_ranks != 0:
            yield f"WRONG: {name}: ranks differ by {result.between_ranks:.2g}"
        moments = zip(
            ("after the first step", "at the end"),
            (result.first, result.end),
            tolerances(request, result),
            strict=True,
        )
        for moment, compared, limit in moments:
            if not compared.from_native <= limit:
                yield (
                    f"WRONG: {name}: {moment} {compared.from_native:.2g} "
                    f"from native, allowed {limit:.2g}"
                )


def _document(
    request: TrainingRequest, facts: dict[str, Any], results: list[TrainingResult], wrong: list[str]
) -> dict[str, Any]:
    return {
        "environment": facts,
        "settings": {
            name: value
            for name, value in asdict(request).items()
            if name not in ("contenders", "modules")
        },
        "world_size": facts["world_size"],
        "results": [_record(request, result) for result in results],
        "wrong": wrong,
        "findings": [] if wrong else list(_findings(request, results)),
    }


def _record(request: TrainingRequest, result: TrainingResult) -> dict[str, Any]:
    return {
        "trainer": result.contender.trainer,
        "algorithm": result.contender.algorithm or "native",
        "epochs": [
            {"number": epoch.number, "loss": epoch.loss, "accuracy": epoch.accuracy}
            for epoch in result.epochs
        ],
        "step": asdict(result.summary) | {"spread": result.summary.spread},
        "nbytes_per_step": result.nbytes,
        "overlap": result.overlap,
        "between_ranks": result.between_ranks,
        "from_native": result.end.from_native,
        "from_native_after_one_step": result.first.from_native,
        "moved": result.end.moved,
        "moved_in_one_step": result.first.moved,
    }
