"""How a program differs from the run whose checkpoint it restores, and which differences the user allows."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fluxcb._declare.described import CODE
from fluxcb._errors import DeclarationError, did_you_mean
from fluxcb._terminal import escape_line

__all__ = [
    "DIFFERENCES",
    "Change",
    "allows",
    "check_allowed",
    "check_allowed_names",
    "check_resume",
    "explained",
    "find_changes",
    "reordered",
]

DIFFERENCES = ("callbacks", "data", "hyperparams", "key")
"""The parts of a run that `allow` names, alone or with the name of a part: `hyperparams.learning_rate`."""

About = Mapping[str, Any]
"""A description of a run; see `Snapshot.about`."""


@dataclass(frozen=True)
class Change:
    """A difference that does not prevent a run from resuming.

    Attributes:
        path: What differs, e.g. `hyperparams.learning_rate`.
        saved: The value of the saved run.
        program: The value of the program that resumes it.
        used: The value with which the run continues, "saved" or "program".
    """

    path: str
    saved: str
    program: str
    used: str


def allows(allow: Collection[str], path: str) -> bool:
    """Return whether the user allows a difference at a path, by its name or by the name of a part that contains it."""
    return any(path == name or path.startswith(f"{name}.") for name in allow)


def check_allowed(allow: Any, call: str) -> None:
    """Check the argument `allow`, as far as possible without a checkpoint.

    Args:
        allow: The argument.
        call: A call with the argument that works, for the message.

    Raises:
        DeclarationError: It is not a collection of paths.
    """
    fits = isinstance(allow, Collection) and not isinstance(allow, str | bytes)
    if fits and all(isinstance(name, str) and name.partition(".")[0] in DIFFERENCES for name in allow):
        return
    if isinstance(allow, str) and allow.partition(".")[0] in DIFFERENCES:  # the comma of the tuple is missing
        call = re.sub(r"allow=\(.*?\)", lambda _: f'allow=("{allow}",)', call)
    raise DeclarationError(
        f"`allow` takes some of {DIFFERENCES}, or parts of them such as 'hyperparams.learning_rate', not {allow!r}.",
        fix=f"write e.g. `{call}`",
    )


def check_resume(resume: Any, owner: str = "learner") -> None:
    """Check the argument `resume`. The path of a checkpoint would have the effect of True, and another run be resumed.

    Args:
        resume: The argument.
        owner: The Learner of which the message says how to restore a checkpoint.

    Raises:
        DeclarationError: It is not a bool.
    """
    if not isinstance(resume, bool):
        raise DeclarationError(
            f"`resume` must be True or False, not {resume!r}.",
            why="`fit` continues the run in the directory of the `Checkpointer` among the callbacks",
            fix=[
                "write `resume=True`",
                f"to continue from another checkpoint, call `{owner}.restore(path)` before `fit`",
            ],
        )


def check_allowed_names(allow: Collection[str], saved: About, program: About) -> None:
    """Check that `allow` names parts that exist, so that a misspelled name does not keep a saved value.

    Raises:
        DeclarationError: Neither the saved run nor the program has a part of this name.
    """
    for path in allow:
        kind, _, name = path.partition(".")
        if kind == "key":
            if name:
                raise DeclarationError(f"`allow` names `{path}`, but `key` has no parts.", fix='write "key"')
            continue
        known = dict.fromkeys([*saved[kind], *program[kind]])
        # A group of hyperparameters, or an argument of a callback, also has a name.
        if name and not any(f"{n}.".startswith(f"{name}.") or f"{name}.".startswith(f"{n}.") for n in known):
            raise DeclarationError(
                f"`allow` names `{path}`, which does not exist.{did_you_mean(path, [f'{kind}.{n}' for n in known])}",
                fix=f'write "{kind}" to allow all of them',
            )


def find_changes(saved: About, program: About, programs: Mapping[str, str], allow: Collection[str]) -> list[Change]:
    """Return the differences that do not prevent the run from resuming.

    Args:
        saved: The description of the saved run.
        program: The description of this run.
        programs: The kinds of programs that this run will use.
        allow: The allowed differences.
    """
    changes = [
        Change(f"hyperparams.{name}", _numbers(then), _numbers(now), used)
        for name, then in saved["hyperparams"].items()
        if (now := program["hyperparams"].get(name, then)) != then
        for used in ["program" if allows(allow, f"hyperparams.{name}") else "saved"]
    ]
    # Checkpoints of earlier versions do not contain the key with which the run began.
    if (then := saved.get("key", program["key"])) != program["key"]:
        changes.append(Change("key", then, program["key"], "program" if allows(allow, "key") else "saved"))
    changes += _rows("callbacks.", saved["callbacks"], program["callbacks"])
    # Other versions have other bytecode. The row of the version is enough then.
    compares_code = saved["versions"] == program["versions"]
    for name, then in saved["arguments"].items():
        now = program["arguments"].get(name)
        # If the class differs, the row of the class is enough.
        if now is not None and saved["callbacks"][name] == program["callbacks"][name]:
            changes += _rows(f"callbacks.{name}.", then, now, compares_code=compares_code)
    changes += _rows("optimizer.", saved["optimizer"], program["optimizer"], compares_code=compares_code)
    lengths = ({name: str(data["batches"]) for name, data in of["data"].items()} for of in (saved, program))
    changes += _rows("data.", *lengths)
    for name, data in saved["data"].items():
        then, now = data.get("order", {}), program["data"].get(name, {}).get("order", {})
        changes += _rows(f"data.{name}.", *_known_in_both(then, now))
    changes += _rows("fit.", *_known_in_both(saved.get("fit", {}), program.get("fit", {})))
    changes += _rows("programs.", saved["programs"], programs)
    changes += _rows("versions.", saved["versions"], program["versions"])
    (*devices, mesh), (*devices_now, mesh_now) = saved["devices"], program["devices"]
    changes += _rows("", {"devices": str(devices), "mesh": mesh}, {"devices": str(devices_now), "mesh": mesh_now})
    return changes


def reordered(changes: Iterable[Change], phases: Collection[str]) -> bool:
    """Return whether the batches of one of these phases have other examples than in the saved run."""
    return any(change.path.startswith(f"data.{phase}.") for change in changes for phase in phases)


def _known_in_both(*parts: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the entries that are in all mappings. Earlier versions, and other kinds of sources, lack some of them."""
    return [{name: text for name, text in part.items() if all(name in of for of in parts)} for part in parts]


def _rows(
    prefix: str, saved: Mapping[str, str], program: Mapping[str, str], *, compares_code: bool = True
) -> list[Change]:
    return [
        Change(prefix + name, saved.get(name, "-"), program.get(name, "-"), "program")
        for name in dict.fromkeys([*saved, *program])
        if saved.get(name) != program.get(name) and (compares_code or not name.endswith(f".{CODE}"))
    ]


def _numbers(values: Iterable[Any]) -> str:
    # The values are those of float32. NumPy writes as many digits as tell them apart, at most 9: 0.1, not 0.100000001.
    numbers = (float(str(np.float32(value))) if isinstance(value, float) else value for value in values)
    return ", ".join(f"{value:.9g}" if isinstance(value, int | float) else str(value) for value in numbers)


def explained(changes: Collection[Change], *, can_allow: bool) -> str:
    """Return a table of the changes. If `can_allow`, a line below the table shows how to allow a change."""
    head = Change("path", "saved", "program", "used")
    cells = [[escape_line(text) for text in vars(row).values()] for row in (head, *changes)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in cells]
    kept = [change.path for change in changes if change.used == "saved" and can_allow]
    if "key" in kept:
        kept.remove("key")
        lines.append("To use the program's key from here on, pass `allow=('key',)`.")
    if kept:
        lines.append(f"To use the program's value of a hyperparameter, pass e.g. `allow=({kept[0]!r},)`.")
    return "\n".join(f"  {line.rstrip()}" for line in lines)
