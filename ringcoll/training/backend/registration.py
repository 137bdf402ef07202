"""Registration: the name "ringcoll" becomes known to torch.distributed, without importing torch.

`import ringcoll` calls `when_torch_is_imported`. torch calls `register` at the end of its own
import: it is an entry point of the group ``torch.backends``, which takes 4 ms and imports little
else of the library. ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns that off; from 2.14 on torch then
still looks into the group ``torch.distributed.backends``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NAME = "ringcoll"
_TORCH = "torch.distributed"


def register(*_: object) -> None:
    """Register the backend; a second call does no harm."""
    import torch.distributed as dist

    if dist.is_available() and _NAME not in dist.Backend.backend_list:
        from ringcoll.training.backend.device_maps import honour_device_maps

        dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu", "cuda"])
        honour_device_maps(_NAME)
    if "torch.profiler" in sys.modules:  # otherwise torch is still being imported
        from ringcoll.runtime.process import note_observers

        note_observers()


class _RegisterBehindTorch:
    """A finder that leaves torch.distributed to the other finders, and registers behind it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _TORCH:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                register()

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec


def when_torch_is_imported() -> None:
    """Register the backend as soon as there is a torch.distributed to register it with."""
    if _TORCH in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _RegisterBehindTorch())


def _create(arguments: Any, options: Any) -> Any:
    from ringcoll.training.backend.process_group import create

    return create(arguments, options)
