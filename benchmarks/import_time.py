"""What `import ringcoll` adds to `import torch`.

Each sample is a fresh interpreter; the two kinds take turns. ringcoll loads its parts
when they are first used, so a third kind loads the public functions as well.

Wanted: at most 150 ms.
"""

from __future__ import annotations

import subprocess
import sys

from common import environment, introduce, parser, table, write

from ringcoll.bench import summarize

KINDS = {
    "import torch": "import torch",
    "+ import ringcoll": "import torch, ringcoll",
    "+ ringcoll.all_reduce": "import torch, ringcoll; ringcoll.all_reduce",
}
TIMED = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"


def sample(statement: str) -> float:
    """Seconds that a statement takes in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", TIMED.format(statement)], check=True, capture_output=True, text=True
    )
    return float(done.stdout)


def main() -> None:
    """Run, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("-n", type=int, default=9, help="samples of each kind")
    options = arguments.parse_args()
    facts = environment(1)
    introduce(facts)
    for statement in KINDS.values():  # once, so that all files are read and compiled
        sample(statement)
    samples: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(options.n):
        for kind, statement in KINDS.items():
            samples[kind].append(sample(statement))
    found = {kind: summarize(times) for kind, times in samples.items()}
    base = found["import torch"].p50_s
    table(
        ("", "median (ms)", "spread", "added (ms)"),
        [
            (kind, f"{1e3 * one.p50_s:.0f}", f"{100 * one.spread:.0f}%",
             f"{1e3 * (one.p50_s - base):.0f}")
            for kind, one in found.items()
        ],
    )  # fmt: skip
    write(options.json, facts, {kind: one.p50_s for kind, one in found.items()})


if __name__ == "__main__":
    main()
