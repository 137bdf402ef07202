"""The algorithms, one family a file, and their registry.

==================  =======================================================
`ring`              ring and bidirectional ring
`binomial`          binomial trees, and what is composed with them
`binary_tree`       pipelined binary tree, double binary tree
`recursive`         recursive doubling and halving, Rabenseifner
`bruck`             Bruck's all-gather and all-to-all
`pairwise`          pairwise exchange
`direct`            everything in one round
`chain`             pipelined chain
`dissemination`     barrier
`hierarchical`      inside each host, then across
==================  =======================================================

A new algorithm is one function with one `register` entry; importing its module
is enough to have it verified, drawn, measured and selectable by name.
"""

from ringcoll.algorithms import (
    binary_tree,
    binomial,
    bruck,
    chain,
    direct,
    dissemination,
    hierarchical,
    pairwise,
    recursive,
    ring,
)
from ringcoll.algorithms.registry import (
    ALIASES,
    Algorithm,
    Cost,
    algorithms,
    find,
    generation,
    on_hosts,
    register,
    schedule_of,
    unregister,
)

__all__ = [
    "ALIASES",
    "Algorithm",
    "Cost",
    "algorithms",
    "binary_tree",
    "binomial",
    "bruck",
    "chain",
    "direct",
    "dissemination",
    "find",
    "generation",
    "hierarchical",
    "on_hosts",
    "pairwise",
    "recursive",
    "register",
    "ring",
    "schedule_of",
    "unregister",
]
