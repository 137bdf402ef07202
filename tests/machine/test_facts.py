"""Which ranks are on one host, and how much memory is free."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from ringcoll.runtime.machine import facts
from ringcoll.runtime.machine.facts import _free_of_groups, cpu, free_bytes, hosts_of, place


def test_places_that_differ_in_anything_are_several_hosts():
    parts = place().split()
    assert place() == place()
    for index in range(len(parts)):
        other = " ".join("other" if number == index else part for number, part in enumerate(parts))
        assert hosts_of([other, place(), other, place()]) == (0, 1, 0, 1)


def test_memory_of_control_groups(tmp_path: Path):
    """The least of the limits of a process's groups counts, in both versions of control groups."""

    def group(folder: str, **files: object) -> None:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (tmp_path / folder / name.replace("__", ".")).write_text(f"{text}\n")

    kinds = "anon 5\nactive_file 10\ninactive_file 20\nslab_reclaimable 30"
    group("pod", memory__max=1000, memory__current=300, memory__stat=kinds)
    group("pod/job", memory__max="max", memory__current=200, memory__stat=kinds)
    group(
        "memory/pod",
        memory__limit_in_bytes=5000,
        memory__usage_in_bytes=4000,
        memory__stat="cache 9\ntotal_active_file 1\ntotal_inactive_file 2\nactive_file 7",
    )
    assert _free_of_groups("0::/pod/job\n", tmp_path) == [1000 - 300 + 60]
    assert _free_of_groups("7:memory:/pod\n3:cpuset:/pod\n0::/\n", tmp_path) == [5000 - 4000 + 3]
    assert _free_of_groups("0::/elsewhere\n", tmp_path) == []
    assert 0 < free_bytes() < 1 << 50


@pytest.mark.parametrize(
    "text,name",
    [
        ("processor\t: 0\nmodel\t\t: 2\nmodel name\t: A B\ncpu family\t: 26\n", "A B (family 26, model 2)"),
        ("model name\t: A: B\n\nFeatures\n", "A: B"),
    ],
    ids=["x86", "without a family"],
)  # fmt: skip
def test_the_processor_has_family_and_model(
    monkeypatch: pytest.MonkeyPatch, text: str, name: str
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: text)
    assert cpu.__wrapped__() == name


def test_a_processor_without_a_file_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(path: Path, encoding: str) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", absent)
    assert cpu.__wrapped__() == (platform.processor() or platform.machine())


@pytest.mark.parametrize("of_groups", [[], [1.0], [float("inf"), 7.0, 5.0]])
def test_the_least_of_what_is_free_counts(
    monkeypatch: pytest.MonkeyPatch, of_groups: list[float]
) -> None:
    monkeypatch.setattr(facts, "_free_of_groups", lambda own, root: of_groups)
    free = facts.free_bytes()
    if of_groups:
        assert free == min(of_groups)
    else:
        assert 1 << 20 < free < float("inf")
