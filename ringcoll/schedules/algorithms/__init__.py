"""The algorithms, a file for each family, and their registry.

==================  =====================================================
`ring`              messages to neighbours: rings, the chain, neighbour exchange
`binomial`          binomial trees, alone and composed with rings
`knomial`           trees of any radix
`binary_tree`       pipelined binary tree, double binary tree
`recursive`         recursive doubling and halving, Rabenseifner
`generalized`       between recursive doubling and the least traffic
`bruck`             messages to rank + 1, 2, 4, ...: all-gather, barrier
`combining`         all-to-all by way of other ranks
`direct`            straight to the destination: all at once, or pair by pair
`circulant`         the fewest rounds and the least traffic, for any number of ranks
`circulant_blocks`  long vectors, a block each round
`parallel_trees`    binomial trees of all ranks at once, far edges first: PAT, Sparbit
`exchanges`         rounds of exchanges: BCube, recursive multiplying, Swing, Trivance
`bine`              binomial trees and exchanges with distances in base -2
`prefix`            scan and exscan: chains, doubling
`hierarchical`      inside each host, then across; along the rows of a torus, then its columns
`unequal`           one rank that is slow or late: OptCC, R2CCL, StragglAR
`registry`          the entries, by collective and name
`names`             algorithms by name, those joined by + or with an order of ranks; their proofs
==================  =====================================================

A new algorithm is one function with one `register` entry. Once its module is imported, the
algorithm can be verified, drawn, measured and selected by name; docs/extending.md walks through it.
"""

import lazy_loader

from ringcoll.schedules.algorithms import (  # noqa: F401  # each registers its algorithms
    binary_tree,
    bine,
    binomial,
    bruck,
    circulant,
    circulant_blocks,
    combining,
    direct,
    exchanges,
    generalized,
    hierarchical,
    knomial,
    parallel_trees,
    prefix,
    recursive,
    registry,
    ring,
    unequal,
)

registry.seal()
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
