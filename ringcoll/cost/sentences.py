"""The cost of a schedule in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from ringcoll.cost.counts import bound_of
from ringcoll.schedule import Proof, contract


def cost_in_sentences(proof: Proof) -> Iterator[str]:
    """Describe the cost of a proved schedule beside the lower bounds: rounds, data, memory; then reductions, if any.

    Examples
    --------
    >>> from ringcoll.algorithms import schedule_of
    >>> from ringcoll.schedule import verify
    >>> next(cost_in_sentences(verify(schedule_of("all_gather", "ring", 4))))
    '3 rounds; no algorithm needs fewer than 2. Each rank sends 3 blocks, the least possible. No extra memory.'
    """
    rules, bound = contract(proof.schedule.collective), bound_of(proof)
    noun = "token" if rules.at_least_once else "vector" if rules.of_vector else "block"
    unit = rules.blocks_of_rank(proof.schedule.world_size)

    if not proof.rounds:
        yield "Nothing is sent."
        return

    def data(value: Fraction, least: Fraction) -> str:
        words = in_number(value * unit, noun)
        if value == least:
            return f"{words}, the least possible"
        return words + (f"; no algorithm needs less than {in_number(least * unit)}" * bool(least))

    ports = f" with {proof.ports} messages at once each way" * (proof.ports > 1)
    if proof.rounds == bound.rounds:
        cost = f"{in_number(proof.rounds, 'round')}, the fewest possible{ports}."
    else:
        cost = f"{proof.rounds} rounds; no algorithm{ports} needs fewer than {bound.rounds}."
    who = "Each" if proof.sent_mean == proof.sent_max else "The busiest"
    cost += f" {who} rank sends {data(proof.sent_max, bound.sent)}."
    if proof.traffic != proof.sent_max:
        traffic = data(proof.traffic, bound.traffic)
        cost += f" Round by round, the busiest rank sends or receives {traffic}."
    slots = proof.schedule.num_slots
    memory = f"Extra memory for {in_number(slots, 'chunk')}" if slots else "No extra memory"
    yield f"{cost} {memory}."
    if bound.reduced and not rules.at_least_once:
        yield f"No rank reduces more than {data(proof.reduced, bound.reduced)}."


def in_number(value: Fraction | int, noun: str = "") -> str:
    """Write an amount with at most three decimals, and its noun.

    >>> in_number(Fraction(3, 2), "vector"), in_number(Fraction(1), "block"), in_number(Fraction(2, 3))
    ('1.5 vectors', '1 block', '0.667')
    """
    number = f"{float(value):.3f}".rstrip("0").rstrip(".")
    return f"{number} {noun}{'s' * (value != 1)}" if noun else number
