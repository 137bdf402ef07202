"""``init_process_group("ringcoll")``: torch.distributed on the library's algorithms.

The collectives of the process group are the public functions of
`ringcoll.runtime.collectives.functions`; `ringcoll.training.backend.c10d` translates the arguments.
How torch reaches a process group (torch 2.13.0):

- The Python functions of ``torch.distributed`` call the methods by name. torch's C++
  (DistributedDataParallel, functional collectives) calls the methods that its pybind11 trampoline
  knows. For the others torch's C++ runs the collective of the *backend* that is registered for
  the device: here an inner group, which is meant for the user's sends and receives only. See
  `ringcoll.training.backend.torch_gaps`.
- Programs use the names of torch 2.13 and older names, and short forms
  (``group.allreduce(tensor, op)``) beside the forms with options.
- ``options.timeout`` is negative unless the user has given a time limit.
- If the options say that a call is synchronous, the caller waits at once. Such a call runs in the
  caller's thread.
- torch.compile must not trace into the methods.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringcoll.errors import ArgumentError
from ringcoll.runtime.collectives import functions as api
from ringcoll.runtime.collectives import groups, share_for
from ringcoll.runtime.group import Work
from ringcoll.runtime.machine import seconds_of
from ringcoll.runtime.process import check_not_ending, untraced
from ringcoll.runtime.rendezvous import ask_store, common_connection, fresh_group_name
from ringcoll.runtime.transport import streams
from ringcoll.runtime.watch import Lives
from ringcoll.schedules import CONTRACTS, contract
from ringcoll.training.backend.c10d import METHODS, C10dCall, Method
from ringcoll.training.backend.device_maps import backend_for_torch
from ringcoll.training.backend.observed_calls import is_watched, observed
from ringcoll.training.backend.options import NAME, Options
from ringcoll.training.backend.point_to_point import PointToPoint
from ringcoll.training.backend.torch_gaps import mend_torch

# pybind11's overloads and the names of their parameters are not ours to repeat.
_ProcessGroup: Any = dist.ProcessGroup
_CUSTOM = dist.ProcessGroup.BackendType.CUSTOM


def _bounded(timeout: timedelta) -> timedelta:
    """A time limit that C++ can add to the time of day."""
    return timedelta(seconds=seconds_of(timeout))


class ProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """The process group behind ``init_process_group("ringcoll")``.

    torch makes the process group; all ranks of the group have to make theirs.

    Parameters
    ----------
    store
        Store that all ranks of the group see, and that nobody else uses; ranks of an earlier start
        of the program may have.
    rank, world_size
        Rank of this process, and number of ranks.
    timeout
        Time limit of an operation that has no time limit of its own.
    options
        The value of ``pg_options``.
    devices
        Types of the devices that a device map gives to this backend; ``None`` without a map.

    Raises
    ------
    ArgumentError
        The options are not `Options`.
    UnknownAlgorithmError, UnsupportedWorldSizeError
        See `Options.algorithm_of`.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        timeout: timedelta,
        options: Options | None = None,
        devices: tuple[str, ...] | None = None,
    ) -> None:
        check_not_ending()
        super().__init__(rank, world_size)
        timeout = _bounded(timeout)
        if options is not None and not isinstance(options, Options):
            raise ArgumentError("not options of this backend", "pg_options",
                                "ringcoll.Options, or None", type(options), rank)  # fmt: skip
        mend_torch(ProcessGroup)
        self.options = Options() if options is None else replace(options)
        self._keywords = {
            collective: self.options.keywords(collective, world_size) for collective in CONTRACTS
        }
        limit_s = timeout.total_seconds()
        begin = partial(_announce, store, rank, world_size, limit_s)
        self.life, self.lives = ask_store(store, limit_s, begin)
        self._store = dist.PrefixStore(self.life, store)
        self._issued = 0
        groups.use(
            self,
            transport=self.options.transport,
            cuda_transport=self.options.cuda_transport,
            verify_messages=self.options.verify_messages,
            fit=self.options.fit,
        )
        self._coalesced: list[Work] | None = None
        own = weakref.ref(self)
        names = lambda: groups.names_of(own())  # noqa: E731
        self._messages = PointToPoint(self._store, timeout, self.lives, self.life, names)
        # For CUDA tensors torch sees gloo's group, too. torch would connect NCCL's group at once
        # if torch has got a `device_id`, and in vain if ranks share a GPU.
        for device in devices or (("cpu", "cuda") if self._messages.has_nccl else ("cpu",)):
            self._register_backend(torch.device(device), _CUSTOM, self._messages.gloo)
        self._set_default_backend(_CUSTOM)
        self._devices = devices
        self._others: dict[str, Any] = {}  # backends of other devices in the map
        # The store may be gone before the first call, with the process that holds it.
        if world_size > 1 and "cpu" in (devices or ("cpu",)):
            groups.communicator(self, torch.device("cpu")).begin()

    def take_over(self, native: Any, kinds: Mapping[str, Any]) -> None:
        """Take the backends of other devices, of these kinds, from a group of torch."""
        self._native = native
        for name, kind in kinds.items():
            device = torch.device(name)
            self._others[name] = native._get_backend(device)
            self._register_backend(device, kind, self._others[name])

    @cached_property
    def _native(self) -> Any:
        """A group of torch, whose calls are c10d's operators; none runs, unless it was taken."""
        native = _ProcessGroup(self._store, self.rank(), self.size())
        for device in self._device_types:
            native._register_backend(device, _CUSTOM, self.inner)
        native._set_default_backend(_CUSTOM)
        native._set_group_name(self.group_name)
        native._set_group_desc(self.group_desc)
        return native

    # --- facts of the group ----------------------------------------------------------

    @property
    def timeout(self) -> timedelta:
        """Time limit of an operation that has no time limit of its own."""
        return self._messages.timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of operations that have no time limit of their own."""
        timeout = self._messages.timeout = _bounded(timeout)
        for backend in self._others.values():
            backend._set_default_timeout(timeout)

    @property
    def inner(self) -> Any:
        """The backend, written in C++, that torch sees in the place of this group."""
        return self._messages.gloo

    def name(self) -> str:
        """Name of the backend."""
        return NAME

    getBackendName = name  # noqa: N815  # C++ calls it

    def _get_backend_name(self) -> str:
        """What torch compares with gloo's name, to learn whether tensors have to be on the CPU."""
        return "gloo" if {device.type for device in self._device_types} == {"cpu"} else NAME

    def get_group_store(self) -> dist.Store:
        """Store of this group."""
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: all ranks count from zero."""

    def _get_sequence_number_for_group(self) -> int:
        """Number of collectives that this rank has issued."""
        return self._issued

    # --- collectives: below the class, `METHODS` adds the others ----------------------

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Work:
        """``barrier``."""
        device = getattr(opts, "device", None)
        indices = None
        if device is not None and device.type == "cuda":
            indices = [streams.current_device() if device.index is None else device.index]
        call = C10dCall([], opts, timeout, [], {"device_ids": indices})
        run = partial(self._start, "barrier", "barrier", call)
        options = {} if opts is None else {"opts": opts}
        work: Work = self._pass("barrier", run, (), options, device or self._device_types[0])
        return work

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """See `ringcoll.monitored_barrier`."""
        api.monitored_barrier(self, self.timeout if timeout is None else timeout, wait_all_ranks)

    def _pass(
        self,
        name: str,
        run: Callable[[], Any],
        arguments: tuple[Any, ...],
        keywords: Mapping[str, Any] = MappingProxyType({}),
        device: torch.device | None = None,
    ) -> Any:
        """Run a call in the sight of observers, or hand it to the backend of its device."""
        if self._devices is not None:
            device = device or _device_of([*arguments, *keywords.values()])
            if device.type in self._others:
                return getattr(self._native, name)(*arguments, **keywords)
            if device.type not in self._devices:
                message = "the group was made for other devices"
                expected = " or ".join((*self._devices, *self._others))
                raise ArgumentError(message, "tensor", expected, device, self.rank())
        if is_watched():
            return observed(getattr(self._native, name), arguments, keywords, run)
        return run()

    def defaults(self, collective: str, dtype: torch.dtype | None) -> dict[str, Any]:
        """The group's options, as keyword arguments of a public function, for a tensor's dtype."""
        keywords = self._keywords[collective]
        rules, wire_dtype = contract(collective), self.options.wire_dtype
        if wire_dtype is None or not rules.reduces or rules.at_least_once:
            return keywords
        # A wire dtype is for floating-point tensors only.
        is_floating = dtype is not None and dtype.is_floating_point
        return keywords | {"wire_dtype": wire_dtype if is_floating else None}

    def _start(self, collective: str, function: str, call: C10dCall) -> Work:
        """Call a public function, as the options of the call and of the group say."""
        limit = call.timeout or getattr(call.options, "timeout", None)
        if limit is None or limit <= timedelta(0):
            limit = self.timeout
        self._issued += 1
        dtype = call.results[0].dtype if call.results else None
        keywords = call.keywords | self.defaults(collective, dtype)
        if collective == "all_reduce" and any(
            getattr(tensor, "is_sparse", False) for tensor in call.results
        ):
            keywords |= {"wire_dtype": None, "segment_bytes": None}
        if self.options.share and collective == "all_reduce":
            for tensor in call.results:
                share_for(self, tensor)
        work: Work | None = getattr(api, function)(
            *call.tensors,
            group=self,
            async_op=getattr(call.options, "asyncOp", True),
            timeout=limit,
            **keywords,
        )
        if work is None:
            work = Work(collective, call.results)
            work.complete(None, streams.mark_of(call.results))
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    # --- the user's sends and receives -----------------------------------------------

    def send(self, tensors: Sequence[Tensor], dst: int, tag: int = 0) -> dist.Work:
        """Send a list of one tensor."""
        return self._message("send", tensors, dst, tag)

    def recv(self, tensors: Sequence[Tensor], src: int, tag: int = 0) -> dist.Work:
        """Receive a list of one tensor."""
        return self._message("recv", tensors, src, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> dist.Work:
        """Receive a list of one tensor from the rank that sends first."""
        return self._message("recv_anysource", tensors, None, tag)

    def _message(
        self, method: str, tensors: Sequence[Tensor], peer: int | None, tag: int
    ) -> dist.Work:
        tensors, peer, tag = self._messages.checked(method, tensors, peer, tag)
        run = partial(self._messages.start, method, tensors, peer, tag)
        arguments = (tensors, tag) if peer is None else (tensors, peer, tag)
        work: dist.Work = self._pass(method, run, arguments)
        return work

    def batched(
        self,
        start: Callable[[], list[dist.Work]],
        messages: Sequence[tuple[str, Tensor, int, int]],
    ) -> list[dist.Work]:
        """Start messages of ``batch_isend_irecv``: of each its method, tensor, peer and tag."""
        for method, tensor, peer, tag in messages:
            self._messages.checked(method, [tensor], peer, tag)
        tensors = [message[:2] for message in messages]
        device = tensors[0][1].device
        other = self._others.get(device.type)
        if other is None:
            return self._messages.batched(start, tensors)
        if not other.supports_coalescing:
            return start()
        self._start_coalescing(device)
        start()
        return [self._end_coalescing(device)]

    # --- several at once, other groups, the end --------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        """Collect the works of the calls that follow."""
        if device.type in self._others:
            self._native._start_coalescing(device)
        else:
            self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        """Make a single work of the collected works."""
        if device.type in self._others:
            work: dist.Work = self._native._end_coalescing(device)
            return work
        works, self._coalesced = self._coalesced or [], None
        return _CoalescedWork(works)

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Options | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> ProcessGroup | None:
        """Make a group of some of the ranks; all of these ranks have to call it, others may.

        Parameters
        ----------
        new_ranks
            Ranks of this group, in the order of the new group.
        timeout, opts
            Time limit and options of the new group; by default those of this group.
        group_name, group_desc
            Name and description for torch. The name must be new.
        device_types
            Accepted for compatibility: the new group takes tensors of the same devices.

        Returns
        -------
        ProcessGroup or None
            ``None`` on a rank that is not in the new group.
        """
        ranks = list(new_ranks)
        if not ranks or len(set(ranks)) < len(ranks) or not set(ranks) <= set(range(self.size())):
            message = "not ranks of this group"
            expected = f"some of 0 to {self.size() - 1}, each once"
            raise ArgumentError(message, "new_ranks", expected, ranks, self.rank())
        if self.rank() not in ranks:
            return None
        kept = {device.type for device in device_types or self._device_types}
        if kept & self._others.keys():
            message = (
                "a group with other backends cannot be split; torch.distributed.new_group makes "
                "groups of some of its ranks"
            )
            expected = " or ".join(self._devices or ())
            got = ", ".join(sorted(kept))
            raise ArgumentError(message, "device_types", expected, got, self.rank())
        if group_name is None:
            group_name = f"{self.group_name}:split:{'_'.join(map(str, ranks))}"
        group = ProcessGroup(
            dist.PrefixStore(f"{group_name}/", self._store),
            ranks.index(self.rank()),
            len(ranks),
            timeout or self.timeout,
            opts if isinstance(opts, Options) else self.options,
            self._devices,
        )
        group._set_group_name(group_name)
        group._set_group_desc(group_desc or f"{self.group_desc}:split")
        return group

    splitGroup = split_group  # noqa: N815  # C++ calls it

    def abort(self) -> None:
        """Make all operations fail, here and at the peers that take part in them."""
        groups.abort(self)
        self._messages.abort()
        for backend in self._others.values():
            backend.abort()

    def shutdown(self) -> None:
        """Complete the issued operations, within their time limits, and close connections."""
        groups.close(self, drain_s=self.timeout.total_seconds())
        self._messages.shutdown()
        for backend in self._others.values():
            backend.shutdown()


def _announce(store: dist.Store, rank: int, world_size: int, limit_s: float) -> tuple[str, Lives]:
    """The group's `life`, and the lives of its ranks, so that a death before a call is seen."""
    name = fresh_group_name(store, rank, world_size, limit_s)
    lives = Lives(common_connection(store, name), rank, world_size)
    lives.tell()
    return name, lives


def _device_of(arguments: Any) -> torch.device:
    """The device of the first tensor in arguments of a call; the CPU without a tensor."""
    while isinstance(arguments, list | tuple):
        arguments = next((each for each in arguments if isinstance(each, Tensor) or each), None)
    return arguments.device if isinstance(arguments, Tensor) else torch.device("cpu")


def _add(method: Method) -> None:
    """Add a collective of c10d to the class, under all its names."""
    native = next((name for name in method.names if hasattr(_ProcessGroup, name)), "")

    def call(self: ProcessGroup, /, *arguments: Any, **keywords: Any) -> Any:
        if self._devices is None and not is_watched():
            return self._start(method.collective, method.function, method.read(arguments, keywords))
        read = partial(method.read, arguments, keywords)
        run = lambda: self._start(method.collective, method.function, read())  # noqa: E731
        return self._pass(native, run, arguments, keywords)

    name, *_ = method.names
    call.__name__, call.__qualname__ = name, f"ProcessGroup.{name}"
    call.__doc__ = (
        f"``{name}({', '.join(method.positional)})`` of c10d: `ringcoll.{method.function}`."
    )
    for alias in method.names:
        setattr(ProcessGroup, alias, untraced(call))


for _name, _function in tuple(vars(ProcessGroup).items()):
    if callable(_function) and not _name.startswith("_"):
        setattr(ProcessGroup, _name, untraced(_function))
for _method in METHODS:
    _add(_method)


class _CoalescedWork(dist.Work):
    """A single work for several works."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all works."""
        return all(work.wait(timeout) for work in self._works)

    def is_completed(self) -> bool:
        """Whether all works are complete."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Any:
        """A future of the futures of all works."""
        return torch.futures.collect_all([work.get_future() for work in self._works])


def create(dist_backend_opts: Any, options: Any) -> Any:
    """Make a group: torch calls this with its own options and with ``pg_options``."""
    make = partial(
        ProcessGroup,
        dist_backend_opts.store,
        dist_backend_opts.group_rank,
        dist_backend_opts.group_size,
        dist_backend_opts.timeout,
    )
    return backend_for_torch(make, options)
