"""One call of a collective as data: prepare its tensors, make it, check what came out.

The same cases run on threads, on processes, and on torch's own collectives, whose
functions have the same names and positional arguments.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ringcoll
from ringcoll import UserOp, premul_sum
from ringcoll.schedules import contract
from ringcoll.tools.testing import Expected, bits, inputs, mismatch
from tests.cases.reference import moved, reduced

__all__ = [
    "STYLES",
    "USER_OPS",
    "Case",
    "Prepared",
    "expected",
    "fingerprint",
    "prepare",
    "styled",
    "verdict",
]

_PRIME = 251


def affine(left: Tensor, right: Tensor) -> Tensor:
    """Composition of the maps x -> a x + b modulo 251, kept as 256 a + b.

    Associative, not commutative, and made of integers, so that a wrong order shows.
    """
    a, b, c, d = left // 256, left % 256, right // 256, right % 256
    return (a * c % _PRIME) * 256 + (a * d + b) % _PRIME


def skewed(left: Tensor, right: Tensor) -> Tensor:
    """Neither associative nor commutative."""
    return 3 * left - right


USER_OPS = {
    "user_sum": UserOp(torch.add, commutative=True, name="user_sum"),
    "user_affine": UserOp(affine, commutative=False),
    "user_skewed": UserOp(skewed, commutative=False, associative=False),
}
_FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "user_sum": torch.add,
    "user_affine": affine,
    "user_skewed": skewed,
}

STYLES = ("flat", "strided", "columns", "offset", "scalar", "conj", "neg")
_UNTOUCHED = 77


@dataclass(frozen=True)
class Case:
    """A call that all ranks of a group make.

    ``lengths`` holds one number for a vector, one for each rank for blocks, and one for
    each (source, destination) for all-to-all. ``root`` is a rank of the group. ``device`` is
    where the tensors of the call are; a rank's own GPU is its current one.
    """

    collective: str
    algorithm: str = "auto"
    form: str = "list"
    op: str = "sum"
    dtype: torch.dtype = torch.int64
    lengths: tuple[int, ...] = (5,)
    root: int = 0
    segment_bytes: int | None = None
    in_place: bool = False
    async_op: bool = False
    wire_dtype: torch.dtype | None = None
    kind: str = "exact"
    style: str = "flat"
    seed: int = 0
    device: str = "cpu"


@dataclass
class Prepared:
    """A case's tensors on one rank."""

    case: Case
    outputs: list[Tensor]
    survivors: list[tuple[Tensor, bytes]]
    """Tensors that must not change, and what they held."""
    surroundings: list[tuple[Tensor, bytes]]
    """Outputs, and what the memory beside them held."""
    start: Callable[[Any, Any], Any]
    """Called with the library and the group, makes the call; returns a work or None."""
    keep: list[Tensor] = field(default_factory=list)


def styled(flat: Tensor, style: str, device: str = "cpu") -> Tensor:
    """A tensor with the same elements, in memory of a device that is laid out in another way.

    A style that does not fit the dtype or the length leaves the tensor as it is.
    """
    numel = flat.numel()

    def memory(*shape: int) -> Tensor:
        return torch.full(shape, _UNTOUCHED).to(flat.dtype).to(device)

    if style == "strided":
        base = memory(2 * numel + 3)
        view = base[1 : 2 * numel + 1 : 2]
    elif style == "offset":
        base = memory(numel + 2)
        view = base[1 : numel + 1]
    elif style == "columns" and numel and numel % 2 == 0:
        base = memory(2, numel // 2 + 1)
        view = base[:, : numel // 2].t()
    elif style == "scalar" and numel == 1:
        view = memory()
    elif style == "conj" and flat.is_complex():
        view = memory(numel).conj()
    elif style == "neg" and (flat.is_complex() or flat.dtype in (torch.float32, torch.float64)):
        view = torch._neg_view(memory(numel))
    else:
        return flat.clone().to(device)
    view.copy_(flat.view(view.shape))
    return view


def _outside(view: Tensor) -> bytes:
    """The whole memory that a tensor lies in, with zeros where its own elements are."""
    whole = torch.empty(0, dtype=torch.uint8, device=view.device)
    memory = whole.set_(view.untyped_storage()).clone().cpu()
    elements = memory[: memory.numel() // view.itemsize * view.itemsize].view(-1, view.itemsize)
    numbers = torch.arange(elements.shape[0])
    own = torch.as_strided(numbers, view.shape, view.stride(), view.storage_offset())
    elements[own.reshape(-1)] = 0
    return bytes(memory.numpy().tobytes())


def _input(case: Case, rank: int, block: int, numel: int) -> Tensor:
    values = inputs.values(
        case.dtype, numel, rank=rank, block=block, seed=case.seed, kind=case.kind, op=case.op
    )
    if case.op == "user_affine":
        values = values.remainder(_PRIME) * 256 + (values // 7).remainder(_PRIME)
    return values


def _factor(case: Case, rank: int) -> float:
    return float((case.seed + rank) % 3 + 1) if case.kind == "exact" else 0.3 * (rank + 1)


def _operator(case: Case, rank: int, lib: Any) -> object:
    if case.op == "premul_sum":
        make = dist._make_nccl_premul_sum if lib is dist else premul_sum
        return make(_factor(case, rank))
    if case.op in USER_OPS:
        return USER_OPS[case.op]
    # A name is as good as a member of the enumeration, but torch knows only the latter.
    if lib is ringcoll and case.seed % 2:
        return case.op
    return getattr(dist.ReduceOp, case.op.upper())


def block_numel(case: Case, block: int) -> int:
    """Length of a block."""
    return case.lengths[block] if len(case.lengths) > 1 else case.lengths[0]


def expected(case: Case, rank: int, world_size: int) -> list[Expected]:
    """What a rank's outputs have to be, in the order of `Prepared.outputs`."""
    rules = contract(case.collective)
    blocks = rules.outputs(rank, world_size, case.root)
    if case.collective == "barrier" or not blocks:
        return []
    answers = []
    for block in blocks:
        numel = block_numel(case, block)
        if not rules.reduces:
            owner = rules.owner(block, world_size, case.root)
            answers.append(moved(_input(case, owner, block, numel)))
            continue
        ranks = range(rules.contributors(rank, world_size))
        answers.append(
            reduced(
                case.op,
                [_input(case, source, block, numel) for source in ranks],
                exact=case.kind == "exact",
                wire_dtype=case.wire_dtype,
                factors=[_factor(case, r) for r in ranks] if case.op == "premul_sum" else None,
                function=_FUNCTIONS.get(case.op),
            )
        )
    if case.form == "single" and case.collective in ("all_gather", "all_to_all"):
        bounds = [answer.bound for answer in answers]
        whole = None if bounds[0] is None else torch.cat([b for b in bounds if b is not None])
        return [Expected(torch.cat([answer.value for answer in answers]), whole)]
    return answers


def prepare(case: Case, rank: int, world_size: int, *, native: bool = False) -> Prepared:
    """Make a rank's tensors for a case.

    Parameters
    ----------
    case
        The case.
    rank, world_size
        Of the group.
    native
        Whether the call is one of torch's: without the arguments that torch lacks.
    """
    maker = {
        "all_reduce": _all_reduce,
        "reduce": _reduce,
        "broadcast": _broadcast,
        "all_gather": _all_gather,
        "gather": _gather,
        "scatter": _scatter,
        "reduce_scatter": _reduce_scatter,
        "all_to_all": _all_to_all,
        "barrier": _barrier,
        "scan": _prefix,
        "exscan": _prefix,
    }[case.collective]
    prepared = maker(case, rank, world_size, native)
    pointers = [tensor.untyped_storage().data_ptr() for tensor in prepared.keep]
    prepared.surroundings = [
        (output, _outside(output))
        for output in prepared.outputs
        if output.numel() and pointers.count(output.untyped_storage().data_ptr()) == 1
    ]
    return prepared


def _empty(case: Case, numel: int) -> Tensor:
    """An output, full of something that is not the result."""
    return styled(torch.full((numel,), _UNTOUCHED).to(case.dtype), case.style, case.device)


def _own(case: Case, rank: int, world_size: int) -> list[Tensor]:
    """The blocks of a rank's input."""
    blocks = contract(case.collective).inputs(rank, world_size, case.root)
    return [_input(case, rank, block, block_numel(case, block)) for block in blocks]


def _options(case: Case, native: bool, reduces: bool = False) -> dict[str, Any]:
    options: dict[str, Any] = {"async_op": case.async_op}
    if native:
        return options
    options["algorithm"] = case.algorithm
    if case.collective not in ("all_to_all", "barrier"):
        options["segment_bytes"] = case.segment_bytes
    if reduces:
        options["wire_dtype"] = case.wire_dtype
    return options


def _prepared(
    case: Case,
    outputs: list[Tensor],
    survivors: Sequence[Tensor],
    start: Callable[[Any, Any], Any],
    keep: Sequence[Tensor] = (),
) -> Prepared:
    remembered = [(tensor, bits(tensor)) for tensor in survivors]
    return Prepared(case, outputs, remembered, [], start, [*outputs, *survivors, *keep])


def _single(lib: Any, collective: str) -> Any:
    """A function of single tensors, by the name that it has in the library's version."""
    older = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
    return getattr(lib, f"{collective}_single", None) or getattr(lib, older[collective])


def _rooted(case: Case, group: Any, what: str) -> dict[str, int]:
    """The root, now as a rank of the group and now as a global rank."""
    if case.seed % 3 or not isinstance(group, dist.ProcessGroup):
        return {f"group_{what}": case.root}
    return {what: dist.get_global_rank(group, case.root)}


def _all_reduce(case: Case, rank: int, world_size: int, native: bool) -> Prepared:
    (own,) = _own(case, rank, world_size)
    tensor = styled(own, case.style, case.device)
    options = _options(case, native, reduces=True)
    if case.in_place or native:
        return _prepared(
            case,
            [tensor],
            [],
            lambda lib, group: lib.all_reduce(tensor, _operator(case, rank, lib), group, **options),
        )
    out = _empty(case, own.numel()).view(tensor.shape)
    return _prepared(
        case,
        [out],
        [tensor],
        lambda lib, group: lib.all_reduce(
            tensor, _operator(case, rank, lib), group, out=out, **options
        ),
    )


def _prefix(case: Case, rank: int, world_size: int, native: bool) -> Prepared:
    """A scan or exscan, which changes nothing on a rank without output."""
    (own,) = _own(case, rank, world_size)
    tensor = out = styled(own, case.style, case.device)
    options = _options(case, native, reduces=True)
    if not case.in_place:
        options["out"] = out = _empty(case, own.numel()).view(tensor.shape)
    has_output = contract(case.collective).outputs(rank, world_size, case.root)
    survivors = {id(kept): kept for kept in (tensor, out) if kept is not out or not has_output}

    def start(lib: Any, group: Any) -> Any:
        function = getattr(lib, case.collective)
        return function(tensor, _operator(case, rank, lib), group, **options)

    return _prepared(case, [out] if has_output else [], [*survivors.values()], start)


def _reduce(case: Case, rank: int, world_size: int, native: bool) -> Prepared:
    (own,) = _own(case, rank, world_size)
    tensor = styled(own, case.style, case.device)
    options = _options(case, native, reduces=True)
    is_root = rank == case.root
    if not (case.in_place or native) and is_root:
        options["out"] = out = _empty(case, own.numel()).view(tensor.shape)
    else:
        out = tensor
    survivors = [] if is_root and out is tensor else [tensor]
    if native and not is_root:
        survivors = []  # gloo scrambles them

    def start(lib: Any, group: Any) -> Any:
        operator = _operator(case, rank, lib)
        root = _rooted(case, group, "dst")
        return lib.reduce(tensor, op=operator, group=group, **root, **options)

    return _prepared(case, [out] if is_root else [], survivors, start)


def _broadcast(case: Case, rank: int, world_size: int, native: bool) -> Prepared:
    own = _own(case, rank, world_size)
    tensor = styled(own[0], case.style, case.device) if own else _empty(case, block_numel(case, 0))
    options = _options(case, native)
    return _prepared(
        case,
        [tensor],
        [],
        lambda lib, group: lib.broadcast(
            tensor, group=group, **_rooted(case, group, "src"), **options
        ),
    )


def _all_gather(case: Case, rank: int, world_size: int, native: bool) -> Prepared:
    (own,) = _own(case, rank, world_size)
    options = _options(case, native)
    if case.form == "single":
        numel = own.numel()
        out = _empty(case, numel * world_size)
        if case.in_place and case.style in ("flat", "offset"):
            tensor = out.view(-1)[rank * numel : (rank + 1) * numel]
            tensor.copy_(own)
        else:
            tensor = styled(own, case.style, case.device)
        survivors = [] if case.in_place else [tensor]
        return _prepared(
            case,
            [out],
            survivors,
            lambda lib, group: _single(lib, "all_gather")(out, tensor, group, **options),
            [tensor],
        )
    outs = [_empty(case, block_numel(case, block)) for block in range(world_size)]
    tensor = styled(own, case.style, case.device)
    if case.in_place:
        outs[rank] = tensor
    return _prepared(
        case,
        outs,
        [] if case.in_place else [tensor],
        lambda lib, group: lib.all_gather(outs, tensor, group, **options),
    )


def _gather(case: Case, rank: int, world_size: int, native: bool) -> Prepared:
    (own,) = _own(case, rank, world_size)
    options, tensor, outs = (
        _options(case, native),
        styled(own, case.style, case.device),
        list[Tensor](),
    )
    if rank == case.root:
        outs = [_empty(case, block_numel(case, block)) for block in range(world_size)]
        if case.in_place:
            outs[rank] = tensor
    return _prepared(
        case,
        outs,
        [] if case.in_place and outs else [tensor],
        lambda lib, group: lib.gather(
            tensor, outs or None, group=group, **_rooted(case, group, "dst"), **options
        ),
    )


def _scatter(case: Case, rank: int, world_size: int, native: bool) -> Prepared:
    sources = [styled(block, case.style, case.device) for block in _own(case, rank, world_size)]
    options = _options(case, native)
    tensor = _empty(case, block_numel(case, rank))
    survivors = list(sources)
    if case.in_place and sources:
        tensor = sources[rank]
        survivors.pop(rank)
    return _prepared(
        case,
        [tensor],
        survivors,
        lambda lib, group: lib.scatter(
            tensor, sources or None, group=group, **_rooted(case, group, "src"), **options
        ),
    )


def _reduce_scatter(case: Case, rank: int, world_size: int, native: bool) -> Prepared:
    own = _own(case, rank, world_size)
    options = _options(case, native, reduces=True)
    out = _empty(case, own[rank].numel())
    if case.form == "single":
        tensor = styled(torch.cat(own), case.style, case.device)
        survivors = [tensor]
        if case.in_place and case.style in ("flat", "offset"):
            numel = own[rank].numel()
            out = tensor.view(-1)[rank * numel : (rank + 1) * numel]
            survivors = []
        return _prepared(
            case,
            [out],
            survivors,
            lambda lib, group: _single(lib, "reduce_scatter")(
                out, tensor, _operator(case, rank, lib), group, **options
            ),
            [tensor],
        )
    tensors = [styled(block, case.style, case.device) for block in own]
    survivors = list(tensors)
    if case.in_place:
        out = tensors[rank]
        survivors.pop(rank)
    return _prepared(
        case,
        [out],
        survivors,
        lambda lib, group: lib.reduce_scatter(
            out, tensors, _operator(case, rank, lib), group, **options
        ),
    )


def _all_to_all(case: Case, rank: int, world_size: int, native: bool) -> Prepared:
    own = _own(case, rank, world_size)
    options = _options(case, native)
    incoming = [block_numel(case, source * world_size + rank) for source in range(world_size)]
    if case.form == "list":
        sources = [styled(block, case.style, case.device) for block in own]
        outs = [_empty(case, numel) for numel in incoming]
        return _prepared(
            case,
            outs,
            sources,
            lambda lib, group: lib.all_to_all(outs, sources, group, **options),
        )
    source = styled(torch.cat(own), case.style, case.device)
    out = _empty(case, sum(incoming))
    splits: list[list[int] | None] = [incoming, [block.numel() for block in own]]
    if len({*incoming, *(block.numel() for block in own)}) == 1 and case.seed % 2:
        splits = [None, None]
    # Pieces are cut along the first dimension.
    source, out = source.reshape(-1), out.reshape(-1)
    return _prepared(
        case,
        [out],
        [source],
        lambda lib, group: lib.all_to_all_single(out, source, *splits, group, **options),
    )


def _barrier(case: Case, rank: int, world_size: int, native: bool) -> Prepared:
    options = _options(case, native)
    if case.device == "cuda":
        options["device_ids"] = [torch.cuda.current_device()]
    return _prepared(case, [], [], lambda lib, group: lib.barrier(group, **options))


def verdict(prepared: Prepared, rank: int, world_size: int) -> list[str]:
    """Check a rank's tensors after the call; returns what is wrong, in words."""
    case = prepared.case
    wrong = [
        mismatch(output, answer, f"rank {rank}, output {index}")
        for index, (output, answer) in enumerate(
            zip(prepared.outputs, expected(case, rank, world_size), strict=True)
        )
    ]
    wrong += [
        f"rank {rank}: input {index} was changed"
        for index, (tensor, before) in enumerate(prepared.survivors)
        if bits(tensor) != before
    ]
    wrong += [
        f"rank {rank}: memory beside an output was changed"
        for output, before in prepared.surroundings
        if _outside(output) != before
    ]
    return [item for item in wrong if item]


def fingerprint(prepared: Prepared) -> str:
    """A hash of the outputs' bits."""
    digest = hashlib.blake2b(digest_size=16)
    for output in prepared.outputs:
        digest.update(bits(output))
    return digest.hexdigest()
