"""Elements of SVG as text; colours, and how they look on light and dark pages.

Colours are those of M. Okabe and K. Ito, "Color Universal Design", which people can tell apart
whatever colours they see. A chunk has the colour of its number; a reader who cannot see it reads
the number, which stands wherever there is room.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from html import escape

COLOURS = (
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999",
)  # fmt: skip
"""Colours of chunks, by their number."""
FONT = 20
"""Size of text; readable from the last row, where a picture fills a slide."""
_WIDE = 0.6  # width of a character over its height, in most fonts

# Classes, and not attributes, so that a page that is dark can have other colours.
_STYLE = """
text {{ font: {font}px "Helvetica Neue", Helvetica, Arial, "Liberation Sans", "DejaVu Sans", \
sans-serif; fill: #1b1f24 }}
.title {{ font-weight: bold }}
.small {{ font-size: {small}px }}
.paper {{ fill: #ffffff }}
.ink {{ stroke: #1b1f24; fill: none; stroke-width: 2 }}
.rank {{ stroke: #1b1f24; fill: #f3f4f6; stroke-width: 2 }}
.cell {{ stroke: #8b949e; fill: #ffffff; stroke-width: 1 }}
.done {{ stroke: #1b1f24; fill: none; stroke-width: 2.5 }}
.add {{ stroke: #d55e00; fill: none; stroke-width: 3 }}
.move {{ stroke: #0072b2; fill: none; stroke-width: 3; stroke-dasharray: 9 5 }}
.addhead {{ fill: #d55e00 }}
.movehead {{ fill: #0072b2 }}
.label {{ font-weight: bold; paint-order: stroke; stroke: #ffffff; stroke-width: 6; \
stroke-linejoin: round }}
.cellnumber {{ font-weight: bold; paint-order: stroke; stroke: #ffffff; stroke-width: 3 }}
.bad {{ stroke: #c8102e; fill: none; stroke-width: 5 }}
.badtext {{ fill: #c8102e; font-weight: bold }}
@media (prefers-color-scheme: dark) {{
text {{ fill: #e6edf3 }}
.paper {{ fill: #0d1117 }}
.ink, .done {{ stroke: #e6edf3 }}
.rank {{ stroke: #e6edf3; fill: #21262d }}
.cell {{ fill: #161b22 }}
.label, .cellnumber {{ stroke: #0d1117 }}
.badtext {{ fill: #ff7b72 }}
.bad {{ stroke: #ff7b72 }}
.move {{ stroke: #56b4e9 }} .movehead {{ fill: #56b4e9 }}
}}
"""


def width_of(words: str, size: int = FONT) -> float:
    """About how wide a text is drawn."""
    return len(words) * size * _WIDE


def element(name: str, inner: str | Iterable[str] = "", /, **attributes: object) -> str:
    """Write an element; ``class_`` and ``text_anchor`` have SVG's names, ``inner`` is markup.

    >>> element("rect", x=1, class_="cell", stroke_width=2.5)
    '<rect x="1" class="cell" stroke-width="2.5"/>'
    """
    words = [name]
    for key, value in attributes.items():
        shown = f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)
        words.append(f'{key.rstrip("_").replace("_", "-")}="{escape(shown)}"')
    content = inner if isinstance(inner, str) else "".join(inner)
    return f"<{' '.join(words)}>{content}</{name}>" if content else f"<{' '.join(words)}/>"


def rect(
    x: float, y: float, width: float, height: float, inner: str = "", **attributes: object
) -> str:
    """Write a rectangle by its upper left corner."""
    return element("rect", inner, x=x, y=y, width=width, height=height, **attributes)


def text(x: float, y: float, words: str, class_: str = "", anchor: str = "middle") -> str:
    """Write a text whose middle, or ``anchor``, is at a place."""
    return element(
        "text", escape(words), x=x, y=y, text_anchor=anchor, dominant_baseline="central",
        **{"class_": class_} if class_ else {},
    )  # fmt: skip


def moved(x: float, y: float, inner: Iterable[str], **attributes: object) -> str:
    """A group of elements with its origin at a place."""
    return element("g", inner, transform=f"translate({x:.1f} {y:.1f})", **attributes)


class Picture(str):
    """An SVG document, which a notebook shows."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        # As an image: on a page with several pictures the rules of one would hold for all.
        data = b64encode(self.encode()).decode()
        return f'<img src="data:image/svg+xml;base64,{data}" style="max-width: 100%">'


def document(
    width: float, height: float, inner: Iterable[str], about: str, style: str = ""
) -> Picture:
    """Write a whole picture; ``about`` is read out by who does not see it."""
    heads = [
        element(
            "marker",
            element("path", d="M0 0 L10 5 L0 10 z", class_=f"{kind}head"),
            id=kind, viewBox="0 0 10 10", refX=9, refY=5, markerWidth=5, markerHeight=5,
            orient="auto-start-reverse",
        )
        for kind in ("add", "move")
    ]  # fmt: skip
    rules = _STYLE.format(font=FONT, small=FONT - 2) + style
    picture = element(
        "svg",
        [
            element("title", escape(about)),
            element("style", rules),
            element("defs", heads),
            element("rect", width="100%", height="100%", class_="paper"),
            *inner,
        ],
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width:.0f} {height:.0f}",
        width=f"{width:.0f}", height=f"{height:.0f}", role="img", aria_label=about,
    )  # fmt: skip
    return Picture(f"{picture}\n")
