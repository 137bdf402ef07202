"""How large the pages are, how long they take to open, and how long a step takes to be drawn.

``python -m tests.player.measure`` measures in Chromium, and writes the table at the end of docs/pictures.md anew; no
test asserts a time. A step is measured from the press of the button to the frame that shows it: a frame, 16.7 ms, at least.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from ringcoll.lab.pictures import player_page
from ringcoll.schedules.algorithms import schedule_of
from ringcoll.tools.bench import environment
from tests.player.conftest import ROOT, Browser, started

DOCS = ROOT / "docs" / "pictures.md"
PLAYED = (
    ("all_reduce", "ring", 4),
    ("all_reduce", "ring", 64),
    ("all_reduce", "recursive_doubling", 64),
    ("all_to_all", "pairwise", 64),
)
OPENED, STEPS = 9, 60
STEP = f"""(async () => {{
  const times = [];
  for (let step = 0; step < {STEPS}; step++) {{
    const begin = performance.now();
    document.getElementById("forth").click();
    await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)));
    times.push(performance.now() - begin);
  }}
  return times;
}})()"""
WORDS = "`python -m tests.player.measure` measures the pages"


def table(browser: Browser, path: Path) -> Iterator[str]:
    """The lines of the table; each time is a median, and the most in brackets."""
    facts = environment(1)
    yield f"{WORDS}; medians, and the most of {OPENED} times and {STEPS} steps, on {facts['cpu']} with {facts['cores']} cores, {facts['started'][:10]}:"
    yield ""
    yield "| page | size | opens in | a step takes |"
    yield "| --- | --- | --- | --- |"
    for collective, name, world_size in PLAYED:
        path.write_text(player_page(schedule_of(collective, name, world_size)), "utf-8")
        opens = [browser("open", path=str(path)) for _ in range(OPENED)]
        steps = browser("evaluate", code=STEP)
        yield (
            f"| {name} {collective}, {world_size} ranks | {path.stat().st_size / 1024:.0f} KiB "
            f"| {statistics.median(opens):.0f} ms ({max(opens):.0f}) | {statistics.median(steps):.1f} ms ({max(steps):.1f}) |"
        )
    yield ""
    yield "A step is measured up to the frame that shows it: 16.7 ms is one frame."


def main() -> None:
    """Measure, print the table, and write it into the page."""
    with TemporaryDirectory() as folder, started() as browser:
        lines = list(table(browser, Path(folder) / "page.html"))
    click.echo("\n".join(lines))
    before, _, _ = DOCS.read_text(encoding="utf-8").partition(WORDS)
    DOCS.write_text(before + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
