"""How sizes and times are written and read."""

from __future__ import annotations

import re

_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"(\d{1,18})\s*([KMGT]?)(?:I?B)?", re.IGNORECASE | re.ASCII)


def parse_size(text: str) -> int:
    """Read a number of bytes, as nccl-tests does: K, M and G are powers of 1024.

    >>> parse_size("4"), parse_size("64K"), parse_size("16 MiB")
    (4, 65536, 16777216)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 4, 64K or 16M")
    return int(match[1]) << 10 * _POWERS[match[2].upper()]


def as_size(nbytes: int) -> str:
    """Write a number of bytes.

    >>> as_size(4), as_size(65536), as_size(16 << 20), as_size(1536), as_size(1000)
    ('4 B', '64 KiB', '16 MiB', '1.5 KiB', '1000 B')
    """
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        whole = 1 << 10 * power
        if nbytes >= whole:
            return f"{nbytes / whole:.4g} {unit}"
    return f"{nbytes} B"


def time_in_words(seconds: float) -> str:
    """Write a time with three digits.

    >>> time_in_words(12.34e-6), time_in_words(0.0123), time_in_words(1.5)
    ('12.3 us', '12.3 ms', '1.5 s')
    """
    for factor, unit in ((1e6, "us"), (1e3, "ms")):
        if seconds * factor < 999.5:  # what three digits can show
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"
