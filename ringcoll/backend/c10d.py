"""What torch.distributed says, in the library's words: options of a group, arguments of a call.

A method of c10d takes its tensors first, the outputs before the inputs. Options follow; in the
short forms the operator or the root is in their place. A list of tensors may be the only element
of another list, a left-over of process groups with several GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.algorithms import required, where_possible
from ringcoll.errors import ArgumentError
from ringcoll.machine import as_algorithm, is_rules, rules_in
from ringcoll.reduction import Reproducible, check_level
from ringcoll.schedule import Schedule, contract
from ringcoll.transport import catalogue

NAME = "ringcoll"
# pybind11's class has no types.
_BackendOptions: Any = torch._C._distributed_c10d.Backend.Options
_SUM = dist.ReduceOp.SUM


@dataclass
class Options(_BackendOptions):  # type: ignore[misc]
    """Options of a group: ``pg_options=`` of ``init_process_group`` and ``new_group``.

    As of all options of torch's backends, device meshes read ``_timeout``, the time limit of the
    groups that they make; it may be set.

    Parameters
    ----------
    algorithm
        Name of an algorithm, for the collectives that have an algorithm of that name; a
        `Schedule`, or the path of a file that holds one, for its collective; ``FILE.py:NAME``;
        rules by collective and size (``"all_reduce:0-64K:tree;ring"``, docs/choice.md); or a
        mapping from collective (``"all_reduce"``) to one of these. See
        `ringcoll.machine.schedule_files`.
    segment_bytes, wire_dtype
        As for the functions of `ringcoll.collectives.functions`; the wire dtype is used for sums
        of floating-point tensors only.
    reproducible
        As for the functions of `ringcoll.collectives.functions`, for all collectives that reduce.
    transport, cuda_transport, verify_messages, fit, refit
        As for `ringcoll.use`.
    share
        Whether long CPU tensors move to shared memory when they are first all-reduced: see
        `ringcoll.share`. For programs whose tensors live long, as the buckets of
        ``DistributedDataParallel`` do, with the ranks on one host. Memory that cannot move, such
        as numpy's, and a part of a storage, is sent as it is. Operations of the group are waited
        for before memory moves; other groups, and sends and receives, must not be using the same
        tensor.

    Examples
    --------
    >>> from ringcoll.backend import Options
    >>> Options(algorithm="ring").algorithm_of("all_gather", 4)
    'ring'
    >>> Options(algorithm="ring").algorithm_of("barrier", 4)
    'auto'
    """

    algorithm: str | Schedule | Mapping[str, str | Schedule] = "auto"
    segment_bytes: int | None = None
    wire_dtype: torch.dtype | None = None
    reproducible: Reproducible = False
    transport: str = "auto"
    cuda_transport: str = "auto"
    share: bool = False
    verify_messages: bool = False
    fit: str | None = None
    refit: bool = False

    def __post_init__(self) -> None:
        super().__init__(NAME)
        catalogue.named("cpu", self.transport)
        catalogue.named("cuda", self.cuda_transport)
        check_level(self.reproducible)
        if isinstance(self.algorithm, Mapping):  # the program may go on to change its own
            object.__setattr__(self, "algorithm", dict(self.algorithm))

    def __reduce__(self) -> tuple[Any, ...]:
        values = (getattr(self, field.name) for field in fields(self))
        return _options, (self._timeout, *values)

    def algorithm_of(self, collective: str, world_size: int) -> str | Schedule:
        """Name of the algorithm for a collective, or the schedule, or the file that holds it.

        Raises
        ------
        UnknownAlgorithmError, UnsupportedWorldSizeError
            The mapping names an algorithm that the collective does not have, or that cannot run
            on so many ranks.
        """
        asked, fitting = self.algorithm, where_possible
        if not isinstance(asked, str | Schedule):
            asked, fitting = asked.get(collective, "auto"), required
        named = as_algorithm(asked)
        if isinstance(named, str) and is_rules(named):
            rules_in(named)  # raises if there is anything wrong with them
            return named
        fits = fitting(collective, named, world_size)
        return asked if fits is named else fits  # a file is read anew at each call

    def keywords(self, collective: str, world_size: int) -> dict[str, Any]:
        """Keyword arguments for the public functions of a collective."""
        keywords: dict[str, Any] = {"algorithm": self.algorithm_of(collective, world_size)}
        rules = contract(collective)
        if self.segment_bytes is not None and rules.can_be_cut:
            keywords["segment_bytes"] = self.segment_bytes
        if self.reproducible and rules.reduces and not rules.at_least_once:
            keywords["reproducible"] = self.reproducible
        return keywords


def _options(timeout: timedelta, *values: Any) -> Options:
    """Options as they were before they were pickled or copied."""
    options = Options(*values)
    options._timeout = timeout
    return options


# --- collectives ------------------------------------------------------------------------


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

    ``names`` are those of the method, in this version of torch and in others. ``tensors`` has the
    name of each tensor argument, the results first, and its conversion to the argument of the
    public function, in which ``root`` is the name of the argument for the root, if there is one,
    and in which the inputs may come first.
    """

    names: tuple[str, ...]
    function: str
    tensors: Mapping[str, Callable[[Any], Any]]
    root: str = ""
    inputs_first: bool = False

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
    Method(("allreduce",), "all_reduce", {"tensors": _only}),
    Method(("allreduce_coalesced",), "all_reduce_coalesced", {"tensors": list}),
    Method(("reduce",), "reduce", {"tensors": _only}, root="group_dst"),
    Method(
        ("reduce_scatter",), "reduce_scatter", {"output_tensors": _only, "input_tensors": _inner}
    ),
    Method(
        ("reduce_scatter_single", "_reduce_scatter_base"), "reduce_scatter_single", _ONE_OF_EACH
    ),
    Method(
        ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
        "reduce_scatter_single_coalesced",
        _LISTS_OF_EACH,
    ),
    Method(("broadcast",), "broadcast", {"tensors": _only}, root="group_src"),
    Method(("allgather",), "all_gather", {"output_tensors": _inner, "input_tensors": _only}),
    Method(
        ("allgather_coalesced",),
        "all_gather_coalesced",
        {"output_lists": _lists, "input_list": list},
    ),
    Method(("all_gather_single", "_allgather_base"), "all_gather_single", _ONE_OF_EACH),
    Method(
        ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
        "all_gather_single_coalesced",
        _LISTS_OF_EACH,
    ),
    Method(
        ("gather",),
        "gather",
        {"output_tensors": _at_root, "input_tensors": _only},
        root="group_dst",
        inputs_first=True,
    ),
    Method(
        ("scatter",),
        "scatter",
        {"output_tensors": _only, "input_tensors": _at_root},
        root="group_src",
    ),
    Method(("alltoall",), "all_to_all", _LISTS_OF_EACH),
    Method(
        ("all_to_all_single", "alltoall_base"), "all_to_all_single", _ONE_OF_EACH | _SPLIT_SIZES
    ),
)
"""All collectives but the barrier, which has no tensors."""
