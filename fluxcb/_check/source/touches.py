"""What reading a function's source found: the places it touches, and what could not be followed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Literal

from fluxcb._declare.access import dotted
from fluxcb._typing import StatePath

__all__ = ["How", "Journal", "Reading", "Runs", "Touch", "shown"]

How = Literal["reads", "writes", "deletes", "drops", "asks", "calls", "passes"]


class Runs(IntEnum):
    """Whether a line does what was read out of it, when it runs."""

    SURELY = 0
    MAYBE = 1  # a name there may stand for something else, or the error is caught
    NEVER = 2  # the line is not reached, with this callback's fields as they are


@dataclass(frozen=True)
class Touch:
    """One place in the Learner that one line touches.

    Attributes:
        path: The place, as far as it is known without running the line; attributes of values count as parts.
        how: `reads`, `writes`, `deletes` an attribute, `drops` an item, `asks` whether a name is there (or for the
            names), `calls` it, or `passes` it on to something that is not read.
        where: `Class.method  file:line`.
        part: Whether it is a part of that place whose name is not known.
        runs: Whether it is sure.
        note: What becomes of it, for messages.
    """

    path: StatePath
    how: How
    where: str
    part: bool = False
    runs: Runs = Runs.SURELY
    note: str = ""


@dataclass(frozen=True)
class Reading:
    """What a function touches.

    Attributes:
        touches: The places, in the order of the source.
        unclear: What could not be followed whatever the access is, each with its place.
    """

    touches: tuple[Touch, ...]
    unclear: tuple[str, ...]


class Journal:
    """A reading being made; what was noted since some point can be taken back."""

    def __init__(self) -> None:
        self._touches: list[Touch] = []
        self._unclear: list[str] = []

    def note(self, touch: Touch) -> None:
        """Add a touch."""
        self._touches.append(touch)

    def give_up(self, what: str, where: str) -> None:
        """Add something that cannot be followed."""
        self._unclear.append(f"{what}  {where}")

    def mark(self) -> tuple[int, int]:
        """Return this point."""
        return len(self._touches), len(self._unclear)

    def take_back(self, mark: tuple[int, int]) -> None:
        """Forget what was noted since a point."""
        del self._touches[mark[0] :], self._unclear[mark[1] :]

    def surely(self, mark: tuple[int, int]) -> set[Touch]:
        """Return what was noted since a point and is sure."""
        return {touch for touch in self._touches[mark[0] :] if touch.runs is Runs.SURELY}

    def soften(self, mark: tuple[int, int], sure: set[Touch]) -> None:
        """Let nothing that was noted since a point be sure but this."""
        for position, touch in enumerate(self._touches[mark[0] :], mark[0]):
            if touch.runs is Runs.SURELY and touch not in sure:
                self._touches[position] = replace(touch, runs=Runs.MAYBE)

    def reading(self) -> Reading:
        """Return what was found, each thing once: the surer of two touches that are alike otherwise."""
        found: dict[Touch, Runs] = {}
        for touch in self._touches:
            alike = replace(touch, runs=Runs.SURELY)
            found[alike] = min(touch.runs, found.get(alike, touch.runs))
        touches = tuple(replace(touch, runs=runs) for touch, runs in found.items())
        return Reading(touches, tuple(dict.fromkeys(self._unclear)))


def shown(path: StatePath) -> str:
    """Return a place as handlers write it, `learner.step.loss`."""
    return dotted(("learner", *path))
