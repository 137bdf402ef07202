"""How large the pages are, how long they take to open, and how long a step takes to be drawn.

``python -m tests.player.measure`` measures in Chromium; no test asserts a time. A step is measured from the press of
the button to the frame that shows it, so that it takes a whole frame (16.7 ms) at least.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from ringcoll.algorithms import schedule_of
from ringcoll.bench import environment
from ringcoll.pictures import player_page
from tests.player.conftest import started

PAGES = (
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


def main() -> None:
    """Measure, and print a line a page."""
    click.echo(environment(1)["cpu"])
    click.echo(
        "page                              KiB  opens: median, most ms   a step: median, most ms"
    )
    with TemporaryDirectory() as folder, started() as browser:
        for collective, name, world_size in PAGES:
            path = Path(folder) / "page.html"
            path.write_text(player_page(schedule_of(collective, name, world_size)), "utf-8")
            opens = [browser("open", path=str(path)) for _ in range(OPENED)]
            steps = browser("evaluate", code=STEP)
            click.echo(
                f"{f'{name} {collective}, {world_size}':32} {path.stat().st_size / 1024:5.0f}"
                f"  {statistics.median(opens):13.0f} {max(opens):9.0f}"
                f"  {statistics.median(steps):13.1f} {max(steps):9.1f}"
            )


if __name__ == "__main__":
    main()
