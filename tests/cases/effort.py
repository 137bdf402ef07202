"""How many examples a property is tried on, by hypothesis' profile."""

from __future__ import annotations

from hypothesis import Phase, settings

__all__ = ["effort"]


def effort(examples: int, *, shrink: bool = True) -> settings:
    """So many examples in the usual profile, and in others in proportion.

    Without shrinking where a failure breaks something that takes seconds to replace.
    """
    current = settings()
    return settings(
        current,
        max_examples=max(1, examples * current.max_examples // 100),
        phases=[phase for phase in Phase if shrink or phase not in (Phase.shrink, Phase.explain)],
    )
