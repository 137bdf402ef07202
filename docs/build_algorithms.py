"""Write docs/algorithms.md, and a page for each collective, from the registry and the docstrings.

``python docs/build_algorithms.py`` writes the pages; with ``--check`` it writes
nothing and fails if a page is out of date.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import count
from pathlib import Path
from types import ModuleType

from click.testing import CliRunner

import ringcoll.schedules.algorithms
import ringcoll.schedules.cost.counts
import ringcoll.schedules.ir.drawing
from ringcoll.schedules import CONTRACTS, Contract, Proof, grid, infix, primitives, verify
from ringcoll.schedules.algorithms import Algorithm, algorithms
from ringcoll.schedules.cost import Bound, lower_bound, wavefront_counts
from ringcoll.tools.cli import cli

DOCS = Path(__file__).parent
WORLDS = (4, 8, 9, 13)
SEGMENTS = (1, 4, 16, 64)

PROMISES = {
    "all_reduce": "Every rank has a vector; every rank ends with the reduction of all of them.",
    "reduce_scatter": "Every rank has a block for each rank; "
    "rank r ends with the reduction of all blocks r.",
    "all_gather": "Every rank has a block; every rank ends with all blocks.",
    "broadcast": "The root has a vector; every rank ends with it.",
    "reduce": "Every rank has a vector; the root ends with the reduction of all of them.",
    "gather": "Every rank has a block; the root ends with all blocks.",
    "scatter": "The root has a block for each rank; rank r ends with block r.",
    "all_to_all": "Every rank has a block for each rank; "
    "rank r ends with the blocks r of all ranks, that is, with a row of the transpose.",
    "barrier": "No rank leaves before every rank has come.",
    "scan": "Every rank has a vector; rank r ends with the reduction of those of ranks 0 to r.",
    "exscan": "Every rank has a vector; rank r ends with the reduction of those of ranks 0 to r - 1, "
    "and rank 0 with nothing.",
}

INTRODUCTION = """\
# The algorithms

Every algorithm of the library, with a picture of what it does, what it costs, and how far that
is from the best possible. All numbers are counted on the schedules themselves, after each has been
proved to do what its collective promises, in place and out of place. Each collective has a page:

COLLECTIVES

## How to read it

k is the number of ranks, lg the logarithm to base 2, and n the size of the whole data: the vector,
or all blocks of one rank. An algorithm takes

    rounds * alpha + (traffic * beta + reduced * gamma) * n

seconds, where a message takes alpha, a byte on its way beta, and reducing a byte gamma. *Traffic* is
summed over the rounds: in each, what the busiest rank sends or receives. *Reduced* is summed in the
same way.

In a picture, a line is a step and a column is a rank:
"""

ORDER_OF_SUMS = """\
## In which order sums are made

A sum of floats depends on its order. Every algorithm has a fixed one, which the proof knows, and which
neither the transport, nor segments, nor the time at which messages arrive can change: the same inputs
give the same bits in every call. A command prints the order of every element:

```text
$ ringcoll verify ring --order -k 5 --size 11
ring all_reduce on 5 ranks
chunk 0, elements 0-2: (((x1 + x2) + x3) + x4) + x0
chunk 1, elements 3-4: (((x2 + x3) + x4) + x0) + x1
chunk 2, elements 5-6: (((x3 + x4) + x0) + x1) + x2
chunk 3, elements 7-8: (((x4 + x0) + x1) + x2) + x3
chunk 4, elements 9-10: (((x0 + x1) + x2) + x3) + x4
```

A program computes the result of a call from its inputs, bit for bit, before it is made or to check it
afterwards. 16-bit floats are added up in float32, and rounded at the end, as in the call:

```python
import torch
from ringcoll.runtime.reduction import predicted_result, reduce_in_order
from ringcoll.schedules import schedule_of, verify

proof = verify(schedule_of("all_reduce", "ring", 3))
inputs = [torch.full((3,), value) for value in (1e8, 1.0, -1e8)]
assert predicted_result(proof, inputs).tolist() == [0.0, 1.0, 0.0]
assert reduce_in_order((0, 2, "+", 1, "+"), inputs).tolist() == [1.0, 1.0, 1.0]
```

A narrower `wire_dtype` rounds on the way, too, and is not predicted."""

FRONT = """\
## Which algorithms no other beats

An algorithm *dominates* another if it needs no more rounds, no more traffic and no more reduced data,
and less of at least one of them. What no algorithm dominates is the Pareto front: which of those is the
fastest depends on alpha, beta, gamma and n. `ringcoll plot pareto -k 24` says for every algorithm
that runs on so many ranks whether it is on the front, and otherwise which algorithms on the front dominate
it; `-o front.png` draws the front (with the extra `ringcoll[plot]`), and `--json` prints data.

A round counts once however many messages a rank sends in it, so that algorithms of one or two rounds
dominate most others. `--ports 1` compares those that send one message at a time:"""
FRONT_CALL = "plot pareto -k 24 --ports 1"
DISTANCE = """\
`ringcoll verify` prints for each algorithm all three as multiples of their bounds, and `ringcoll show` those
of one. In a program, `ringcoll.schedules.cost.distance` computes them from a proof, and
`ringcoll.schedules.cost.dominators` the front from costs."""


def paragraphs(text: str) -> list[str]:
    """Split a docstring at its blank lines."""
    return [part.strip("\n") for part in text.split("\n\n") if part.strip()]


def is_source(paragraph: str) -> bool:
    """Whether a paragraph names the literature."""
    return paragraph.startswith(("Source: ", "Sources: "))


def fenced(text: str) -> str:
    """Text that keeps its blanks."""
    return f"```text\n{text}\n```"


def literal_blocks(docstring: str) -> list[str]:
    """The indented blocks behind ``::``."""
    found: list[str] = []
    after = False
    for paragraph in paragraphs(docstring):
        if after and paragraph.startswith("    "):
            found.append(inspect.cleandoc("\n" + paragraph))
        after = paragraph.endswith("::")
    return found


def as_markdown(docstring: str) -> Iterator[str]:
    """Paragraphs of a docstring, without doctests and sources."""
    for paragraph in paragraphs(docstring):
        if is_source(paragraph) or paragraph.startswith(">>>"):
            continue
        if paragraph.startswith("    "):
            yield fenced(inspect.cleandoc("\n" + paragraph))
        elif paragraph.startswith("==="):
            yield simple_table(paragraph)
        elif paragraph != "::":
            yield paragraph.replace("::", ":") if paragraph.endswith("::") else paragraph


def simple_table(text: str) -> str:
    """A table with ``===`` rules, in Markdown."""
    lines = text.splitlines()
    starts = [
        index
        for index, letter in enumerate(lines[0])
        if letter == "=" and (index == 0 or lines[0][index - 1] == " ")
    ]
    rows = [
        [line[start:end].strip() for start, end in zip(starts, [*starts[1:], None], strict=True)]
        for line in lines
        if not line.startswith("===")
    ]
    return table(rows[0], rows[1:])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def sources(*docstrings: str) -> list[str]:
    """What the literature is, without line breaks."""
    found = [text for docstring in docstrings for text in paragraphs(docstring) if is_source(text)]
    return [" ".join(text.partition(": ")[2].split()) for text in found]


def in_reading_order(collective: str | None = None) -> list[Algorithm]:
    """The algorithms, with their families as the package lists them."""
    listed = inspect.getdoc(ringcoll.schedules.algorithms) or ""

    def family(algorithm: Algorithm) -> int:
        name = module_of(algorithm).__name__.rpartition(".")[2]
        place = listed.find(f"`{name}`")
        return place if place >= 0 else len(listed)

    return sorted(algorithms(collective), key=family)


def number(value: Fraction | int) -> str:
    """An exact number, such as 7/4."""
    return str(Fraction(value))


def times(amount: Fraction | int, bound: Fraction | int = 1) -> str:
    """An amount over its bound, with up to two decimals."""
    return f"{float(amount / bound):.2f}".rstrip("0").rstrip(".")


def rank_order(algorithm: Algorithm, world_size: int) -> str:
    """Whether operands stay in rank order, for every root."""
    roots = range(world_size) if CONTRACTS[algorithm.collective].rooted else range(1)
    in_order = [verify(algorithm.schedule(world_size, root)).rank_order for root in roots]
    if all(in_order):
        return "yes"
    return "for root 0" if in_order[0] else "no"


def anchor(algorithm: Algorithm) -> str:
    """The name by which the page links to an algorithm."""
    return f"{algorithm.collective}-{algorithm.name}"


def bound_in_words(bound: Bound, rules: Contract) -> str:
    """The lower bounds, for a cell of a table."""
    reduced = f", {number(bound.reduced)} n reduced" if rules.reduces else ""
    return f"{bound.rounds} rounds, {number(bound.traffic)} n of traffic{reduced}"


def comparison(rules: Contract) -> str:
    """The table of a collective's algorithms."""
    bound = lower_bound(rules.collective, 8)
    head = ["algorithm", "rounds", "traffic / n"]
    least = ["*lower bound*", str(bound.rounds), number(bound.traffic)]
    if rules.reduces:
        head.append("reduced / n")
        least.append(number(bound.reduced))
    head += ["messages at once", "rounds / bound", "traffic / bound"]
    least += ["1", "", ""]
    if rules.reduces:
        head += ["reduced / bound", "operands in rank order"]
        least += ["", ""]
    rows = [least]
    for algorithm in in_reading_order(rules.collective):
        world_size = next(k for k in count(8) if not algorithm.restriction(k))
        proof = verify(algorithm.schedule(world_size))
        least_here = lower_bound(rules.collective, world_size, ports=max(1, proof.ports))
        link = f"[{algorithm.name}](#{anchor(algorithm)})"
        row = [
            link if world_size == 8 else f"{link} on {world_size} ranks",
            str(proof.rounds),
            number(proof.traffic),
        ]
        row += [number(proof.reduced)] if rules.reduces else []
        row += [
            str(proof.ports),
            times(proof.rounds, least_here.rounds),
            times(proof.traffic, least_here.traffic),
        ]
        if rules.reduces:
            row += [times(proof.reduced, least_here.reduced), rank_order(algorithm, world_size)]
        rows.append([*row, algorithm.needs, algorithm.source])
    return table([*head, "restriction", "source"], [[*least, "", ""], *rows[1:]])


def costs(algorithm: Algorithm, rules: Contract) -> str:
    """What an algorithm costs, for some numbers of ranks."""
    head = [
        "k",
        "rounds",
        "traffic / n",
        *(["reduced / n"] if rules.reduces else []),
        "lower bound",
    ]
    rows: list[list[str]] = []
    for world_size in WORLDS:
        if algorithm.restriction(world_size):
            continue
        counts = algorithm.counts(world_size)
        row = [str(world_size), str(counts.rounds), number(counts.traffic)]
        row += [number(counts.reduced)] if rules.reduces else []
        rows.append([*row, bound_in_words(lower_bound(rules.collective, world_size), rules)])
    return table(head, rows)


def segments(algorithm: Algorithm) -> str:
    """What a pipelined algorithm costs, for some numbers of segments."""
    schedule = algorithm.schedule(8)
    rows: list[list[str]] = []
    for num_segments in SEGMENTS:
        counts = wavefront_counts(schedule, num_segments)
        rows.append([str(num_segments), str(counts.rounds), times(counts.traffic)])
    return table(["segments", "rounds", "traffic / n"], rows)


def orders(proof: Proof) -> str:
    """In which order the first chunks are reduced."""
    chunks = sorted(proof.orders)
    shown = chunks[:1] if len(set(proof.orders.values())) == 1 else chunks[:2]
    listed = " and ".join(f"chunk {chunk} as `{infix(proof.order(chunk))}`" for chunk in shown)
    is_prefix = CONTRACTS[proof.schedule.collective].is_prefix
    where = "On the last rank it" if is_prefix else "It"
    return f"{where} reduces {listed}, where xr is the share of rank r."


def module_of(algorithm: Algorithm) -> ModuleType:
    """The module of the family."""
    module = inspect.getmodule(algorithm.program)
    assert module is not None
    return module


def section(algorithm: Algorithm, rules: Contract) -> Iterator[str]:
    """All about one algorithm."""
    module = module_of(algorithm)
    program_doc, module_doc = inspect.getdoc(algorithm.program) or "", inspect.getdoc(module) or ""
    world_size = 3 if algorithm.restriction(4) else 4
    schedule = algorithm.schedule(world_size)
    proof = verify(schedule)
    yield f"## {algorithm.collective}: {algorithm.name}"
    yield from as_markdown(program_doc)
    if module.__name__.endswith(("binary_tree", "binomial")):
        yield "The tree:"
        yield from map(fenced, literal_blocks(module_doc))
    hosts = ", 2 on each of 2 hosts" if algorithm.needs_hosts else ""
    yield f"On {world_size} ranks{', root 0' if rules.rooted else ''}{hosts}:"
    yield fenced(grid(schedule))
    words = ", ".join(f"`{word}`" for word in primitives(schedule, 0))
    yield f"What rank 0 does, in NCCL's words: {words}."
    if rules.reduces and not rules.at_least_once:
        yield orders(proof)
    if algorithm.needs_hosts:
        yield "With the ranks divided between 2 hosts, as evenly as can be:"
    yield costs(algorithm, rules)
    if algorithm.pipelined:
        yield "In segments, on 8 ranks:"
        yield segments(algorithm)
    if found := sources(program_doc) or sources(module_doc):  # a file may hold several families
        yield f"Source: {' '.join(found)}"


def front_page() -> str:
    """How to read the pages, bounds, orders of sums, and the families of algorithms."""
    collectives = "\n".join(
        f"- [{name}](algorithms/{name}.md): {', '.join(a.name for a in in_reading_order(name))}"
        for name in CONTRACTS
    )
    parts = [INTRODUCTION.strip().replace("COLLECTIVES", collectives)]
    parts += [
        fenced(block)
        for block in literal_blocks(inspect.getdoc(ringcoll.schedules.ir.drawing) or "")
    ]
    parts.append("## What no algorithm can beat")
    cost_doc = paragraphs(inspect.getdoc(ringcoll.schedules.cost.counts) or "")
    parts += as_markdown("\n\n".join(cost_doc[2:]))
    parts += [f"Source: {found}" for found in sources("\n\n".join(cost_doc))]
    parts.append(
        "An algorithm that sends several messages at once is held against the bound for as many "
        "ports: with p of them, the logarithm is to base p + 1."
    )
    printed = CliRunner().invoke(cli, FRONT_CALL.split()).stdout.strip()
    parts += [FRONT, fenced(f"$ ringcoll {FRONT_CALL}\n{printed}"), DISTANCE]
    parts.append(ORDER_OF_SUMS)
    parts.append("## Families")
    described: list[ModuleType] = []
    for algorithm in in_reading_order():
        module = module_of(algorithm)
        if module not in described:
            described.append(module)
            title, *text = paragraphs(inspect.getdoc(module) or "")
            parts.append(f"### {title.rstrip('.')}")
            parts += as_markdown("\n\n".join(text))
    return "\n\n".join(parts) + "\n"


def collective_page(rules: Contract) -> str:
    """The algorithms of a collective."""
    parts = [
        f"# {rules.collective}",
        f"{PROMISES[rules.collective]} [How to read this page](../algorithms.md#how-to-read-it).",
        "On 8 ranks:",
        comparison(rules),
    ]
    for algorithm in in_reading_order(rules.collective):
        parts += section(algorithm, rules)
    return "\n\n".join(parts) + "\n"


def pages() -> dict[str, str]:
    """The pages, by their paths in this folder."""
    of_collectives = {
        f"algorithms/{name}.md": collective_page(rules) for name, rules in CONTRACTS.items()
    }
    return {"algorithms.md": front_page()} | of_collectives


def main() -> int:
    """Write or check the pages; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail if a page is out of date")
    arguments = parser.parse_args()
    status = 0
    for name, text in pages().items():
        page = DOCS / name
        if not arguments.check:
            page.parent.mkdir(exist_ok=True)
            page.write_text(text, encoding="utf-8")
        elif not page.exists() or page.read_text(encoding="utf-8") != text:
            print(f"{page} is out of date; run: python {Path(__file__).name}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
