"""What docs/security.md says is true: what listens, what is told and written, what is unpickled.

How texts are parsed is tried by ``tests/test_parsers.py``.
"""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import ringcoll
from ringcoll.errors import MissingExtraError, TransportError
from ringcoll.runtime.launch import Ranks
from ringcoll.runtime.launch.processes import _context
from ringcoll.runtime.machine import replace_file
from ringcoll.runtime.rendezvous import Lines, serve_store
from ringcoll.runtime.transport import SharedMemory, catalogue, costs_of, gloo, ucx
from ringcoll.runtime.transport.shared.memory import identity
from ringcoll.runtime.user_files import Tuned, tuning
from ringcoll.runtime.watch import Lives, Monitor, announce
from ringcoll.runtime.watch.flight_recorder import save
from ringcoll.schedules.cost import built_in
from ringcoll.tools.bench import environment
from ringcoll.tools.cli import cli
from ringcoll.training.backend import PointToPoint
from ringcoll.training.resilient import Membership, packed, unpacked
from tests.programs import listeners
from tests.test_rooms import DOORS

PACKAGE = Path(ringcoll.__file__).parent
PAGE = (PACKAGE.parent / "docs" / "security.md").read_text(encoding="utf-8")
LOOPBACK = "127.0.0.1"
TAKEN_AWAY = 0o1000  # SHM_DEST, of a segment that goes with the last process
ELEMENT = 12345678


# --- where the package does what matters ------------------------------------------------

# For each name, the modules that use it; no other module may. A module that is added here has to
# be judged, and the page to be written again. ``*`` stands for any letters.
ONLY = {
    # pickle and its kin; `multiprocessing` pickles what passes through its connections
    "pickle": {"runtime/launch/processes", "tools/testing/pool", "tools/testing/on_ranks"},
    "cloudpickle": {"runtime/launch/processes"},
    "multiprocessing": {"runtime/launch/processes"},
    "dist.*_object": {"tools/bench/rounds", "tools/cli/measuring"},
    "torch.load": {"training/resilient/group"},
    "torch.load(weights_only=True)": {"training/resilient/group"},
    "torch.save": {"training/resilient/group"},
    # modules whose name is made while the program runs
    "import_module(variable)": {
        *("__init__", "tools/cli/app", "runtime/transport/catalogue", "runtime/user_files/algorithms", "tools/testing/pool"),
    },
    # doors: a stub of the package lists the names and their modules
    "lazy_loader": {
        "_package",
        *(
            f"{room.replace('.', '/')}/__init__"
            for room in DOORS.keys()
            - {"schedules", "schedules.ir", "lab", "runtime", "training"}  # by `_package`
        ),
    },
    "subprocess": {"tools/cli/versions", "tools/cli/run"},
    "socket": {
        *("runtime/rendezvous/stores", "runtime/transport/gloo", "training/resilient/membership"),
        *("runtime/rendezvous/mailboxes", "runtime/process/calls"),
        *("tools/bench/measure", "runtime/launch/adopted"),  # the host's name; a free port
        *("runtime/watch/flight_report", "runtime/rendezvous/lines"),
        "runtime/machine/facts",  # the way to another host, on which nothing is sent
    },
    "os.exec*": {"runtime/launch/leash"},  # the program that its caller names
    "*.create_server": {"runtime/rendezvous/stores", "runtime/rendezvous/lines"},
    "*.TCPStore()": {"runtime/rendezvous/stores", "runtime/launch/processes", "training/resilient/membership"},
    "secrets": {"training/resilient/membership"},  # a name, and no password
    # files
    "*.write_bytes": {"runtime/machine/files"},
    "*.touch": {"runtime/machine/files"},
    "*.mkdir": {"runtime/user_files/tuning"},
    "*.savefig": {"tools/bench/plot"},
    "open(write)": {"tools/cli/new"},
    "tempfile": {"runtime/watch/notices"},
    "os.O_WRONLY": {"runtime/machine/files"},  # of pipes
    "os.O_RDWR": {"runtime/transport/shared/memory"},
    # what reads text that was written elsewhere
    "json.load*": {
        *("runtime/rendezvous/keys", "tools/tracing/records"),  # tests/test_parsers.py tries them
        "training/model_on_ranks",
        *("runtime/watch/flight_report", "lab/formats/documents"),
        "lab/simulation/measured",  # tests/simulation/test_measured.py tries it
        "runtime/machine/files",  # traces, which tests/player and tests/pictures give odd
    },
    "xml": {"lab/formats/documents"},  # expat, without document types
    "zlib.decompress": {"tools/tracing/records"},
    "*.fromhex": {"runtime/transport/ucx"},
}  # fmt: skip
NOWHERE = (
    *("torch.load()", "torch.jit*", "torch.hub*", "np.load", "*_object_list"),
    *("marshal", "shelve", "dill", "joblib", "yaml", "tomllib", "struct", "*.literal_eval"),
    *("eval()", "exec()", "compile()", "__import__()", "runpy", "code", "pty", "shell="),
    *("os.system", "os.popen", "os.spawn*"),
    *("ssl", "hmac", "socketserver", "http", "urllib", "requests"),
    *("*chmod", "*.symlink_to", "shutil.copy*", "shutil.move"),
)


def dotted(node: ast.expr) -> str:
    """``a.b.c`` of an expression; other expressions are ``?``."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else "?"


def used(source: str) -> Iterator[str]:
    """The names that a module uses, as they are written in `ONLY`."""
    tree = ast.parse(source)
    for statement in tree.body:  # doctests are not run by who imports the module
        yield from _used(statement)


def _used(tree: ast.stmt) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                yield from (alias.name.partition(".")[0] for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield module.partition(".")[0]
                yield from (f"{module}.{alias.name}" for alias in names)
            case ast.Attribute():
                yield dotted(node)
            case ast.keyword(arg="shell"):
                yield "shell="
            case ast.Call(func=function, args=arguments, keywords=keywords):
                name = dotted(function)
                if name == "torch.load" and any(map(_is_weights_only, keywords)):
                    yield "torch.load(weights_only=True)"
                else:
                    yield f"{name}()"
                if name.endswith("import_module") and not isinstance(arguments[0], ast.Constant):
                    yield "import_module(variable)"
                if re.fullmatch(r"(.*\.)?open", name) and name != "os.open":
                    values = [*arguments, *(keyword.value for keyword in keywords)]
                    modes = [
                        str(value.value) for value in values if isinstance(value, ast.Constant)
                    ]
                    if any(re.fullmatch(r"[rbt]*[wax+][rbtwax+]*", mode) for mode in modes):
                        yield "open(write)"


def _is_weights_only(keyword: ast.keyword) -> bool:
    return keyword.arg == "weights_only" and getattr(keyword.value, "value", None) is True


def matches(name: str, pattern: str) -> bool:
    return bool(re.fullmatch(re.escape(pattern).replace(r"\*", r".*"), name))


@cache
def names_by_module() -> dict[str, frozenset[str]]:
    return {
        str(file.relative_to(PACKAGE).with_suffix("")): frozenset(used(file.read_text("utf-8")))
        for file in PACKAGE.rglob("*.py")
    }


def users(pattern: str) -> set[str]:
    """The modules of the package that use a name."""
    return {
        module
        for module, names in names_by_module().items()
        if any(matches(name, pattern) for name in names)
    }


@pytest.mark.parametrize("pattern", ONLY)
def test_only_these_modules(pattern: str) -> None:
    assert users(pattern) == ONLY[pattern]


@pytest.mark.parametrize("pattern", NOWHERE)
def test_no_module(pattern: str) -> None:
    assert users(pattern) == set()


@pytest.mark.parametrize(
    "source, pattern",
    [
        ("import pickle", "pickle"),
        ("def f():\n    from cloudpickle import loads", "cloudpickle"),
        ("import xml.etree.ElementTree as tree", "xml"),
        ("class A:\n    def f(self): return eval('1')", "eval()"),
        ("import torch\ntorch.load('x')", "torch.load()"),
        ("torch.load('x', weights_only=some)", "torch.load()"),
        ("from torch import load", "torch.load"),
        ("dist.broadcast_object_list([])", "*_object_list"),
        ("import_module(name)", "import_module(variable)"),
        ("importlib.import_module(self.name)", "import_module(variable)"),
        ("open(path, 'w')", "open(write)"),
        ("path.open(mode='ab')", "open(write)"),
        ("path.open('r+')", "open(write)"),
        ("subprocess.run('ls', shell=True)", "shell="),
        ("os.execvp('ls', [])", "os.exec*"),
        ("json.loads(text)", "json.load*"),
        ("dist.TCPStore('', 0)", "*.TCPStore()"),
    ],
)
def test_and_the_test_finds_others(source: str, pattern: str) -> None:
    assert pattern in (*ONLY, *NOWHERE)
    assert any(matches(name, pattern) for name in used(source))


@pytest.mark.parametrize(
    "source", ["import_module('a.b')", "path.open()", "open(p, 'rb')", "open(p, encoding='ascii')"]
)
def test_but_not_what_is_harmless(source: str) -> None:
    assert not {"import_module(variable)", "open(write)"} & set(used(source))


@pytest.mark.parametrize(
    "pattern",
    [
        *("pickle", "cloudpickle", "dist.*_object", "torch.load"),
        *("import_module(variable)", "subprocess"),
    ],
)
def test_the_page_names_them(pattern: str) -> None:
    for module in ONLY[pattern] - {"__init__"}:
        name = module.removesuffix("/__init__").replace("/", ".")
        assert f"`ringcoll.{name}`" in PAGE


# --- what listens ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def without_group() -> Iterator[Ranks]:
    with Ranks(2, backend=None) as ranks:
        yield ranks


def installed(transport: str) -> str:
    try:
        catalogue.entry(transport).check()
    except MissingExtraError as error:
        pytest.skip(str(error))
    return transport


@pytest.mark.processes
@pytest.mark.parametrize("transport, hosts", [("shared", []), ("gloo", [LOOPBACK]),
                                              ("ucx", [LOOPBACK])])  # fmt: skip
def test_what_a_transport_listens_on(
    without_group: Ranks, transport: str, hosts: list[str]
) -> None:
    """On one host; without `GLOO_SOCKET_IFNAME`, and without a group of torch's gloo."""
    for opened in without_group.run(listeners.connected, installed(transport)):
        # UCX keeps what it has opened for another group of the process.
        assert opened.listening == hosts
        assert not opened.files
        # The user's group may attach UCX's segments; the kernel takes them away with their last process.
        assert set(opened.segments) == ({TAKEN_AWAY | 0o660} if transport == "ucx" else set())


def test_the_interfaces_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loopback interface where all are on one host, the way to the others, or what is told."""
    asked: list[str] = []

    def device(interface: str = "", hostname: str = "of the host's name") -> None:
        asked.append(interface or hostname)

    monkeypatch.setattr(dist.ProcessGroupGloo, "create_device", device)
    monkeypatch.setattr(dist.ProcessGroupGloo, "create_default_device", device)
    monkeypatch.setattr(gloo, "own_address", lambda peer: f"way to {peer}")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    ways = ["127.0.0.1", "10.1.2.3", "no address"]
    gloo._devices(0, (0, 0, 0), ways)
    gloo._devices(0, (0, 1, 2), ways)
    gloo._devices(1, (0, 1, 2), ways)
    gloo._devices(0, (0, 1, 2), ["", "127.0.0.1", "::1"])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0,eth1")
    gloo._devices(0, (0, 0, 0), ways)
    way = "way to 10.1.2.3"
    assert asked == ["lo", way, way, "of the host's name", "eth0", "eth1"]


def test_the_interface_of_the_users_own_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of `dist.send` in the backend go where the library's go."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_interface")
    with pytest.raises(TransportError, match="rank 0 cannot listen for gloo on no_such_interface"):
        PointToPoint(store := dist.HashStore(), timedelta(seconds=5), Lives(store, 0, 1), "life")


def test_the_interfaces_of_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(UCXContext=lambda options, _: options, Feature=mock.MagicMock())
    monkeypatch.setattr(ucx, "core", lambda: library)
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    context = partial(ucx.context_of.__wrapped__, torch.device("cpu"))
    assert context(True)["NET_DEVICES"] == "lo"
    # With CMA, UCX ends the process when a peer dies in a copy; with files, a killed process leaves them.
    assert context(True)["TLS"] == "^cma,posix"
    assert "NET_DEVICES" not in context(False)
    monkeypatch.setenv("UCX_NET_DEVICES", "eth0")
    assert "NET_DEVICES" not in context(True)


@pytest.mark.processes
def test_an_interface_that_is_not_there_is_an_error_of_the_transport(
    without_group: Ranks,
) -> None:
    for told in without_group.run(listeners.on_no_interface):
        assert told.startswith("TransportError: rank")
        assert "no_such_interface" in told


@pytest.mark.processes
def test_what_starts_the_ranks_is_reached_by_this_user_only() -> None:
    """Through sockets that have a path, in folders of this user."""
    with Ranks(1) as ranks:
        (result,) = ranks.run(listeners.tensor_result)
        assert result.sum() == 1000
        (addresses,) = ranks.run(listeners.listening)
    from multiprocessing import forkserver

    assert _context().get_start_method() == "forkserver"
    server = forkserver._forkserver._forkserver_address  # type: ignore[attr-defined]
    paths = [server, *(address for address in addresses if address != LOOPBACK)]
    assert len(paths) == 2  # the second is for tensors in results
    for path in paths:
        folder = Path(path).parent
        assert folder.is_absolute()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 if folder.exists() else path != server


def test_a_store_of_torch_listens_on_every_interface() -> None:
    """As `init_process_group` makes it."""
    before = set(listeners.listening())
    assert not before & {"::", "0.0.0.0"}
    store = dist.TCPStore("localhost", 0, None, True, wait_for_workers=False)
    assert set(listeners.listening()) - before <= {"::", "0.0.0.0"}
    assert set(listeners.listening()) & {"::", "0.0.0.0"}
    del store


def test_lines_listen_on_one_interface_and_say_nothing() -> None:
    before = set(listeners.listening())
    lines = Lines("127.0.0.2")
    assert set(listeners.listening()) - before == {"127.0.0.2"} - before
    with socket.create_connection(lines.address) as stranger:
        stranger.sendall(b"what a stranger says")
        assert not lines.has_ended(lines.address)
        stranger.settimeout(10.0)
        assert stranger.recv(1) == b"", "closed"
    lines.close()


@pytest.mark.parametrize("host", [LOOPBACK, "127.0.0.2"])
def test_a_door_listens_on_one_interface(host: str) -> None:
    before = set(listeners.listening())
    membership = Membership(host)
    assert set(listeners.listening()) - before == {host} - before
    assert membership.own.host == host
    stranger = dist.TCPStore(host, membership.door.port, None, False)
    stranger.set("view", "what a stranger says")
    assert membership.door.get("view") == b"what a stranger says"


def test_a_store_asks_nobody_who_they_are() -> None:
    store = serve_store()
    stranger = dist.TCPStore(LOOPBACK, store.port, None, False)
    store.set("verdict", "all is well")
    assert stranger.get("verdict") == b"all is well"
    stranger.set("verdict", json.dumps({"kind": "lost", "peer": 1, "text": "says a stranger"}))
    watching = Monitor(store, 0, 2, lambda: None, Lives(store, 0, 2))
    verdict = watching.notices.verdict()
    assert verdict is not None
    assert verdict["text"] == "says a stranger"


# --- what ranks tell each other through the store ---------------------------------------

TOLD = {
    r"process/\d": r'\[\d+, "\d+ time:\[\d+\]", "[-0-9a-f]{36} net:\[\d+\] ipc:\[\d+\] pid:\[\d+\] shm:.*", null\]',
    r"cpu/0/transport/here/\d": r"transport \w+ of ringcoll [\w.]+\n[-0-9a-f]{36} net:.*\n"
    # Process, descriptor, the memory's device, inode and length, a secret and its address.
    r"(\[\d+, \d+, \[\d+, \d+, \d+\], \d+, \d+, \d+\])?",
    r"cpu/0/transport/unopened/\d": "",
    r"cpu/0/transport/opened": "2",
    r"cpu/0/transport/all opened": "0",
    r"cpu/0/transport/ucx/\d": r'\{"pid": \d+, "address": "[0-9a-f]+"\}',
    r"cpu/0/transport/gloo/way/\d": r'\{"place": ".*", "way": "127\.0\.0\.1"\}',
    r"cpu/0/transport/gloo/address/\d": r'\[\["127\.0\.0\.1", \d+\]\]',
    r"cpu/0/transport/gloo/0/\d": r"(?s:.*)",  # of torch
    r"cpu/0/monitor/choice/decision": r'\["", false, 1, "", (null|".*")\]',
    r"cpu/0/monitor/choice/table": r'"\{\\"transport\\": \\"\w+\\", \\"world_size\\": 2, \\"hosts\\": 1, \\"param.*\}"',
    r"cpu/0/monitor/token": r"[0-9a-f]{32}",
    r"cpu/0/monitor/state/\d": r'\{"calls": \{("0": \["all_reduce\(sum, float32, 1000 elements.*)?\}.*\}',
}


@pytest.mark.processes
@pytest.mark.parametrize("transport", ["shared", "gloo", "ucx"])
def test_what_is_in_the_store(transport: str) -> None:
    with Ranks(2) as ranks:
        first, second = ranks.run(listeners.all_reduced, installed(transport))
    for listening in (first.listening, second.listening):
        assert listening[0] == LOOPBACK
        assert [re.fullmatch(r"@ringcoll-\d+-\d+", name) is not None for name in listening[1:]] == [
            True
        ]
    own = {key: value for key, value in second.told.items() if "ringcoll/" in key}
    assert len(own) >= 8
    for key, value in own.items():
        texts = [text for path, text in TOLD.items() if re.fullmatch(rf".*ringcoll/{path}", key)]
        assert len(texts) == 1, key
        assert re.fullmatch(texts[0], value), (key, value)


def test_the_text_of_an_error_goes_through_the_store() -> None:
    store = dist.HashStore()
    watching = Monitor(store, 1, 2, lambda: None, Lives(store, 1, 2))
    watching.report(ValueError("the value was 4711"), 3.0)
    assert "the value was 4711" in store.get("verdict").decode()


# --- what is written --------------------------------------------------------------------


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def tune(path: Path) -> None:
    tuning.update_tables(path, Tuned.now(built_in("gloo", costs_of("gloo"), 2)))


def trace(path: Path) -> None:
    def main(group: Any) -> None:
        with ringcoll.trace(path, group):
            ringcoll.all_reduce(torch.full((4,), float(ELEMENT)), group=group)

    ringcoll.run_threads(main, 2)


def new(path: Path) -> None:
    assert CliRunner().invoke(cli, ["new", "all_reduce", path.stem]).exit_code == 0


def test_only_its_user_reads_the_record_of_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGCOLL_DUMP", str(tmp_path))
    with umask(0):
        save()
    (path,) = tmp_path.iterdir()
    assert re.fullmatch(rf".*-{os.getpid()}\.json", path.name)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


WRITERS: dict[str, Callable[[Path], None]] = {
    "folder/tuning.json": tune,
    "trace.json": trace,
    "algorithm_of_mine.py": new,
}


@pytest.mark.parametrize("mask, mode", [(0o022, 0o644), (0o077, 0o600)])
@pytest.mark.parametrize("name", WRITERS)
def test_the_mode_of_a_file_is_what_the_umask_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, mask: int, mode: int
) -> None:
    monkeypatch.chdir(tmp_path)
    with umask(mask):
        WRITERS[name](tmp_path / name)
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == mode
    files = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {Path(name).name} | ({f"test_{name}"} if name.endswith(".py") else set())
    for folder in (path for path in tmp_path.rglob("*") if path.is_dir()):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o777 & ~mask


@pytest.mark.parametrize("name", ["folder/tuning.json", "trace.json"])
def test_a_file_is_replaced_and_not_what_a_link_leads_to(tmp_path: Path, name: str) -> None:
    path, other = tmp_path / name, tmp_path / "other"
    WRITERS[name](path)
    other.write_bytes(path.read_bytes())
    before = other.read_bytes()
    path.unlink()
    path.symlink_to(other)
    WRITERS[name](path)
    assert not path.is_symlink()
    assert json.loads(path.read_text())
    assert other.read_bytes() == before


def test_a_link_in_the_place_of_the_draft_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder of all users, who guesses the number of the process could make one."""
    victim = tmp_path / "victim"
    victim.write_text("as it was")
    real = Path.unlink

    def set_trap_again(path: Path, missing_ok: bool = False) -> None:
        real(path, missing_ok)
        if path.name.startswith(".ringcoll.") and not traps:
            path.symlink_to(victim)
            traps.append(path)

    traps: list[Path] = []
    replace_file(tmp_path / "file", "text")
    assert (tmp_path / "file").read_text() == "text"
    monkeypatch.setattr(Path, "unlink", set_trap_again)
    with pytest.raises(FileExistsError):
        replace_file(tmp_path / "file", "other text")
    assert victim.read_text() == "as it was"
    assert (tmp_path / "file").read_text() == "text"


def test_what_is_no_regular_file_stays_what_it_is(tmp_path: Path) -> None:
    """Root would otherwise put a file in the place of /dev/null."""
    path = tmp_path / "null"
    path.symlink_to("/dev/null")
    replace_file(path, "text")
    assert path.is_char_device()
    assert list(tmp_path.iterdir()) == [path]


def test_new_overwrites_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_algorithm_of_mine.py").symlink_to(tmp_path / "nowhere")
    result = CliRunner().invoke(cli, ["new", "all_reduce", "algorithm_of_mine"])
    assert result.exit_code == 2
    assert "test_algorithm_of_mine.py exists" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["test_algorithm_of_mine.py"]


def test_no_element_is_in_a_trace(tmp_path: Path) -> None:
    trace(tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    assert '"all_reduce(sum, float32, 4 elements' in text
    assert str(ELEMENT) not in text


def test_the_variables_in_a_record_of_a_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET", "4711")
    monkeypatch.setenv("UCX_TLS", "tcp")
    facts = environment(2)
    prefixes = ("GLOO_", "KMP_", "MKL_", "NCCL_", "OMP_", "RINGCOLL_", "TORCH_", "UCX_")
    assert facts["variables"]["UCX_TLS"] == "tcp"
    assert all(name.startswith(prefixes) for name in facts["variables"])
    assert "4711" not in json.dumps(facts)
    assert all(f"`{prefix}`" in PAGE for prefix in prefixes)
    assert facts["command"] == sys.argv


def test_the_error_file_of_torchrun_is_new_and_this_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    for text in ("the first", "the second"):
        announce(text, is_raised=True)
    assert "the first" in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]


class RunsCode:
    """What pickle would call as it reads it."""

    def __reduce__(self) -> Any:
        return print, ("code has run",)

    def state_dict(self) -> Any:
        return {"weight": RunsCode()}

    def load_state_dict(self, state: Any) -> None:
        pytest.fail("it was loaded")


def test_a_state_that_a_rank_sends_runs_no_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        unpacked(packed([RunsCode()], 3), [RunsCode()])
    assert capsys.readouterr().out == ""


PROGRAM = """
import torch, ringcoll
from ringcoll.runtime.launch.processes import Ranks

with Ranks(2, backend="ringcoll") as ranks:
    print(ranks.run(torch.distributed.get_rank))
    ranks.run(ringcoll.all_reduce, torch.ones(100_000))
"""


@pytest.mark.processes
@pytest.mark.parametrize("tuning", ["", "off"])
def test_nothing_else_is_written(tmp_path: Path, tuning: str) -> None:
    """Not by an import, nor by ranks and their collectives but for the costs of messages; what is temporary is gone."""
    folders = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME"), str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=False,
        env=os.environ | folders | {"PYTHONPATH": str(PACKAGE.parent), "RINGCOLL_TUNING": tuning},
    )  # fmt: skip
    assert done.stdout == "[0, 1]\n", done.stderr
    files = [path for path in tmp_path.rglob("*") if not path.is_dir()]
    assert files == ([] if tuning else [tmp_path / "ringcoll" / "measured.json"])


# --- shared memory ----------------------------------------------------------------------


@pytest.fixture
def memory() -> Iterator[int]:
    """The descriptor of memory as a rank makes it."""
    _, descriptor = SharedMemory.create(4096, 4096)
    yield descriptor
    os.close(descriptor)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a while")
def test_another_user_cannot_open_the_memory(memory: int) -> None:
    name = f"/proc/{os.getpid()}/fd/{memory}"
    for user, is_open in ((0, True), (65534, False)):
        done = subprocess.run(["cat", name], user=user, capture_output=True, check=False)
        assert (done.returncode == 0) is is_open
        assert (b"Permission denied" in done.stderr) is not is_open


def test_nothing_but_such_memory_is_opened_to_be_written(memory: int, tmp_path: Path) -> None:
    """Whoever writes into the store could otherwise name a file that the user has open."""
    assert SharedMemory.open(os.getpid(), memory, identity(memory)).data.nbytes == 4096
    other = os.memfd_create("of another library")
    os.ftruncate(other, 4096)
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(4096)
        for descriptor in (file.fileno(), other):
            with pytest.raises(OSError, match="is no memory to be shared"):
                SharedMemory.open(os.getpid(), descriptor, identity(descriptor))
    os.close(other)


def test_memory_of_share_is_this_users_and_has_no_name() -> None:
    names = set(Path("/dev/shm").iterdir())
    before = listeners._files()
    tensor = torch.ones(100_000)
    ringcoll.share(tensor)
    own = {name: mode for name, mode in listeners._files().items() if name not in before}
    assert own
    for name, mode in own.items():
        assert name.endswith(" (deleted)")
        assert mode == 0o600
    assert not {path for path in set(Path("/dev/shm").iterdir()) - names if "torch" in path.name}
    assert tensor.is_shared()
