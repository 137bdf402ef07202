"""A proof in words, in cells of tables, and as data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ringcoll.schedules import Proof, Schedule, as_runs, chunks_by_order, contract, infix
from ringcoll.schedules.cost import bound_of, cost_in_sentences
from ringcoll.tools.cli.output import amount, times

_MOST_ORDERS = 4  # lines that still help, for up to twice as many ranks, terms of a line


def header(schedule: Schedule) -> dict[str, object]:
    """The purpose of a schedule, as data for JSON."""
    names = ("collective", "algorithm", "world_size", "root", "num_chunks", "num_slots")
    facts = {name: getattr(schedule, name) for name in names}
    return facts if contract(schedule.collective).rooted else facts | {"root": None}


def findings(proof: Proof) -> dict[str, Any]:
    """A proof as data for JSON; amounts of data in n."""
    bound = bound_of(proof)
    facts: dict[str, Any] = {}
    for name in ("rounds", "traffic", "reduced"):
        facts |= {name: getattr(proof, name), f"{name}_at_least": getattr(bound, name)}
    names = ("sent_mean", "sent_max", "messages_mean", "messages_max", "ports", "in_flight")
    facts |= {name: getattr(proof, name) for name in names}
    return facts | {"staged_steps": len(proof.staged), "order": order_in_words(proof)}


def findings_at(proof: Proof) -> dict[str, Any]:
    """The findings, with the number of ranks."""
    return {"world_size": proof.schedule.world_size} | findings(proof)


def cost_cells(facts: dict[str, Any], *amounts: str) -> tuple[str, ...]:
    """The number of ranks, the rounds, the traffic and further amounts, each with its factor."""
    cells = [str(facts["world_size"]), str(facts["rounds"])]
    cells.append(times(facts["rounds"], facts["rounds_at_least"]))
    for name in ("traffic", *amounts):
        cells += [amount(facts[name]), times(facts[name], facts[f"{name}_at_least"])]
    return tuple(cells)


def order_in_words(proof: Proof) -> str | None:
    """The order in which contributions are reduced; ``None`` if there is no reduction."""
    rules = contract(proof.schedule.collective)
    if not rules.reduces or rules.at_least_once:
        return None
    if not proof.same_everywhere:
        return "differs"
    if proof.left_fold:
        return "left to right"
    return "rank order" if proof.rank_order else "fixed"


def in_words(proof: Proof) -> Iterator[str]:
    """Describe cost and order: some sentences in each item, and the orders of chunks."""
    yield from cost_in_sentences(proof)
    word = order_in_words(proof)
    if word is None or not proof.rounds:
        return
    words = {
        "differs": "differs between ranks: their last bits may differ, too",
        "fixed": "is the same on all ranks",
        "rank order": "is the same on all ranks, with the operands in rank order",
        "left to right": "is the same on all ranks, from left to right",
    }
    is_short = word != "differs" and proof.schedule.world_size <= 2 * _MOST_ORDERS
    sums, text = chunks_by_order(proof) if is_short else {}, words[word]
    if contract(proof.schedule.collective).is_prefix:
        text = text.replace("the same on all ranks", "that of ranks") + "; on the last rank"
    yield f"The order of reduction {text}{':' if sums else '.'}"
    for number, (order, chunks) in enumerate(sums.items()):
        if number == _MOST_ORDERS:
            yield f"  ... and {len(sums) - _MOST_ORDERS} more"
            return
        plural = "s" if len(chunks) > 1 else ""
        yield f"  chunk{plural} {as_runs(chunks)}: {infix(order)}"
