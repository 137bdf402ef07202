"""The costs of a link between two ranks: the numbers that all cost models share."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple


class LinkCosts(NamedTuple):
    """The costs of a message, of a byte on its way and of a reduced byte.

    Parameters
    ----------
    alpha_s
        Seconds that a message takes, however short.
    beta_s_per_byte
        Seconds that a byte takes on a link.
    gamma_s_per_byte
        Seconds that a rank needs to reduce a byte with another.
    overhead_s
        Seconds for each further message that a rank posts in the same step.
    """

    alpha_s: float
    beta_s_per_byte: float
    gamma_s_per_byte: float = 0.0
    overhead_s: float = 0.0

    def seconds(
        self,
        nbytes: float,
        rounds: float,
        traffic: Fraction | float,
        reduced: Fraction | float = 0.0,
        further: float = 0.0,
    ) -> float:
        """``rounds * alpha + further * overhead + (traffic * beta + reduced * gamma) * nbytes``.

        The source is R. Hockney's model, "The communication challenge for MPP",
        Parallel Computing 20 (1994), with gamma as R. Thakur et al. add it.

        Parameters
        ----------
        nbytes
            Size n of the whole data.
        rounds, traffic, reduced
            The terms of `ringcoll.schedule.counting.Counts`.
        further
            Messages that a rank posts in a step after its first.

        Examples
        --------
        >>> from ringcoll.algorithms import find
        >>> link = LinkCosts(alpha_s=5e-6, beta_s_per_byte=1e-9, gamma_s_per_byte=2e-10)
        >>> round(link.seconds(8_000_000, *find("all_reduce", "ring").counts(8)), 6)
        0.01547
        """
        messages_s = rounds * self.alpha_s + further * self.overhead_s
        return messages_s + nbytes * (
            traffic * self.beta_s_per_byte + reduced * self.gamma_s_per_byte
        )
