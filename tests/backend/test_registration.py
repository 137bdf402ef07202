"""The name ``ringcoll`` is known to torch.distributed."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "program",
    [
        "import ringcoll, torch.distributed as dist",
        "import torch.distributed as dist, ringcoll",
        "import torch, ringcoll; import torch.distributed as dist",
        "import torch.distributed as dist; from ringcoll.backend import registration;"
        "registration.register(); registration.register()",
    ],
)
def test_the_name_is_known_once_both_are_imported(program: str):
    program += "; print(dist.Backend('ringcoll'), dist.Backend.backend_capability['ringcoll'])"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == "ringcoll ['cpu', 'cuda']"


def test_the_entry_point_is_there():
    """Newer versions of torch look for it, and call it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    target = project["entry-points"]["torch.distributed.backends"]["ringcoll"]
    module, function = target.split(":")
    getattr(import_module(module), function)()
