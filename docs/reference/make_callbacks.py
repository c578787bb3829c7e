"""Make the table of reference/callbacks.md from the callbacks themselves: `python docs/reference/make_callbacks.py`.

A test compares the page with what this script would write.
"""

from __future__ import annotations

import re
from pathlib import Path

from fluxcb._tools.catalogue import Listed, listed

PAGE = Path(__file__).with_name("callbacks.md")
BEGIN, END = "<!-- table: callbacks -->\n", "<!-- end of table -->\n"


def row(callback: Listed) -> list[str]:
    """Return the cells of one callback."""
    reads = ", ".join(f"`{path}`" for path in callback.reads)
    written = ", ".join(re.sub(r"^(\S+)", r"`\1`", path) for path in callback.writes)
    runs = "; ".join(map(_marked, callback.runs)) or "only at construction"
    cells = [f"`{callback.shown}`", callback.what, reads, written, runs, callback.cost, callback.origin]
    return [cell.replace("|", "\\|") for cell in cells]


def _marked(runs: str) -> str:
    events, _, rest = runs.partition(" x ")
    phase, _, how = rest.partition(" ")
    return f"{', '.join(f'`{event}`' for event in events.split(', '))} × `{phase}` {how}"


def table() -> str:
    """Return the table."""
    head = ["callback", "what it does", "reads", "writes", "runs", "cost", "origin"]
    rows = [head, ["---"] * len(head), *[row(callback) for callback in listed()]]
    return "\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in rows).replace("|  |", "| |") + "\n"


def page() -> str:
    """Return the page with the table made anew."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
