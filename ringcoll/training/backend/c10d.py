"""What torch.distributed says, in the library's words: options of a group, arguments of a call.

A method of c10d takes its tensors first, the outputs before the inputs. Options follow; in the
short forms the operator or the root is in their place. A list of tensors may be the only element
of another list, a left-over of process groups with several GPUs.

torch 2.13 does some work in C++, or for groups of its own classes only; functions here fill these
gaps for a process group that is written in Python. And its dispatch modes and its
profiler see c10d's operators, as torch's own process groups run every call as one; a group that is
written in Python runs none. So while somebody looks, the call of torch's base class is made (the
operator), under a mode of this module that stands below all modes of the user, and runs this
library's call in the place of the operator's kernel. Nothing native runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from ringcoll.errors import ArgumentError
from ringcoll.runtime.group import Work
from ringcoll.runtime.process import note_observers, observers, untraced
from ringcoll.runtime.reduction import Reproducible, check_level
from ringcoll.runtime.transport import catalogue
from ringcoll.runtime.user_files import as_algorithm, is_rules, rules_in
from ringcoll.schedules import Schedule, contract
from ringcoll.schedules.algorithms import required, where_possible

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
        `ringcoll.runtime.user_files.algorithms`.
    segment_bytes, wire_dtype
        As for the functions of `ringcoll.runtime.collectives.functions`; the wire dtype is used for
        sums of floating-point tensors only.
    reproducible
        As for the functions of `ringcoll.runtime.collectives.functions`, for all collectives that
        reduce.
    transport, cuda_transport, verify_messages, fit
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
    >>> from ringcoll.training.backend import Options
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


_c10d: Any = torch._C._distributed_c10d
_num_modes = torch._C._len_torch_dispatch_stack
_profiler = torch.autograd.profiler


@functools.cache
def mend_torch(group_class: type) -> object:
    """Fill torch's gaps for groups of a class; for other groups nothing changes."""
    _mend_built_in_hook(group_class)
    _mend_monitored_barrier(group_class)
    _mend_batches(group_class)
    note_observers()
    return _mend_bypasses()


def _mend_bypasses() -> Any:
    """Redirect the calls of C++ that would run a collective of the inner group.

    In torch 2.13 these are the functional collectives with ``out=``, which call methods that
    pybind11's trampoline does not know. The kernels below call the methods of any group by
    name, as torch's own kernels do. torch 2.14 has no such gap.
    """
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14):
        return None

    def all_gather_out(
        input: Tensor,  # noqa: A002  # the schema's name
        group_size: int,
        group_name: str,
        *,
        out: Tensor,
    ) -> Tensor:
        group = _c10d._resolve_process_group(group_name)
        return _registered(out, group._allgather_base(out, input, _c10d.AllgatherOptions()))

    def reduce_scatter_out(
        input: Tensor,  # noqa: A002  # the schema's name
        reduce_op: str,
        group_size: int,
        group_name: str,
        *,
        out: Tensor,
    ) -> Tensor:
        group = _c10d._resolve_process_group(group_name)
        options = _c10d.ReduceScatterOptions()
        options.reduceOp = getattr(dist.ReduceOp, reduce_op.upper())
        return _registered(out, group._reduce_scatter_base(out, input, options))

    torch_library: Any = torch.library  # it has no types
    library = torch_library.Library("_c10d_functional", "IMPL")
    for key in ("CPU", "CUDA"):
        library.impl("all_gather_into_tensor_out", all_gather_out, key)
        library.impl("reduce_scatter_tensor_out", reduce_scatter_out, key)
    return library


def _mend_built_in_hook(group_class: type) -> None:
    """Let DDP's built-in hook FP16_COMPRESS be torch's Python version of the hook.

    The C++ version wants a future whose value is a list of tensors made by C++; a future made
    in Python holds a Python object. Both versions halve, add up and widen alike.
    """
    ddp: Any = torch.nn.parallel.DistributedDataParallel
    built_in = ddp._register_builtin_comm_hook

    @functools.wraps(built_in)
    def register(self: Any, comm_hook_type: Any) -> None:
        compresses = comm_hook_type == dist.BuiltinCommHookType.FP16_COMPRESS
        if compresses and isinstance(self.process_group, group_class):
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            self.register_comm_hook(self.process_group, default_hooks.fp16_compress_hook)
        else:
            built_in(self, comm_hook_type)

    ddp._register_builtin_comm_hook = register


def _mend_monitored_barrier(group_class: type) -> None:
    """Let ``torch.distributed.monitored_barrier``, which wants gloo, call the group's own."""
    native = dist.monitored_barrier

    @functools.wraps(native)
    def monitored_barrier(
        group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
    ) -> None:
        own: Any = dist.group.WORLD if group is None else group
        if isinstance(own, group_class):
            own.monitored_barrier(timeout, wait_all_ranks)  # type: ignore[attr-defined]
        else:
            native(group, timeout, wait_all_ranks)

    _replace(monitored_barrier)


def _mend_batches(group_class: type) -> None:
    """Let ``torch.distributed.batch_isend_irecv`` call the group's ``batched``.

    torch starts the messages one by one, except on groups of its own class, and checks none before.
    """
    native = dist.batch_isend_irecv

    @untraced
    @functools.wraps(native)
    def batch_isend_irecv(p2p_op_list: list[dist.P2POp]) -> list[dist.Work]:
        dist.distributed_c10d._check_p2p_op_list(p2p_op_list)
        group: Any = p2p_op_list[0].group
        if isinstance(group, group_class):
            methods = {dist.isend: "send", dist.irecv: "recv"}
            messages = [(methods[p.op], p.tensor, p.group_peer, p.tag) for p in p2p_op_list]
            start = functools.partial(native, [*map(_resolved, p2p_op_list)])
            return group.batched(start, messages)  # type: ignore[no-any-return,attr-defined]
        return native(p2p_op_list)

    _replace(batch_isend_irecv)


def _resolved(message: dist.P2POp) -> dist.P2POp:
    """The same message, or the values of a conjugate view: torch would refuse it after others."""
    if message.op is not dist.isend or not message.tensor.is_conj():
        return message
    tensor, group, peer = message.tensor.resolve_conj(), message.group, message.group_peer
    return dist.P2POp(message.op, tensor, group=group, tag=message.tag, group_peer=peer)


def _replace(function: Callable[..., Any]) -> None:
    """Put a function in the place of the function of torch.distributed with the same name."""
    for module in (dist, dist.distributed_c10d):
        setattr(module, function.__name__, function)


def _registered(out: Tensor, work: dist.Work) -> Tensor:
    """Note the work that ``wait_tensor`` will wait for."""
    if isinstance(work, Work):
        # torch keeps the C++ part of a work only; a work of this library has no such part.
        work = _c10d._create_work_from_future(work.get_future())
    _c10d._register_work(out, work)
    return out


# --- calls that are seen ----------------------------------------------------------------


def is_watched() -> bool:
    """Whether a dispatch mode of this thread, torch's profiler or its observer looks at calls."""
    return _profiler._is_profiler_enabled or bool(_num_modes() or observers)


class _Lowest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs a call in the place of c10d's operator."""

    def __init__(self, run: Callable[[], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run, self.work, self.has_run = run, None, False
        self.error: BaseException | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d" or self.has_run:
            return func(*args, **(kwargs or {}))
        self.has_run = True
        try:
            self.work = self._run()
        except BaseException as error:
            self.error = error
            raise
        # The caller gets the call's own work; torch would keep no more of it than this.
        results = [
            _work_that_is_done() if "Work" in str(result.type) else args[0]
            for result in func._schema.returns
        ]
        return results[0] if len(results) == 1 else tuple(results)


@functools.cache
def _work_that_is_done() -> Any:
    future: torch.futures.Future[None] = torch.futures.Future()
    future.set_result(None)
    return _c10d._create_work_from_future(future).boxed()


def observed(
    native: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any], run: Any
) -> Any:
    """Call ``run()`` in the place of the operator that ``native(*arguments, **keywords)`` calls."""
    modes = _get_current_dispatch_mode_stack()
    if any(getattr(mode, "_mode_key", None) is not None for mode in modes):
        return run()  # torch traces with tensors that have no memory: there is no call to see
    lowest = _Lowest(run)
    _replace_modes(modes, [lowest, *modes])
    try:
        result = native(*arguments, **keywords)
    except BaseException as error:
        if lowest.error is not None:
            raise lowest.error from None
        if isinstance(error, TypeError) and not lowest.has_run:
            return run()  # torch lacks this form of the call
        raise
    finally:
        _replace_modes([lowest, *modes], modes)
    return lowest.work if lowest.has_run else result  # a mode may have answered by itself


def _replace_modes(before: list[Any], after: list[Any]) -> None:
    for _ in before:
        _pop_mode()
    for mode in after:
        _push_mode(mode)
