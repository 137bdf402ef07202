"""Every mutant of a file, with cosmic-ray's operators and our own."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

from tests.mutants.accepted import Change, normal
from tests.mutants.operators import OWN

__all__ = ["Mutant", "Place", "mutants", "operators", "places", "sampled"]

_Position = tuple[int, int]  # line, from 1, and column
_BLOCKS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Mutant(NamedTuple):
    """A file with one change: its whole ``source``, and the ``line`` of the change."""

    change: Change
    line: int
    source: str


@dataclass(frozen=True)
class Place:
    """Where an operator can change a file.

    Parameters
    ----------
    operator, occurrence
        The operator, and the number of the place among those that it can change.
    within
        Function, as in `Change`.
    line
        Number of the line, from 1.
    number
        How many lines of the function, up to this one, have its text.
    """

    operator: Any
    occurrence: int
    within: str
    line: int
    number: int


def operators(patterns: Sequence[str]) -> list[Any]:
    """The operators with a name that one of the regular expressions matches in full."""
    known = {name.partition("/")[2]: get_operator(name) for name in operator_names()}
    known.update({operator.__name__: operator for operator in OWN})
    chosen = []
    for pattern in patterns:
        names = [name for name in known if re.fullmatch(pattern, name)]
        if not names:
            raise ValueError(f"no operator of cosmic-ray, and none of ours, is called {pattern!r}")
        chosen += [known[name]() for name in names]
    return chosen


def places(
    source: str,
    chosen: Sequence[Any],
    within: Sequence[str] = (),
    skip: Sequence[str] = (),
    keywords: Sequence[str] = (),
) -> list[Place]:
    """Where a source can be changed; annotations are left alone.

    Parameters
    ----------
    source
        The text of the file.
    chosen
        The operators.
    within
        Functions that are changed; all, if there are none.
    skip
        Regular expressions; lines that match one of them in full are left alone.
    keywords
        Keyword arguments that are left alone.
    """
    tree = ast.parse(source)
    left_alone, functions = list(_left_alone(tree, keywords)), dict(_functions(tree))
    lines = source.splitlines()
    nodes = list(ast_nodes(get_ast(source)))
    found: list[Place] = []
    for operator in chosen:
        positions = [position for node in nodes for position in operator.mutation_positions(node)]
        for occurrence, (start, _) in enumerate(positions):
            line = start[0]
            text = lines[line - 1].strip()
            if any(first <= start < last for first, last in left_alone):
                continue
            if any(re.fullmatch(pattern, text) for pattern in skip):
                continue
            begin, function = _function_at(functions, line)
            if not within or function in within:
                number = [other.strip() for other in lines[begin - 1 : line]].count(text)
                found.append(Place(operator, occurrence, function, line, number))
    return found


def sampled(source: str, found: Sequence[Place], number: int, seed: int) -> list[Place]:
    """A sample, in the order of lines, which a change of other lines hardly changes."""
    lines = source.splitlines()

    def draw(place: Place) -> str:
        text = lines[place.line - 1].strip()
        name = type(place.operator).__name__
        kind = f"{seed} {place.within} {text} {place.number} {name}"
        same = [other for other in found if other.operator is place.operator]
        of_line = [other.occurrence for other in same if other.line == place.line]
        key = f"{kind} {of_line.index(place.occurrence)}"
        return hashlib.sha256(key.encode()).hexdigest()

    return sorted(sorted(found, key=draw)[:number], key=lambda place: place.line)


def mutants(file: str, source: str, found: Iterable[Place]) -> Iterator[Mutant]:
    """The mutants of a file at some places, without those that do not compile, and without doubles."""
    seen = {source}
    for place in found:
        changed = mutate_code(source, place.operator, place.occurrence)
        if changed is None or changed in seen or not _compiles(changed):
            continue
        seen.add(changed)
        was, now = _difference(source, changed)
        if place.number > 1:
            now = f"{now} # {place.number}"
        yield Mutant(Change(file, place.within, was, now), place.line, changed)


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except SyntaxError:
        return False
    return True


def _left_alone(tree: ast.AST, keywords: Sequence[str]) -> Iterator[tuple[_Position, _Position]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _signature(node)
        parts = [getattr(node, "annotation", None)]
        if isinstance(node, ast.keyword) and node.arg in keywords:
            parts.append(node.value)
        for part in parts:
            if isinstance(part, ast.expr):
                start = part.lineno, part.col_offset
                yield start, (part.end_lineno or 0, part.end_col_offset or 0)


def _signature(
    node: ast.FunctionDef | ast.AsyncFunctionDef,
) -> Iterator[tuple[_Position, _Position]]:
    """A signature without its defaults: cosmic-ray takes its stars for operators."""
    start = node.lineno, node.col_offset
    for default in sorted(
        filter(None, [*node.args.defaults, *node.args.kw_defaults]),
        key=lambda default: (default.lineno, default.col_offset),
    ):
        yield start, (default.lineno, default.col_offset)
        start = default.end_lineno or 0, default.end_col_offset or 0
    yield start, (node.body[0].lineno, node.body[0].col_offset)


def _functions(tree: ast.AST, outer: str = "") -> Iterator[tuple[tuple[int, int], str]]:
    for node in ast.iter_child_nodes(tree):
        name = outer
        if isinstance(node, _BLOCKS):
            name = f"{outer}.{node.name}" if outer else node.name
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield (first, node.end_lineno or first), name
        yield from _functions(node, name)


def _function_at(functions: dict[tuple[int, int], str], line: int) -> tuple[int, str]:
    """First line and name of the innermost function around a line."""
    around = [(first, name) for (first, last), name in functions.items() if first <= line <= last]
    return max(around, default=(1, ""))


def _difference(source: str, changed: str) -> tuple[str, str]:
    before, after = source.splitlines(), changed.splitlines()
    start = next(i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
    same = 0  # lines at the end
    while same < min(len(before), len(after)) - start and before[-1 - same] == after[-1 - same]:
        same += 1
    return (
        normal(" ".join(before[start : len(before) - same])),
        normal(" ".join(after[start : len(after) - same])),
    )
