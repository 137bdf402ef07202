"""The build's hook: it compiles the interpreter of programs over shared memory, where it can.

The compiled part is optional. Without a compiler, or without Python's headers, the package is
installed all the same, and Python runs what the interpreter would. `ringcoll doctor` tells which.
``RINGCOLL_WITHOUT_C=1`` makes a wheel for every machine (``py3-none-any``).
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import zlib
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path("ringcoll/runtime/transport/shared")


class Hook(BuildHookInterface):
    """Compiles ``program.c`` beside itself, for the stable interface of Python 3.11 and later."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and name the wheel by what it holds."""
        if self.target_name != "wheel":
            return
        source = Path(self.root) / FOLDER / "program.c"
        # An editable installation imports from the source's folder.
        folder = source.parent if version == "editable" else Path(tempfile.mkdtemp())
        target = folder / "_program.abi3.so"
        error = compiled(source, target)
        if error:
            self.app.display_warning(f"Python interprets programs over shared memory: {error}")
            return
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"cp311-abi3-{platform}"
        build_data["force_include"][str(target)] = str(FOLDER / target.name)


def compiled(source: Path, target: Path) -> str:
    """Compile the interpreter; return why that cannot be, or nothing."""
    target.unlink(missing_ok=True)
    if os.environ.get("RINGCOLL_WITHOUT_C"):
        return "RINGCOLL_WITHOUT_C is set"
    if not sys.platform.startswith("linux"):
        return f"it has been written for Linux, not for {sys.platform}"
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    include = sysconfig.get_paths()["include"]
    flags = ["-O3", "-fPIC", "-shared", f"-DSOURCE={zlib.crc32(source.read_bytes())}L"]
    flags += [*shlex.split(os.environ.get("CFLAGS", "")), f"-I{include}"]
    new = target.with_suffix(f".{os.getpid()}")  # a process may have loaded the old one
    command = [compiler[0], *flags, str(source), "-o", str(new)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if result.returncode:
        new.unlink(missing_ok=True)
        return f"{shlex.join(command)} failed: {result.stderr.strip()[-500:]}"
    new.replace(target)
    return ""
