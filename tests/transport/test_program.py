"""Programs over shared memory: the interpreter in C does what Python does, and Python goes on where it cannot."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ringcoll.errors import ArgumentError, PeerLostError, TransportError
from ringcoll.runtime.operation import BoundInstruction, Posting, Program, Wait, run
from ringcoll.runtime.transport import PIECE, SHORT, Message, SharedTransport
from ringcoll.runtime.transport.shared import program
from tests.programs import interpreted

HERE = Path(program.__file__).parent
LIMIT_S = 20.0
# Where it could have been compiled, it is there, and of this source.
HEADER = Path(sysconfig.get_paths()["include"], "Python.h")
pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None or not HEADER.exists(),
    reason="no C compiler, or no header of Python",
)
WATCH: Any = SimpleNamespace(wait=None)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_same_bits_whoever_interprets(pool: Any, world_size: int) -> None:
    """Random calls with random bits: C, Python, and groups in which some ranks have C."""
    rounds, seed = 40, 100 + world_size
    mixed = ["python" if rank % 2 else "c" for rank in range(world_size)]
    ways = [["c"] * world_size, ["python"] * world_size, mixed]
    found = [pool(world_size).run(interpreted.random_calls, way, seed, rounds) for way in ways]
    for rank in range(world_size):
        (in_c, num_c), (in_python, num_python), (in_both, _) = (each[rank] for each in found)
        assert in_c == in_python
        assert in_c == in_both
        assert num_python == 0
        assert num_c > 0


@pytest.mark.processes
@pytest.mark.parametrize("lent", [False, True])
@pytest.mark.parametrize("nbytes", [8, SHORT + 8, PIECE, 3 * PIECE + 8])
def test_a_message_that_nobody_has_asked_for_is_kept(pool: Any, nbytes: int, lent: bool) -> None:
    assert pool(2).run(interpreted.after_a_strange_message, nbytes, lent) == [[], []]


@pytest.mark.processes
def test_whole_calls_are_counted_and_give_way(pool: Any) -> None:
    for about in pool(2).run(interpreted.in_a_row):
        assert about["made"] == [True, True]
        assert about["counted"] == (10, 2 * 4 + 3 * 4)
        assert about["runs"] == ["all_reduce"] * 4, "two calls in turn are runs of their own"
        assert about["last"] == about["issued"] - 1
        assert about["right"]
        assert about["profiled"] == (1, True)
        assert about["traced"] == 1
        assert "storage" in about["freed"]
        assert about["others"] == "done", "nothing was sent"
        assert about["closed"] == "GroupBrokenError"


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_python_has_a_part_in_a_whole_call(pool: Any, world_size: int) -> None:
    assert all(map(all, pool(world_size).run(interpreted.maxima)))


@pytest.mark.processes
def test_tensors_that_move_keep_their_calls_right(pool: Any) -> None:
    """More addresses than an operation remembers, of which some come again."""
    assert pool(2).run(interpreted.moving, 150) == [[], []]


Pair = tuple[SharedTransport, SharedTransport]


@pytest.fixture
def pair() -> Iterator[Callable[[bool], Pair]]:
    """Makes two ranks of one process, of which each may read the other's memory, or copies pieces."""
    made: list[SharedTransport] = []

    def connect(in_pieces: bool) -> Pair:
        store = dist.HashStore()
        made.extend(SharedTransport(store, rank, 2) for rank in range(2))
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(lambda transport: transport.connect(LIMIT_S), made))
        for transport in made:
            for channel in transport.channels.values():
                channel.peer_reads = not in_pieces
            transport.direct_from = SHORT + 1
        return made[0], made[1]

    yield connect
    for transport in made:
        transport.close()


def content(number: int, nbytes: int) -> torch.Tensor:
    return (torch.arange(nbytes) * 31 + 7 * number).to(torch.uint8)


def receiving(
    transport: SharedTransport, peer: int, into: torch.Tensor, tag: int
) -> Callable[[], None]:
    """A run that receives a message, by the interpreter."""
    receives = [Message(peer, into, tag)]
    items: list[BoundInstruction] = [
        Posting(transport.bind(receives, []), receives, []),
        Wait(0, peer, 0, True),
    ]
    interpreter = transport.interpret(items, {})
    assert interpreter is not None
    return partial(run, Program(items, interpreter), 0, transport.wait, float("inf"), WATCH)


def sending(
    transport: SharedTransport, peer: int, source: torch.Tensor, tag: int
) -> Callable[[], None]:
    """A run that sends a message, by the interpreter."""
    sends = [Message(peer, source, tag)]
    items: list[BoundInstruction] = [
        Posting(transport.bind([], sends), [], sends),
        Wait(0, peer, 0, False),
    ]
    interpreter = transport.interpret(items, {})
    assert interpreter is not None
    return partial(run, Program(items, interpreter), 0, transport.wait, float("inf"), WATCH)


@pytest.mark.parametrize("in_pieces", [True, False])
@pytest.mark.parametrize(
    "nbytes", [0, 1, 4, 100, SHORT, SHORT + 1, PIECE, PIECE + 1, 9 * PIECE + 3]
)
def test_messages_of_every_way(pair: Callable[[bool], Pair], nbytes: int, in_pieces: bool) -> None:
    sender, receiver = pair(in_pieces)
    for turn in range(20 if nbytes < PIECE else 3):
        into = torch.zeros(nbytes, dtype=torch.uint8)
        with ThreadPoolExecutor(2) as threads:
            ends = [
                threads.submit(sending(sender, 1, content(turn, nbytes), turn)),
                threads.submit(receiving(receiver, 0, into, turn)),
            ]
            assert [end.result(LIMIT_S) for end in ends] == [None, None]
        assert torch.equal(into, content(turn, nbytes))


@pytest.mark.parametrize("in_pieces", [True, False])
@pytest.mark.parametrize("nbytes", [1, SHORT, SHORT + 1, PIECE, PIECE + 1, 3 * PIECE])
def test_what_python_has_taken_before_is_had(
    pair: Callable[[bool], Pair], nbytes: int, in_pieces: bool
) -> None:
    """A message comes while Python waits for another one: an interpreted program has it later."""
    sender, receiver = pair(in_pieces)
    first, second = content(1, nbytes), content(2, 10)
    with ThreadPoolExecutor(1) as thread:
        handles = sender.post([], [Message(1, first, 5), Message(1, second, 6)])
        sent = thread.submit(waited, sender, handles)
        other = torch.zeros(10, dtype=torch.uint8)
        (handle,) = receiver.post([Message(0, other, 6)], [])
        receiver.wait(handle, LIMIT_S)
        assert torch.equal(other, second)
        (channel,) = receiver.channels.values()
        assert [*channel.early] == [5]
        into = torch.zeros(nbytes, dtype=torch.uint8)
        receiving(receiver, 0, into, 5)()
        sent.result(LIMIT_S)
    assert torch.equal(into, first)
    assert not channel.early


def waited(transport: SharedTransport, handles: list[Any]) -> None:
    for handle in handles:
        transport.wait(handle, LIMIT_S)


# What a broken peer may write into the entry of a message in pieces: word, and its value.
DAMAGE = {
    "a place beyond the last": (4, 1 << 40),
    "a place before the first": (4, (1 << 64) - 1),
    "more bytes than a piece has": (2, PIECE + 1),
    "no bytes": (2, 0),
    "fewer than none": (2, (1 << 64) - 8),
    "more than are left": (2, SHORT + 9),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_a_broken_peer_writes_is_no_index(pair: Callable[[bool], Pair], name: str) -> None:
    sender, receiver = pair(True)
    nbytes = SHORT + 8
    sender.post([], [Message(1, content(0, nbytes), 3)])
    (channel,) = receiver.channels.values()
    at, _ = channel.awaited()
    word, value = DAMAGE[name]
    channel.other_words[at + word] = value
    begun = receiving(receiver, 0, torch.zeros(nbytes, dtype=torch.uint8), 3)
    with pytest.raises(TransportError, match="the memory of rank 0 is damaged") as caught:
        begun()
    assert caught.value.peer == 0


def test_a_peer_that_gives_up_while_it_is_read_is_lost(pair: Callable[[bool], Pair]) -> None:
    sender, receiver = pair(False)
    sender.post([], [Message(1, content(0, PIECE), 3)])
    sender.abort()
    with pytest.raises(PeerLostError, match="the connection was broken"):
        receiving(receiver, 0, torch.zeros(PIECE, dtype=torch.uint8), 3)()


def test_memory_that_cannot_be_read_names_the_reason(pair: Callable[[bool], Pair]) -> None:
    sender, receiver = pair(False)
    sender.post([], [Message(1, content(0, PIECE), 3)])
    (channel,) = receiver.channels.values()
    at, _ = channel.awaited()
    channel.other_words[at + 2] = 8  # no address of anything
    with pytest.raises(PeerLostError, match=r"the memory of rank 0 cannot be read.*Bad address"):
        receiving(receiver, 0, torch.zeros(PIECE, dtype=torch.uint8), 3)()


def test_what_fails_while_a_rank_sleeps_is_no_success(pair: Callable[[bool], Pair]) -> None:
    """It has to read what is not there, when its peer has woken it."""
    sender, receiver = pair(False)
    starting: Any = sender.bind([], [Message(1, content(0, PIECE), 3)])
    (send,) = starting.leaving
    send.address = 8
    into = torch.zeros(PIECE, dtype=torch.uint8)
    with ThreadPoolExecutor(1) as thread:
        end = thread.submit(receiving(receiver, 0, into, 3))
        time.sleep(0.2)
        starting(0)
        with pytest.raises(PeerLostError, match=r"cannot be read.*Bad address"):
            end.result(LIMIT_S)


@pytest.mark.parametrize("number", [17, 40])
def test_messages_that_nobody_has_asked_for_do_not_stop_their_sender(
    pair: Callable[[bool], Pair], number: int
) -> None:
    """A rank waits in a program for its own message to be read; its peer has no room for others before."""
    first, second = pair(False)
    tensor = content(1, 2 * PIECE)
    short = [content(n, 16) for n in range(number)]
    into = torch.zeros(2 * PIECE, dtype=torch.uint8)

    def busy() -> None:
        for n, each in enumerate(short):
            for handle in first.post([], [Message(1, each, 100 + n)]):
                first.wait(handle, LIMIT_S)
        receiving(first, 1, into, 3)()

    with ThreadPoolExecutor(2) as threads:
        ends = [threads.submit(busy), threads.submit(sending(second, 0, tensor, 3))]
        assert [end.result(LIMIT_S) for end in ends] == [None, None]
    assert torch.equal(into, tensor)
    for n, each in enumerate(short):
        got = torch.zeros(16, dtype=torch.uint8)
        (handle,) = second.post([Message(0, got, 100 + n)], [])
        second.wait(handle, LIMIT_S)
        assert torch.equal(got, each)


def test_a_program_can_be_collected(pair: Callable[[bool], Pair]) -> None:
    """What it keeps may keep it: a function of the user's that knows its own call."""
    sender, _ = pair(True)
    sends = [Message(1, content(0, 8), 3)]
    known: list[Any] = []
    items: list[BoundInstruction] = [
        Posting(sender.bind([], sends), [], sends),
        Wait(0, 1, 0, False),
        partial(known.append, 1),
    ]
    program = sender.interpret(items, {})
    assert program is not None
    known.append(program)
    gone = weakref.ref(program)
    del items, program, known
    gc.collect()
    assert gone() is None


# --- which interpreter ------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    def ask(name: str) -> None:
        monkeypatch.setenv("RINGCOLL_INTERPRETER", name)
        program.compiled.cache_clear()

    yield ask
    monkeypatch.undo()
    program.compiled.cache_clear()


def test_the_user_chooses(asked: Callable[[str], None]) -> None:
    asked("python")
    assert program.compiled() == (None, "RINGCOLL_INTERPRETER=python")
    for name in ("c", "auto", ""):
        asked(name)
        assert program.compiled()[1] == ""
    asked("rust")
    with pytest.raises(ArgumentError, match=r"RINGCOLL_INTERPRETER.*one of auto, c, python.*rust"):
        program.compiled()


def test_a_compiled_part_of_another_version_is_refused(
    asked: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = program.compiled()[0]
    asked("auto")
    monkeypatch.setattr(module, "SOURCE", module.SOURCE + 1)
    found, why = program.compiled()
    assert found is None
    assert why == (
        "there is no interpreter in C (it was compiled from another version); to get it: install "
        "ringcoll with a C compiler and Python's headers"
    )
    asked("c")
    with pytest.raises(ArgumentError, match="it was compiled from another version"):
        program.compiled()


def test_the_installed_one_is_of_this_source() -> None:
    module: Any = program.compiled()[0]
    assert zlib.crc32((HERE / "program.c").read_bytes()) == module.SOURCE


# --- the file in C ----------------------------------------------------------------------

PROGRAM = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from ringcoll.runtime.transport.shared import program
from tests.transport.test_program import ends_of_two_ranks
ends_of_two_ranks()
print("done")
"""


def ends_of_two_ranks() -> None:
    """Collectives of two ranks that are threads over shared memory, with every kind of message."""
    from ringcoll.runtime.operation import Layout, bind, compile_plan
    from ringcoll.runtime.reduction import resolve
    from ringcoll.schedules.algorithms import schedule_of

    def sum_of_both(
        transport: SharedTransport, name: str, dtype: torch.dtype, numel: int
    ) -> torch.Tensor:
        schedule = schedule_of("all_reduce", name, 2)
        plan = compile_plan(schedule, transport.rank, Layout(((0, numel),), in_place=True))
        tensor, work = (
            torch.empty(numel, dtype=dtype),
            torch.empty(plan.workspace_numel, dtype=dtype),
        )
        memory = [tensor], [tensor], work
        found = bind(plan, *memory, transport, reduction=resolve("sum", dtype))
        assert found.interpreted is not None
        for tag in range(3):
            tensor.copy_(torch.arange(numel).to(dtype))
            run(found, tag, transport.wait, float("inf"), SimpleNamespace(wait=None))
        return tensor

    store = dist.HashStore()
    ranks = [SharedTransport(store, rank, 2) for rank in range(2)]
    dtypes = torch.float32, torch.float64, torch.int8, torch.bool, torch.complex64
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda transport: transport.connect(LIMIT_S), ranks))
        for direct_from, dtype, numel, name in product(
            (SHORT + 1, 1 << 40),
            dtypes,
            (0, 1, 3, 1000, 50_000, 700_001),
            ("ring", "direct", "double_tree"),
        ):
            for transport in ranks:
                transport.direct_from = direct_from
            own = torch.arange(numel).to(dtype)
            expected = own if dtype is torch.bool else own + own
            for result in threads.map(
                partial(sum_of_both, name=name, dtype=dtype, numel=numel), ranks
            ):
                assert torch.equal(result, expected), (dtype, numel, name)
    for transport in ranks:
        transport.close()


def test_every_kind_of_message_on_threads() -> None:
    ends_of_two_ranks()


@pytest.mark.slow
@pytest.mark.processes
def test_the_file_is_clean(tmp_path: Path) -> None:
    """Under warnings, the address sanitizer, and that of undefined behaviour."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc")
    source = HERE / "program.c"
    include = sysconfig.get_paths()["include"]
    sanitizers = [
        "-fsanitize=address,undefined",
        "-fno-sanitize-recover=all",
        "-DNO_CLONES",
        "-g",
        "-O1",
    ]
    target = tmp_path / "_program.abi3.so"
    flags = [
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fPIC",
        "-shared",
        f"-I{include}",
        f"-DSOURCE={zlib.crc32(source.read_bytes())}L",
    ]
    command = [compiler, *flags, *sanitizers, str(source), "-o", str(target)]
    subprocess.run(command, check=True, timeout=300)
    libraries = [
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    root = Path(__file__).parents[2]
    start = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('ringcoll.runtime.transport.shared._program', {str(target)!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "sys.modules['ringcoll.runtime.transport.shared._program'] = module\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", start + PROGRAM, str(root)],
        env=os.environ
        | {
            "LD_PRELOAD": ":".join(libraries),
            "ASAN_OPTIONS": "detect_leaks=0",
            "RINGCOLL_INTERPRETER": "c",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=root,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("without", [False, True])
def test_a_wheel_holds_what_its_name_says(tmp_path: Path, without: bool) -> None:
    root = Path(__file__).parents[2]
    env = os.environ | ({"RINGCOLL_WITHOUT_C": "1"} if without else {})
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "-w",
        str(tmp_path),
        str(root),
    ]
    done = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    listed = subprocess.run(
        [sys.executable, "-m", "zipfile", "-l", str(wheel)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ("py3-none-any" in wheel.name) == without
    assert ("cp311-abi3-" in wheel.name) != without
    assert ("shared/_program.abi3.so" in listed.stdout) != without
    assert "shared/program.c" in listed.stdout


@pytest.mark.processes
def test_a_compiler_that_fails_fails_no_installation(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    code = (
        "import json, sys, types\n"
        "names = 'hatchling', 'builders', 'hooks', 'plugin', 'interface'\n"
        "for end in range(1, 6):\n"
        "    sys.modules['.'.join(names[:end])] = types.ModuleType(names[end - 1])\n"
        "sys.modules['.'.join(names)].BuildHookInterface = object\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "import hatch_build, pathlib\n"
        "source = pathlib.Path(sys.argv[1], 'ringcoll/runtime/transport/shared/program.c')\n"
        "print(json.dumps(hatch_build.compiled(source, pathlib.Path(sys.argv[2], 'x.so'))))\n"
    )
    for compiler, word in (
        ("false", "failed"),
        ("/no/such/compiler", "No such file"),
        ("cc -DSOURCE", "failed"),
    ):
        env = os.environ | {"CC": compiler, "CFLAGS": "-Wrong-flag" if " " in compiler else ""}
        done = subprocess.run(
            [sys.executable, "-c", code, str(root), str(tmp_path)],
            env=env,
            capture_output=True,
            text=True,
            check=True,
        )
        assert word in json.loads(done.stdout)
        assert not (tmp_path / "x.so").exists()
