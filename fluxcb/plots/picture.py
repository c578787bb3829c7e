"""Curves as an object that a notebook displays."""

from __future__ import annotations

import os
from pathlib import Path

from fluxcb._errors import DeclarationError
from fluxcb.plots.panel import Panel
from fluxcb.plots.svg import panels_svg

__all__ = ["Picture"]


class Picture:
    """Curves as an SVG image, which a notebook displays and `save` writes to a file.

    Args:
        *panels: The panels to show, one below the other.
        title: Heading, or an empty string for none.
    """

    def __init__(self, *panels: Panel, title: str = "") -> None:
        self._panels = panels
        self._title = title

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the image to a file.

        Args:
            path: The file, whose name ends in `.svg`.

        Raises:
            DeclarationError: The name does not end in `.svg`.
        """
        path = Path(path)
        if path.suffix != ".svg":
            raise DeclarationError(
                f"Plots can only be saved as SVG files, not as {path}.", fix="use a file name that ends in `.svg`"
            )
        path.write_text(self._repr_svg_(), encoding="utf-8")

    def _repr_svg_(self) -> str:
        return panels_svg(self._panels, title=self._title)

    def __repr__(self) -> str:
        names = [name for panel in self._panels for name in panel.curves]
        return f"<Picture of {', '.join(names)}>"
