r"""Pipelined binary trees, one and two of them.

Problem: a tree has few rounds, but in a plain one the leaves only send and the root is the
bottleneck. In segments, all levels of a binary tree work at once. With *two* trees, each on half of
the vector, every rank is an inner node of at most one of them, so all ranks send and receive alike.

The tree is in-order: label the ranks 1 to k; the height of a label is the
number of its trailing zero bits, so odd labels are leaves::

    height 2           4
                  .--'   '--.
    height 1      2         6
                 / \       / \
    height 0    1   3     5   7

The second tree is the first one turned by one rank, so that its inner nodes are
the first one's leaves; that holds for every k, odd ones too.

With two *roots*, each half of the ranks has a tree of its own, and the roots exchange what they
have.

Source: P. Sanders, J. Speck and J. L. Träff, "Two-tree algorithms for full
bandwidth broadcast, reduction and scan", Parallel Computing 35 (2009).
"""

from __future__ import annotations

from fractions import Fraction
from functools import partial

from ringcoll.schedules.algorithms.registry import Cost, register
from ringcoll.schedules.ir import (
    OperandOrder,
    Operation,
    Program,
    Step,
    inp,
    out,
    parallel,
    recv,
    recv_reduce,
    renumber,
    send,
    unfinished,
)


def parent(label: int, world_size: int) -> int | None:
    """The label above, or ``None`` for the root.

    The lowest set bit moves up by one; where that leads past the end, it goes.
    """
    bit = label & -label
    above = (label ^ bit) | (bit << 1)
    if above > world_size:
        above = label ^ bit
    return above or None


def children(label: int, world_size: int) -> list[int]:
    """The labels below, the lower one first; at most two."""
    half = (label & -label) // 2
    below = [label - half] if half else []
    while half and label + half > world_size:
        half //= 2
    return [*below, label + half] if half else below


def depth(label: int, world_size: int) -> int:
    """Distance from the root."""
    above = parent(label, world_size)
    return 0 if above is None else 1 + depth(above, world_size)


def height(world_size: int) -> int:
    """Distance of the deepest leaf from the root: floor(lg k)."""
    return world_size.bit_length() - 1


def tree_all_reduce(rank: int, world_size: int, *, chunk: int, turn: int) -> Program:
    """Reduce one chunk up the tree and send it down again; rank ``turn`` has label 1."""

    def rank_of(label: int) -> int:
        return (label - 1 + turn) % world_size

    label = (rank - turn) % world_size + 1
    above, level, levels = parent(label, world_size), depth(label, world_size), height(world_size)
    below = children(label, world_size)
    up, down = [Step()] * levels, [Step()] * levels
    held, gathering = inp(chunk), list[Operation]()
    for child in below:
        left, final = child < label, above is None and child == below[-1]
        peer, total = rank_of(child), out(chunk)
        gathering.append(recv_reduce(peer, total, held, received_left=left, final=final))
        held = total
    if below:
        up[levels - level - 1] = Step(*gathering)
        down[level] = Step(*(send(rank_of(child), out(chunk)) for child in below))
    if above is not None:
        up[levels - level] = Step(send(rank_of(above), held))
        down[level - 1] = Step(recv(rank_of(above), out(chunk)))
    yield from up
    yield from down


def _inner_levels(k: int) -> list[int]:
    """Most children of any label at each depth; all are heard in one step."""
    most = [0] * (height(k) + 1)
    for label in range(1, k + 1):
        level = depth(label, k)
        most[level] = max(most[level], len(children(label, k)))
    return most[:-1]  # the lowest labels have none


_register = partial(register, "all_reduce", pipelined=True)


def _children_heard(k: int) -> Fraction:
    return Fraction(sum(_inner_levels(k)))


@_register(
    "binary_tree",
    order=OperandOrder.RANK,
    cost=Cost(lambda k: 2 * height(k), lambda k: 2 * _children_heard(k), _children_heard),
)
def binary_tree_all_reduce(rank: int, world_size: int) -> Program:
    """All-reduce on a binary tree, to be run in segments.

    2 floor(lg k) steps; an inner rank hears two children at once, so a step takes
    up to twice the vector. Operands stay in rank order.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(binary_tree_all_reduce, 4))
    step  rank 0  rank 1     rank 2  rank 3
       0  >1:0    +0:0 +2:0  >1:0    .
       1  .       >3:0       .       +1:0!
       2  .       <3:0       .       >1:0
       3  <1:0    >0:0 >2:0  <1:0    .
    """
    return tree_all_reduce(rank, world_size, chunk=0, turn=0)


@_register(
    "double_tree",
    chunks=lambda k: 2,
    cost=Cost(lambda k: 2 * height(k), _children_heard, lambda k: _children_heard(k) / 2),
)
def double_tree_all_reduce(rank: int, world_size: int) -> Program:
    """All-reduce on two binary trees, half of the vector on each, to be run in segments.

    2 floor(lg k) steps. Every rank is a leaf of at least one tree, and sends no
    more than four half-vectors in all.

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(double_tree_all_reduce, 4))
    step  rank 0  rank 1          rank 2          rank 3
       0  >1:0    +0:0 +2:0 >2:1  >1:0 +1:1 +3:1  >2:1
       1  +2:1!   >3:0            >0:1            +1:0!
       2  >2:1    <3:0            <0:1            >1:0
       3  <1:0    >0:0 >2:0 <2:1  <1:0 >1:1 >3:1  <2:1
    """
    return parallel(
        tree_all_reduce(rank, world_size, chunk=0, turn=0),
        tree_all_reduce(rank, world_size, chunk=1, turn=1),
    )


# ---- Two roots ------------------------------------------------------------------------------


def _halves(k: int) -> tuple[int, int]:
    return (k + 1) // 2, k // 2


def _root(world_size: int) -> int:
    """The rank without a parent: its label is the highest power of two."""
    return (1 << height(world_size)) - 1


def _children_at_once(k: int) -> int:
    """Most children of any label at each depth of both trees, added up."""
    longer, shorter = map(_inner_levels, _halves(k))
    return sum(map(max, longer, shorter + [0] * (len(longer) - len(shorter))))


@_register(
    "dual_root",
    order=OperandOrder.RANK,
    cost=Cost(
        lambda k: 2 * height(_halves(k)[0]) + 1,
        lambda k: Fraction(2 * _children_at_once(k) + 1),
        lambda k: Fraction(_children_at_once(k) + 1),
    ),
    second_choice=True,
)
def dual_root_all_reduce(rank: int, world_size: int) -> Program:
    """Dual-root tree all-reduce, in segments: a tree on each half, and the roots exchange.

    2 floor(lg ceil(k/2)) + 1 steps; it is to be run in segments: then partial results go up and
    results go down at the same time. Both roots complete the result, so that no rank is the only
    one. Any number of ranks. Operands stay in rank order.

    Source: J. L. Träff, "A doubly-pipelined, dual-root reduction-to-all algorithm and
    implementation", arXiv 2109.12626. P. Sanders, J. Speck and J. L. Träff, "Two-tree algorithms
    for full bandwidth broadcast, reduction and scan", Parallel Computing 35 (2009).

    >>> from ringcoll.schedules.ir import grid
    >>> print(grid(dual_root_all_reduce, 4))
    step  rank 0  rank 1      rank 2  rank 3
       0  >1:0    +0:0        >3:0    +2:0
       1  .       >3:0 +3:0!  .       >1:0 +1:0!
       2  <1:0    >0:0        <3:0    >2:0
    """
    first, second = _halves(world_size)
    begin, size = (0, first) if rank < first else (first, second)
    label, levels = rank - begin + 1, height(size)
    tree = tree_all_reduce(rank - begin, size, chunk=0, turn=0)
    steps = [*unfinished(renumber(tree, peer=lambda peer: begin + peer))]
    later = [Step()] * (height(first) - levels)
    exchange = Step()
    if parent(label, size) is None:
        other = _root(second) + first if begin == 0 else _root(first)
        held = out(0) if size > 1 else inp(0)
        exchange = Step(send(other, held), recv_reduce(other, out(0), held, final=True))
    yield from (*later, *steps[:levels], exchange, *steps[levels:])
