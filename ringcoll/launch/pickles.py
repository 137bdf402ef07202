"""What travels to ranks and back: calls and values, pickled with the tensors that they hold.

Tensors of all dtypes do so but torch's integers of 1 to 7 bits, which it does not pickle.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ringcoll.errors import ArgumentError


class _Pickler(pickle.Pickler):
    dispatch_table = copyreg.dispatch_table


def pickled(value: object, pickler: Any = _Pickler) -> bytes:
    """Write a value for ``pickle.loads``, which shares no memory with the value.

    What torch 2.13 itself pickles of tensors of newer dtypes (uint16, float8) cannot be read back.

    Parameters
    ----------
    value
        Any value that can be pickled; it may hold tensors.
    pickler
        A class such as cloudpickle's ``Pickler``, for what only that can pickle.

    Returns
    -------
    bytes
        The pickle.
    """
    table = {**pickler.dispatch_table, torch.UntypedStorage: _reduced}
    written = io.BytesIO()
    # A pickler looks its table up in its class.
    type("Pickler", (pickler,), {"dispatch_table": table})(written).dump(value)
    return written.getvalue()


def _reduced(storage: torch.UntypedStorage) -> tuple[object, ...]:
    data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return _storage, (data.cpu().numpy().tobytes(), storage.device)


def _storage(data: bytes, device: torch.device) -> Any:
    memory = torch.empty(len(data), dtype=torch.uint8, device=device).untyped_storage()
    if data:
        memory.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8).untyped_storage())
    typed: Any = torch.TypedStorage
    return typed(wrap_storage=memory, dtype=torch.uint8, _internal=True)  # for torch's functions


def by_value(function: Callable[..., Any], call: object) -> bytes | None:
    """Write ``call`` as bytes if the ranks cannot import its function; otherwise ``None``.

    Ranks import the file of ``__main__``. A notebook has no such file: the definitions of its cells
    have to travel with the call.
    """
    cause = None
    try:
        pickle.dumps(function)
        if Path(getattr(sys.modules["__main__"], "__file__", None) or "").is_file():
            return None
    except (AttributeError, TypeError, pickle.PicklingError) as error:  # a lambda, for example
        cause = error
    try:
        import cloudpickle
    except ImportError:
        named: Any = function if hasattr(function, "__qualname__") else type(function)
        if cause is None and named.__module__ != "__main__":
            return None
        raise ArgumentError(
            "the ranks cannot import the function; put it into a module, or install "
            "cloudpickle: pip install 'ringcoll[notebooks]'",
            argument="function",
            expected="a function of a module",
            got=f"{named.__module__}.{named.__qualname__}",
        ) from cause
    return pickled(call, cloudpickle.Pickler)
