"""ringcoll: collective communication rebuilt from send and recv.

The collectives have the names and arguments of ``torch.distributed``::

    import ringcoll

    ringcoll.all_reduce(tensor)                       # chosen automatically
    ringcoll.all_reduce(tensor, algorithm="ring")     # or by name

A program that uses ``torch.distributed`` runs on them after ``import ringcoll`` and
``init_process_group("ringcoll")``.

What lies beneath can be looked at, and used, without torch::

    from ringcoll.algorithms import schedule_of
    from ringcoll.draw import grid
    from ringcoll.verify import verify

    schedule = schedule_of("all_reduce", "ring", 4)
    print(grid(schedule))
    print(verify(schedule))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ringcoll.registration import when_torch_is_imported

__version__ = "0.1.0"

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
        "ringcoll.api",
    ),
    **dict.fromkeys(("UserOp", "premul_sum"), "ringcoll.reduction"),
    **dict.fromkeys(("LocalGroup", "run_threads", "close", "use"), "ringcoll.groups"),
    **dict.fromkeys(("Explanation", "explain"), "ringcoll.choice.explanation"),
    **dict.fromkeys(("MpiGroup", "mpi_group"), "ringcoll.mpi_groups"),
    "Options": "ringcoll.backend",
    "Work": "ringcoll.work",
    "trace": "ringcoll.tracing",
}

if TYPE_CHECKING:
    from ringcoll.api import (
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
    from ringcoll.backend import Options
    from ringcoll.choice.explanation import Explanation, explain
    from ringcoll.groups import LocalGroup, close, run_threads, use
    from ringcoll.mpi_groups import MpiGroup, mpi_group
    from ringcoll.reduction import UserOp, premul_sum
    from ringcoll.tracing import trace
    from ringcoll.work import Work

__all__ = [
    "Explanation",
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
    "close",
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
    "trace",
    "use",
]


when_torch_is_imported()


def __getattr__(name: str) -> Any:
    if name == "ddp":
        return import_module("ringcoll.ddp")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
