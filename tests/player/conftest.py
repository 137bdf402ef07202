"""A browser for the tests of the player: Debian's Chromium, driven by playwright-core."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
MODULES = ROOT / "player" / "node_modules"
SECONDS = 60  # for an answer


class Browser:
    """Does what `browser.mjs` knows; a wrong step raises its error."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.answers: Queue[str] = Queue()
        assert process.stdout is not None
        Thread(target=self._read, args=(process.stdout,), daemon=True).start()

    def _read(self, lines: Any) -> None:
        for line in lines:
            self.answers.put(line)
        self.answers.put("")

    def __call__(self, deed: str, **rest: object) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": deed, **rest}) + "\n")
        self.process.stdin.flush()
        try:
            line = self.answers.get(timeout=SECONDS)
        except Empty:
            raise TimeoutError(f"the browser does not answer: {deed} {rest}") from None
        answer = json.loads(line) if line else {"error": "the browser has ended"}
        if "error" in answer:
            raise RuntimeError(f"{deed} {rest}: {answer['error']}")
        return answer["value"]


@contextmanager
def started() -> Iterator[Browser]:
    """Start a browser, if what it needs is there."""
    chromium, node = shutil.which("chromium"), shutil.which("node")
    if chromium is None or node is None or not (MODULES / "playwright-core").is_dir():
        pytest.skip("the player is not tried: that needs chromium, node, and `npm ci` in player/")
    script = str(Path(__file__).with_name("browser.mjs"))
    with subprocess.Popen(
        [node, script, chromium], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        try:
            yield Browser(process)
            process.stdin.close()
            process.wait(30)
        finally:
            process.kill()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with started() as browser:
        yield browser
