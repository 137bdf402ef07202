"""The computation of reductions: by engines, and in the order of a proof, before a call.

An engine binds a reduction to memory once; the bound reduction then runs any number of times
(`Engine.bind`). torch's operators are the reference, and the fallback;
`ringcoll.runtime.reduction.gpu` has kernels. ``Engine.name`` says which engine is used, and
``Engine.reason`` why.

A sum of floats depends on the order of its operands. The proof of a schedule says in which order
every chunk is reduced, so the bits of a result follow from the inputs alone: `predicted_result`
computes them with the functions and the dtypes of a real call, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ringcoll.errors import ArgumentError
from ringcoll.runtime.reduction.operators import Combiner, Reduction, resolve
from ringcoll.schedules import Order, Proof, chunk_elements, contract


class Engine:
    """torch's own operators, one after the other; other engines derive from this one.

    ``reason`` says why reductions run on torch's operators.
    """

    name = "torch"

    def __init__(self, reason: str = "tensors of the CPU") -> None:
        self.reason = reason

    def bind(
        self,
        reduction: Reduction,
        into: Sequence[Tensor],
        sources: Sequence[Tensor],
        world_size: int | None,
        narrow: Tensor | None = None,
    ) -> Callable[[], object]:
        """Make a function that reduces vectors, from left to right.

        Parameters
        ----------
        reduction
            An operator bound to a dtype.
        into
            Vectors for the total, in the reduction's ``work_dtype``: at least one. The first vector
            may be one of the first two sources, and overlaps no other source.
        sources
            Vectors to reduce, in ``work_dtype`` or ``wire_dtype``: at least one.
        world_size
            Number of ranks if the total is complete and is to be finished, otherwise ``None``.
        narrow
            Vector for the total in ``wire_dtype``; the total itself is then rounded as well.
        """
        target, *copies = into
        total, *others = sources
        steps: list[Callable[[], object]] = []
        if not others and total is not target:
            steps.append(partial(target.copy_, total))
        if others and reduction.combine_all is not None:
            steps.append(partial(reduction.combine_all, sources, target))
            others = []
        for other in others:
            mixed = total.dtype is not target.dtype or other.dtype is not target.dtype
            combine = partial(_widened, reduction.combine) if mixed else reduction.combine
            steps.append(partial(combine, total, other, out=target))
            total = target
        if world_size is not None and reduction.finish is not None:
            steps.append(partial(reduction.finish, target, world_size))
        if narrow is not None:
            steps.append(self.round(narrow, target))
        steps += [partial(copy.copy_, target) for copy in copies]
        return run_all(steps)

    def round(self, narrow: Tensor, tensor: Tensor) -> Callable[[], object]:
        """Make a function that converts a tensor to a narrower one, and rounds the tensor, too."""
        return run_all([partial(narrow.copy_, tensor), partial(tensor.copy_, narrow)])

    def encode(self, reduction: Reduction, flat: Tensor) -> Tensor:
        """Convert a rank's flat input to the work dtype, and scale it if the operator scales."""
        encoded = reduction.encode(flat)
        return encoded if reduction.scale is None else reduction.scale(encoded)


TORCH = Engine()
"""The engine for CPU tensors."""


def _widened(combine: Combiner, left: Tensor, right: Tensor, *, out: Tensor) -> object:
    return combine(left.to(out.dtype), right.to(out.dtype), out=out)


def run_all(steps: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Make one function of several, which run one after the other."""
    return steps[0] if len(steps) == 1 else partial(_in_turn, steps)


def _in_turn(steps: Sequence[Callable[[], object]]) -> None:
    for step in steps:
        step()


def _check_alike(inputs: Sequence[Tensor]) -> None:
    if not inputs or not all(isinstance(tensor, Tensor) for tensor in inputs):
        message = "each rank needs an input"
        expected = "a tensor of each rank"
        got = [type(tensor).__name__ for tensor in inputs]
        raise ArgumentError(message, "inputs", expected, got)
    kinds = {(tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in inputs}
    if len(kinds) > 1:
        message = "the inputs are not alike"
        expected = "one shape, dtype and device"
        got = sorted(f"{dtype} of shape {shape} on {device}" for shape, dtype, device in kinds)
        raise ArgumentError(message, "inputs", expected, " and ".join(got))


def reduce_in_order(
    order: Order, inputs: Sequence[Tensor], *, op: object = "sum", dtype: torch.dtype | None = None
) -> Tensor:
    """Reduce the inputs of all ranks in a given order, as a call reduces them.

    Parameters
    ----------
    order
        Order of reduction in postfix, each rank once: ``Proof.order(chunk)``.
    inputs
        Tensor of each rank, all of one shape, dtype and device.
    op
        The operator; see `as_operator`. AVG divides by the number of inputs.
    dtype
        Dtype of the tensors of the call, to which the inputs are converted first; by default their
        own. Narrower floats are added up in float32, and rounded at the end, as in a call without
        ``wire_dtype``.

    Returns
    -------
    Tensor
        The result in ``dtype``, with the shape of an input.

    Raises
    ------
    ArgumentError
        The inputs are not alike, ``order`` does not have each rank once, or the operator is not
        defined for the dtype.

    Examples
    --------
    >>> inputs = [torch.tensor(value) for value in (1e8, 1.0, -1e8)]
    >>> reduce_in_order((0, 1, "+", 2, "+"), inputs).item()
    0.0
    >>> reduce_in_order((0, 2, "+", 1, "+"), inputs).item()
    1.0
    """
    _check_alike(inputs)
    _check_order(order, len(inputs))
    reduction = resolve(op, inputs[0].dtype if dtype is None else dtype)
    stack: list[Tensor] = []
    for item in order:
        if isinstance(item, int):
            # A copy: the operators of a single input write to it.
            flat = inputs[item].detach().reshape(-1).to(reduction.dtype, copy=True)
            stack.append(TORCH.encode(reduction, flat))
        else:
            right, left = stack.pop(), stack.pop()
            total = torch.empty_like(left)
            reduction.combine(left, right, out=total)
            stack.append(total)
    (total,) = stack
    if reduction.finish is not None:
        reduction.finish(total, len(inputs))
    return reduction.decode(total).reshape(inputs[0].shape)


def _check_order(order: Order, world_size: int) -> None:
    depth = 0
    for item in order:
        depth += -1 if item == "+" else 1
        if depth < 1:
            break
    ranks = sorted(item for item in order if isinstance(item, int))
    pluses = sum(item == "+" for item in order)
    if depth != 1 or ranks != list(range(world_size)) or len(ranks) + pluses != len(order):
        message = "not an order of reduction"
        expected = f"each rank below {world_size} once, in postfix, as (0, 1, '+')"
        raise ArgumentError(message, "order", expected, order)


def predicted_result(
    proof: Proof, inputs: Sequence[Tensor], *, op: object = "sum", dtype: torch.dtype | None = None
) -> Tensor:
    """Compute the result of a call, bit for bit, from the order that was proved.

    The number of segments, the transport and the time at which messages arrive change no bit. A
    narrower ``wire_dtype`` does, and is not predicted.

    Parameters
    ----------
    proof
        The proof of the schedule that the call runs: of the same algorithm, number of ranks, root
        and hosts. The collective is one that reduces.
    inputs, op, dtype
        As for `reduce_in_order`; an input is the whole input of a rank.

    Returns
    -------
    Tensor
        The result, with the shape of an input. Rank r has all of it after an all-reduce, and block
        r of it after a reduce-scatter; the root has it after a reduce.

    Raises
    ------
    ArgumentError
        As for `reduce_in_order`; or the ranks do not reduce in the same order, so that there is no
        single result.
    ScheduleError
        The collective reduces no data, or the inputs cannot be divided into equal blocks.

    Examples
    --------
    Where rank 0 stands in the ring of a chunk decides whether the small number survives:

    >>> from ringcoll.schedules import schedule_of, verify
    >>> inputs = [torch.full((3,), value) for value in (1e8, 1.0, -1e8)]
    >>> predicted_result(verify(schedule_of("all_reduce", "ring", 3)), inputs).tolist()
    [0.0, 1.0, 0.0]
    """
    schedule = proof.schedule
    _check_alike(inputs)
    if len(inputs) != schedule.world_size:
        raise ArgumentError("each rank needs an input", "inputs", schedule.world_size, len(inputs))
    if not proof.same_everywhere or contract(schedule.collective).is_prefix:
        message = (
            f"the ranks of {schedule.algorithm} {schedule.collective} reduce in different orders"
        )
        raise ArgumentError(message, "proof", "one order of each chunk on all ranks", "several")
    flats = [tensor.reshape(-1) for tensor in inputs]
    chunks = [
        reduce_in_order(
            proof.order(chunk),
            [flat[elements.start : elements.stop] for flat in flats],
            op=op,
            dtype=dtype,
        )
        for chunk, elements in enumerate(chunk_elements(schedule, flats[0].numel()))
    ]
    return torch.cat(chunks).reshape(inputs[0].shape)
