"""What the core asks of the laboratory, which it does not know.

The core proves schedules and sends what they say. Who draws them, and who reads the files of other
systems, says the root of the package, which knows both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Laboratory:
    """Functions of the laboratory.

    ``picture`` draws a schedule, or another thing of the core, as HTML for a notebook;
    ``schedule_in`` reads a schedule in a text of any format.
    """

    picture: Callable[[Any], str]
    schedule_in: Callable[[str], Any]


laboratory = Laboratory()
