"""The algorithms, a file for each family, and their registry.

================  =======================================================
`ring`            messages to neighbours: rings, the chain, neighbour exchange
`binomial`        binomial trees, alone and composed with rings; k-nomial trees
`binary_tree`     pipelined binary tree, double binary tree
`recursive`       recursive doubling and halving, Rabenseifner, and what is between
`bruck`           messages to rank + 1, 2, 4, ...; all-to-all by way of other ranks
`direct`          straight to the destination: all at once, or pair by pair
`circulant`       the fewest rounds and the least traffic, for any number of ranks
`parallel_trees`  binomial trees of all ranks at once, far edges first: PAT, Sparbit
`exchanges`       rounds of exchanges: BCube, recursive multiplying, Swing, Trivance
`bine`            binomial trees and exchanges with distances in base -2
`prefix`          scan and exscan: chains, doubling
`hierarchical`    inside each host, then across; along the rows of a torus, then its columns
`unequal`         one rank that is slow or late: OptCC, R2CCL, StragglAR
`registry`        what an entry is, and the entries by collective and name
`names`           algorithms by name, those joined by + or with an order of ranks; their proofs
================  =======================================================

A new algorithm is one function with one `register` entry. Once its module is imported, the
algorithm can be verified, drawn, measured and selected by name; docs/extending.md walks through it.
"""

from ringcoll.schedules.algorithms import (
    binary_tree,
    bine,
    binomial,
    bruck,
    circulant,
    direct,
    exchanges,
    hierarchical,
    parallel_trees,
    prefix,
    recursive,
    registry,
    ring,
    unequal,
)

# Families that share a file keep their names.
from ringcoll.schedules.algorithms import binomial as knomial
from ringcoll.schedules.algorithms import bruck as combining
from ringcoll.schedules.algorithms import bruck as dissemination
from ringcoll.schedules.algorithms import circulant as circulant_blocks
from ringcoll.schedules.algorithms import direct as pairwise
from ringcoll.schedules.algorithms import exchanges as swing
from ringcoll.schedules.algorithms import hierarchical as blocks_on_hosts
from ringcoll.schedules.algorithms import recursive as generalized
from ringcoll.schedules.algorithms import ring as chain
from ringcoll.schedules.algorithms.names import (
    find,
    named,
    order_in_text,
    order_of,
    passes_on_blocks,
    proved_schedule,
    required,
    schedule_of,
    where_possible,
)
from ringcoll.schedules.algorithms.registry import (
    ALIASES,
    Algorithm,
    Cost,
    Parameter,
    algorithms,
    alone,
    entry_of_schedule,
    mark_built_in,
    on_hosts,
    register,
    register_schedule,
    seal,
    unregister,
)

seal()

__all__ = [
    "ALIASES",
    "Algorithm",
    "Cost",
    "Parameter",
    "algorithms",
    "alone",
    "binary_tree",
    "bine",
    "binomial",
    "blocks_on_hosts",
    "bruck",
    "chain",
    "circulant",
    "circulant_blocks",
    "combining",
    "direct",
    "dissemination",
    "entry_of_schedule",
    "exchanges",
    "find",
    "generalized",
    "hierarchical",
    "knomial",
    "mark_built_in",
    "named",
    "on_hosts",
    "order_in_text",
    "order_of",
    "pairwise",
    "parallel_trees",
    "passes_on_blocks",
    "prefix",
    "proved_schedule",
    "recursive",
    "register",
    "register_schedule",
    "registry",
    "required",
    "ring",
    "schedule_of",
    "swing",
    "unequal",
    "unregister",
    "where_possible",
]
