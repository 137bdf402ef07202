"""The library UCX in this process: its contexts, the memory it can reach, and addresses as it takes them.

What this rests on, read in the sources of UCX 1.21 and ucxx 0.52 (the functions are named):

- Memory that was not made by ``cudaMalloc`` has no handle for other processes unless it can be exported as a
  fabric handle (``uct_cuda_ipc_mem_add_reg``). Torch's expandable segments cannot: UCX would go
  through host memory without a word (openucx/ucx issue 11548). So they are refused: `check_device`
  reads the allocator's settings, and `bind` asks CUDA about each tensor for a peer on this host. If
  ``UCX_TLS`` leaves ``cuda_ipc`` out, no memory is exported, and none is refused.
- Where ``libuct_cuda.so`` cannot be loaded, since it needs ``libcuda.so.1`` and
  ``libnvidia-ml.so.1``, UCX takes addresses of a GPU for addresses of the host, and the process ends
  by a signal. So a context for CUDA tensors has to list ``cuda_copy`` among its resources.
  `UCXContext.cuda_support` does not tell: it compares the mask of memory types with the number of
  CUDA's type, which is the host's bit, and is ``True`` on machines without a GPU (`context.cpp`).
- Whether an address is of a GPU is looked up by CUDA for every message, as ucxx turns UCX's cache
  of that off (``UCX_MEMTYPE_CACHE=n``, set when ucxx is imported): the cache misses
  what was allocated before UCX was there (openucx/ucx issue 2755).
- A UCX context asks for the device of the CUDA context that is current
  (``uct_cuda_base_query_devices_common``) to tell which devices are near to it. So one is made
  for each device, with that device current, and one for CPU memory.
- CUDA's current context is per thread, and UCX looks for it in whatever thread calls. A thread that
  runs operations is inside the device; a thread that aborts or closes need not be, and enters it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringcoll.errors import ArgumentError, MissingExtraError
from ringcoll.transport.base import settle

# A host that vanishes is missed after 3 + 5 * 1 seconds of silence; short outages are not.
_KEEPALIVE = {"TCP_KEEPIDLE": "3s", "TCP_KEEPINTVL": "1s", "TCP_KEEPCNT": "5"}
# UCX ends the process (`ucs_fatal` in cma_ep.c) when a peer dies whose memory it reads by CMA. Beside the memory of
# `sysv`, which it uses, it makes that of `posix`: files of 4 MiB, whose names it takes away when it has written them
# (`uct_posix_mem_alloc`), so that a process which is killed meanwhile leaves them behind.
_OPTIONS = {**_KEEPALIVE, "TLS": "^cma,posix"}
# Over TCP UCX would send a long message by active messages, and two hosts that send to each other wait for one another:
# 4 MiB each way on links of 200 Mbit/s take 344 ms so, and 179 ms when they are put into the receiver's memory.
_OVER_TCP = {"RNDV_SCHEME": "put_zcopy"}
_LOOPBACK, _RDMA = Path("/sys/class/net/lo"), Path("/sys/class/infiniband")
# Of cuda.h: two numbers of `CUpointer_attribute`, and a bit of `CUmemAllocationHandleType`.
_IS_LEGACY_CUDA_IPC_CAPABLE, _ALLOWED_HANDLE_TYPES, _FABRIC = 10, 14, 8


@functools.cache
def core() -> Any:
    """Ucxx's core."""
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")  # it warns of every UCX_ variable
    try:
        return import_module("ucxx._lib.libucxx")
    except ImportError as error:
        raise MissingExtraError(
            "UCX comes with ringcoll[ucx]: pip install 'ringcoll[ucx]'"
        ) from error
    except OSError as error:  # an MPI library may have loaded a UCX of its own
        raise MissingExtraError(f"UCX cannot be loaded into this process: {error}") from error


@functools.cache
def context_of(device: torch.device, is_local: bool) -> Any:
    """The context of the process for a device, which has to be current.

    If it is for ranks of this host only (``is_local``), it listens on the loopback interface.
    """
    ucx = core()
    asked = dict(_OPTIONS)
    if is_local and _LOOPBACK.exists():
        asked["NET_DEVICES"] = _LOOPBACK.name
    if not is_local and device.type == "cpu" and not (_RDMA.exists() and [*_RDMA.iterdir()]):
        asked |= _OVER_TCP
    options = {key: value for key, value in asked.items() if f"UCX_{key}" not in os.environ}
    context = ucx.UCXContext(options, (ucx.Feature.TAG, ucx.Feature.WAKEUP))
    if device.type == "cuda" and not lists(context, "cuda_copy"):
        raise ArgumentError(
            "UCX has no CUDA support in this process: it needs libuct_cuda.so, libcuda.so.1 and "
            "libnvidia-ml.so.1, and UCX_TLS, if it is set, has to allow cuda_copy and cuda_ipc; "
            "ucx_info -d shows what UCX has, UCX_LOG_LEVEL=debug why not more"
        )
    return context


def lists(context: Any, resource: str) -> bool:
    """Whether a context has some of UCX's ways to move data; see the module."""
    return f" {resource}/" in context.info


@contextlib.contextmanager
def current(device: torch.device) -> Iterator[None]:
    """Make a CUDA device current, and its context too."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        settle([device])  # before the first work there may be no context
        yield


@contextlib.contextmanager
def entered(device: torch.device) -> Iterator[None]:
    """Make a CUDA device current, and its context too, without waiting for its work.

    A device that has failed is let be: who aborts or closes goes on.
    """
    with contextlib.ExitStack() as stack:
        if device.type == "cuda":
            with contextlib.suppress(RuntimeError):
                stack.enter_context(torch.cuda.device(device))
                torch.cuda.current_stream(
                    device
                ).query()  # before the first call there is no context
        yield


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def is_exportable(address: int) -> bool:
    """Whether CUDA IPC lets other processes open memory, as far as CUDA says."""
    attribute, is_legacy, handles = (
        _driver().cuPointerGetAttribute,
        ctypes.c_int(),
        ctypes.c_uint64(),
    )
    pointer = ctypes.c_uint64(address)
    if attribute(ctypes.byref(is_legacy), _IS_LEGACY_CUDA_IPC_CAPABLE, pointer) or is_legacy.value:
        return True
    failed = attribute(ctypes.byref(handles), _ALLOWED_HANDLE_TYPES, pointer)
    return not failed and bool(handles.value & _FABRIC)


@functools.cache
def array_type() -> Any:
    """Ucxx's class of memory that can be sent."""
    return import_module("ucxx._lib.arr").Array


_NOTHING = bytearray(1)  # the content of an empty message


class _DeviceMemory:
    """Some bytes of a GPU's memory, of whatever dtype, as ucxx takes them.

    Of the CUDA array interface, ucxx reads ``data``, ``typestr``, ``shape`` and ``strides``.
    """

    __slots__ = ("__cuda_array_interface__",)

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "typestr": "|u1",
            "shape": (nbytes,),
            "version": 3,
        }


@functools.lru_cache(maxsize=4096)
def _at(address: int, nbytes: int, kind: str) -> Any:
    """Some bytes of memory as ucxx takes them; the result does not keep the memory alive.

    To make it takes 5 us, so it is kept: training uses the same addresses again and again. An
    address of the host may later be an address of a device, so the kind of device is in the key.
    """
    if kind == "cuda":
        return array_type()(_DeviceMemory(address, nbytes))
    return array_type()((ctypes.c_char * nbytes).from_address(address))


def buffer_of(tensor: Tensor) -> Any:
    """The memory of a tensor as ucxx takes it."""
    nbytes = tensor.nbytes
    return _at(tensor.data_ptr(), nbytes, tensor.device.type) if nbytes else array_type()(_NOTHING)
