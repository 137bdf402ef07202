"""ringcoll: collective communication rebuilt from send and recv.

The collectives have the names and arguments of ``torch.distributed``::

    import ringcoll

    ringcoll.all_reduce(tensor)                       # chosen automatically
    ringcoll.all_reduce(tensor, algorithm="ring")     # or by name

A program that uses ``torch.distributed`` runs on them after
``init_process_group("ringcoll")``.

What lies beneath can be looked at, and used, without torch::

    from ringcoll.schedules import grid, schedule_of, verify

    schedule = schedule_of("all_reduce", "ring", 4)
    print(grid(schedule))
    print(verify(schedule))

and simulated on a network that is not here::

    from ringcoll.lab.simulation import topology_named

    print(ringcoll.simulate(schedule, 1 << 20, topology_named("torus:2x2", 4)))
"""

import sys
from functools import cache
from importlib import import_module
from typing import Any

import lazy_loader

from ringcoll._version import __version__ as __version__
from ringcoll.schedules.ir.laboratory import laboratory
from ringcoll.training.backend.registration import when_torch_is_imported

_ROOMS = {
    "ddp": "ringcoll.training.data",
    "pictures": "ringcoll.lab.pictures",
    "testing": "ringcoll.tools.testing",
}


when_torch_is_imported()
laboratory.picture = lambda shown: import_module("ringcoll.lab.pictures").shown_in_notebook(shown)
laboratory.schedule_in = lambda text: import_module("ringcoll.lab.formats").schedule_in(text)


class _Earlier:
    """Says, of a module that nobody else finds, where it is now, or what takes its place."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raise `ImportError` for a module, or a name, of an earlier version."""
        if name.startswith("ringcoll.") and (said := _gone(name)):
            raise ImportError(said, name=name)


sys.meta_path.append(_Earlier())


def _gone(name: str) -> str | None:
    from ringcoll.tools.gone import sentence

    return sentence(name)


@cache
def _door() -> Any:
    """The public names, which ``__init__.pyi`` lists; it is read when the first one is used."""
    return lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(_ROOMS[name])
    named, _, every = _door()
    if name == "__all__":
        return every
    if name not in every:
        said = _gone(f"{__name__}.{name}")
        raise AttributeError(said or f"module {__name__!r} has no attribute {name!r}")
    return named(name)


def __dir__() -> list[str]:
    return list(_door()[2])
