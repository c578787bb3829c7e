"""The exchange of values between the members of a population."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Meeting", "Share"]


@dataclass(frozen=True, eq=False)
class Share:
    """A value that a member shares with the others.

    Attributes:
        owner: The name of the callback.
        value: The value.
    """

    owner: str
    value: Any


class Meeting:
    """The place where the callbacks of all members exchange values while the population trains.

    Attributes:
        ended: The reasons of the members that have ended in the current fit, by member.
    """

    def __init__(self) -> None:
        self._park: Sequence[Callable[[Any], Any]] = ()
        self.ended: dict[int, str] = {}

    def open(self, park: Sequence[Callable[[Any], Any]]) -> None:
        """Begin a fit; `park` waits, by member, until the values of all members have been exchanged."""
        self._park, self.ended = park, {}

    def close(self) -> None:
        """End a fit."""
        self._park = ()

    def share(self, owner: str, member: int, value: Any) -> dict[int, Any]:
        """Share a value with all members that still train, and return their values by member, in order."""
        # A member that is trained alone, with its own `fit`, is the only one.
        return self._park[member](Share(owner, value)) if self._park else {member: value}
