"""Modules of a user that register algorithms: ``module:algorithm``, ``path/file.py:algorithm``.

The module is imported as Python imports it, with the current folder, or that of the file,
before all others. So every rank can import it in the same way, and it may import its neighbours.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
import traceback
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from ringcoll.algorithms import Algorithm, algorithms
from ringcoll.errors import ScheduleError, UnknownAlgorithmError


class UserModule(NamedTuple):
    """A module that registers algorithms; a rank that loads it has the algorithms as well.

    ``name`` is the name of the module, with dots; Python looks for it in ``folder`` first.
    """

    name: str
    folder: str

    @property
    def file(self) -> Path:
        """The file at which Python looks first."""
        return Path(self.folder, *self.name.split(".")).with_suffix(".py")

    def load(self) -> ModuleType:
        """Import the module, and with it register its algorithms.

        Raises
        ------
        UnknownAlgorithmError
            There is no such module.
        ScheduleError
            The module raised an error; the message names its line.
        """
        if self.folder not in sys.path:
            sys.path.insert(0, self.folder)
        importlib.invalidate_caches()  # the file may be younger than the last import
        spec = None
        try:
            with contextlib.suppress(ImportError, ValueError):
                spec = find_spec(self.name)  # it runs the packages that the module is in
            if spec is not None:
                return importlib.import_module(self.name)
        except Exception as error:
            last = traceback.TracebackException.from_exception(error)
            place = f"{last.filename}:{last.lineno}" if isinstance(error, SyntaxError) else ""
            for frame in last.stack:
                if spec is not None and frame.filename == spec.origin:
                    place = f"{frame.filename}:{frame.lineno}"
            where = place or (self.name if spec is None else spec.origin)
            raise ScheduleError(f"{where}: {type(error).__name__}: {error}") from error
        raise UnknownAlgorithmError(
            f"there is no module {self.name!r}: neither {self.file} nor elsewhere on sys.path"
        )


@cache
def _registered_by(module: UserModule) -> tuple[ModuleType, frozenset[tuple[str, str]]]:
    """Load a module, and return the algorithms that it has registered."""
    before = {(entry.collective, entry.name) for entry in algorithms()}
    loaded = module.load()
    after = {(entry.collective, entry.name) for entry in algorithms()}
    return loaded, frozenset(after - before)


def is_reference(text: str) -> bool:
    """Whether a text is ``module:algorithm`` or ``path/file.py:algorithm``."""
    return ":" in text


def algorithms_named(reference: str) -> tuple[UserModule, list[Algorithm]]:
    """Import a module, and find the algorithm that a reference names, for each collective.

    Parameters
    ----------
    reference
        ``module:algorithm`` or ``path/file.py:algorithm``. The algorithm is the name under
        which it is registered, or the name of its function.

    Raises
    ------
    UnknownAlgorithmError
        There is no such file, module or algorithm, or the function is not registered. The
        message names the file, and the algorithms in it.
    ScheduleError
        The module raised an error.
    """
    text, _, name = reference.rpartition(":")
    try:
        path = Path(text).expanduser().absolute()
        is_file = path.is_file()
    except (RuntimeError, OSError) as error:  # a user who is not there, a name that is too long
        raise UnknownAlgorithmError(f"{reference!r}: {error}") from error
    if path.suffix == ".py":
        module = UserModule(path.stem, str(path.parent))
        if not is_file:
            raise UnknownAlgorithmError(f"{reference!r}: there is no file {path}")
    else:
        module = UserModule(text, os.getcwd())  # noqa: PTH109  # an entry of sys.path is a str
    loaded, registered = _registered_by(module)
    file = Path(getattr(loaded, "__file__", None) or module.file)
    if path.suffix == ".py" and not file.samefile(path):
        raise UnknownAlgorithmError(
            f"{reference!r}: Python takes {path.stem!r} for {file}; give {path} another name"
        )
    program = getattr(loaded, name, None)
    own = [
        entry
        for entry in algorithms()
        if (entry.collective, entry.name) in registered or entry.program.__module__ == module.name
    ]
    called = [entry for entry in own if entry.name == name.replace("-", "_")]
    entries = called or [e for e in algorithms() if inspect.unwrap(e.program) is program]
    if entries:
        return module, entries
    if inspect.isfunction(program):
        raise UnknownAlgorithmError(
            f"{file}: the function {name} is not registered; write "
            f'@register("all_reduce", "{name}"), or another collective, above it: '
            "from ringcoll.algorithms import register"
        )
    names = ", ".join(dict.fromkeys(entry.name for entry in own))
    raise UnknownAlgorithmError(
        f"{file} has no algorithm {name!r}; it holds: {names or 'no algorithm'}"
    )
