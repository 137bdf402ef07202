"""The names of the operators; the command line reads them without torch."""

import re

OPERATORS = {
    "sum": "sum",
    "prod": "product",
    "max": "max",
    "min": "min",
    "avg": "avg",
    "mulsum": "premul_sum",
    # torch's own, beyond those of nccl-tests
    "band": "band",
    "bor": "bor",
    "bxor": "bxor",
}
"""Torch's names in lower case, by those of nccl-tests, which are MPI's without ``MPI_``."""

_BEFORE_A_NAME = re.compile(r".*\.|mpi_|nccl")


def operator_named(text: str) -> str | None:
    """Torch's name, in lower case, of an operator in any spelling; ``None`` for no operator.

    Examples
    --------
    >>> [operator_named(text) for text in ("PRODUCT", "prod", "MPI_PROD", "ncclProd", "SUM")]
    ['product', 'product', 'product', 'product', 'sum']
    """
    word = _BEFORE_A_NAME.sub("", text.strip().lower())
    return word if word in OPERATORS.values() else OPERATORS.get(word)
