"""The way of a call: its key, one look-up in the group, and the operation runs.

::

    all_reduce(tensor, ...) --> start --> key --> the group's operations --> run
                                           |              ^
                                           +-- new --> Arguments --> Operation

The key holds all that checks and decisions depend on: the function, its options, and the kind of
every tensor. So the checks of a call hold for all calls with the same key.

An all-reduce of sparse tensors is three such calls (`sparse_all_reduce`). No rank knows how many
entries the others have, so there are three all-gathers: of the numbers of entries, of the indices,
and of the values. Each rank then adds all entries up, in rank order, so that the result is bitwise
the same on all ranks. Values of 16 and 8 bits are sent and added up in float32, like those of dense
tensors; the real and imaginary parts of complex numbers are added as real numbers. Cost: k times
the bytes of a rank, as many as the sum may have.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from inspect import signature
from itertools import chain, islice
from typing import Any, ParamSpec, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ringcoll.errors import ArgumentError, MismatchError
from ringcoll.runtime.collectives.arguments import (
    AlgorithmChoice,
    Arguments,
    Compile,
    Options,
    Timeout,
    check_dtype,
    compiled,
    seconds,
)
from ringcoll.runtime.collectives.groups import OwnGroup, as_group, communicator, known
from ringcoll.runtime.group import Call, Part, Work
from ringcoll.runtime.operation import Operation
from ringcoll.runtime.reduction import Operator, as_operator, resolve
from ringcoll.runtime.tensors import can_write, extent, has_memory, with_memory
from ringcoll.runtime.user_files import as_algorithm, rules_in
from ringcoll.schedules import Schedule
from ringcoll.schedules.algorithms import registry

P = ParamSpec("P")
_RedOpType = dist.ReduceOp.RedOpType
_STRIDED = torch.strided
# Types of options that stay as they are. A call with an option of another type is not remembered.
_LASTING = {
    type(None), bool, int, float, str, tuple, type, torch.dtype, _RedOpType, Operator, Schedule
}  # fmt: skip


class Deferred:
    """A group for which a call is checked and returned as a `Call`, but not run.

    ``group`` is the group as the user gave it. A ``prepared`` call keeps its bindings, to run again
    and again.
    """

    def __init__(self, group: Any, *, prepared: bool = False) -> None:
        self.group, self.prepared = group, prepared

    @classmethod
    def of(cls, group: Any) -> Deferred:
        """Make a deferred group, unless the group is a deferred group already."""
        return group if isinstance(group, cls) else cls(group)

    def rank(self) -> int:
        """Rank of this process or thread in the group."""
        return as_group(self.group).rank()


def operator(op: object) -> object:
    """A reduction operator as part of a key: operators that compute the same now are equal keys."""
    if type(op) is _RedOpType or type(op) is str:
        return op
    try:
        named = as_operator(op)
    except ArgumentError:
        return op  # `Arguments.reduces` refuses it, and names the rank
    if isinstance(named.factor, Tensor):
        with_memory(named.factor, argument="op")
    is_plain = named.user is None and named.factor is None
    return named if is_plain else named.now()


def start(
    compile_: Compile,
    group: Any,
    tensors: Sequence[Any],
    options: Options,
    async_op: bool,
    timeout: Timeout,
) -> Work | None:
    """Run a call, by the operation that the group keeps for such calls, or by a new operation.

    Parameters
    ----------
    compile_
        Function that checks the call and compiles it.
    group, tensors, async_op, timeout
        Arguments of the user, unchecked; ``tensors`` are all that the call has.
    options
        The other arguments, for ``compile_``.

    Returns
    -------
    Work or None
        The work, if ``async_op``; but a `Call` if the group is `Deferred`.
    """
    deferred = group if type(group) is Deferred else None
    if deferred is not None:
        group = deferred.group
    member = operation = key = None
    # Whether the tensors may come to need gradients while the operation runs.
    is_tracked = async_op or deferred is not None
    try:
        facts = [compile_, registry.revision, *options, *map(type, options)]  # 4.0 equals 4
        is_several = len(tensors) > 1
        addresses: list[int] = []
        places: list[tuple[int, int]] = []
        for tensor in tensors:
            kind = type(tensor)
            if (kind is not Tensor and kind is not Parameter) or tensor.layout is not _STRIDED:
                raise TypeError  # a subclass may not be what its facts say
            is_contiguous = tensor.is_contiguous()
            facts += (
                tensor.shape,
                tensor.dtype,
                tensor.is_cpu or tensor.device,
                is_contiguous or tensor.stride(),
                tensor.is_conj(),
                tensor.is_neg(),
                tensor.is_inference(),
            )
            is_tracked = is_tracked or tensor.requires_grad
            address = tensor.data_ptr()
            addresses.append(address)
            if is_several:
                nbytes = tensor.nbytes if is_contiguous else extent(tensor)
                places.append((address, address + nbytes))
        if is_several:
            first = addresses[0]
            end = 0
            for place in sorted(places):
                if place[0] < end:  # the way of the overlap decides whether it is allowed
                    facts += [begin - first for begin in addresses]
                    break
                end = place[1]
        key = tuple(facts)
        # A new group stays as it is until the call has been checked.
        member = known(dist.GroupMember.WORLD if group is None else group, tensors[0])
        if member is not None and (deferred is None or not deferred.prepared):
            operation = member.operations.get(key)
        if operation is not None and operation.file:
            if rules := operation.request.rules:
                is_same = rules_in(operation.file) == rules
            else:
                is_same = as_algorithm(operation.file) is operation.request.algorithm
            operation = operation if is_same else None
        # Memory that an operation is bound to has been checked; what is freed has another address.
        binding = None if operation is None else operation.bindings.get(tuple(addresses))
        if binding is None:
            if not all(map(has_memory, tensors)):
                raise TypeError
            for number in () if operation is None else operation.written:
                if not can_write(tensors[number]):
                    raise TypeError
    except (AttributeError, IndexError, RuntimeError, TypeError):
        # An unusual argument: `compile_` checks it, and names the fault.
        operation = key = binding = None
        rank = as_group(group).rank()
        plain = [with_memory(tensor, rank) for tensor in tensors]
        if any(new is not old for new, old in zip(plain, tensors, strict=True)):
            return start(compile_, deferred or group, plain, options, async_op, timeout)
    if member is None and isinstance(group, OwnGroup) and group.retries:
        if deferred is not None:
            message = "cannot be prepared or joined with others"
            raise ArgumentError(
                message, "group", "a group that keeps its ranks", group, group.rank()
            )
        make = partial(
            start, compile_, tensors=tensors, options=options, async_op=False, timeout=timeout
        )
        return group.retried(lambda inner: cast("Call", make(Deferred(inner))), async_op)
    if member is None or operation is None:
        is_prepared = deferred is not None and deferred.prepared
        with torch.inference_mode(False):  # the operation may run outside of that mode
            operation = compile_(group, tensors, options, is_prepared)
        member = communicator(group, operation.device)
        if key is not None and not is_prepared and _LASTING.issuperset(map(type, options)):
            member.remember(key, operation)
    limit_s = member.timeout_s if timeout is None else seconds(timeout, member)
    is_at_once = deferred is None and not async_op
    if (
        binding is not None
        and binding.quick is not None
        and is_at_once
        and member.run_quickly(binding, operation, tensors, limit_s)
    ):
        return None
    results = tensors
    if is_tracked:
        results = [tensors[number] for number in operation.results]
        tensors = [tensor.detach() for tensor in tensors]
    if deferred is None:
        return member.run(operation, tensors, limit_s, async_op, results)
    results = [tensors[number] for number in operation.results]
    call: Any = Call(member, operation, tensors, limit_s, async_op, results)
    return cast("Work | None", call)  # a caller with a `Deferred` knows


def together(group: Any, calls: Sequence[Call]) -> Work | None:
    """Run several calls as one operation with one work, or defer them for a `Deferred` group."""
    first, *following = calls
    for call in following:
        if call.operation.device != first.operation.device:
            expected, got = first.operation.device, call.operation.device
            message = "all tensors of a call must be on one device"
            raise ArgumentError(message, "tensors", expected, got, first.member.rank)
    each = [chain([(call.operation, call.tensors)], call.following) for call in calls]
    parts = islice(chain.from_iterable(each), 1, None)
    # Parts of a sparse call are known only when those before them are done.
    is_known = all(isinstance(call.following, Sequence) for call in calls)
    first.following = list(parts) if is_known else parts
    if not is_known:
        first.tensors = [tensor for call in calls for tensor in call.tensors]  # for `Lane.use`
    first.num_parts = sum(call.num_parts for call in calls)
    first.results = [tensor for call in calls for tensor in call.results]
    if type(group) is not Deferred:
        return first()
    deferred: Any = first
    return cast("Work | None", deferred)


class Collective(Protocol[P]):
    """A public function, with a `plan`."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Work | None:
        """Call the function."""
        ...

    def plan(self, *args: P.args, **kwargs: P.kwargs) -> Call:
        """Prepare to call the function with these arguments again and again.

        Everything is checked, decided and bound once. The call keeps the tensors, and each run
        works on their present contents. All ranks must run the call as often,
        and in the same order among the group's other operations.

        Examples
        --------
        >>> import torch, ringcoll
        >>> def rank_main(group):
        ...     tensor = torch.zeros(3)
        ...     operation = ringcoll.all_reduce.plan(tensor, group=group)
        ...     for step in range(2):
        ...         tensor.fill_(step + group.rank())
        ...         operation()
        ...     return tensor.tolist()
        >>> ringcoll.run_threads(rank_main, 2)
        [[3.0, 3.0, 3.0], [3.0, 3.0, 3.0]]
        """
        ...


def collective(function: Callable[P, Work | None]) -> Collective[P]:
    """Give a public function its ``plan``."""
    parameters = signature(function)

    def plan(*args: P.args, **kwargs: P.kwargs) -> Call:
        bound = parameters.bind(*args, **kwargs)
        group = bound.arguments.get("group")
        bound.arguments["group"] = Deferred(group, prepared=True)
        call = cast("Call", function(*bound.args, **bound.kwargs))
        if not isinstance(call.following, Sequence):
            rank = as_group(group).rank()
            raise ArgumentError(
                "cannot be prepared", "tensor", "a dense tensor", "a sparse one", rank
            )
        return call

    function.plan = plan  # type: ignore[attr-defined]  # functions take attributes
    return cast("Collective[P]", function)


def sparse_all_reduce(
    tensor: Tensor,
    op: object,
    group: Any,
    async_op: bool,
    algorithm: AlgorithmChoice,
    timeout: Timeout,
    **of_dense: object,
) -> Work | None:
    """Add up a tensor in coordinate layout over all ranks; it becomes the coalesced sum or average.

    Shape, dtype and number of sparse dimensions are the same on all ranks; otherwise there is a
    `MismatchError`. Zero is not the neutral element of other operators than SUM and AVG.
    ``algorithm`` is that of the all-gathers, if they have an algorithm of that name; ``of_dense``
    are arguments for dense tensors only, and have to be ``None``.
    """
    deferred = Deferred.of(group)
    rank, world_size = deferred.rank(), as_group(deferred.group).size()
    for argument, value in of_dense.items():
        if value is not None:
            raise ArgumentError("not for sparse tensors", argument, "None", type(value), rank)
    reduction_operator = as_operator(op, rank)
    if reduction_operator.name not in ("sum", "avg"):
        message = "sparse tensors can be added up only"
        raise ArgumentError(message, "op", "sum or avg", reduction_operator, rank)
    for stored in (tensor._indices(), tensor._values()):
        with_memory(stored, rank)
    check_dtype(tensor.dtype, rank)
    reduction = resolve(reduction_operator, tensor.dtype, rank=rank)
    own = tensor.detach()
    values = reduction.encode(own._values().resolve_conj().resolve_neg())
    indices, values = _added(own._indices(), values, own.shape)
    sparse_dims, entry = own.sparse_dim(), values.shape[1:]
    dtype, dims = tensor.dtype, f"{sparse_dims} of the dimensions sparse"
    kind = f"{tuple(tensor.shape)}, {dims}, {dtype}, {reduction_operator}"
    # Number of entries and checksum: two numbers, whatever the length of the shape.
    about = torch.tensor([len(values), zlib.crc32(kind.encode())], device=tensor.device)
    call: Any = _gather(deferred, about, [2] * world_size, async_op, "auto", timeout)
    abouts = call.tensors[0].view(world_size, 2)

    def following() -> Iterator[Part]:
        for peer, checksum in enumerate(abouts[:, 1].tolist()):
            if checksum != about[1]:
                message = (
                    f"rank {rank} called all_reduce with a sparse tensor of shape "
                    f"{kind}, rank {peer} with one of another shape, dtype or operator"
                )
                raise MismatchError(message, peer=peer, mine=kind)
        counts = abouts[:, 0].tolist()
        gathered = []
        # Entry by entry, so that the ranks' entries can be laid end to end.
        for own_entries, width in ((indices.t(), sparse_dims), (values, entry.numel())):
            lengths = [width * count for count in counts]
            gather = _gather(deferred, own_entries, lengths, async_op, algorithm, timeout)
            yield gather.operation, gather.tensors
            gathered.append(gather.tensors[0])
        everywhere = gathered[0].view(-1, sparse_dims).t(), gathered[1].view(-1, *entry)
        places, sums = _added(*everywhere, tensor.shape)
        if reduction.finish is not None:
            reduction.finish(sums, world_size)
        entries = places, reduction.decode(sums), tensor.shape
        total = torch.sparse_coo_tensor(
            *entries, device=sums.device, check_invariants=False, is_coalesced=True
        )
        with torch.no_grad():
            tensor.copy_(total)

    call.following, call.num_parts, call.results = following(), 3, [tensor]
    call.tensors = [*call.tensors, indices, values]  # for `Lane.use`
    work: Work | None = call if deferred is group else call()
    return work


def _added(indices: Tensor, values: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Add up the entries of each place; indices and values of the sums."""
    if values.is_complex():  # torch would multiply by a complex 1, which makes NaN of infinities
        indices, parts = _added(indices, torch.view_as_real(values), torch.Size([*shape, 2]))
        return indices, torch.view_as_complex(parts)
    entries = torch.sparse_coo_tensor(
        indices, values, shape, device=values.device, check_invariants=False
    ).coalesce()
    return entries.indices(), entries.values()


def _gather(
    group: Deferred,
    tensor: Tensor,
    lengths: list[int],
    async_op: bool,
    algorithm: AlgorithmChoice,
    timeout: Timeout,
) -> Any:
    """An all-gather into one tensor, of parts of different lengths."""
    gathered = torch.empty(sum(lengths), dtype=tensor.dtype, device=tensor.device)
    tensors, options = (gathered, tensor.contiguous()), (algorithm, None, tuple(lengths))
    return start(_all_gather_parts, Deferred(group.group), tensors, options, async_op, timeout)


@compiled("all_gather", "tensor")
def _all_gather_parts(call: Arguments, lengths: tuple[int, ...]) -> Operation:
    return call.operation((1,), (0,), lengths)
