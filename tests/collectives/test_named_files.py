"""Files and rules in place of an algorithm's name: in calls, in a group's options, and in the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch

import ringcoll
from ringcoll.errors import RingcollError, RulesError, ScheduleError, UnknownAlgorithmError
from ringcoll.schedules.algorithms import algorithms, schedule_of, unregister
from ringcoll.training.backend import Options

SOURCE = """
from ringcoll.schedules.algorithms import find, register

@register("all_reduce", "my_{name}", cost=None)
def my_{name}(rank, world_size):
    yield from find("all_reduce", "binomial_tree").program(rank, world_size)
"""


@pytest.fixture(autouse=True)
def only_own() -> Any:
    before = {(entry.collective, entry.name) for entry in algorithms()}
    yield
    for entry in algorithms():
        if (entry.collective, entry.name) not in before:
            unregister(entry.collective, entry.name)


@pytest.fixture
def module(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    name = f"m{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(SOURCE.format(name=name))
    return f"{tmp_path / name}.py:my_{name}"


@pytest.fixture
def tree_file(tmp_path: Path) -> str:
    path = tmp_path / "tree of three.txt".replace(" ", "_")
    path.write_text(schedule_of("all_reduce", "binomial_tree", 3).to_text())
    return str(path)


def sums(algorithm: str, *lengths: int) -> list[tuple[list[float], str]]:
    """The first elements of all-reduces, alike on 3 ranks, and the algorithm of each."""

    def main(group: Any) -> list[tuple[list[float], str]]:
        found = []
        for numel in lengths:
            tensor = torch.arange(float(numel)) + 100 * group.rank()
            ringcoll.all_reduce(tensor, group=group, algorithm=algorithm)
            ran = ringcoll.explain("all_reduce", "last", group).algorithm
            found.append((tensor[:2].tolist(), ran))
        return found

    first, *others = ringcoll.run_threads(main, 3)
    assert others == [first] * 2
    return first  # type: ignore[no-any-return]


EXPECTED = [300.0, 303.0]
OF_THE_FILE = f"file_tree_of_three_{crc32(schedule_of('all_reduce', 'binomial_tree', 3).to_text().encode()):08x}"


def test_files_of_one_name_are_not_mixed_up(tmp_path: Path) -> None:
    files = []
    for algorithm in ("ring", "direct"):
        (tmp_path / algorithm).mkdir()
        files.append(tmp_path / algorithm / "mine.txt")
        files[-1].write_text(schedule_of("all_reduce", algorithm, 3).to_text())
    rules = f"all_reduce:0-1K:{files[0]};{files[1]}"

    def main(group: Any) -> list[int]:
        sent = []
        for numel in (6, 600, 6, 600):
            before = ringcoll.bytes_sent(group)
            ringcoll.all_reduce(torch.ones(numel), group=group, algorithm=rules)
            sent.append(ringcoll.bytes_sent(group) - before)
        return sent

    # A ring sends 2 (k - 1) / k of the bytes, the direct algorithm k - 1 times them.
    assert ringcoll.run_threads(main, 3) == [[32, 4800, 32, 4800]] * 3


def test_a_call_takes_what_commands_take(module: str, tree_file: str) -> None:
    assert sums(module, 4, 4) == [(EXPECTED, module.rpartition(":")[2])] * 2
    assert sums(tree_file, 4) == [(EXPECTED, "binomial_tree")]


def test_a_call_takes_rules_by_size(module: str, tree_file: str) -> None:
    rules = f"all_reduce:0-1K:{module};all_reduce:1K-16K:{tree_file};ring"
    names = [module.rpartition(":")[2], OF_THE_FILE, "ring"]
    assert sums(rules, 4, 1000, 10_000, 4) == [(EXPECTED, name) for name in [*names, names[0]]]


def test_a_file_in_rules_is_read_anew(tree_file: str) -> None:
    """As a file that is named alone."""
    rules = f"all_reduce:0-1K:{tree_file};recursive_doubling"

    def main(group: Any) -> list[int]:
        sent = []
        for algorithm in ("ring", "direct"):
            if group.rank() == 0:
                text = schedule_of("all_reduce", algorithm, 3).to_text()
                Path(tree_file).write_text(text)
            ringcoll.barrier(group=group)
            tensor = torch.arange(4.0)
            ringcoll.all_reduce(tensor, group=group, algorithm=rules)
            before = ringcoll.bytes_sent(group)
            ringcoll.all_reduce(tensor, group=group, algorithm=rules)
            sent.append(ringcoll.bytes_sent(group) - before)
            ringcoll.barrier(group=group)
        return sent

    ring, direct = ringcoll.run_threads(main, 3)[0]
    assert ring < direct  # 2 (k - 1) / k of the bytes, and k - 1 times them


def test_the_environment_takes_files(
    module: str, tree_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = module.rpartition(":")[2]
    for text, ran in (
        (module, name),
        (tree_file, OF_THE_FILE),
        (f"all_reduce:*:{module}", name),
    ):
        monkeypatch.setenv("RINGCOLL_ALGORITHM", text)
        assert sums("auto", 4) == [(EXPECTED, ran)]


def test_options_take_rules_and_files(module: str, tree_file: str) -> None:
    rules = f"all_reduce:0-1K:{module};ring"
    assert Options(algorithm=rules).algorithm_of("all_reduce", 3) == rules
    assert Options(algorithm={"all_reduce": rules}).algorithm_of("all_reduce", 3) == rules
    assert Options(algorithm=module).algorithm_of("all_gather", 3) == "auto"
    assert Options(algorithm=module).algorithm_of("all_reduce", 3) == module


@pytest.mark.parametrize(
    "text, error",
    [
        ("all_reduce:4K-1K:ring;tree", RulesError),
        ("all_reduce:*:nothing_of_the_kind", RulesError),
        ("nowhere.py:star", UnknownAlgorithmError),
        ("all_reduce:*:nowhere.py:star", UnknownAlgorithmError),
        ("all_reduce:*:nowhere.txt", ScheduleError),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_sent(text: str, error: type[Exception]) -> None:
    def main(group: Any) -> float:
        tensor = torch.ones(3)
        with pytest.raises(error):
            ringcoll.all_reduce(tensor, group=group, algorithm=text)
        ringcoll.all_reduce(tensor, group=group)
        return tensor[0].item()

    assert issubclass(error, RingcollError)
    assert ringcoll.run_threads(main, 2) == [2.0, 2.0]
    with pytest.raises(error):
        Options(algorithm=text).algorithm_of("all_reduce", 2)
