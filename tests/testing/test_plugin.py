"""The plugin as its users meet it: pytest runs in pytest, and its tests on ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from ringcoll.tools.testing import plugin
from tests.cases.pages import ROOT, blocks

pytestmark = pytest.mark.processes
PLUGIN = ("-p", "ringcoll.tools.testing.plugin", "-p", "no:cacheprovider")

HEAD = """
import os, signal, time, unittest
from pathlib import Path
import pytest, torch
import torch.distributed as dist
from hypothesis import assume, given, settings, strategies as st
from ringcoll.tools.testing import given_collective, ranks

def summed(value=1):
    tensor = torch.tensor([value * (dist.get_rank() + 1)])
    dist.all_reduce(tensor)
    return tensor.item()

def note():
    (Path(__file__).parent / f"pid{os.getpid()}").touch()
"""

PROGRAM = """
@ranks(3)
def test_pass():
    note()
    assert (dist.get_backend(), dist.get_world_size(), summed()) == ("ringcoll", 3, 6)
    print("seen")

@ranks(2, backend="gloo")
def test_gloo():
    assert (dist.get_backend(), summed()) == ("gloo", 3)

@pytest.mark.parametrize("backend", ["gloo", "ringcoll"])
@ranks(3)
def test_one_fails(backend):
    value = dist.get_rank()
    print("before it")
    assert value != 1
    dist.barrier()

@ranks(3, threads=True)
def test_thread_fails():
    value = dist.get_rank()
    assert value != 1
    dist.barrier()

@ranks(3, threads=True, backend="gloo")
def test_threads():
    assert (os.getpid(), summed()) == (PARENT, 6)

@ranks(2, threads=True, timeout_s=3)
def test_thread_hangs():
    time.sleep(1000 * dist.get_rank())

@ranks(2, timeout_s=4)
def test_hang():
    note()
    if dist.get_rank() == 1:
        time.sleep(1000)

@ranks(2)
def test_crash():
    note()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()

@ranks(2)
def test_values_differ():
    return {"mine": [torch.tensor([1.0, dist.get_rank()])]}

class Unsendable(Exception):
    def __init__(self, one, two):
        super().__init__(one + two)

@ranks(2)
def test_error_that_cannot_be_sent():
    raise Unsendable("a", "b")

@ranks(2)
def test_value_that_cannot_be_sent():
    return lambda: 0

@pytest.mark.xfail(raises=LookupError, strict=True)
@ranks(2)
def test_expected():
    raise LookupError

@ranks(2)
def test_skipped():
    pytest.skip("not today")

@ranks(2)
def test_group_of_its_own():
    dist.destroy_process_group()

@ranks(2)
def test_after_it():
    assert summed() == 3

@ranks(2)
def test_more_groups():
    assert dist.get_backend(dist.new_group([0, 1])) == "ringcoll"

@pytest.fixture
def base():
    return torch.tensor([5])

@pytest.mark.parametrize("factor", [1, 2])
@ranks(2)
def test_arguments(base, factor, tmp_path):
    base *= factor * (dist.get_rank() + 1)
    dist.all_reduce(base)
    assert base.item() == 15 * factor
    return str(tmp_path)

@pytest.fixture
def stays():
    return lambda: 0

@ranks(2)
def test_unsendable_fixture(stays):
    pass

class TestMethods:
    @ranks(2)
    def test_method(self, base):
        assert isinstance(self, TestMethods)

class OfUnittest(unittest.TestCase):
    def setUp(self):
        self.number = 2
        self.addCleanup(lambda: None)

    @ranks(2)
    def test_case(self):
        self.assertEqual(summed(self.number), 6)

@ranks(2)
@settings(deadline=None)
@given(number=st.integers(0, 1000))
def test_inside(number):
    assume(number != 17)
    assert summed(number) < 30

@settings(deadline=None)
@given(number=st.integers(0, 1000))
@ranks(2)
def test_outside(number):
    if dist.get_rank() == 1:
        assert number < 10
    dist.barrier()

@given_collective(ops=("sum",), world_sizes=(3,), max_examples=30)
def test_wrong_collective(tensor, op):
    dist.all_reduce(tensor, op)
    return tensor + 1 if tensor.numel() > 3 else tensor

PARENT = None
if __name__ == "program":
    PARENT = os.getpid()
"""


def sections(output: str) -> dict[str, str]:
    """What pytest shows of each failing test."""
    pieces = re.split(r"^_{3,} (\S+) _{3,}$", output, flags=re.MULTILINE)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def test_every_way(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_ways=HEAD + PROGRAM.replace('"program"', '"test_ways"'))
    result = pytester.runpytest_subprocess(*PLUGIN, "-rA")
    result.assert_outcomes(passed=10, failed=13, skipped=1, xfailed=1)
    shown = sections(result.stdout.str())
    for name in ("test_one_fails[gloo]", "test_one_fails[ringcoll]", "test_thread_fails"):
        text = shown[name]
        first, _, rest = text.partition("rank 1 of 3:\n")
        assert not first.strip().replace("ringcoll.tools.testing.pool.RanksTraceback:", "").strip()
        trace, _, others = rest.partition("rank 0 failed after it: ")
        assert "assert value != 1" in trace
        assert "AssertionError: assert 1 != 1" in trace
        assert ("before it" in trace) == name.startswith("test_one")
        assert "direct cause" in others
        assert "E   assert 1 != 1" in others
        assert "runtime/launch/processes.py" not in text
    for name, expected in {
        "test_hang": r"rank 1 is here:\n.*\n *time\.sleep\(1000\)(?s:.*)ranks \[1\] were not done after 6 s",
        "test_thread_hangs": r"rank 1 is here:\n.*\n *time\.sleep(?s:.*)TimeoutError: ranks \[1\] were not done after 5 s",
        "test_crash": r"rank 1 raised ProcessDied: the process ended with exit code -9",
        "test_values_differ": r"rank 1 does not return .*: tensor is wrong in 1 of 2 elements, first at 1",
        "test_error_that_cannot_be_sent": r"RankError: rank . raised Unsendable: ab",
        "test_value_that_cannot_be_sent": r"pickle",
        "test_unsendable_fixture": r"a fixture or argument cannot be sent to the ranks",
        "test_inside": r"Failing test case: test_inside\(\nE +number=10,",
        "test_outside": r"Failing test case: test_outside\(\nE +number=10,",
        "test_wrong_collective[3]": r"wrong in 4 of 4 elements, first at 0(?s:.*)dtype=torch.int64,\nE +numel=4,",
    }.items():
        assert re.search(expected, shown[name]), shown[name]
    assert "[rank 2] seen" in shown["test_pass"]
    pids = [path.name.removeprefix("pid") for path in pytester.path.glob("pid*")]
    # The first three outlive the tests that fail, until one hangs; two others run the crash.
    assert len(pids) == 5
    assert not [pid for pid in pids if Path("/proc", pid).exists()]


def test_workers_have_ranks_of_their_own(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_workers=f"{HEAD}\n@pytest.mark.parametrize('number', range(4))\n@ranks(2)\n"
        "def test_many(number):\n    assert summed(number) == 3 * number\n    note()\n"
    )
    pytester.runpytest_subprocess(*PLUGIN, "-n", "2").assert_outcomes(passed=4)
    pids = [path.name.removeprefix("pid") for path in pytester.path.glob("pid*")]
    assert len(pids) == 4
    assert not [pid for pid in pids if Path("/proc", pid).exists()]


def test_the_example_of_the_page(pytester: pytest.Pytester) -> None:
    (example,) = (b for b in blocks(ROOT / "docs" / "testing.md") if b.language == "python")
    pytester.makepyfile(test_mine=example.text)
    pytester.runpytest_subprocess(*PLUGIN).assert_outcomes(passed=5)


def test_nothing_heavy_is_imported_for_others(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_plain="import sys\ndef test_plain():\n"
        "    assert not {'torch', 'numpy'} & sys.modules.keys()\n"
        "    assert 'ringcoll.tools.testing.plugin' in sys.modules\n"
    )
    result = pytester.runpytest_subprocess(*PLUGIN, "-p", "no:hypothesispytest")
    result.assert_outcomes(passed=1)


def test_without_pytest_and_hypothesis() -> None:
    code = (
        "import sys\nsys.modules.update(dict.fromkeys(['pytest', 'hypothesis']))\n"
        "import ringcoll\n"
        "try:\n    ringcoll.testing.given_collective()\n"
        "except ringcoll.errors.MissingExtraError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'ringcoll[testing]'" in done.stdout


def test_an_installation_names_the_plugin() -> None:
    """Pytest loads it by this name where plugins are loaded by themselves, as they are not here."""
    (entry,) = entry_points(group="pytest11", name="ringcoll.tools.testing.plugin")
    assert entry.load() is plugin


SETTINGS = """
import logging, warnings

class OwnWarning(UserWarning):
    pass

def warn():
    warnings.warn("it warns", OwnWarning)

def log():
    assert logging.getLogger("own").isEnabledFor(logging.INFO)

@pytest.mark.filterwarnings("ignore:it warns")
def ignored():
    warn()

@pytest.mark.filterwarnings("error::{module}.OwnWarning")
def error():
    warn()

def plain():
    assert False

for function in (warn, log, ignored, error, plain):
    name = function.__name__
    globals()[f"test_{name}"] = function
    for threads in (False, True):
        test = ranks(2, threads=threads)(function)
        test.__name__ = test.__qualname__ = f"test_{name}_{threads}"
        globals()[test.__name__] = test
del test
"""


@pytest.mark.parametrize(
    "python, options, passing",
    [
        ((), (), {"warn", "ignored"}),
        ((), ("--log-level=INFO", "-W", "error"), {"log", "ignored"}),
        (("-O",), ("--assert=plain",), {"warn", "log", "ignored", "plain"}),
        (("-O",), (), {"warn", "ignored"}),
    ],
)
@pytest.mark.slow
def test_settings_of_pytest_reach_the_ranks(
    pytester: pytest.Pytester,
    python: tuple[str, ...],
    options: tuple[str, ...],
    passing: set[str],
) -> None:
    """A test passes on processes and threads exactly if it passes without ranks."""
    pytester.makepyfile(test_settings=HEAD + SETTINGS.replace("{module}", "test_settings"))
    command = [sys.executable, *python, "-m", "pytest", *PLUGIN, *options, "-rA"]
    shown = pytester.run(*command).stdout.str()
    passed = {line.rpartition("::test_")[2] for line in shown.splitlines() if line[:4] == "PASS"}
    assert passed == {f"{name}{how}" for name in passing for how in ("", "_False", "_True")}


THINGS = """
import pytest
class Thing:
    def __init__(self, value):
        self.value = value
    def checked(self, value):
        assert self.value == value
        return self
@pytest.fixture
def thing():
    return Thing({value})
"""


def test_classes_are_found_as_pytest_imports_them(pytester: pytest.Pytester) -> None:
    """Two modules have one name, as a third has, which Python would import."""
    other = pytester.mkdir("path")
    (other / "conftest.py").write_text("raise RuntimeError('the wrong one')")
    for value in (3, 4):
        folder = pytester.mkdir(f"sub{value}")
        (folder / "conftest.py").write_text(THINGS.replace("{value}", f"{value}"))
        (folder / "helper.py").write_text(f"VALUE = {value}")
        (folder / "__init__.py").touch()
        (folder / f"test_{value}.py").write_text(
            f"{HEAD}\nfrom .helper import VALUE\n@ranks(2)\ndef test_it(thing):\n"
            "    return thing.checked(VALUE)\n"
            "@ranks(2)\ndef test_wrong(thing):\n    thing.checked(VALUE + 1)\n"
        )
    options = ("--import-mode=importlib", "-o", "pythonpath=path", "-rA", "sub3", "sub4")
    result = pytester.runpytest_subprocess(*PLUGIN, *options)
    result.assert_outcomes(passed=2, failed=2)
    result.stdout.re_match_lines([r"E +assert 3 == \(?4", r"E +assert 4 == \(?5"])


LIBRARY = """
import ringcoll
@pytest.mark.parametrize("threads", [False, True])
def test_library(threads):
    ranks(2, threads=threads).run(in_library)

def in_library():
    ringcoll.all_reduce(torch.zeros(2), "no operator")
"""


@pytest.mark.slow
def test_frames_of_the_library_are_hidden(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_library=HEAD + LIBRARY)
    for options, is_shown in ((), False), (("--full-trace",), True):
        result = pytester.runpytest_subprocess(*PLUGIN, *options)
        result.assert_outcomes(failed=2)
        for text in sections(result.stdout.str()).values():
            trace = text.partition("direct cause")[0]
            assert 'ringcoll.all_reduce(torch.zeros(2), "no operator")' in trace
            assert ("/ringcoll/" in trace) == is_shown


HANGS = """
@pytest.mark.parametrize("how", ["barrier", "recv"])
@ranks(2, timeout_s=3{options})
def test_hang(how):
    if dist.get_rank() == 1:
        time.sleep(1000)
    dist.barrier() if how == "barrier" else dist.recv(torch.zeros(1), 1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", ["", ", threads=True", ", threads=True, backend='gloo'"])
def test_where_ranks_hang_is_said_also_if_the_group_notices_first(
    pytester: pytest.Pytester, options: str
) -> None:
    pytester.makepyfile(test_hangs=HEAD + HANGS.replace("{options}", options))
    result = pytester.runpytest_subprocess(*PLUGIN)
    result.assert_outcomes(failed=2)
    assert result.ret == 1
    where = r'rank 1 is here:\n  File ".*test_hangs.py", line \d+, in test_hang\n.*sleep\(1000\)'
    for text in sections(result.stdout.str()).values():
        assert re.search(where, text), text
    result.stderr.no_fnmatch_line("*terminate called*")


def test_ranks_that_are_threads_keep_their_group(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_threads=f"""{HEAD}
import threading
local = threading.local()
def counted(more_groups=False):
    if more_groups:
        dist.new_group()
    local.number = getattr(local, "number", 0) + 1
    return local.number

def test_kept():
    on = ranks(2, threads=True)
    for number, more_groups in ((1, False), (2, False), (3, True), (1, False), (2, False)):
        assert on.run(counted, more_groups) == [number] * 2
    with pytest.raises(ZeroDivisionError):
        on.run(divmod, 1, 0)
    assert on.run(counted) == [1, 1]
    assert on.run(summed) == [3, 3]
    assert ranks(3, threads=True).run(summed) == [6, 6, 6]
    assert not dist.is_initialized()
"""
    )
    pytester.runpytest_subprocess(*PLUGIN).assert_outcomes(passed=1)
