"""The results of reading a function's source: the state that it uses, and the parts that could not be followed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from fluxcb._declare.access import dotted
from fluxcb._typing import StatePath

__all__ = ["How", "Reading", "Runs", "Touch", "shown"]

How = Literal["reads", "writes", "deletes", "drops", "lists", "calls", "passes"]


class Runs(IntEnum):
    """Whether a line uses the state for certain when it runs."""

    SURELY = 0
    MAYBE = 1  # a name may refer to something else, or the error is caught
    NEVER = 2  # the line cannot be reached with the current values of the callback's fields


@dataclass(frozen=True)
class Touch:
    """One use of a place in the Learner by one line.

    Attributes:
        path: The place, as far as it is known without running the line. Attributes of values count as parts.
        how: `reads`, `writes`, `deletes` an attribute, `drops` an item, `lists` the names or tests whether a name
            exists, `calls` it, or `passes` it to code that is not analyzed.
        where: `Class.method  file:line`.
        part: Whether it is a part of that place whose name is not known.
        runs: How certain the use is.
        note: Where the value is passed to, for messages.
    """

    path: StatePath
    how: How
    where: str
    part: bool = False
    runs: Runs = Runs.SURELY
    note: str = ""


@dataclass(frozen=True)
class Reading:
    """The state that a function uses.

    Attributes:
        touches: The uses, in the order of the source.
        unclear: Places that could not be followed, whatever the access is, each with its location.
    """

    touches: tuple[Touch, ...]
    unclear: tuple[str, ...]


def shown(path: StatePath) -> str:
    """Return a place in the form that handlers use, `learner.step.loss`."""
    return dotted(("learner", *path))
