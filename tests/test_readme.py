"""The README's Python blocks run as they stand, one after the other."""

import re
from pathlib import Path

from ringcoll.algorithms import unregister

README = Path(__file__).parents[1] / "README.md"


def test_the_examples_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, object] = {}
    try:
        for block in blocks:
            exec(compile(block, str(README), "exec"), names)
    finally:
        unregister("all_gather", "left_ring")
    assert capsys.readouterr().out.endswith("3 3/4\n")
