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

    from ringcoll.lab import topology_named

    print(ringcoll.simulate(schedule, 1 << 20, topology_named("torus:2x2", 4)))
"""

import sys
from importlib import import_module
from typing import Any

from ringcoll._package import __version__ as __version__
from ringcoll._package import late_door
from ringcoll.schedules.ir.outside import laboratory
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
        """Raise `ImportError` for a module, or a name, of an earlier version.

        Python asks for a name that a module lacks, as in ``from ringcoll import refit``, and hides
        a `ModuleNotFoundError` then.
        """
        if name.startswith("ringcoll.") and (said := _gone(name)):
            raise ImportError(said, name=name)


sys.meta_path.append(_Earlier())


def _gone(name: str) -> str | None:
    from ringcoll.tools.gone import sentence

    return sentence(name)


_named, __dir__ = late_door(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return import_module(_ROOMS[name])
    if name != "__all__" and name not in __dir__():
        said = _gone(f"{__name__}.{name}")
        raise AttributeError(said or f"module {__name__!r} has no attribute {name!r}")
    return _named(name)
