"""The Pareto front: the algorithms that no other algorithm beats in every way.

Problem: rounds, traffic and reduced data pull in different directions, and what they cost depends
on the machine and on the size of the data. An algorithm *dominates* another if it costs no more in
each of the three, and less in at least one: then it is the faster of the two wherever alpha, beta
and gamma are what counts. The front is what no algorithm dominates.
"""

from __future__ import annotations

from collections.abc import Mapping

from ringcoll.schedule import Counts


def dominates(first: Counts, second: Counts) -> bool:
    """Whether the first cost is nowhere above the second, and somewhere below.

    >>> from fractions import Fraction
    >>> cheap, dear = Counts(3, Fraction(2), Fraction(1)), Counts(3, Fraction(3), Fraction(1))
    >>> dominates(cheap, dear), dominates(dear, cheap), dominates(cheap, cheap)
    (True, False, False)
    """
    return (
        first != second
        and first.rounds <= second.rounds
        and first.traffic <= second.traffic
        and first.reduced <= second.reduced
    )


def dominators(costs: Mapping[str, Counts]) -> dict[str, tuple[str, ...]]:
    """Find the algorithms that dominate each algorithm.

    Parameters
    ----------
    costs
        Cost of each algorithm, by its name, all for the same collective and world size.

    Returns
    -------
    dict
        For each name the names *on the front* that dominate it; none for those that are on
        the front. Algorithms of equal cost do not dominate each other.

    Examples
    --------
    >>> from ringcoll.algorithms import find
    >>> names = ("ring", "recursive_doubling", "binomial_tree")
    >>> dominators({name: find("all_reduce", name).counts(8) for name in names})
    {'ring': (), 'recursive_doubling': (), 'binomial_tree': ('recursive_doubling',)}
    """
    front = {
        name
        for name, cost in costs.items()
        if not any(dominates(other, cost) for other in costs.values())
    }
    return {
        name: tuple(other for other in costs if other in front and dominates(costs[other], cost))
        for name, cost in costs.items()
    }
