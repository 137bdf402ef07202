"""Makes the name "ringcoll" known to torch.distributed, without importing torch.

`import ringcoll` calls `when_torch_is_imported`; torch 2.14 and later find `register`
by itself, as an entry point of the group ``torch.distributed.backends``.
"""

from __future__ import annotations

from typing import Any

__all__ = ["register", "when_torch_is_imported"]

_NAME = "ringcoll"


def register(*_: object) -> None:
    """Register the backend; once is enough, more often does no harm."""
    import torch.distributed as dist

    if dist.is_available() and _NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def when_torch_is_imported() -> None:
    """Register the backend as soon as there is a torch.distributed to register it with."""
    import wrapt

    wrapt.register_post_import_hook(register, "torch.distributed")


def _create(given: Any, options: Any) -> Any:
    from ringcoll.backend import create

    return create(given, options)
