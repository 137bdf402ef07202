"""``init_process_group("ringcoll")``: torch.distributed on the library's algorithms.

A process group whose collectives are the public functions of `ringcoll.api`. There is
no algorithm here: calls of c10d are mapped to those functions, and their results to
what c10d expects. How torch reaches a process group, and what has to be minded
(torch 2.13.0):

- ``torch.distributed``'s Python functions call the methods by name. Torch's C++
  (DistributedDataParallel, functional collectives) calls those of them that its
  pybind11 trampoline knows, and for the rest runs the collective of the *backend* that
  is registered for the device: here an inner group that is meant for the user's
  sends and receives only. `_mend_bypasses` closes the one gap that is known.
- Both the names of 2.13 and the older ones are used in the wild, and so are the
  short forms (``group.allreduce(tensor, op)``) next to those with options.
- ``options.timeout`` is negative unless the user gave one; then the group's counts.
- A call whose options say that it is synchronous is waited for by the caller at
  once, so it may as well run in the caller's thread.
- torch.compile must not trace into the methods: see `_untraced`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._dynamo import eval_frame

from ringcoll import api, groups, select
from ringcoll.errors import ArgumentError, PeerLostError
from ringcoll.work import Work

__all__ = ["NAME", "Options", "ProcessGroup", "create"]

NAME = "ringcoll"

_SUM = dist.ReduceOp.SUM
# pybind11's overloads and the names of their parameters are not ours to repeat.
_ProcessGroup: Any = dist.ProcessGroup
_c10d: Any = torch._C._distributed_c10d
_Method = TypeVar("_Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class Options:
    """What ``pg_options=`` of ``init_process_group`` and ``new_group`` may say.

    Parameters
    ----------
    algorithm
        Name of an algorithm, used by the collectives that have one of that name, or a
        mapping from collective (``"all_reduce"``) to name; see `ringcoll.algorithms`.
    segment_bytes, wire_dtype
        As for the functions of `ringcoll.api`; the wire dtype is used for sums of
        floating-point tensors only.

    Examples
    --------
    >>> from ringcoll.backend import Options
    >>> Options(algorithm="ring").algorithm_of("all_gather", 4)
    'ring'
    >>> Options(algorithm="ring").algorithm_of("barrier", 4)
    'auto'
    """

    algorithm: str | Mapping[str, str] = "auto"
    segment_bytes: int | None = None
    wire_dtype: torch.dtype | None = None

    def algorithm_of(self, collective: str, world_size: int) -> str:
        """The algorithm to use for a collective.

        Raises
        ------
        UnknownAlgorithmError, UnsupportedWorldSizeError
            It was asked for by the collective's name, and cannot be had.
        """
        if isinstance(self.algorithm, str):
            return select.where_possible(collective, self.algorithm, world_size)
        name = self.algorithm.get(collective, "auto")
        return select.required(collective, name, world_size)


def _untraced(method: _Method) -> _Method:
    """Keep torch.compile's tracer out of a method and of all that it calls.

    As ``torch.compiler.disable`` does, without the 2 s that importing it takes.
    """

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        tracer = eval_frame.set_eval_frame(None)
        try:
            return method(*args, **kwargs)
        finally:
            eval_frame.set_eval_frame(tracer)

    made: Any = run
    made._torchdynamo_disable = True
    # Where nothing is traced on the way here, as after a graph break, the tracer looks at
    # every frame, and would warn that it cannot follow this one.
    with contextlib.suppress(AttributeError):  # where a version of torch has it otherwise
        frames: Any = eval_frame
        strategy = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
        frames.set_code_exec_strategy(made.__code__, strategy)
    return made  # type: ignore[no-any-return]


def _listed(tensors: Any) -> list[Any]:
    return list(tensors) if isinstance(tensors, list | tuple) else [tensors]


class ProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """The process group behind ``init_process_group("ringcoll")``.

    Made by torch; all ranks of the group have to make theirs.

    Parameters
    ----------
    store
        Seen by all ranks of the group, and used by nobody else.
    rank, world_size
        This rank, and the number of ranks.
    timeout
        Time limit of an operation that gives none of its own.
    options
        What was given as ``pg_options``.

    Raises
    ------
    UnknownAlgorithmError, UnsupportedWorldSizeError
        The options name an algorithm that there is not.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        options: Options | None = None,
    ) -> None:
        super().__init__(rank, world_size)
        if options is not None and not isinstance(options, Options):
            raise ArgumentError(
                "not options of this backend",
                rank=rank,
                argument="pg_options",
                expected="ringcoll.Options, or None",
                got=type(options),
            )
        _mend_bypasses()
        self.options = options or Options()
        self._algorithms = {
            collective: self.options.algorithm_of(collective, world_size)
            for collective in select.COLLECTIVES
        }
        self._store = store
        self._issued = 0
        self._coalesced: list[Work] | None = None
        # For the user's sends and receives, which so never meet the library's own.
        self._channels: dict[str, Any] = {
            "cpu": dist.ProcessGroupGloo(
                dist.PrefixStore("cpu", store), rank, world_size, timeout=timeout
            )
        }
        self._register_backend(
            torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, self._channels["cpu"]
        )
        if torch.cuda.is_available() and dist.is_nccl_available():
            nccl_options = dist.ProcessGroupNCCL.Options()
            nccl_options._timeout = timeout
            nccl = dist.ProcessGroupNCCL(
                dist.PrefixStore("cuda", store), rank, world_size, nccl_options
            )
            self._channels["cuda"] = nccl
            self._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)

    # --- what it is ------------------------------------------------------------------

    @property
    def timeout(self) -> timedelta:
        """Time limit of an operation that gives none of its own."""
        # Kept where torch's functions that set it put it.
        limit: timedelta = self._channels["cpu"].options._timeout
        return limit

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of operations that give none of their own."""
        for channel in self._channels.values():
            channel._set_default_timeout(timeout)

    def getBackendName(self) -> str:  # noqa: N802  # C++ calls it
        """The backend's name."""
        return NAME

    def name(self) -> str:
        """The backend's name."""
        return NAME

    def get_group_store(self) -> dist.Store:
        """The store of this group."""
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        """There is nothing to agree on: all ranks count from zero."""

    def _get_sequence_number_for_group(self) -> int:
        """Number of collectives issued so far."""
        return self._issued

    # --- reductions ------------------------------------------------------------------

    def allreduce(
        self, tensors: Any, opts: Any = _SUM, timeout: timedelta | None = None, *, op: Any = None
    ) -> Work:
        """``all_reduce``, of a list of one tensor."""
        (tensor,) = _listed(tensors)
        opts = opts if op is None else op
        return self._start(
            "all_reduce",
            api.all_reduce,
            [tensor],
            opts,
            timeout,
            tensor,
            _operator(opts),
            **self._reducing(tensor, opts),
        )

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = _SUM) -> Work:
        """``all_reduce`` of several tensors, as one operation."""
        tensors = list(tensors)
        return self._start(
            "all_reduce",
            api.all_reduce_coalesced,
            tensors,
            opts,
            None,
            tensors,
            _operator(opts),
            **self._reducing(tensors, opts),
        )

    def reduce(
        self,
        tensors: Any,
        opts: Any = 0,
        op: Any = _SUM,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Work:
        """``reduce``, of a list of one tensor."""
        opts = opts if root is None else root
        (tensor,) = _listed(tensors)
        op = _operator(opts, op)
        return self._start(
            "reduce",
            api.reduce,
            [tensor],
            opts,
            timeout,
            tensor,
            group_dst=_root(opts),
            op=op,
            **self._reducing(tensor, op),
        )

    def reduce_scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = _SUM,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> Work:
        """``reduce_scatter``, of a list of one output and one list of inputs."""
        opts = opts if op is None else op
        (output,) = _listed(output_tensors)
        inputs = _inner(input_tensors)
        return self._start(
            "reduce_scatter",
            api.reduce_scatter,
            [output],
            opts,
            timeout,
            output,
            inputs,
            _operator(opts),
            **self._reducing(output, opts),
        )

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = _SUM) -> Work:  # noqa: A002
        """``reduce_scatter_single``."""
        return self._start(
            "reduce_scatter",
            api.reduce_scatter_single,
            [output],
            opts,
            None,
            output,
            input,
            _operator(opts),
            **self._reducing(output, opts),
        )

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = _SUM
    ) -> Work:
        """``reduce_scatter_single`` of several tensors, as one operation."""
        outputs, inputs = list(outputs), list(inputs)
        return self._start(
            "reduce_scatter",
            api.reduce_scatter_single_coalesced,
            outputs,
            opts,
            None,
            outputs,
            inputs,
            _operator(opts),
            **self._reducing(outputs, opts),
        )

    # --- data that are only moved ----------------------------------------------------

    def broadcast(
        self,
        tensors: Any,
        opts: Any = 0,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Work:
        """``broadcast``, of a list of one tensor."""
        opts = opts if root is None else root
        tensor = _listed(tensors)[getattr(opts, "rootTensor", 0)]
        return self._start(
            "broadcast",
            api.broadcast,
            [tensor],
            opts,
            timeout,
            tensor,
            group_src=_root(opts),
            segment_bytes=self.options.segment_bytes,
        )

    def allgather(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """``all_gather``, of one list of outputs and a list of one input."""
        outputs = _inner(output_tensors)
        (tensor,) = _listed(input_tensors)
        return self._start(
            "all_gather",
            api.all_gather,
            outputs,
            opts,
            timeout,
            outputs,
            tensor,
            segment_bytes=self.options.segment_bytes,
        )

    def allgather_coalesced(
        self,
        output_lists: Sequence[Sequence[Tensor]],
        input_list: Sequence[Tensor],
        opts: Any = None,
    ) -> Work:
        """``all_gather`` of several tensors; ``output_lists[rank][index]``."""
        results = [tensor for tensors in output_lists for tensor in tensors]
        return self._start(
            "all_gather",
            api.all_gather_coalesced,
            results,
            opts,
            None,
            [list(tensors) for tensors in output_lists],
            list(input_list),
            segment_bytes=self.options.segment_bytes,
        )

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:  # noqa: A002
        """``all_gather_single``."""
        return self._start(
            "all_gather",
            api.all_gather_single,
            [output],
            opts,
            None,
            output,
            input,
            segment_bytes=self.options.segment_bytes,
        )

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """``all_gather_single`` of several tensors, as one operation."""
        outputs, inputs = list(outputs), list(inputs)
        return self._start(
            "all_gather",
            api.all_gather_single_coalesced,
            outputs,
            opts,
            None,
            outputs,
            inputs,
            segment_bytes=self.options.segment_bytes,
        )

    def gather(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = 0,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Work:
        """``gather``, of one list of outputs (at the root) and a list of one input."""
        opts = opts if root is None else root
        outputs = _inner(output_tensors)
        (tensor,) = _listed(input_tensors)
        return self._start(
            "gather",
            api.gather,
            outputs,
            opts,
            timeout,
            tensor,
            outputs or None,
            group_dst=_root(opts),
            segment_bytes=self.options.segment_bytes,
        )

    def scatter(
        self,
        output_tensors: Any,
        input_tensors: Any,
        opts: Any = 0,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Work:
        """``scatter``, of a list of one output and one list of inputs (at the root)."""
        opts = opts if root is None else root
        (output,) = _listed(output_tensors)
        return self._start(
            "scatter",
            api.scatter,
            [output],
            opts,
            timeout,
            output,
            _inner(input_tensors) or None,
            group_src=_root(opts),
            segment_bytes=self.options.segment_bytes,
        )

    def alltoall(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """``all_to_all``."""
        outputs, inputs = list(outputs), list(inputs)
        return self._start("all_to_all", api.all_to_all, outputs, opts, timeout, outputs, inputs)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,  # noqa: A002  # torch's name
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """``all_to_all_single``."""
        return self._start(
            "all_to_all",
            api.all_to_all_single,
            [output],
            opts,
            timeout,
            output,
            input,
            list(output_split_sizes or ()),
            list(input_split_sizes or ()),
        )

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """``barrier``."""
        device = getattr(opts, "device", None)
        indices = [device.index or 0] if device is not None and device.type == "cuda" else None
        return self._start("barrier", api.barrier, [], opts, timeout, device_ids=indices)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """See `ringcoll.monitored_barrier`; torch's function of that name insists on gloo."""
        api.monitored_barrier(self, self.timeout if timeout is None else timeout, wait_all_ranks)

    # --- the user's sends and receives -----------------------------------------------

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> dist.Work:
        """Send a list of one tensor."""
        (tensor,) = tensors
        what = f"rank {self.rank()} lost rank {dst}, while it sent to it with tag {tag}"
        return _Message(self._channel(tensor).send([tensor], dst, tag), what, dst)

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> dist.Work:
        """Receive a list of one tensor."""
        (tensor,) = tensors
        what = f"rank {self.rank()} lost rank {src}, while it received from it with tag {tag}"
        return _Message(self._channel(tensor).recv([tensor], src, tag), what, src)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> dist.Work:
        """Receive a list of one tensor from whoever sends first."""
        (tensor,) = tensors
        what = f"rank {self.rank()} lost a rank, while it received from any with tag {tag}"
        return _Message(self._channel(tensor).recv_anysource([tensor], tag), what, None)

    def _channel(self, tensor: Tensor) -> Any:
        channel = self._channels.get(tensor.device.type)
        if channel is None:
            raise ArgumentError(
                "tensors on this device cannot be sent",
                rank=self.rank(),
                argument="tensor",
                expected=" or ".join(self._channels),
                got=tensor.device,
            )
        return channel

    # --- several at once, other groups, the end --------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        """Collect the works of what follows."""
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """One work for all that was collected."""
        works, self._coalesced = self._coalesced or [], None
        return _All(works)

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Options | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> ProcessGroup | None:
        """Make a group of some of the ranks; they all have to call it, others may.

        Parameters
        ----------
        new_ranks
            Ranks of this group, in the order of the new one.
        timeout, opts
            By default this group's.
        group_name, group_desc
            For torch's books. The name must be new.
        device_types
            Accepted for compatibility: the new group takes what this one takes.

        Returns
        -------
        ProcessGroup or None
            ``None`` on a rank that is not in the new group.
        """
        ranks = list(new_ranks)
        if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(self.size())):
            raise ArgumentError(
                "not ranks of this group",
                rank=self.rank(),
                argument="new_ranks",
                expected=f"some of 0 to {self.size() - 1}, each once",
                got=ranks,
            )
        if self.rank() not in ranks:
            return None
        if group_name is None:
            group_name = f"{self.group_name}:split:{'_'.join(map(str, ranks))}"
        made = ProcessGroup(
            dist.PrefixStore(f"{group_name}/", self._store),
            ranks.index(self.rank()),
            len(ranks),
            timeout or self.timeout,
            opts if isinstance(opts, Options) else self.options,
        )
        made._set_group_name(group_name)
        made._set_group_desc(group_desc or f"{self.group_desc}:split")
        return made

    splitGroup = split_group  # noqa: N815  # C++ calls it

    def abort(self) -> None:
        """Make all operations fail, here and at the peers that take part in them."""
        groups.abort(self)
        for channel in self._channels.values():
            channel.abort()

    def shutdown(self) -> None:
        """Complete what was issued, within its time limits, and let go of connections."""
        groups.close(self, drain_s=self.timeout.total_seconds())

    # --- how all of them run ---------------------------------------------------------

    def _reducing(self, tensors: Any, opts: Any) -> dict[str, Any]:
        """The options of a reduction."""
        first = _listed(tensors)[0] if tensors is not None and len(_listed(tensors)) else None
        wire = self.options.wire_dtype
        if wire is not None and (first is None or not first.is_floating_point()):
            wire = None
        return {"segment_bytes": self.options.segment_bytes, "wire_dtype": wire}

    def _start(
        self,
        collective: str,
        function: Callable[..., Work | None],
        results: list[Tensor],
        opts: Any,
        timeout: timedelta | None,
        *arguments: Any,
        **keywords: Any,
    ) -> Work:
        """Call a public function, as the options of c10d say."""
        limit = timeout or getattr(opts, "timeout", None)
        if limit is None or limit <= timedelta(0):
            limit = self.timeout
        self._issued += 1
        work = function(
            *arguments,
            group=self,
            async_op=getattr(opts, "asyncOp", True),
            algorithm=self._algorithms[collective],
            timeout=limit,
            **keywords,
        )
        if work is None:
            work = Work(collective, results)
            work.complete(None)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    # Names of other versions of torch.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


for _name, _function in tuple(vars(ProcessGroup).items()):
    if callable(_function) and (not _name.startswith("_") or _name.endswith("_base")):
        setattr(ProcessGroup, _name, _untraced(_function))


def _operator(opts: Any, op: Any = None) -> Any:
    """The operator: options have one, and the short forms give it in their place."""
    if hasattr(opts, "reduceOp"):
        return opts.reduceOp
    return opts if op is None else op


def _root(opts: Any) -> int:
    """The root, in options or in their place."""
    root: int = getattr(opts, "rootRank", opts)
    return root


def _inner(lists: Any) -> list[Tensor]:
    """The one list of tensors in a list of lists, or the list itself."""
    lists = _listed(lists)
    return list(lists[0]) if lists and isinstance(lists[0], list | tuple) else lists


class _Message(dist.Work):
    """A send or a receive of the user's.

    Parameters
    ----------
    work
        Of torch's own group.
    failure
        What has happened if it fails, in words.
    peer
        The other rank, if it is known.
    """

    def __init__(self, work: dist.Work, failure: str, peer: int | None) -> None:
        super().__init__()
        self._work, self._failure, self._peer = work, failure, peer
        self._waited = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for it; more than once does no harm, as it does on gloo's own."""
        if not self._waited:
            try:
                self._work.wait(timeout)
            except RuntimeError as error:
                raise PeerLostError(f"{self._failure}: {error}", peer=self._peer) from error
            self._waited = True
        return True

    def is_completed(self) -> bool:
        """Whether it is over; gloo does not know before it is waited for."""
        return self._waited or self._work.is_completed()

    def is_success(self) -> bool:
        """Whether it is over and went well."""
        return self._waited

    def get_future(self) -> Any:
        """The future of torch's own work, where it has one."""
        return self._work.get_future()

    def _source_rank(self) -> int:
        """Whom a receive from any rank has received from."""
        return int(self._work._source_rank())

    source_rank = _source_rank


class _All(dist.Work):
    """Several works as one."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all of them."""
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        """Whether all are over."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Any:
        """A future of all of their futures."""
        return torch.futures.collect_all([work.get_future() for work in self._works])


@functools.cache
def _mend_bypasses() -> Any:
    """Bring home the calls of C++ that would run the inner group's own collective.

    In torch 2.13 these are the functional collectives with ``out=``, which call methods
    that pybind11's trampoline does not know. The kernels given here call the group's
    methods by name, so they do for any group what torch's own do.
    """

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

    library: Any = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
    for key in ("CPU", "CUDA"):
        library.impl("all_gather_into_tensor_out", all_gather_out, key)
        library.impl("reduce_scatter_tensor_out", reduce_scatter_out, key)
    return library


def _registered(out: Tensor, work: dist.Work) -> Tensor:
    """Note the work that ``wait_tensor`` will wait for."""
    if isinstance(work, Work):
        # Only the part of a work that is C++ is kept; this one has no other.
        work = _c10d._create_work_from_future(work.get_future())
    _c10d._register_work(out, work)
    return out


def create(given: Any, options: Any) -> ProcessGroup:
    """Make a group from what torch gives to the creator of a backend."""
    return ProcessGroup(given.store, given.group_rank, given.group_size, given.timeout, options)
