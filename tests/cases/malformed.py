"""Text and JSON that is wrong: chance, and what is right with some changes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

__all__ = ["altered", "altered_json", "documents", "values", "words"]

# What parsers stumble over: numbers that are long, negative or of other scripts, a letter whose
# lower case is ASCII, separators, brackets, ends of lines that only `splitlines` knows, and all that
# is special in some of the texts.
PIECES = (
    *("", " ", "  ", "\t", "\n", "\n\n", "\r", "\u2028", "\x1c", "\x7f", "\u0663", "\u212a"),
    *("0", "-1", "1", "7", "9" * 9, "9" * 18, "9" * 19, "9" * 5000, "1e999", "0.5", "NaN", "inf"),
    *("[", "]", "{", "}", '"', "\\", "[" * 5000, ",", ";", ":", "=", " = ", "+", " + ", "@", "-"),
    *("*", "x", "K", "T", "auto", "ring", "rank 1", "send", "recv", "final", "tmp", "in[0]", "0F0"),
    *("true", "null", "\u00e9", "\ufffd", "~nobody_of_that_name/"),
)


@st.composite
def altered(draw: st.DrawFn, originals: Sequence[str]) -> str:
    """A text with some spans left out, doubled, exchanged for others, or moved."""
    text = draw(st.sampled_from(originals))
    for _ in range(draw(st.integers(1, 4))):
        first = draw(st.integers(0, len(text)))
        last = min(len(text), first + draw(st.integers(0, 12)))
        put = draw(
            st.one_of(
                st.sampled_from(PIECES),
                st.text(max_size=4),
                st.just(2 * text[first:last]),
                st.just(text[last : last + 20]),
            )
        )
        text = text[:first] + put + text[last:]
    return text


def words(*originals: str) -> st.SearchStrategy[str]:
    """Any text, and more often one of some texts with changes."""
    return st.one_of(altered(originals), altered(originals), st.text(max_size=60))


# --- JSON -----------------------------------------------------------------------------

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**18, 10**30, -1, 0, 1, 2**31, 2**64, 10**400]),
    st.floats(),
    st.text(max_size=8),
)

values: st.SearchStrategy[Any] = st.recursive(
    _SCALARS,
    lambda below: st.one_of(
        st.lists(below, max_size=4), st.dictionaries(st.text(max_size=6), below, max_size=4)
    ),
    max_leaves=8,
)
"""Any value that JSON can hold."""


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container in a value, with each of its keys or indices."""
    keys: Sequence[Any] = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = range(len(value))
    for key in keys:
        yield value, key
        yield from _places(value[key])


@st.composite
def altered_json(draw: st.DrawFn, originals: Sequence[Any]) -> Any:
    """A value with some of its parts left out, or exchanged for others."""
    value = copy.deepcopy(draw(st.sampled_from(originals)))
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(value))
        if not places:
            return draw(values)
        container, key = draw(st.sampled_from(places))
        if draw(st.booleans()):
            container[key] = draw(values)
        elif draw(st.booleans()):
            del container[key]
        elif isinstance(container, list):
            container.insert(key, draw(values))
        else:
            container[draw(st.text(max_size=6))] = draw(values)
    return value


def documents(*originals: Any) -> st.SearchStrategy[str]:
    """Any text, JSON of any value, and more often JSON of some values with changes."""
    return st.one_of(
        altered_json(originals).map(json.dumps),
        altered_json(originals).map(json.dumps),
        values.map(json.dumps),
        words(*map(json.dumps, originals)),
    )
