"""``init_process_group("ringcoll")``: torch.distributed on the library's algorithms.

A process group whose collectives are the public functions of `ringcoll.api`. There is
no algorithm here: calls of c10d are mapped to those functions, and their results to
what c10d expects. How torch reaches a process group, and what has to be minded
(torch 2.13.0):

- ``torch.distributed``'s Python functions call the methods by name. Torch's C++
  (DistributedDataParallel, functional collectives) calls those of them that its
  pybind11 trampoline knows, and for the rest runs the collective of the *backend* that
  is registered for the device: here an inner group that is meant for the user's
  sends and receives only. See `ringcoll.torch_gaps`.
- Both the names of 2.13 and the older ones are used in the wild, and so are the
  short forms (``group.allreduce(tensor, op)``) next to those with options.
- ``options.timeout`` is negative unless the user gave one; then the group's counts.
- A call whose options say that it is synchronous is waited for by the caller at
  once, so it may as well run in the caller's thread.
- torch.compile must not trace into the methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll import api, groups, select, streams
from ringcoll.errors import ArgumentError
from ringcoll.point_to_point import PointToPoint
from ringcoll.torch_gaps import (
    mend_batches,
    mend_built_in_hook,
    mend_bypasses,
    mend_monitored_barrier,
    untraced,
)
from ringcoll.work import Work

__all__ = ["NAME", "Options", "ProcessGroup", "create"]

NAME = "ringcoll"

_SUM = dist.ReduceOp.SUM
_REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
# pybind11's overloads and the names of their parameters are not ours to repeat.
_ProcessGroup: Any = dist.ProcessGroup


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
    transport, cuda_transport
        As for `ringcoll.use`.

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
    transport: str = "auto"
    cuda_transport: str = "auto"

    def __post_init__(self) -> None:
        select.transport(self.transport)
        select.cuda_transport(self.cuda_transport)

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

    def keywords(self, collective: str, world_size: int) -> dict[str, Any]:
        """What to give to a function of `ringcoll.api`."""
        found: dict[str, Any] = {"algorithm": self.algorithm_of(collective, world_size)}
        if self.segment_bytes is not None and collective not in ("all_to_all", "barrier"):
            found["segment_bytes"] = self.segment_bytes
        return found


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
        mend_bypasses()
        mend_built_in_hook(ProcessGroup)
        mend_monitored_barrier(ProcessGroup)
        mend_batches(ProcessGroup)
        self.options = options or Options()
        self._keywords = {
            collective: self.options.keywords(collective, world_size)
            for collective in select.COLLECTIVES
        }
        self._store = store
        self._issued = 0
        groups.use(
            self,
            transport=self.options.transport,
            cuda_transport=self.options.cuda_transport,
        )
        self._coalesced: list[Work] | None = None
        self._messages = PointToPoint(store, rank, world_size, timeout)
        # For CUDA tensors, too, so that torch sees a group for them. Were it NCCL's, torch would
        # connect it at once where it is given a `device_id`, and in vain where ranks share a GPU.
        kind = dist.ProcessGroup.BackendType.CUSTOM
        for device in ("cpu", "cuda") if self._messages.has_nccl else ("cpu",):
            self._register_backend(torch.device(device), kind, self._messages.gloo)
        self._set_default_backend(kind)

    # --- what it is ------------------------------------------------------------------

    @property
    def timeout(self) -> timedelta:
        """Time limit of an operation that gives none of its own."""
        return self._messages.timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of operations that give none of their own."""
        self._messages.timeout = timeout

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
        indices = None
        if device is not None and device.type == "cuda":
            indices = [streams.current_device() if device.index is None else device.index]
        return self._start("barrier", api.barrier, [], opts, timeout, device_ids=indices)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """See `ringcoll.monitored_barrier`."""
        api.monitored_barrier(self, self.timeout if timeout is None else timeout, wait_all_ranks)

    # --- the user's sends and receives -----------------------------------------------

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> dist.Work:
        """Send a list of one tensor."""
        return self._messages.send(tensors, dst, tag)

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> dist.Work:
        """Receive a list of one tensor."""
        return self._messages.recv(tensors, src, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> dist.Work:
        """Receive a list of one tensor from whoever sends first."""
        return self._messages.recv_anysource(tensors, tag)

    def batched(
        self, start: Callable[[], list[dist.Work]], device: torch.device
    ) -> list[dist.Work]:
        """Start the sends and receives of ``torch.distributed.batch_isend_irecv``."""
        return self._messages.batched(start, device)

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
        self._messages.abort()

    def shutdown(self) -> None:
        """Complete what was issued, within its time limits, and let go of connections."""
        groups.close(self, drain_s=self.timeout.total_seconds())
        self._messages.shutdown()

    # --- how all of them run ---------------------------------------------------------

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
        keywords |= self._keywords[collective]
        if self.options.wire_dtype is not None and collective in _REDUCTIONS:
            # Integers have no other dtype to travel in.
            floating = bool(results) and results[0].is_floating_point()
            keywords["wire_dtype"] = self.options.wire_dtype if floating else None
        if collective == "all_reduce" and any(getattr(one, "is_sparse", False) for one in results):
            keywords |= {"wire_dtype": None, "segment_bytes": None}
        work = function(
            *arguments,
            group=self,
            async_op=getattr(opts, "asyncOp", True),
            timeout=limit,
            **keywords,
        )
        if work is None:
            work = Work(collective, results)
            work.complete(None, streams.mark_of(results))
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
        setattr(ProcessGroup, _name, untraced(_function))


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


def create(given: Any, options: Any) -> ProcessGroup:
    """Make a group from what torch gives to the creator of a backend."""
    return ProcessGroup(given.store, given.group_rank, given.group_size, given.timeout, options)
