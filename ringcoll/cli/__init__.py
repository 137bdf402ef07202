"""The command line; ``ringcoll --help`` describes it.

================  =====================================================
`app`             the group of commands, and what they share
`compare`         ``ringcoll compare``
`bench`           ``ringcoll bench``
`measuring`       what these two share
`listing`         ``ringcoll list``
`show`            ``ringcoll show``
`prove`           ``ringcoll verify``
`info`            ``ringcoll info``
================  =====================================================

A command's module is imported when the command is called, so that asking for
help is quick and none of it is imported by ``import ringcoll``.
"""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line; the entry point of the ``ringcoll`` script."""
    from ringcoll.cli.app import cli

    cli(prog_name="ringcoll")
