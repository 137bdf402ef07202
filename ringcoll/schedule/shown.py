"""Objects that a notebook shows as pictures.

The room `pictures` draws them. It stands above the rooms that have such objects, so the face of the package hands it out.
"""

from __future__ import annotations

import sys


class Shown:
    """Something that a notebook shows as a picture, see `ringcoll.pictures.shown_in_notebook`."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return str(sys.modules["ringcoll"].pictures.shown_in_notebook(self))
