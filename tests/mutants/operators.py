"""Operators that cosmic-ray has not: a check, or a part of it, is left out; `max` and `min` change places."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import parso
from cosmic_ray.operators.operator import Example, Operator

__all__ = ["OWN"]

_Position = tuple[tuple[int, int], tuple[int, int]]
_OPPOSITES = {"max": "min", "min": "max", "any": "all", "all": "any"}
_AUGMENTED = ("+=", "-=", "*=", "/=", "//=", "%=", "&=", "|=", "^=", "<<=", ">>=", "**=")


class RemoveStatement(Operator):  # type: ignore[misc]  # cosmic-ray has no types
    """Leave out a call whose result is not used, a ``raise``, or an augmented assignment."""

    def mutation_positions(self, node: Any) -> Iterator[_Position]:
        if node.type == "simple_stmt" and self._counts(node.children[0]):
            yield node.start_pos, node.children[0].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        nothing = parso.parse("pass").children[0]
        nothing.prefix = node.get_first_leaf().prefix
        node.children[0] = nothing
        return node

    @staticmethod
    def _counts(statement: Any) -> bool:
        if statement.type == "expr_stmt":
            operator = statement.children[1]
            return getattr(operator, "value", None) in _AUGMENTED
        if statement.type in ("atom_expr", "power"):
            return str(statement.get_code()).rstrip().endswith(")")
        return bool(statement.type == "raise_stmt")

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (
            Example("check(x)\n", "pass\n"),
            Example("if x:\n    raise E(x)\n", "if x:\n    pass\n"),
            Example("x += 1\n", "pass\n"),
        )


class RemoveOperand(Operator):  # type: ignore[misc]  # cosmic-ray has no types
    """Leave out an operand of ``and`` or ``or``."""

    def mutation_positions(self, node: Any) -> Iterator[_Position]:
        if node.type in ("and_test", "or_test"):
            for operand in node.children[::2]:
                yield operand.start_pos, operand.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        leaves = node.get_first_leaf(), node.children[2].get_first_leaf()
        if index == 0:
            leaves[1].prefix = leaves[0].prefix
            del node.children[:2]
        else:
            del node.children[2 * index - 1 : 2 * index + 1]
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (
            Example("a and b and c", "b and c"),
            Example("a and b and c", "a and c", occurrence=1),
            Example("a or b", "a", occurrence=1),
        )


class RemoveElement(Operator):  # type: ignore[misc]  # cosmic-ray has no types
    """Leave out an element of three or more in a tuple or list of a function, such as a key."""

    def mutation_positions(self, node: Any) -> Iterator[_Position]:
        if node.type != "testlist_comp" or not parso.tree.search_ancestor(node, "funcdef"):
            return
        if node.children[1].type != "sync_comp_for" and len(node.children) >= 5:
            for element in node.children[::2]:
                yield element.start_pos, element.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        del node.children[2 * index : 2 * index + 2]
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (
            Example("def f():\n    key = (a, b, c)\n", "def f():\n    key = ( b, c)\n"),
            Example("def f():\n    key = [a, b, c]\n", "def f():\n    key = [a, c]\n", 1),
            Example("def f():\n    key = (a, b, c)\n", "def f():\n    key = (a, b,)\n", 2),
        )


class SwapExtreme(Operator):  # type: ignore[misc]  # cosmic-ray has no types
    """Call `min` for `max`, `all` for `any`, and the other way round."""

    def mutation_positions(self, node: Any) -> Iterator[_Position]:
        if node.type == "name" and node.value in _OPPOSITES:
            called = node.get_next_sibling()
            if called is not None and called.type == "trailer" and called.children[0].value == "(":
                yield node.start_pos, node.end_pos

    def mutate(self, node: Any, index: int) -> Any:
        node.value = _OPPOSITES[node.value]
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (
            Example("max(a, b)", "min(a, b)"),
            Example("x = any(a) + max", "x = all(a) + max"),
        )


OWN = (RemoveStatement, RemoveOperand, RemoveElement, SwapExtreme)
