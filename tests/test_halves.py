"""What `make test` leaves out, and what it never does."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import halves
from tests.durations import lacks


@pytest.mark.parametrize("part, others", halves.LONG.items())
def test_the_long_parts_and_what_they_test_are_there(part: str, others: tuple[str, ...]) -> None:
    assert all((halves.ROOT / path).exists() for path in (part, *others, *halves.EVERYTHING))


@pytest.mark.parametrize("part, others", halves.LONG.items())
def test_a_long_part_runs_if_it_or_what_it_tests_is_changed(
    part: str, others: tuple[str, ...]
) -> None:
    test = f"{part}::test" if part.endswith(".py") else f"{part}test_some.py::test"
    assert halves.is_left_out(test, {"SECURITY.md"})
    assert not halves.is_left_out(test, None), "git does not say what is changed"
    for path in (part, *others, *halves.EVERYTHING):
        assert not halves.is_left_out(test, {f"{path}more" if path.endswith("/") else path})


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One with a commit in which all tests have passed."""
    monkeypatch.setattr(halves, "ROOT", tmp_path)
    monkeypatch.delenv("BASE", raising=False)
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        monkeypatch.delenv(name, raising=False)
    git(tmp_path, "init", "--quiet")
    commit(tmp_path, "tests/durations.json")
    return tmp_path


def git(folder: Path, *words: str) -> None:
    author = ["-c", "user.name=a", "-c", "user.email=a@b.invalid"]
    subprocess.run(["git", *author, *words], cwd=folder, check=True, capture_output=True)


def commit(folder: Path, name: str) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(name)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", name)


def test_all_commits_since_all_tests_passed_count(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert halves.changed() == set()
    commit(repository, "one")
    commit(repository, "two")
    (repository / "new").write_text("not known to git")
    assert halves.changed() == {"one", "two", "new"}
    monkeypatch.setenv("BASE", "HEAD~1")
    assert halves.changed() == {"two", "new"}
    monkeypatch.setenv("BASE", "nothing-like-that")
    assert halves.changed() is None


def test_without_a_history_all_tests_run(repository: Path, tmp_path: Path) -> None:
    commit(repository, "one")
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{repository}", str(shallow))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(halves, "ROOT", shallow)
        assert halves.changed() is None
        patch.setattr(halves, "ROOT", Path(tmp_path.anchor))
        assert halves.changed() is None


def test_a_run_of_some_tests_is_not_recorded() -> None:
    cases = "".join(
        f'<testcase classname="{part.removesuffix(".py").rstrip("/").replace("/", ".")}.X" name="t"/>'
        for part in halves.LONG
    )
    assert lacks(f"<t>{cases}</t>") == []
    assert lacks("<t/>") == [f"nothing of {part}" for part in halves.LONG]
