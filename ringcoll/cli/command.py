"""How a command describes itself: text, definitions and examples, as wide as the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from functools import partial
from typing import Any

import click

SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""The settings of click for the group and every command."""


class DescribedCommand(click.Command):
    """A command whose page of help has definitions, under headings, and examples, one a line."""

    def __init__(
        self,
        name: str,
        *,
        examples: str,
        terms: Mapping[str, Mapping[str, str]] = {},
        **options: Any,
    ) -> None:
        settings = SETTINGS | options.pop("context_settings", {})
        super().__init__(name, context_settings=settings, **options)
        self.examples, self.terms = examples, terms

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the definitions and the examples, below the options."""
        for heading, definitions in self.terms.items():
            with formatter.section(heading):
                formatter.write_dl(list(definitions.items()))
        write_examples(formatter, self.examples)


command = partial(click.command, cls=DescribedCommand)


def write_examples(formatter: click.HelpFormatter, examples: str) -> None:
    """Write calls of commands; a call that is too long is continued as a shell reads it."""
    with formatter.section("Examples"):
        for example in examples.strip().splitlines():
            lines = textwrap.wrap(
                example.strip(),
                formatter.width - formatter.current_indent - len("  \\"),
                subsequent_indent="  ",
                break_long_words=False,
                break_on_hyphens=False,
            )
            indent = " " * formatter.current_indent
            formatter.write(" \\\n".join(indent + line for line in lines) + "\n")
