"""The table of c10d's collectives: which public function a call is, with which arguments.

A method of c10d takes its tensors first, the outputs before the inputs. Options follow; in the
short forms the operator or the root is in their place. A list of tensors may be the only element
of another list, a left-over of process groups with several GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from ringcoll.errors import ArgumentError

_SUM = dist.ReduceOp.SUM


def _listed(tensors: Any) -> list[Any]:
    return list(tensors) if isinstance(tensors, list | tuple) else [tensors]


def _only(tensors: Any) -> Any:
    """The tensor of a list of one tensor, or the tensor itself."""
    (tensor,) = _listed(tensors)
    return tensor


def _inner(lists: Any) -> list[Tensor]:
    """The only list of tensors in a list of lists, or the list itself."""
    lists = _listed(lists)
    return list(lists[0]) if lists and isinstance(lists[0], list | tuple) else lists


def _at_root(lists: Any) -> list[Tensor] | None:
    """The list of tensors of a gather or scatter; ``None`` on all ranks but the root."""
    return _inner(lists) or None


def _lists(lists: Any) -> list[list[Tensor]]:
    return [*map(list, lists)]


def _same(tensor: Any) -> Any:
    return tensor


def _flat(tensors: Any) -> list[Tensor]:
    """The tensors of a tensor, a list, or a list of lists."""
    return [tensor for inner in _listed(tensors) for tensor in _listed(inner)]


class C10dCall(NamedTuple):
    """The arguments of a call of c10d, translated.

    ``results`` are the tensors that the call changes; ``options`` are those of c10d, an operator
    or a root; ``tensors`` and ``keywords`` are the arguments of the public function.
    """

    results: list[Tensor]
    options: Any
    timeout: timedelta | None
    tensors: list[Any]
    keywords: dict[str, Any]


@dataclass(frozen=True)
class Method:
    """A collective of c10d, and the public function for it.

    ``aliases`` has the names of the method, in this version of torch and in others. ``tensors`` has
    the name of each tensor argument, the results first, and its conversion to the argument of the
    public function, in which ``root`` is the name of the argument for the root, if there is one,
    and in which the inputs may come first.
    """

    aliases: str
    function: str
    tensors: Mapping[str, Callable[[Any], Any]]
    root: str = ""
    inputs_first: bool = False

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the method."""
        return tuple(self.aliases.split())

    @cached_property
    def collective(self) -> str:
        """The name of the collective's contract, which does not name the layout of tensors."""
        return self.function.removesuffix("_coalesced").removesuffix("_single")

    @cached_property
    def reduces(self) -> bool:
        """Whether the collective has an operator."""
        return "reduce" in self.function

    @cached_property
    def positional(self) -> tuple[str, ...]:
        """Names of the positional arguments, in order."""
        operator = ("op",) if self.root and self.reduces else ()
        return (*self.tensors, "opts", *operator, "timeout")

    def read(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> C10dCall:
        """Translate the arguments of a call."""
        names = self.positional
        unread = {**dict(zip(names, arguments, strict=False)), **keywords}
        tensors = [convert(unread.pop(name, None)) for name, convert in self.tensors.items()]
        results = [] if tensors[0] is None else _flat(tensors[0])
        options = unread.pop("opts", 0 if self.root else _SUM)
        timeout = unread.pop("timeout", None)
        public: dict[str, Any] = {}
        if self.root:
            public[self.root] = unread.pop("root", getattr(options, "rootRank", options))
        if self.reduces:
            operator = unread.pop("op", _SUM if self.root else options)
            public["op"] = getattr(options, "reduceOp", operator)
        if unread or len(arguments) > len(names):
            raise ArgumentError(
                f"{self.names[0]} has no such argument",
                expected=", ".join(names),
                got=", ".join(unread) or f"{len(arguments)} arguments",
            )
        return C10dCall(
            results, options, timeout, tensors[::-1] if self.inputs_first else tensors, public
        )


_ONE_OF_EACH = {"output": _same, "input": _same}
_LISTS_OF_EACH = {"outputs": list, "inputs": list}
_SPLIT_SIZES = dict.fromkeys(
    ("output_split_sizes", "input_split_sizes"), lambda sizes: [] if sizes is None else sizes
)
METHODS = (
    Method("allreduce", "all_reduce", {"tensors": _only}),
    Method("allreduce_coalesced", "all_reduce_coalesced", {"tensors": list}),
    Method("reduce", "reduce", {"tensors": _only}, root="group_dst"),
    Method("reduce_scatter", "reduce_scatter", {"output_tensors": _only, "input_tensors": _inner}),
    Method("reduce_scatter_single _reduce_scatter_base", "reduce_scatter_single", _ONE_OF_EACH),
    Method(
        "reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced",
        "reduce_scatter_single_coalesced",
        _LISTS_OF_EACH,
    ),
    Method("broadcast", "broadcast", {"tensors": _only}, root="group_src"),
    Method("allgather", "all_gather", {"output_tensors": _inner, "input_tensors": _only}),
    Method(
        "allgather_coalesced", "all_gather_coalesced", {"output_lists": _lists, "input_list": list}
    ),
    Method("all_gather_single _allgather_base", "all_gather_single", _ONE_OF_EACH),
    Method(
        "all_gather_single_coalesced allgather_into_tensor_coalesced",
        "all_gather_single_coalesced",
        _LISTS_OF_EACH,
    ),
    Method(
        "gather",
        "gather",
        {"output_tensors": _at_root, "input_tensors": _only},
        root="group_dst",
        inputs_first=True,
    ),
    Method(
        "scatter",
        "scatter",
        {"output_tensors": _only, "input_tensors": _at_root},
        root="group_src",
    ),
    Method("alltoall", "all_to_all", _LISTS_OF_EACH),
    Method("all_to_all_single alltoall_base", "all_to_all_single", _ONE_OF_EACH | _SPLIT_SIZES),
)
"""All collectives but the barrier, which has no tensors."""
