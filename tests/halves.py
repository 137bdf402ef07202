"""The long half of the tests, and what of it a change can break.

``make test`` runs the short half, and of the long half what the change touches; ``make test-all`` runs
all. The change is what has changed since all tests passed, which ``tests/durations.json`` is written
from (`tests.durations`), committed or not; ``BASE`` may name another commit. A test of a room is
touched by the room; what else touches a test stands here. Who is in doubt runs all.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
# All that runs on ranks: what a call goes through, and what stands in for machines.
_RUN = (
    "ringcoll/runtime/",
    "ringcoll/schedules/",
    "ringcoll/training/backend/",
    "tests/programs/",
    "tests/fakes/",
)
_FIT = ("ringcoll/lab/", "ringcoll/schedules/", "ringcoll/tools/bench/", "tests/programs/")
# What all of them rest on.
EVERYTHING = (
    "Makefile",
    "constraints.txt",
    "pyproject.toml",
    "ringcoll/__init__.py",
    "ringcoll/_package.py",
    "ringcoll/errors.py",
    "tests/cases/",
    "tests/conftest.py",
    "tests/halves.py",
)
_TRAINING = (*_RUN, "ringcoll/training/")
_RESILIENT = (*_RUN, "ringcoll/training/resilient/")
_TOOLS = ("ringcoll/runtime/launch/", "ringcoll/tools/")
# By tests/durations.json: mostly processes, a browser, notebooks, builds, GPUs' stand-ins.
LONG: dict[str, tuple[str, ...]] = {
    "tests/backend/test_announcement.py": _RUN,
    "tests/backend/test_faults.py": _RUN,
    "tests/backend/test_registration.py": _RUN,
    "tests/backend/test_restarts.py": _RESILIENT,
    "tests/backend/test_torch_suite.py": _RUN,
    "tests/backend/test_users.py": _RUN,
    "tests/bench/test_measure.py": (*_RUN, *_TOOLS),
    "tests/bench/test_network.py": _FIT,
    "tests/benchmarks/": ("benchmarks/", "ringcoll/tools/bench/"),
    "tests/cli/test_bench.py": ("ringcoll/tools/bench/",),
    "tests/cli/test_dump.py": _TOOLS,
    "tests/cli/test_effort.py": _TOOLS,
    "tests/cli/test_networks.py": ("ringcoll/lab/", *_TOOLS),
    "tests/cli/test_pareto.py": ("ringcoll/lab/", "ringcoll/schedules/", *_TOOLS),
    "tests/cli/test_probe.py": _FIT,
    "tests/cli/test_run.py": (*_RUN, "ringcoll/tools/cli/"),
    "tests/cli/test_train.py": (*_TRAINING, *_TOOLS),
    "tests/collectives/test_fit_between_hosts.py": (*_FIT, *_RUN),
    "tests/collectives/test_functions_on_gpu.py": _RUN,
    "tests/collectives/test_functions_on_processes.py": _RUN,
    "tests/collectives/test_no_native.py": _RUN,
    "tests/group/test_interrupts.py": _RUN,
    "tests/launch/test_adopted.py": _RUN,
    "tests/launch/test_processes.py": _RUN,
    "tests/player/": ("player/", "ringcoll/lab/"),
    "tests/reduction/test_gpu.py": ("ringcoll/runtime/reduction/",),
    "tests/reduction/test_kernels.py": ("ringcoll/runtime/reduction/",),
    "tests/reduction/test_kernels_compiled.py": ("ringcoll/runtime/reduction/",),
    "tests/resilient/test_membership.py": _RESILIENT,
    "tests/resilient/test_resilient.py": _RESILIENT,
    "tests/search/test_fitting.py": _FIT,
    "tests/search/test_search.py": ("ringcoll/lab/", "ringcoll/schedules/"),
    "tests/test_collecting.py": (),
    "tests/test_documents.py": ("docs/", *_TOOLS),
    "tests/test_examples.py": (*_RUN, "examples/"),
    "tests/test_lab.py": (*_RUN, "docs/lab.md", "ringcoll/lab/", "ringcoll/tools/cli/"),
    "tests/test_notebooks.py": ("notebooks/", "ringcoll/lab/", "ringcoll/tools/"),
    "tests/test_readme.py": ("Makefile", "README.md", "ringcoll/tools/cli/"),
    "tests/test_security.py": _RUN,
    "tests/test_site.py": ("docs/",),
    "tests/testing/test_plugin.py": ("ringcoll/runtime/launch/", "ringcoll/tools/testing/"),
    "tests/training/test_data_parallel.py": _TRAINING,
    "tests/training/test_default_device.py": _TRAINING,
    "tests/training/test_mesh.py": _TRAINING,
    "tests/training/test_pipeline.py": _TRAINING,
    "tests/training/test_sharded.py": _TRAINING,
    "tests/training/test_tensor_parallel.py": _TRAINING,
    "tests/transport/test_between_hosts.py": _RUN,
    "tests/transport/test_faulty.py": _RUN,
    "tests/transport/test_nccl.py": _RUN,
    "tests/transport/test_nccl_on_streams.py": _RUN,
    "tests/transport/test_staged.py": _RUN,
    "tests/tracing/test_tracing.py": (*_RUN, "ringcoll/tools/tracing/"),
    "tests/watch/test_deaths.py": _RUN,
    "tests/watch/test_disagreements.py": _RUN,
    "tests/watch/test_faults.py": _RUN,
}


def changed() -> set[str] | None:
    """The files that are changed, from the root; ``None`` if git does not say."""
    try:
        if _git("rev-parse", "--is-shallow-repository") != ["false"]:
            return None  # its first commit seems to have made all files
        passed = _git("log", "-1", "--format=%H", "--", "tests/durations.json")
        changes = _git("diff", "--no-renames", "--name-only", os.environ.get("BASE", *passed))
        return {*changes, *_git("ls-files", "--others", "--exclude-standard")}
    except (OSError, TypeError, subprocess.CalledProcessError):  # no git, or no such commit
        return None


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def is_left_out(test: str, names: set[str] | None) -> bool:
    """Whether a test, by its path from the root, is of the long half and nothing touches it.

    >>> is_left_out("tests/player/test_player.py::test", {"player/src/main.ts"})
    False
    >>> is_left_out("tests/player/test_player.py::test", {"README.md"})
    True
    >>> is_left_out("tests/watch/test_faults.py::test", {"ringcoll/runtime/watch/lives.py"})
    False
    >>> is_left_out("tests/group/test_queue.py::test", {"README.md"})
    False
    """
    touching = {
        source
        for part, others in LONG.items()
        if test.startswith(part)
        for source in (part, *others)
    }
    if not touching or names is None:
        return False
    room = f"/{test.split('/')[1]}/"
    return not any(name.startswith((*touching, *EVERYTHING)) or room in name for name in names)
