"""The recorded values of metrics on the host: `EpochValues` and `StepValues`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxcb._errors import did_you_mean
from fluxcb.callbacks.named_values import NamedValues

__all__ = ["EpochValues", "StepValues", "is_array"]

_RECORDED_BY = "`Metrics(function)` records further metrics, such as `Metrics(accuracy)`."


class EpochValues(NamedValues):
    """The epoch values of the metrics of one phase, by name.

    Attributes:
        values: For each metric, `(epoch, value)` pairs in the order in which the epochs ended. A value is a float, or a
            NumPy array if the metric has a shape.
    """

    recorded_by = _RECORDED_BY

    def __init__(self) -> None:
        self.values: dict[str, list[tuple[int, Any]]] = {}

    def add(self, name: str, epoch: int, value: Any) -> None:
        """Append the value of an epoch, a float or a NumPy array."""
        self.values.setdefault(name, []).append((epoch, value))

    def cut(self, epoch: int) -> None:
        """Drop the values of epochs after this one."""
        for name, pairs in self.values.items():
            if pairs and pairs[-1][0] > epoch:
                self.values[name] = [pair for pair in pairs if pair[0] <= epoch]
        self.values = {name: pairs for name, pairs in self.values.items() if pairs}

    def cbstate_part(self, name: str, *, writable: bool) -> list[tuple[int, Any]]:
        """Return the pairs of a metric, for access to `cbstate.metrics_epoch.<phase>.<name>`.

        Raises:
            KeyError: The metric has no pairs, and the access is read-only.
        """
        return self.values.setdefault(name, []) if writable else self.values[name]

    def last(self, name: str) -> Any:
        """Return the latest value of a metric, a float or a NumPy array.

        Raises:
            KeyError: The metric has no values.
        """
        if not self[name]:
            raise KeyError(name)
        return self[name][-1][1]

    def at(self, epoch: int) -> dict[str, float]:
        """Return the numbers of an epoch, by metric. If the phase ran several times in it, the last run counts."""
        return {name: value for name, value in self._at(epoch).items() if not is_array(value)}

    def arrays_at(self, epoch: int) -> dict[str, Any]:
        """Return the arrays of an epoch, by metric. If the phase ran several times in it, the last run counts."""
        return {name: value for name, value in self._at(epoch).items() if is_array(value)}

    def _at(self, epoch: int) -> dict[str, Any]:
        latest = {}
        for name, pairs in self.values.items():
            for number, value in reversed(pairs):  # usually the epoch is the last one, or among the last
                if number <= epoch:
                    if number == epoch:
                        latest[name] = value
                    break
        return latest

    def state_dict(self) -> dict[str, Any]:
        """Return `{"epochs": [...], "values": [...]}` for each metric."""
        return {n: {"epochs": [e for e, _ in p], "values": [v for _, v in p]} for n, p in self.values.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the values by what `state_dict` returned.

        Raises:
            TypeError: The epochs or values of a metric are not lists.
        """
        if not all(isinstance(saved[part], list) for saved in state.values() for part in ("epochs", "values")):
            raise TypeError("the epochs and values of a metric are not lists")
        self.values = {n: list(zip(saved["epochs"], saved["values"], strict=True)) for n, saved in state.items()}

    def __getattr__(self, name: str) -> list[tuple[int, Any]]:  # `values.loss`
        return _by_attribute(self, name)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, EpochValues) or self.values.keys() != other.values.keys():
            return False
        return all(_same_pairs(pairs, other.values[name]) for name, pairs in self.values.items())

    def __repr__(self) -> str:
        return f"EpochValues({self.values!r})"


class StepValues(NamedValues):
    """The step values of the metrics of one phase.

    Attributes:
        steps: Step numbers. The first training step of a run is number 1.
        values: For each metric, its value at each of these steps.
        seen: Number of the last step that was processed, even if it has no values.
    """

    recorded_by = _RECORDED_BY

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.values: dict[str, list[float]] = {}
        self.seen = 0

    def cut(self, step: int) -> None:
        """Drop the values of steps after this one."""
        if self.seen <= step:
            return
        count = sum(number <= step for number in self.steps)
        self.steps = self.steps[:count]
        self.values = {name: column[:count] for name, column in self.values.items()}
        self.seen = step

    def add(self, steps: list[int], columns: dict[str, list[float]]) -> None:
        """Append the values of some steps. A metric is NaN at the steps for which it has no value."""
        nan = float("nan")
        for name in columns:  # not a set of new names, which would lose the order of the metrics
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
        """Return the steps, the values by metric, and the number of the last step that was processed."""
        return {"steps": list(self.steps), "values": {n: list(v) for n, v in self.values.items()}, "seen": self.seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the values by what `state_dict` returned.

        Raises:
            TypeError: The steps or the values of a metric are not lists.
        """
        if not all(isinstance(numbers, list) for numbers in (state["steps"], *state["values"].values())):
            raise TypeError("the steps and values of a metric are not lists")
        self.steps, self.values, self.seen = state["steps"], state["values"], state["seen"]

    def __getattr__(self, name: str) -> list[float]:  # `values.loss`
        return _by_attribute(self, name)

    def __len__(self) -> int:
        return len(self.steps)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StepValues):
            return False
        return (self.steps, self.values, self.seen) == (other.steps, other.values, other.seen)

    def __repr__(self) -> str:
        return f"StepValues({len(self.steps)} steps of {', '.join(self.values) or 'nothing'})"


def is_array(value: Any) -> bool:
    """Return whether the value of a metric is an array instead of a number."""
    return hasattr(value, "shape") and value.shape != ()


def _same_pairs(one: list[tuple[int, Any]], other: list[tuple[int, Any]]) -> bool:
    if not any(is_array(value) for _, value in (*one, *other)):
        return one == other
    import numpy as np

    return [epoch for epoch, _ in one] == [epoch for epoch, _ in other] and all(
        np.array_equal(a, b, equal_nan=True) for (_, a), (_, b) in zip(one, other, strict=True)
    )


def _by_attribute(values: EpochValues | StepValues, name: str) -> Any:
    by_name = vars(values).get("values", {})  # `copy` and `pickle` call `__getattr__` before `__init__` has run
    if name in by_name:
        return by_name[name]
    empty = "" if by_name else " It has no values before the end of the first step or epoch of its phase."
    raise AttributeError(f"{type(values).__name__} has no `{name}`.{did_you_mean(name, by_name)}{empty}")
