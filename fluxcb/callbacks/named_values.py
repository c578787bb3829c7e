"""`NamedValues`, the base class of what callbacks record by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from fluxcb._calls import Constructed
from fluxcb._errors import did_you_mean

__all__ = ["NamedValues"]


class NamedValues(Constructed):
    """Values that a callback records, as a mapping from their names that only the callback changes.

    Subclasses define `__eq__`, which makes their instances unhashable. They are mutable, so this is right.

    Attributes:
        values: The values by name.
        recorded_by: A sentence for errors that says how to record further values.
    """

    values: dict[str, Any]
    recorded_by: ClassVar[str] = ""

    def __getitem__(self, name: str) -> Any:
        if name not in self.values:
            known = ", ".join(map(repr, self.values)) or "nothing"
            if not isinstance(name, str):
                raise KeyError(f"{name!r} is not the name of a metric. Recorded so far: {known}.")
            hint = " Epoch values are recorded at EpochEnd of their phase. Trigger comes after the validation."
            nearest = did_you_mean(name, self.values)
            text = f"`{name}` has no values yet.{nearest} Recorded so far: {known}."
            further = "" if nearest or not self.recorded_by else f" {self.recorded_by}"
            raise KeyError(text + (further if self.values else hint))
        return self.values[name]

    def __contains__(self, name: object) -> bool:
        return name in self.values

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.values))  # a list, so that the caller can add values while iterating

    def __len__(self) -> int:
        return len(self.values)
