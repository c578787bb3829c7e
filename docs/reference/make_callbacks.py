"""Make the table of reference/callbacks.md from the callbacks themselves: `python docs/reference/make_callbacks.py`.

What each reads and writes comes from `stateaccess`, when it runs from its handlers, the words from its docstring. A
test compares the page with what this script would write.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fluxcb.callbacks as library
from fluxcb import Callback, Read
from fluxcb._declare.access import Append, dotted, normalise, writes
from fluxcb._declare.dispatch import Entry
from fluxcb._declare.events import BUILTIN_EVENTS
from fluxcb.events import StepEnd

PAGE = Path(__file__).with_name("callbacks.md")
BEGIN, END = "<!-- table: callbacks -->\n", "<!-- end of table -->\n"

# Those that cannot be made without arguments, as the table shows them.
EXAMPLES: dict[str, tuple[str, Callable[[], Callback]]] = {
    "ClipGradients": ("ClipGradients(1.0)", lambda: library.ClipGradients(1.0)),
    "CustomCallback": (
        'CustomCallback(fn, StepEnd, access={"step": {"loss": Read()}})',
        lambda: library.CustomCallback(lambda learner: None, StepEnd, access={"step": {"loss": Read()}}, name="fn"),
    ),
    "Metrics": ("Metrics(accuracy)", lambda: library.Metrics(library.accuracy)),
    "Scheduler": ("Scheduler({LearningRate: schedule})", lambda: library.Scheduler({library.LearningRate: abs})),
    "ToDevice": ("ToDevice(device)", lambda: library.ToDevice(None)),
}


def names() -> list[str]:
    """Return the names of the public callback classes."""
    found = ((name, getattr(library, name)) for name in library.__all__)
    return [name for name, value in found if isinstance(value, type) and issubclass(value, Callback)]


def section(cls: type, title: str) -> str:
    """Return a section of a class's docstring as one line."""
    found = re.search(rf"^{title}:\n((?:    .*\n|\n)+)", inspect.cleandoc(cls.__doc__ or "") + "\n", re.MULTILINE)
    return " ".join(found[1].split()) if found else ""


def row(name: str) -> list[str]:
    """Return the cells of one callback."""
    cls = getattr(library, name)
    shown, make = EXAMPLES.get(name, (f"{name}()", cls))
    callback = make()
    access = normalise(callback.stateaccess(), owner=name, where="")
    reads = [f"`{dotted(path)}`" for path, permission in access.items() if not writes(permission)]
    written = [
        f"`{dotted(path)}`{' (appends)' if isinstance(permission, Append) else ''}"
        for path, permission in access.items()
        if writes(permission)
    ]
    what = inspect.cleandoc(cls.__doc__ or "").splitlines()[0]
    cells = [f"`{shown}`", what, ", ".join(reads), ", ".join(written), runs(callback)]
    return [cell.replace("|", "\\|") for cell in [*cells, section(cls, "Cost"), section(cls, "Source")]]


def runs(callback: Callback) -> str:
    """Return the events and phases a callback has handlers for, those that differ in the event alone together."""
    position = {event: i for i, event in enumerate(BUILTIN_EVENTS)}
    groups: dict[tuple[str, str], list[str]] = {}
    for entry in sorted(callback.handlers(), key=lambda e: position.get(e.event, -1)):
        groups.setdefault((entry.phase.__name__, how(entry)), []).append(f"`{entry.event.__name__}`")
    lines = [f"{', '.join(events)} × `{phase}` ({kind})" for (phase, kind), events in groups.items()]
    return "; ".join(lines) or "only at construction"


def how(entry: Entry) -> str:
    """Return whether a handler is traced, and its schedule."""
    kind = "traced" if entry.traced else "host"
    return kind if entry.when is None else f"{kind}, {period(entry.when)}"


def period(schedule: Any) -> str:
    """Return a schedule in words."""
    (unit, number), *_ = vars(schedule).items()
    return f"every {number} {unit}"


def table() -> str:
    """Return the table."""
    head = ["callback", "what it does", "reads", "writes", "runs", "cost", "origin"]
    rows = [head, ["---"] * len(head), *[row(name) for name in names()]]
    return "\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in rows).replace("|  |", "| |") + "\n"


def page() -> str:
    """Return the page with the table made anew."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
