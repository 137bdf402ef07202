"""The name ``ringcoll`` is known to torch.distributed."""

from __future__ import annotations

import os
import re
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
        "import torch.distributed as dist; from ringcoll.training.backend import registration;"
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


GROUPS = ("torch.backends", "torch.distributed.backends")


@pytest.mark.parametrize("group", GROUPS)
def test_the_entry_point_is_there(group: str):
    """torch looks for it, and calls it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, function = project["entry-points"][group]["ringcoll"].split(":")
    getattr(import_module(module), function)()


NAME_ALONE = """
import sys
import torch.distributed as dist

print(sorted(name for name in sys.modules if name.startswith("ringcoll.")))
dist.init_process_group("ringcoll", store=dist.HashStore(), rank=0, world_size=1)
print(type(dist.group.WORLD).__module__)
"""


def test_the_name_alone_is_enough_where_the_package_is_installed(tmp_path: Path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = tmp_path / "ringcoll_of_a_test-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: ringcoll-of-a-test\nVersion: 1\n"
    )
    target = project["entry-points"]["torch.backends"]["ringcoll"]
    (installed / "entry_points.txt").write_text(f"[torch.backends]\nringcoll = {target}\n")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", NAME_ALONE],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    imported, module = done.stdout.splitlines()
    assert "ringcoll.training.backend.registration" in imported
    for large in ("process_group", "ringcoll.runtime.collectives", "ringcoll.runtime.group"):
        assert large not in imported
    light = re.findall(r"ringcoll\.runtime\.(?:machine|process)[\w.]*", imported)
    assert light == [
        f"ringcoll.runtime.{name}"
        for name in ("machine", "machine.settings", "process", "process.tracers")
    ]
    assert module == "ringcoll.training.backend.process_group"
