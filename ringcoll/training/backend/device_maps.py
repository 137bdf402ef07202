"""Device maps: in ``init_process_group("cpu:gloo,cuda:ringcoll")`` each device has its own backend.

torch makes the backends of a map one after the other. But it takes a process group that is written
in Python for the whole group: the backends that it made before are lost, and it makes no others.
So a group of this library, in a map with other backends, is made in three steps:

1. `backend_for_torch` keeps the group, and gives torch a backend written in C++ in the place of it.
2. torch makes the other backends, and a process group of its own with all of them.
3. This library's group takes the place of that process group, and gets its other backends. A call
   on tensors of their devices goes to them: see `ProcessGroup.take_over`.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringcoll.errors import ArgumentError
from ringcoll.runtime.machine import FOREVER_S

_c10d: Any = dist.distributed_c10d
_CUSTOM = dist.ProcessGroup.BackendType.CUSTOM
_DEVICES = {"cpu", "cuda"}


class _CurrentCall(threading.local):
    """The arguments of a thread's current call of torch; ``devices`` is ``None`` without a map."""

    devices: tuple[str, ...] | None = None
    is_mixed = False
    options: Any = None
    group: Any = None


_current = _CurrentCall()


def backend_for_torch(make: Callable[..., Any], options: Any) -> Any:
    """The backend, as torch gets it; ``make(options, devices)`` makes the group."""
    if not _current.is_mixed:
        return make(options, _current.devices)
    if _current.group is None:
        # Options of another class are meant for another backend of the map.
        _current.group = make(_current.options, _current.devices)
    return _current.group.inner


def honour_device_maps(name: str) -> None:
    """Let torch honour device maps that name the backend ``name``; for others nothing changes."""
    native = _c10d._new_process_group_helper
    parameters = inspect.signature(native)

    @functools.wraps(native)
    def helper(*arguments: Any, **keywords: Any) -> Any:
        call = parameters.bind(*arguments, **keywords)
        backend = str(call.arguments["backend"]).lower()
        if name not in backend:
            return native(*arguments, **keywords)
        timeout = call.arguments.get("timeout")
        if isinstance(timeout, timedelta):  # C++ would turn a very long one into a negative one
            call.arguments["timeout"] = min(timeout, timedelta(seconds=FOREVER_S))
        # Where torch chooses a device for a group, it takes the first of these that is not the CPU.
        # It is too early to ask for a GPU when the backend is registered: that starts CUDA.
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        _c10d.Backend.backend_capability[name] = devices
        if ":" not in backend:
            return native(*call.args, **call.kwargs)
        backends = _c10d.BackendConfig(backend).get_device_backend_map()
        others = {device: other for device, other in backends.items() if other != name}
        own = tuple(backends.keys() - others.keys())
        if not own:
            return native(*call.args, **call.kwargs)
        _check(backend, own, others)
        _current.devices, _current.is_mixed, _current.group = own, bool(others), None
        if others:
            from ringcoll.training.backend.options import Options

            options = call.arguments.get("backend_options")
            _current.options = options if isinstance(options, Options) else None
            if _current.options is not None:
                call.arguments["backend_options"] = None
        try:
            group, store = native(*call.args, **call.kwargs)
            if _current.group is not None:
                group = _replaced(group, _current.group, others)
            return group, store
        finally:
            _current.devices, _current.is_mixed, _current.group = None, False, None

    _c10d._new_process_group_helper = helper


def _check(backend: str, own: tuple[str, ...], others: dict[str, str]) -> None:
    """Refuse a map that cannot be honoured."""
    unknown = sorted(set(own) - _DEVICES)
    if unknown:
        message = f"ringcoll does not send tensors on {unknown[0]}"
        raise ArgumentError(message, "backend", "ringcoll for cpu or cuda", backend)
    # torch keeps one backend of each kind, and takes it for all devices of that kind.
    kinds = dist.Backend.backend_type_map
    custom = [name for name in others.values() if kinds.get(name) == _CUSTOM]
    if custom:
        message = (
            f"torch does not tell the custom backends ringcoll and {custom[0]} of a group apart; "
            "make a group for each"
        )
        expected = "gloo, nccl or another built-in backend beside ringcoll"
        raise ArgumentError(message, "backend", expected, backend)


def _replaced(native: Any, own: Any, others: dict[str, str]) -> Any:
    """Put this library's group in the place of torch's, with torch's backends of other devices."""
    kinds = dist.Backend.backend_type_map
    own.take_over(native, {device: kinds[other] for device, other in others.items()})
    own._set_group_name(native.group_name)
    own._set_group_desc(native.group_desc)
    if native.bound_device_id is not None:
        own.bound_device_id = native.bound_device_id
    world = _c10d._world
    for table in (world.pg_map, world.pg_names, world.pg_backend_config, world.pg_to_tag):
        table[own] = table.pop(native)
    for groups in world.tags_to_pg.values():
        groups[:] = [own if group is native else group for group in groups]
    _c10d._unregister_process_group(own.group_name)
    _c10d._register_process_group(own.group_name, own)
    return own
