"""Files of pictures: what is SVG becomes a page, PNG, PDF or GIF after the ending of the file."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ringcoll.errors import MissingExtraError
from ringcoll.machine import replace_file

PICTURES = (".svg", ".html", ".png", ".pdf")
"""The endings of files that `write_picture` writes."""

_GIF_SECONDS = 1.6  # that a step is shown, as in a moving SVG


def write_picture(path: Path, picture: str) -> None:
    """Write an SVG document: as it is, as a page, as PNG or PDF.

    Raises
    ------
    MissingExtraError
        What makes a PNG or PDF is not installed.
    OSError
        The file cannot be written.
    """
    ending = path.suffix.lower()
    content: str | bytes = picture
    if ending == ".html":
        content = f'<!doctype html>\n<meta charset="utf-8">\n<body style="margin: 0">\n{picture}'
    elif ending != ".svg":
        content = _typeset(picture, "pdf" if ending == ".pdf" else "png")
    replace_file(path, content)


def write_gif(path: Path, pictures: Sequence[str]) -> None:
    """Write SVG documents as a GIF that shows one after the other, for ever; the last one twice as long."""
    try:
        from PIL import Image
    except ImportError as error:
        raise _missing(path.suffix) from error
    frames = [Image.open(io.BytesIO(_typeset(picture, "png"))) for picture in pictures]
    size = max(frame.width for frame in frames), max(frame.height for frame in frames)
    pages = []
    for frame in frames:
        page = Image.new("RGB", size, "white")
        page.paste(frame, ((size[0] - frame.width) // 2, (size[1] - frame.height) // 2))
        pages.append(page)
    milliseconds = int(1000 * _GIF_SECONDS)
    durations = [milliseconds] * (len(pages) - 1) + [2 * milliseconds]
    file = io.BytesIO()
    pages[0].save(file, "GIF", save_all=True, append_images=pages[1:], duration=durations, loop=0)
    replace_file(path, file.getvalue())


def _typeset(picture: str, form: Literal["png", "pdf"]) -> bytes:
    """Make a page of the size of an SVG document, a point a pixel."""
    try:
        import typst
    except ImportError as error:
        raise _missing(f".{form}") from error
    size = re.search(r'viewBox="0 0 (\d+) (\d+)"', picture)
    assert size is not None
    width, height = size.groups()
    source = (
        f"#set page(width: {width}pt, height: {height}pt, margin: 0pt)\n"
        '#image(bytes(sys.inputs.picture), format: "svg", width: 100%)'
    )
    made = typst.compile(source.encode(), format=form, ppi=72.0, sys_inputs={"picture": picture})
    assert isinstance(made, bytes)
    return made


def _missing(ending: str) -> MissingExtraError:
    return MissingExtraError(
        f"a file {ending} needs typst and Pillow: pip install 'ringcoll[pictures]'; "
        ".svg and .html need nothing"
    )
