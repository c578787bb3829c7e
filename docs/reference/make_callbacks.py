"""Make the pages of callbacks from the callbacks themselves: `python docs/reference/make_callbacks.py`.

`callbacks.md` gets a card for each callback, and `api/callbacks.md` the list of all public names of
`fluxcb.callbacks`. A test compares both pages with what this script would write.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import fluxcb.callbacks as library
from fluxcb._tools.catalogue import Listed, listed

FOLDER = Path(__file__).parent
CARDS, API = FOLDER / "callbacks.md", FOLDER / "api" / "callbacks.md"
BEGIN, END = "<!-- callbacks: made by make_callbacks.py -->\n", "<!-- end of callbacks -->\n"

# The folders of fluxcb/callbacks, in the order of the pages. No heading is a name of a callback, so that the anchors of
# the cards are their names.
GROUPS = {
    "metrics": "Metrics and history",
    "progress": "Progress in the terminal",
    "logging": "Logging",
    "hyperparams": "Hyperparameters and schedules",
    "gradients": "Gradients and parameters",
    "augment": "Inputs and labels",
    "inference": "Evaluation on other data",
    "saving": "Saving",
    "stopping": "Stopping",
    "inspect": "Looking inside",
    "system": "Devices, memory, processes",
    "wrappers": "Callbacks from functions and other callbacks",
}
BASES = "Building blocks"


def group_of(name: str) -> str:
    """Return the heading for a public name: that of the folder it is defined in."""
    package, *parents, _ = getattr(library, name).__module__.split(".")
    folder = parents[1] if parents[1:] and (package, parents[0]) == ("fluxcb", "callbacks") else ""
    return GROUPS.get(folder, BASES)


def grouped(names: list[str]) -> dict[str, list[str]]:
    """Return names by heading; headings without a name are left out."""
    groups: dict[str, list[str]] = {heading: [] for heading in [*GROUPS.values(), BASES]}
    for name in names:
        groups[group_of(name)].append(name)
    return {heading: members for heading, members in groups.items() if members}


def card(callback: Listed) -> str:
    """Return the section of one callback."""
    lines = {
        "Reads": ", ".join(f"`{path}`" for path in callback.reads),
        "Writes": ", ".join(re.sub(r"^(\S+)", r"`\1`", path) for path in callback.writes),
        "Runs": "; ".join(map(_marked, callback.runs)) or "only when the Learner is built",
        "Cost": callback.cost,
        "Source": callback.origin,
    }
    facts = "".join(f"- **{title}:** {text}\n" for title, text in lines.items() if text)
    return f"### {callback.name}\n\n`{callback.name}{signature(callback.name)}`\n\n{callback.what}\n\n{facts}"


def signature(name: str) -> str:
    """Return the parameters of a class with their defaults. The types are in the API reference."""
    found = inspect.signature(getattr(library, name))
    plain = [
        parameter.replace(annotation=inspect.Parameter.empty, default=_shown(parameter.default))
        for parameter in found.parameters.values()
    ]
    return str(found.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def _shown(default: Any) -> Any:
    """Return a value that `Signature` prints as a reader would write it: a class or a function by its name."""
    if default is inspect.Parameter.empty or not (inspect.isclass(default) or inspect.isfunction(default)):
        return default
    return type("Name", (), {"__repr__": lambda self: default.__name__})()


def _marked(runs: str) -> str:
    events, _, rest = runs.partition(" x ")
    phase, _, how = rest.partition(" ")
    return f"{', '.join(f'`{event}`' for event in events.split(', '))} × `{phase}` {how}"


def cards() -> str:
    """Return an overview with a link to each card, and the cards."""
    callbacks = {callback.name: callback for callback in listed()}
    groups = grouped(list(callbacks))
    overview = "".join(
        f"- **{heading}:** {', '.join(f'[{name}](#{name.lower()})' for name in names)}\n"
        for heading, names in groups.items()
    )
    sections = [
        f"## {heading}\n\n" + "\n".join(card(callbacks[name]) for name in names) for heading, names in groups.items()
    ]
    return "\n".join(["", overview, *sections, ""])


def api() -> str:
    """Return a list of the public names for each group."""
    groups = grouped(list(library.__all__))
    fences = [
        f"## {heading}\n\n```{{api}} fluxcb.callbacks\n" + "".join(f"{name}\n" for name in names) + "```\n"
        for heading, names in groups.items()
    ]
    return "\n".join(["", *fences, ""])


def made(page: Path) -> str:
    """Return the text of a page with its generated part made anew."""
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + {CARDS: cards, API: api}[page]() + END + rest.partition(END)[2]


if __name__ == "__main__":
    for path in (CARDS, API):
        path.write_text(made(path), encoding="utf-8")
