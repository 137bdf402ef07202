"""The algorithms, a file for each family, and their registry.

==================  =======================================================
`ring`              rings: one, both directions, several strides
`binomial`          binomial trees, alone and composed with rings
`knomial`           trees with up to r - 1 children a level
`binary_tree`       pipelined binary tree, double binary tree
`recursive`         recursive doubling and halving, Rabenseifner
`bruck`             Bruck's all-gather
`pairwise`          pairwise exchange
`combining`         all-to-all by way of other ranks: Bruck's of any radix, ReTri, torus
`circulant`         the fewest rounds and the least traffic, for any number of ranks
`parallel_trees`    binomial trees of all ranks at once, far edges first: PAT, Sparbit
`exchanges`         rounds of exchanges: BCube, recursive multiplying
`swing`             exchanges over short distances: Swing, Trivance
`bine`              binomial trees and exchanges with distances in base -2
`direct`            everything in one round
`chain`             pipelined chain
`dissemination`     barrier
`prefix`            scan and exscan: chains, doubling
`circulant_blocks`  broadcast and reduce in blocks, in the fewest rounds
`hierarchical`      inside each host, then across; along the rows of a torus, then its columns
`blocks_on_hosts`   the same for reduce-scatters and all-gathers
`generalized`       between the fewest rounds and the least traffic
`unequal`           one rank that is slow or late: OptCC, R2CCL, StragglAR
`host_layout`       which ranks of each host act in a hierarchy, and for which others
`entry`             what an entry is: all that the rest has to know of an algorithm
`registry`          the entries, by collective and name
`names`             algorithms by name: entries, those joined by +, and those with an order of ranks
`placed`            algorithms whose ranks stand in another order
`proved`            schedules that may be run with an operator
==================  =======================================================

A new algorithm is one function with one `register` entry. Once its module is imported,
the algorithm can be verified, drawn, measured and selected by name; docs/extending.md
walks through it.
"""

from ringcoll.algorithms import (
    binary_tree,
    bine,
    binomial,
    blocks_on_hosts,
    bruck,
    chain,
    circulant,
    circulant_blocks,
    combining,
    direct,
    dissemination,
    exchanges,
    generalized,
    hierarchical,
    knomial,
    pairwise,
    parallel_trees,
    prefix,
    recursive,
    registry,
    ring,
    swing,
    unequal,
)
from ringcoll.algorithms.entry import Algorithm, Cost, Parameter, alone, mark_built_in, on_hosts
from ringcoll.algorithms.names import find, named, required, schedule_of, where_possible
from ringcoll.algorithms.placed import order_in_text
from ringcoll.algorithms.proved import order_of, passes_on_blocks, proved_schedule
from ringcoll.algorithms.registry import (
    ALIASES,
    algorithms,
    entry_of_schedule,
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
