"""The site: `make site` builds it from the pages, the notebooks and the docstrings.

napoleon reads the docstrings' numpydoc sections, because it comes with Sphinx. All that pages load
is on the site: formulas become MathML, and no notebook has widgets.
"""

from __future__ import annotations

import re
import sys
from inspect import isclass, ismodule, isroutine
from pathlib import Path
from typing import Any

import click
from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

sys.path.insert(0, str(Path(__file__).parents[2]))

import ringcoll
from ringcoll.lab import player_page
from ringcoll.schedules.algorithms import algorithms, on_hosts
from ringcoll.tools.cli import cli

ROOT = Path(__file__).parents[2]
API = ROOT / "docs" / "site" / "api"  # written anew by each build
EXAMPLES = ROOT / "docs" / "rooms"  # a page for each room, which becomes a part of its page here

project = "ringcoll"
author = "The ringcoll authors"
version = release = ringcoll.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
root_doc = "docs/site/index"
include_patterns = [
    "*.md",
    "benchmarks/*.md",
    "benchmarks/measured/*.md",
    "docs/**",
    "examples/*.md",
    "notebooks/*.ipynb",
    "player/*.md",
]
exclude_patterns = ["[.]*", "build", "dist", "**/node_modules", "docs/rooms", "ringcoll", "tests"]
# A word between backticks is a name if it is one; some are names in several rooms.
default_role = "py:obj"
suppress_warnings = ["ref.python"]

nb_execution_mode = "off"
nb_ipywidgets_js: dict[str, dict[str, str]] = {}
nb_merge_streams = True
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath", "deflist"]

autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_google_docstring = False
napoleon_use_rtype = False

html_theme = "furo"
html_title = "ringcoll"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_copy_source = False
html_math_renderer = "mathml"
"""The renderer of `setup`: browsers draw MathML without a script."""


# --- the API, from the doors of the rooms ---------------------------------------------


def heading(title: str, line: str = "=") -> str:
    """A title of reStructuredText."""
    return f"{title}\n{line * len(title)}\n"


def room_page(room: str, documented: dict[int, str]) -> str:
    """A room's public names; ``documented`` holds the objects that earlier pages have."""
    module = __import__(room, fromlist=["*"])
    names = [name for name in module.__all__ if hasattr(module, name)]
    lines = [".. rubric:: Names\n", ".. autosummary::\n   :nosignatures:\n"]
    # Of a constant it would show what its type says of itself.
    lines += [
        f"   {name}"
        for name in names
        if isclass(getattr(module, name)) or isroutine(getattr(module, name))
    ]
    lines.append("")
    for name in names:
        value, full = getattr(module, name), f"{room}.{name}"
        earlier = documented.get(id(value))
        if earlier:
            lines.append(f".. py:data:: {full}\n   :no-typesetting:\n")
            lines.append(f"``{name}`` is :py:obj:`{earlier}`.\n")
            continue
        if isclass(value):
            lines.append(f".. autoclass:: {full}\n   :members:\n")
        elif isroutine(value):
            lines.append(f".. autofunction:: {full}\n")
        else:
            lines.append(f".. py:data:: {full}\n")
            lines += [f"   {line}" for line in words_below(module, name).splitlines()]
            lines.append("")
        if isclass(value) or isroutine(value):
            documented[id(value)] = full
    page = EXAMPLES / f"{room.removeprefix('ringcoll.')}.md"
    text = page.read_text("utf-8") if page.exists() else f"# {room}\n"
    title, _, examples = text.partition("\n")
    # The page of examples stands a folder higher.
    examples = re.sub(r"\]\((?!https:)", "](../", examples)
    return "\n".join([title, examples, directives(f".. automodule:: {room}", "", *lines)])


def directives(*lines: str) -> str:
    """Lines of reStructuredText in a page of Markdown."""
    return "\n".join(["", "```{eval-rst}", *lines, "```", ""])


def words_below(module: Any, name: str) -> str:
    """The docstring below a constant, where its value is set; of a module, its first line."""
    value = getattr(module, name)
    if ismodule(value):
        return (value.__doc__ or "").partition("\n")[0]
    door = Path(module.__file__)
    stub = door.with_suffix(".pyi") if door.with_suffix(".pyi").exists() else door
    found = re.search(
        rf"^from \.([\w.]*) import \w+ as {name}$", stub.read_text("utf-8"), re.MULTILINE
    )
    origin = f"{module.__name__}.{found[1]}" if found else module.__name__
    comments = ModuleAnalyzer.for_module(origin).find_attr_docs()
    return "\n".join(comments.get(("", name), ()))


def rooms() -> list[str]:
    """The package, then its rooms."""
    stubs = (ROOT / "ringcoll").glob("*/__init__.pyi"), (ROOT / "ringcoll").glob("*/*/__init__.py")
    folders = {path.parent.relative_to(ROOT) for paths in stubs for path in paths}
    # What is below training, and the inside of shared memory, stands at the doors above.
    inside = {"data", "sharded", "split", "pipeline", "free"}
    return [
        "ringcoll",
        *(".".join(each.parts) for each in sorted(folders) if each.name not in inside),
    ]


def write_api() -> None:
    """A page for each room, one for the errors, and the list of them."""
    API.mkdir(exist_ok=True)
    documented: dict[int, str] = {}
    pages = {f"{room}.md": room_page(room, documented) for room in rooms()}
    pages["ringcoll.errors.rst"] = (
        heading("ringcoll.errors")
        + "\n.. automodule:: ringcoll.errors\n   :members:\n   :show-inheritance:\n"
    )
    listed = "\n".join(f"   {Path(name).stem}" for name in pages)
    pages["index.rst"] = (
        f"{heading('Every public name')}\n.. toctree::\n   :maxdepth: 1\n\n{listed}\n"
    )
    for page in API.iterdir():
        if page.name not in pages:
            page.unlink()
    for name, text in pages.items():
        page = API / name
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            page.write_text(text, encoding="utf-8")


def write_commands() -> None:
    """The command line's own help, command by command."""
    parts = ["# The command line\n"]
    for name in ("", *cli.list_commands(click.Context(cli))):
        command = cli.get_command(click.Context(cli), name) if name else cli
        assert command is not None
        called = f"ringcoll {name}".strip()
        text = command.get_help(click.Context(command, info_name=called))
        parts.append(f"## {called}\n\n```text\n{text}\n```\n")
    (API / "commands.md").write_text("\n".join(parts), encoding="utf-8")


# --- algorithms -----------------------------------------------------------------------


def write_player(algorithm: str, collective: str, path: Path) -> None:
    """Write the page that plays an algorithm on 4 ranks, or as few as it can have above that."""
    (entry,) = (entry for entry in algorithms(collective) if entry.name == algorithm)
    world_size = next(k for k in (4, *range(3, 64)) if not entry.restriction(k))
    hosts = on_hosts(world_size, 2) if entry.needs_hosts else None
    page = player_page(entry.schedule(world_size, 0, hosts), hosts=hosts)
    path.write_text(page, encoding="utf-8")


def write_players(app: Sphinx, error: Exception | None) -> None:
    """Write what no builder writes: a page for each algorithm, and the way to the first page."""
    if error is not None:
        return
    folder = Path(app.outdir) / "players"
    folder.mkdir(exist_ok=True)
    for entry in algorithms():
        path = folder / f"{entry.collective}-{entry.name}.html"
        write_player(entry.name, entry.collective, path)
    way = '<meta http-equiv="refresh" content="0; url=docs/site/index.html"><title>ringcoll</title>'
    (Path(app.outdir) / "index.html").write_text(way, encoding="utf-8")


# --- what a page says in a browser of the repository, and here ------------------------


def on_the_site(_: Sphinx, page: str, source: list[str]) -> None:
    """Players below the algorithms' titles; folders of the repository are no pages."""
    here = (ROOT / page).parent

    def link(match: re.Match[str]) -> str:
        return match[1] if (here / match[2]).is_dir() else match[0]

    text = re.sub(r"\[([^\]]+)\]\(([\w./-]+)\)", link, source[0])
    if page.startswith("docs/algorithms/"):
        player = r'\n\n<a class="player" href="../../players/\1-\2.html">Step by step</a>'
        text = re.sub(r"^## (\w+): (\w+)$", rf"\g<0>{player}", text, flags=re.MULTILINE)
    source[0] = text


def formula(translator: Any, node: nodes.math | nodes.math_block) -> None:
    """A formula as MathML."""
    is_block = isinstance(node, nodes.math_block)
    translator.body.append(tex2mathml(node.astext(), as_block=is_block))
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Join all that to Sphinx."""
    API.mkdir(exist_ok=True)
    write_api()
    write_commands()
    app.add_html_math_renderer("mathml", (formula, None), (formula, None))
    app.connect("source-read", on_the_site)
    app.connect("build-finished", write_players)
