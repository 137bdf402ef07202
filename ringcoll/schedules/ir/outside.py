"""Functions of the laboratory that the core calls without knowing the laboratory.

The core proves and runs schedules. The laboratory draws them, and reads files of other systems. The
root of the package knows both, and puts the functions here.
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
