"""`chief_only`: what a callback that acts on process 0 only must not do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fluxcb._declare.access import Append, dotted, overlap, writes
from fluxcb._declare.dispatch import Entry
from fluxcb._errors import DeclarationError
from fluxcb._typing import StatePath

if TYPE_CHECKING:
    from fluxcb._declare.declared import Declared

__all__ = ["check_chief_only"]

# What all processes train with: it must stay the same on each of them.
_TRAINED_WITH = (
    *((name,) for name in ("params", "model_state", "opt_state", "hyperparams", "data", "model")),
    *(("step", name) for name in ("batch", "xs", "ys")),
)


def check_chief_only(declared: Sequence[Declared]) -> None:
    """Check the callbacks that act on process 0 only.

    Raises:
        DeclarationError: One has a traced handler, writes what the processes train with, or what a callback reads that
            acts on all of them.
    """
    for chief in declared:
        if not chief.callback.chief_only:
            continue
        for entry in chief.callback.handlers():
            if entry.traced:
                raise _traced(chief, entry)
            for path in _written(chief, entry):
                if any(overlap(path, part) for part in _TRAINED_WITH):
                    raise _writes(chief, entry, path)
                for other in declared:
                    if not other.callback.chief_only and any(overlap(path, read) for read in _read(other)):
                        raise _read_by(chief, entry, path, other)


def _written(chief: Declared, entry: Entry) -> Iterator[StatePath]:
    for path, permission in chief.access_of(entry).items():
        # Records for a log may differ; `control` is agreed upon.
        if writes(permission) and not isinstance(permission, Append):
            yield path


def _read(other: Declared) -> Iterator[StatePath]:
    """Iterate over what the handlers of a callback read; who reads everything saves it."""
    for entry in other.callback.handlers():
        for path, permission in other.access_of(entry).items():
            if not isinstance(permission, Append) and path != ("*",):
                yield path


def _traced(chief: Declared, entry: Entry) -> DeclarationError:
    return DeclarationError(
        f"{chief.label} is `chief_only`, and its handler `{entry.name}` of {entry.title()} is traced into the step.",
        where=chief.place_of(entry),
        why="all processes must compile the same step, so a traced handler runs on each of them",
        fix=[
            "move the traced handler into a callback of its own, which is not `chief_only`",
            "remove `chief_only = True`, and test `jax.process_index() == 0` in the host handlers",
        ],
    )


def _writes(chief: Declared, entry: Entry, path: StatePath) -> DeclarationError:
    return DeclarationError(
        f"{chief.label} is `chief_only`, and its handler `{entry.name}` may write `{dotted(path)}`.",
        where=chief.place_of(entry),
        why="process 0 alone would train with another state than the others",
        fix=["remove `chief_only = True`", "declare `Read()` if the handler only reads it"],
    )


def _read_by(chief: Declared, entry: Entry, path: StatePath, other: Declared) -> DeclarationError:
    return DeclarationError(
        f"{chief.label} is `chief_only`, and may write `{dotted(path)}`, which {other.label} reads on every process.",
        where=[chief.place_of(entry), other.where],
        why="the others would never see what process 0 has written, and would go another way",
        fix=[
            f"remove `chief_only = True` from {chief.cls.__name__}",
            f"make {other.cls.__name__} `chief_only`, too",
        ],
    )
