"""How many examples a property is tried on, by hypothesis' profile."""

from __future__ import annotations

from hypothesis import settings

__all__ = ["effort"]


def effort(examples: int) -> settings:
    """So many examples in the usual profile, and in others in proportion."""
    current = settings()
    return settings(current, max_examples=max(1, examples * current.max_examples // 100))
