"""Orders of reduction: which contributions are added first, and for which elements.

Problem: a sum of floats depends on the order in which it is made. `verify` finds the order of
every chunk; here an order becomes a sum that a person reads, and a chunk becomes the elements that
it has in a vector of some length.
"""

from __future__ import annotations

from ringcoll.errors import ScheduleError
from ringcoll.schedule.contracts import balanced_share, contract
from ringcoll.schedule.ir import Written
from ringcoll.schedule.verifier import Order, Proof


def infix(order: Order) -> str:
    """Write an order in postfix as a sum.

    >>> infix((0, 1, "+", 2, 3, "+", "+"))
    '(x0 + x1) + (x2 + x3)'
    """
    stack: list[str] = []
    for item in order:
        if isinstance(item, int):
            stack.append(f"x{item}")
        else:
            right, left = stack.pop(), stack.pop()
            stack.append(f"({left} + {right})")
    (total,) = stack
    return total.removeprefix("(").removesuffix(")") if len(order) > 1 else total


def chunks_by_order(proof: Proof) -> dict[Order, list[int]]:
    """The chunks that are reduced in each order; chunks ascend.

    >>> from ringcoll.algorithms import schedule_of
    >>> from ringcoll.schedule import verify
    >>> proof = verify(schedule_of("all_reduce", "recursive_doubling", 4))
    >>> chunks_by_order(proof)
    {(0, 1, '+', 2, 3, '+', '+'): [0]}
    """
    chunks: dict[Order, list[int]] = {}
    for chunk, order in proof.orders.items():
        chunks.setdefault(order, []).append(chunk)
    return chunks


def check_reduces(collective: str) -> None:
    """Check that a collective has sums.

    Raises
    ------
    ScheduleError
        There is no such collective, or it reduces no data.
    """
    rules = contract(collective)
    if not rules.reduces or rules.at_least_once:
        raise ScheduleError(f"{collective} reduces no data, so that there is no order of reduction")


def chunk_elements(schedule: Written, numel: int) -> list[range]:
    """The elements of every chunk.

    Parameters
    ----------
    schedule
        A schedule of a collective that reduces.
    numel
        Elements of the whole data: of the vector, or of all blocks of a rank.

    Raises
    ------
    ScheduleError
        ``numel`` is below 0, or the blocks of a rank would not have equal lengths; or the
        collective reduces no data.

    Examples
    --------
    >>> from ringcoll.algorithms import schedule_of
    >>> chunk_elements(schedule_of("all_reduce", "ring", 3), 5)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    check_reduces(schedule.collective)
    rules = contract(schedule.collective)
    blocks = rules.num_blocks(schedule.world_size)
    per_block = rules.chunks_per_block(schedule.num_chunks, schedule.world_size)
    if numel < 0 or numel % blocks:
        raise ScheduleError(
            f"{schedule.collective} on {schedule.world_size} ranks cannot divide {numel} elements "
            f"into blocks of equal length: expected a multiple of {blocks}, at least 0"
        )
    elements = []
    for chunk in range(schedule.num_chunks):
        block, index = divmod(chunk, per_block)
        offset, length = balanced_share(numel // blocks, per_block, index)
        start = block * (numel // blocks) + offset
        elements.append(range(start, start + length))
    return elements
