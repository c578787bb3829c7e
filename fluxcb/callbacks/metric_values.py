"""What metrics leave behind on the host: values per epoch, and values per step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fluxcb._errors import did_you_mean

__all__ = ["EpochValues", "StepValues"]


class EpochValues:
    """The epoch values of one phase's metrics, by name.

    Attributes:
        values: For each metric, `(epoch, value)` pairs in the order in which the epochs ended.
    """

    def __init__(self) -> None:
        self.values: dict[str, list[tuple[int, float]]] = {}

    def add(self, name: str, epoch: int, value: float) -> None:
        """Note an epoch's value."""
        self.values.setdefault(name, []).append((epoch, value))

    def cut(self, epoch: int) -> None:
        """Drop the values of epochs after this one."""
        for name, pairs in self.values.items():
            if pairs and pairs[-1][0] > epoch:
                self.values[name] = [pair for pair in pairs if pair[0] <= epoch]
        self.values = {name: pairs for name, pairs in self.values.items() if pairs}

    def cbstate_part(self, name: str, *, writable: bool) -> list[tuple[int, float]]:
        """Return the pairs of a metric, for access to `cbstate.metrics_epoch.<phase>.<name>`.

        Raises:
            KeyError: The metric has no pairs, and the access is not for adding some.
        """
        return self.values.setdefault(name, []) if writable else self.values[name]

    def last(self, name: str) -> float:
        """Return a metric's latest value.

        Raises:
            KeyError: It has none.
        """
        if not self.values[name]:
            raise KeyError(name)
        return self.values[name][-1][1]

    def at(self, epoch: int) -> dict[str, float]:
        """Return the values of one epoch, by metric; the last one if the phase ran several times in it."""
        found = {}
        for name, pairs in self.values.items():
            for number, value in reversed(pairs):
                if number <= epoch:
                    if number == epoch:
                        found[name] = value
                    break
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the values by metric: `{"epochs": [n], "values": [n]}`."""
        return {n: {"epochs": [e for e, _ in p], "values": [v for _, v in p]} for n, p in self.values.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned, in place of what is there."""
        self.values = {n: list(zip(of["epochs"], of["values"], strict=True)) for n, of in state.items()}

    def __getitem__(self, name: str) -> list[tuple[int, float]]:
        return self.values[name]

    def __getattr__(self, name: str) -> list[tuple[int, float]]:  # `values.loss`
        return _by_attribute(self, name)

    def __contains__(self, name: object) -> bool:
        return name in self.values

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.values))

    def __len__(self) -> int:
        return len(self.values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EpochValues) and self.values == other.values

    def __hash__(self) -> int:
        raise TypeError("an EpochValues changes, and cannot be hashed")

    def __repr__(self) -> str:
        return f"EpochValues({self.values!r})"


class StepValues:
    """The step values of one phase's metrics.

    Attributes:
        steps: Step numbers (1 is the first training step ever).
        values: For each metric, its value at each of these steps.
        seen: Number of the last step that was looked at.
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: dict[str, list[float]] = {}
        self.seen = 0

    def cut(self, step: int) -> None:
        """Drop the values of steps after this one."""
        if self.seen <= step:
            return
        kept = sum(number <= step for number in self.steps)
        self.steps = self.steps[:kept]
        self.values = {name: column[:kept] for name, column in self.values.items()}
        self.seen = step

    def add(self, steps: list[int], columns: dict[str, list[float]]) -> None:
        """Add the values of some steps; a metric that is new, or missing, is NaN where it has no value."""
        nan = float("nan")
        for name in columns:  # in the order of the metrics, which a set would lose
            self.values.setdefault(name, [nan] * len(self.steps))
        for name, values in self.values.items():
            values.extend(columns.get(name) or [nan] * len(steps))
        self.steps.extend(steps)

    def cbstate_part(self, name: str, *, writable: bool) -> list[float]:
        """Return the values of a metric, for access to `cbstate.metrics_step.<phase>.<name>`.

        Raises:
            KeyError: The metric has no values.
        """
        return self.values[name]

    def state_dict(self) -> dict[str, Any]:
        """Return steps, values by metric, and the last step looked at."""
        return {"steps": list(self.steps), "values": {n: list(v) for n, v in self.values.items()}, "seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned, in place of what is there."""
        self.steps, self.values, self.seen = state["steps"], state["values"], state["seen"]

    def __getitem__(self, name: str) -> list[float]:
        return self.values[name]

    def __getattr__(self, name: str) -> list[float]:  # `values.loss`
        return _by_attribute(self, name)

    def __contains__(self, name: object) -> bool:
        return name in self.values

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.values))

    def __len__(self) -> int:
        return len(self.steps)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StepValues):
            return False
        return (self.steps, self.values, self.seen) == (other.steps, other.values, other.seen)

    def __hash__(self) -> int:
        raise TypeError("a StepValues changes, and cannot be hashed")

    def __repr__(self) -> str:
        return f"StepValues({len(self.steps)} steps of {', '.join(self.values) or 'nothing'})"


def _by_attribute(values: EpochValues | StepValues, name: str) -> Any:
    held = vars(values).get("values", {})  # `copy` and `pickle` call this before there are attributes
    if name in held:
        return held[name]
    raise AttributeError(f"{type(values).__name__} has no `{name}`.{did_you_mean(name, held)}")
