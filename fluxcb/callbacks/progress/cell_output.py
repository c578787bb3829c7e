"""`CellOutput`: a single output below a notebook cell, in which the table and the bar of a fit are updated in place."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, Protocol

from fluxcb._terminal import escape_block

__all__ = ["CellOutput", "Part", "cell_output", "current_cell"]

_SECONDS = 0.1  # between two updates, because front ends and servers limit the rate of messages
_ORDER = ("table", "bar")  # from top to bottom


class Part(Protocol):
    """A part of the output, as HTML, and as text for front ends without HTML. An empty string shows nothing."""

    def html(self) -> str:
        """Return the part as HTML."""
        ...

    def text(self) -> str:
        """Return the part as text."""
        ...


class CellOutput:
    """An output of a notebook cell. The first drawing creates it, and each later drawing replaces its content.

    The output only uses the standard messages `display_data` and `update_display_data`, which all front ends support. A
    saved notebook contains the last drawing.

    Args:
        cell: The execution count of the cell.
    """

    def __init__(self, cell: int) -> None:
        self.cell = cell
        self.parts: dict[str, Part] = {}
        self._open: set[str] = set()
        self._handle: Any = None
        self._drawn = 0.0
        self._lock = threading.Lock()  # callbacks may run in threads

    def takes(self, name: str, cell: int) -> bool:
        """Return whether a part can be added. It must belong to the same fit and run in the same cell."""
        closed = bool(self.parts) and not self._open  # all parts were closed, so that fit has ended
        return cell == self.cell and not closed and name not in self.parts

    def add(self, name: str, part: Part) -> None:
        """Add a part: `table` or `bar`."""
        with self._lock:
            self.parts[name] = part
            self._open.add(name)

    def close(self, name: str, *, remove: bool) -> None:
        """End a part, and draw the output in its final state.

        Args:
            name: The part.
            remove: Whether to remove the part.
        """
        with self._lock:
            self._open.discard(name)
            if remove:
                del self.parts[name]
        self.draw()

    def redraw(self) -> None:
        """Draw the output, unless it was drawn less than 0.1 s ago."""
        if time.monotonic() - self._drawn >= _SECONDS:
            self.draw()

    def draw(self) -> None:
        """Draw the output."""
        from IPython.display import display  # imported here, because IPython is only available in a notebook

        with self._lock:
            self._drawn = time.monotonic()
            shown = [self.parts[name] for name in _ORDER if name in self.parts]
            html = "".join(part.html() for part in shown)
            text = "\n".join(line for part in shown if (line := part.text()))
            bundle = {"text/html": html, "text/plain": escape_block(text)}
            if self._handle is not None:
                self._handle.update(bundle, raw=True)
            elif html:
                self._handle = display(bundle, raw=True, display_id=True)


def current_cell() -> int:
    """Return the execution count of the running cell."""
    return getattr(sys.modules["IPython"].get_ipython(), "execution_count", 0)


_current: CellOutput | None = None
_choosing = threading.Lock()


def cell_output(name: str, part: Part) -> CellOutput:
    """Add a part to the output of the running cell and fit, or to a new output.

    The bar and the table of one fit share an output. The next fit, and a hand-written loop in another cell, get a new
    output.

    Args:
        name: `table` or `bar`.
        part: The part.
    """
    global _current  # a kernel runs one cell at a time
    cell = current_cell()
    with _choosing:
        if _current is None or not _current.takes(name, cell):
            _current = CellOutput(cell)
        _current.add(name, part)
        return _current
