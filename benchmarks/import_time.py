"""Time of `import ringcoll` beyond `import torch`.

Each sample is a fresh interpreter; the kinds take turns. ringcoll loads its parts when they
are first used, so a third kind loads the public functions as well.

Wanted: `import ringcoll` adds at most 20 ms.
"""

from __future__ import annotations

import subprocess
import sys

from common import Table, environment, introduce, parser, write

from ringcoll.tools.bench import summarize

KINDS = {
    "import torch": "import torch",
    "+ import ringcoll": "import torch, ringcoll",
    "+ ringcoll.all_reduce": "import torch, ringcoll; ringcoll.all_reduce",
}
TIMED = "import time; start = time.perf_counter(); {}; print(time.perf_counter() - start)"


def sample(statement: str) -> float:
    """Time a statement in a fresh interpreter, in seconds."""
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
    summaries = {kind: summarize(times) for kind, times in samples.items()}
    base = summaries["import torch"].p50_s
    table = Table(
        {"statements": "text", "median": "seconds", "spread": "share", "added": "seconds"},
        [
            (kind, summary.p50_s, summary.spread, summary.p50_s - base)
            for kind, summary in summaries.items()
        ],
    )
    table.show()
    write(options.json, __doc__, facts, [table])


if __name__ == "__main__":
    main()
