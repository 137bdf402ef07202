"""ringcoll: collective communication rebuilt from send and recv.

The collectives have the names and arguments of ``torch.distributed``::

    import ringcoll

    ringcoll.all_reduce(tensor)                       # chosen automatically
    ringcoll.all_reduce(tensor, algorithm="ring")     # or by name

A program that uses ``torch.distributed`` runs on them after ``import ringcoll`` and
``init_process_group("ringcoll")``.

What lies beneath can be looked at, and used, without torch::

    from ringcoll.algorithms import schedule_of
    from ringcoll.schedule import grid, verify

    schedule = schedule_of("all_reduce", "ring", 4)
    print(grid(schedule))
    print(verify(schedule))

and simulated on a network that is not here::

    from ringcoll.simulation import topology_named

    print(ringcoll.simulate(schedule, 1 << 20, topology_named("torus:2x2", 4)))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ringcoll._version import __version__ as __version__
from ringcoll.backend.registration import when_torch_is_imported

# Loaded when first used, so that the pure modules can be used without torch.
_HOME = {
    **dict.fromkeys(
        (
            "all_gather",
            "reduce_scatter_single_coalesced",
            "monitored_barrier",
            "all_reduce_coalesced",
            "all_gather_single_coalesced",
            "all_gather_coalesced",
            "all_gather_into_tensor",
            "all_gather_single",
            "all_reduce",
            "all_to_all",
            "all_to_all_single",
            "barrier",
            "broadcast",
            "gather",
            "reduce",
            "reduce_scatter",
            "reduce_scatter_single",
            "reduce_scatter_tensor",
            "scatter",
        ),
        "ringcoll.collectives.functions",
    ),
    **dict.fromkeys(("UserOp", "premul_sum"), "ringcoll.reduction"),
    **dict.fromkeys(("bytes_sent", "close", "use"), "ringcoll.collectives.groups"),
    **dict.fromkeys(("LocalGroup", "run_threads"), "ringcoll.launch.threads"),
    **dict.fromkeys(("Explanation", "explain"), "ringcoll.collectives.explanation"),
    **dict.fromkeys(("MpiGroup", "mpi_group"), "ringcoll.launch.mpi"),
    "empty_shared": "ringcoll.transport.shared.tensors",
    "share": "ringcoll.collectives.sharing",
    "Faults": "ringcoll.transport.faulty",
    "Options": "ringcoll.backend.options",
    "Work": "ringcoll.group.work",
    "simulate": "ringcoll.simulation",
    "trace": "ringcoll.tracing",
}

_ROOMS = {"ddp": "ringcoll.training.data", "testing": "ringcoll.testing"}

if TYPE_CHECKING:
    from ringcoll.backend.options import Options
    from ringcoll.collectives.explanation import Explanation, explain
    from ringcoll.collectives.functions import (
        all_gather,
        all_gather_coalesced,
        all_gather_into_tensor,
        all_gather_single,
        all_gather_single_coalesced,
        all_reduce,
        all_reduce_coalesced,
        all_to_all,
        all_to_all_single,
        barrier,
        broadcast,
        gather,
        monitored_barrier,
        reduce,
        reduce_scatter,
        reduce_scatter_single,
        reduce_scatter_single_coalesced,
        reduce_scatter_tensor,
        scatter,
    )
    from ringcoll.collectives.groups import bytes_sent, close, use
    from ringcoll.collectives.sharing import share
    from ringcoll.group.work import Work
    from ringcoll.launch.mpi import MpiGroup, mpi_group
    from ringcoll.launch.threads import LocalGroup, run_threads
    from ringcoll.reduction import UserOp, premul_sum
    from ringcoll.simulation import simulate
    from ringcoll.tracing import trace
    from ringcoll.transport.faulty import Faults
    from ringcoll.transport.shared.tensors import empty_shared

__all__ = [
    "Explanation",
    "Faults",
    "LocalGroup",
    "MpiGroup",
    "Options",
    "UserOp",
    "Work",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "bytes_sent",
    "close",
    "empty_shared",
    "explain",
    "gather",
    "monitored_barrier",
    "mpi_group",
    "premul_sum",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor",
    "run_threads",
    "scatter",
    "share",
    "simulate",
    "trace",
    "use",
]


when_torch_is_imported()


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(_ROOMS[name])
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
