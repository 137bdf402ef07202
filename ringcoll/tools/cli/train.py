"""``ringcoll train``: small real training runs of every system, against torch's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

import ringcoll.tools.bench as lab
from ringcoll.errors import ArgumentError
from ringcoll.tools.bench import (
    BUCKET_BYTES,
    EPOCHS,
    FEW_SAMPLES,
    NATIVE,
    WIRE_NAMES,
    as_size,
    spread_in_words,
    time_in_words,
)
from ringcoll.tools.cli import measuring, options
from ringcoll.tools.cli.app import command, nearest
from ringcoll.tools.cli.output import echo, print_json, print_table, print_text, progress
from ringcoll.training import (
    LAYERS,
    LEARNING_RATES,
    MODELS,
    TRAINERS,
    TrainerEntry,
    find_trainer,
    trainer_names,
    usual_task,
)


def _trainers(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> dict[str, TrainerEntry]:
    """Read names that are separated by commas, or by repeating the option."""
    names = options.names_in(",".join(values))
    try:
        return {name: find_trainer(name)[0] for name in names}
    except ArgumentError as error:
        raise click.BadParameter(
            f"{error.got!r} is none of {error.expected}{nearest(error)}"
        ) from error


_SETTINGS = ("backend", "epochs", "wire", "bucket_bytes")
_TASK_SETTINGS = ("model", "layers", "width", "batch", "optimizer", "lr", "seed")
_RATES = ", ".join(f"{lr} for {name}" for name, lr in LEARNING_RATES.items())


def _taking(what: str) -> str:
    """The trainers that take an algorithm, or a wire dtype."""
    return ", ".join(name for name, entry in TRAINERS.items() if getattr(entry, f"takes_{what}"))


@command(
    examples="""
        ringcoll train
        ringcoll train -k 4 --epochs 20 --wire bfloat16
        ringcoll train --trainer per-parameter,bucketed,torch-ddp-hook
        ringcoll train --trainer bucketed --backend gloo
        ringcoll train --algorithms ring,star.py:star
        ringcoll train --trainer bucketed,tensor,pipeline:1f1b,one-process
        ringcoll train -k 4 --trainer gossip:exponential,local-sgd,server:async --picture loss.png
        ringcoll train -k 8 --trainer 3d:2x2x2,sharded:2
        torchrun --nproc-per-node 2 -m ringcoll train
    """,
    terms={
        "Trainers": {
            name + (f":{entry.placeholder}" if entry.placeholder else ""): entry.about
            for name, entry in TRAINERS.items()
        }
    },
)
@click.option("--trainer", "trainers", multiple=True, default=["bucketed,torch-ddp"],
              show_default=True, callback=_trainers, metavar="NAMES",
              help=f"Any of {', '.join(trainer_names())}; separated by commas, "
              "or repeated.")  # fmt: skip
@click.option("--algorithm", "--algorithms", "names", metavar="NAMES", default="ring,tree",
              show_default=True, shell_complete=options.complete_algorithms,
              help="Names from `ringcoll list`, auto, algorithms of your own, such as "
              f"star.py:star, or files such as best.txt; for {_taking('algorithm')}.")  # fmt: skip
@click.option("--backend", type=options.OneOf(["gloo", "ringcoll"]), default="ringcoll",
              show_default=True, help="Backend of the process group.")  # fmt: skip
@measuring.ranks_option(2)
@measuring.transport
@click.option("--model", type=options.OneOf(MODELS),
              help="A perceptron reads digits, a transformer continues text; without it the model "
              "that the trainers need, or the perceptron.")  # fmt: skip
@click.option("--optimizer", type=options.OneOf(list(LEARNING_RATES)),
              help="All contenders use it; without the option, the optimizer that the trainers "
              "need, or sgd, with momentum 0.9.")  # fmt: skip
@click.option("--epochs", type=click.IntRange(1, 10**6), default=EPOCHS,
              show_default=True, help="Times that each sample is seen.")  # fmt: skip
@click.option("--batch", type=click.IntRange(1, 1 << 16),
              help="Samples in a step, for each rank; 32 pictures, or 8 pieces of "
              "text.")  # fmt: skip
@click.option("--layers", type=click.IntRange(1, 1 << 10), default=LAYERS, show_default=True,
              help="Linear layers of the perceptron, blocks of the transformer.")  # fmt: skip
@click.option("--width", type=click.IntRange(1, 1 << 14),
              help="Neurons between two layers, 256, or numbers for a token, 64.")  # fmt: skip
@click.option("--bucket-bytes", type=options.nbytes_of,
              default=as_size(BUCKET_BYTES), show_default=True,
              help="Size of the buckets, for trainers that have buckets.")  # fmt: skip
@click.option("--wire", type=options.OneOf(list(WIRE_NAMES)),
              help=f"Send gradients in 16 bits; for {_taking('wire')}.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0, (1 << 63) - 1), default=0, show_default=True,
              help="Seed of the weights and of the order of the samples.")  # fmt: skip
@click.option("--lr", type=options.FiniteRange(min=0, min_open=True),
              help=f"Learning rate; {_RATES}.")  # fmt: skip
@click.option("--picture", type=click.Path(dir_okay=False, path_type=Path),
              callback=options.new_picture, metavar="FILE",
              help="Draw the loss over steps and over time.")  # fmt: skip
@options.json_option
@click.pass_context
def train(
    ctx: click.Context,
    /,
    trainers: dict[str, TrainerEntry],
    names: str,
    backend: str,
    ranks: int | None,
    transport: str,
    picture: Path | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Train a small model with every trainer and algorithm, and natively.

    Ranks are processes on this machine. All contenders start from the same weights,
    see the same samples, and take turns epoch by epoch; native is torch's
    DistributedDataParallel on gloo.

    Loss and accuracy are those on the test set. Times are medians, of the slowest rank;
    the spread is the interquartile range over the median. Sent are the bytes of the rank
    that sends most; memory is that of parameters, gradients and optimizer state on the rank
    that holds most. Overlap is the share of the communication that was hidden behind
    backward; bubble the share of a step in which a rank waits for other stages.

    Exit status: 1 if ranks that train in lock-step ended with different parameters, if a
    contender that computes what native computes differs from it, or if another contender has
    learned nothing. After the first step parameters may differ by rounding, with AdamW by a
    twentieth of the way that they have gone; at the end by a tenth of the way, with --wire float16
    by a quarter, with bfloat16 by half of it.
    """
    world_size = measuring.ranks_to_use(ranks, 2)
    algorithms, modules = measuring.contenders("all_reduce", names, world_size)
    if NATIVE in algorithms and names.strip() != "all":
        raise click.BadParameter("native takes part in any case", param_hint="--algorithm")
    task = usual_task(trainers, **{name: settings.pop(name) for name in _TASK_SETTINGS})
    contenders = tuple(_contenders(trainers, algorithms, backend))
    request = lab.TrainingRequest(contenders, task, backend, modules=modules, **settings)
    lab.check_fit(request, world_size)  # before ranks are started
    facts = lab.environment(world_size) | {"transport": transport}
    printing = measuring.is_first_rank()
    if printing and not as_json:
        _announce(request, facts)
    results = _run(request, world_size)
    wrong = [
        f"WRONG: {_name(result.contender)}: {complaint}"
        for result in results
        for complaint in result.complaints(request)
    ]
    if printing and as_json:
        print_json(_document(request, facts, results, wrong))
    elif printing:
        _print(request, results, wrong, facts)
    if printing and picture is not None:
        curves = {
            _name(result.contender): [
                (0.0, 0, result.start_loss),
                *((epoch.seconds, epoch.steps, epoch.loss) for epoch in result.epochs),
            ]
            for result in results
        }
        lab.draw_losses(curves, picture)
    if wrong:
        ctx.exit(1)


def _contenders(
    trainers: dict[str, TrainerEntry], names: tuple[str, ...], backend: str
) -> Iterator[lab.Contender]:
    for trainer, system in trainers.items():
        if trainer == "torch-ddp" and backend == "gloo":
            yield lab.NATIVE_TRAINER
        elif not system.takes_algorithm:
            yield lab.Contender(trainer, "auto")
        else:
            yield from (lab.Contender(trainer, name) for name in names if name != NATIVE)


def _announce(request: lab.TrainingRequest, facts: dict[str, Any]) -> None:
    task, world_size = request.task, facts["world_size"]
    if task.model == "perceptron":
        sizes = [64, *[task.width] * (task.layers - 1), 10]
        model, data = f"{'-'.join(map(str, sizes))} perceptron", "pictures of digits"
    else:
        model = f"transformer of {task.layers} blocks, {task.width} wide"
        data = f"pieces of text of {task.shape.context} characters"
    count = len(task.examples.train_targets)
    print_text(
        f"{model} on {count} {data}, {count // (world_size * task.batch)} steps an epoch of "
        f"{world_size} x {task.batch}, {task.optimizer} with learning rate {task.lr:g}",
        f"{request.backend}: {lab.ran_on(facts)}",
        "",
    )


def _run(request: lab.TrainingRequest, world_size: int) -> list[lab.TrainingResult]:
    total = request.epochs * len({*request.contenders, lab.NATIVE_TRAINER})
    with progress(total, "starting ranks", shown=measuring.is_first_rank()) as advance:
        results: list[lab.TrainingResult] = measuring.on_ranks(
            lab.train_on_rank,
            request,
            world_size=world_size,
            backend=request.backend,
            on_report=lambda epoch: advance(
                f"epoch {epoch.number}: {_name(epoch.contender)} {_quality(epoch)}"
            ),
        )
    return results


def _name(contender: lab.Contender) -> str:
    trainer, algorithm = contender
    if algorithm is None:
        return "native"
    takes_algorithm = find_trainer(trainer)[0].takes_algorithm
    return f"{trainer}, {lab.label(algorithm)}" if takes_algorithm else trainer


def _quality(epoch: lab.Epoch) -> str:
    return f"{epoch.loss:.4f} {100 * epoch.accuracy:.1f}%"


_COLUMNS = (
    "trainer\n", "test\nloss", "test\naccuracy", "step\n(ms)", "\nspread", "sent\na step",
    "\nmemory", "overlap\n", "bubble\n", "between\nranks", "from\nnative",
)  # fmt: skip


def _print(
    request: lab.TrainingRequest,
    results: list[lab.TrainingResult],
    wrong: list[str],
    facts: dict[str, Any],
) -> None:
    names = [_name(result.contender) for result in results]
    lines = zip(*(result.epochs for result in results), strict=True)
    rows = [(str(line[0].number), *map(_quality, line)) for line in lines]
    print_table(["epoch", *names], rows, left=1)
    echo()
    columns = zip(_COLUMNS, *map(_row, results), strict=True)
    shown = [column for column in columns if set(column[1:]) != {"-"}]
    titles, *cells = zip(*shown, strict=True)
    print_table(titles, cells, left=1)
    if any(result.summary.few for result in results):
        print_text(f"~ median and spread are {FEW_SAMPLES}")
    print_text("", *lab.oversubscribed(facts["world_size"]))
    print_text("", *(wrong or _findings(request, results)))


def _row(result: lab.TrainingResult) -> tuple[str, ...]:
    summary, last = result.summary, result.epochs[-1]
    overlap, bubble = (
        "-" if share is None else f"{100 * share:.0f}%" for share in (result.overlap, result.bubble)
    )
    return (
        _name(result.contender),
        f"{last.loss:.6f}",
        f"{100 * last.accuracy:.2f}%",
        f"{summary.p50_s * 1e3:.2f}",
        spread_in_words(summary),
        as_size(result.nbytes_sent) if result.nbytes_sent else "0",
        as_size(int(result.memory.total)) if result.memory else "-",
        overlap,
        bubble,
        f"{result.between_ranks:.2g}",
        "-" if result.contender == lab.NATIVE_TRAINER else f"{result.end.from_native:.2g}",
    )


def _findings(request: lab.TrainingRequest, results: list[lab.TrainingResult]) -> Iterator[str]:
    ours = [result for result in results if result.contender != lab.NATIVE_TRAINER]
    systems = {result.contender: find_trainer(result.contender.trainer)[0] for result in results}
    if all(system.meets for system in systems.values()):
        yield "Parameters are the same on all ranks, to the last bit, for every contender."
    exact = [result for result in ours if systems[result.contender].is_exact]
    if exact:
        losses = [result.epochs[-1].loss for result in (*exact, results[-1])]
        worst = max(result.end.from_native for result in exact)
        every = "Every contender" if exact == ours else "Every contender that computes the same"
        if worst == 0:
            yield f"{every} ends with the parameters of native, to the last bit."
        else:
            limit = min(lab.tolerances(request, result)[1] for result in exact)
            yield (
                f"Largest difference from native: {worst:.2g}, allowed {limit:.2g}; "
                f"losses differ by {max(losses) - min(losses):.2g} at most."
            )
    if ours:
        fastest = min(results, key=lambda result: result.summary.p50_s)
        took = time_in_words(fastest.summary.p50_s)
        yield f"Lowest median of a step: {_name(fastest.contender)}, {took}."


def _document(
    request: lab.TrainingRequest,
    facts: dict[str, Any],
    results: list[lab.TrainingResult],
    wrong: list[str],
) -> dict[str, Any]:
    return {
        "environment": facts,
        "settings": {
            name: getattr(holder, name)
            for holder, names in ((request, _SETTINGS), (request.task, _TASK_SETTINGS))
            for name in names
        },
        "world_size": facts["world_size"],
        "results": [_record(result) for result in results],
        "wrong": wrong,
        "findings": [] if wrong else list(_findings(request, results)),
    }


def _record(result: lab.TrainingResult) -> dict[str, Any]:
    first = result.first
    return {
        "trainer": result.contender.trainer,
        "algorithm": result.contender.algorithm or "native",
        "epochs": [
            {name: value for name, value in epoch._asdict().items() if name != "contender"}
            for epoch in result.epochs
        ],
        "start_loss": result.start_loss,
        "step": asdict(result.summary) | {"spread": result.summary.spread},
        "nbytes_sent_per_step": result.nbytes_sent,
        "memory_nbytes": result.memory and asdict(result.memory),
        "overlap": result.overlap,
        "bubble": result.bubble,
        "between_ranks": result.between_ranks,
        "from_native": result.end.from_native,
        "from_native_after_one_step": None if first is None else first.from_native,
        "moved": result.end.moved,
        "moved_in_one_step": None if first is None else first.moved,
    }
