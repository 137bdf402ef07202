"""A program that ends with this process: ``python -IS leash.py PID SIGNAL PROGRAM ...``.

However this process ends, also by a signal that no program hears, the system sends SIGNAL to
PROGRAM, which ``leash.py`` becomes. (On Linux; elsewhere PROGRAM is only started.) The system looks
at the *thread* that has started ``leash.py``, so that thread has to wait for the end of PROGRAM.
"""

from __future__ import annotations

import ctypes
import os
import sys

_PR_SET_PDEATHSIG, _SIGKILL = 1, 9


def leashed(*command: str, by: int = _SIGKILL) -> list[str]:
    """The command that starts a program which gets a signal when this process ends.

    >>> leashed("sleep", "1")[-2:]
    ['sleep', '1']
    """
    return [sys.executable, "-IS", __file__, f"{os.getpid()}", f"{by:d}", *command]


if __name__ == "__main__":
    pid, number, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))
        if os.getppid() != int(pid):  # it has ended before the line above
            sys.exit(1)
    os.execvp(command[0], command)  # noqa: S606  # the program that the command names
