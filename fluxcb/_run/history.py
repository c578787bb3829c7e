"""`History`, which `Learner.fit` returns: the metrics of a training run, and the reason it ended."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from fluxcb._calls import Constructed, entry_point
from fluxcb._errors import DeclarationError, did_you_mean, nearest

__all__ = ["History"]

_ATTRIBUTES = ("per_epoch", "per_step", "epoch", "step", "stop_reason", "commands", "plot")
"""The names that a misspelled attribute can mean."""

Series = dict[str, dict[str, list[tuple[int, Any]]]]
"""Pairs of an epoch (or step) and a value, by phase and metric."""


class _ByName(dict[str, Any]):
    """A dict whose error for a missing name suggests a name that exists."""

    def __missing__(self, name: Any) -> Any:
        raise KeyError(f"{name!r} is not among {list(self)}.{did_you_mean(str(name), self)}")


def _by_name(series: Mapping[str, Mapping[str, Any]]) -> Series:
    return _ByName({phase: _ByName(metrics) for phase, metrics in series.items()})


class History(Constructed, Mapping[str, list[Any]]):
    """The metrics of a training run and the reason it ended, as returned by `Learner.fit`.

    A history is a copy, so later fits do not change it. It covers the whole training run, not only the last fit. After
    a resume, it includes the part before the interruption.

    A history is a mapping of names to values per epoch. The names are those that `LogMetrics` logs, so
    `history["validation/loss"]` is a list with one value per epoch. Without the callback `Metrics`, the mapping is
    empty. The values of a metric with a shape, such as `ConfusionMatrix`, are NumPy arrays.

    Args:
        per_epoch: See Attributes.
        per_step: See Attributes.
        epoch: See Attributes.
        step: See Attributes.
        stop_reason: See Attributes.
        commands: See Attributes.

    Attributes:
        per_epoch: `per_epoch[phase][metric]` is a list of `(epoch, value)`; phases are names, such as "training".
        per_step: `per_step[phase][metric]` is a list of `(step, value)`.
        epoch: Number of the last epoch.
        step: Number of finished training steps.
        stop_reason: Why the last fit ended early, or None if it ran to its end.
        commands: The commands that a `ControlFile` has applied, in order: dicts with `id`, `action`, `name`, `value`
            and `step`.

    Example:
        >>> from fluxcb.callbacks import Metrics
        >>> from fluxcb.testing import testlearner
        >>> history = testlearner(Metrics()).fit(3)
        >>> list(history)
        ['training/loss', 'validation/loss']
        >>> history["training/loss"][0] > history["training/loss"][-1]
        True
        >>> history.per_epoch["validation"]["loss"][-1] == (3, history["validation/loss"][-1])
        True
        >>> len(history.per_step["training"]["loss"]), history.stop_reason
        (12, None)

    Source:
        Keras, `History`.
    """

    def __init__(
        self,
        per_epoch: Series,
        per_step: Series,
        *,
        epoch: int,
        step: int,
        stop_reason: str | None = None,
        commands: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        self.per_epoch = _by_name(per_epoch)
        self._step_columns = {
            phase: {name: ([n for n, _ in pairs], [value for _, value in pairs]) for name, pairs in metrics.items()}
            for phase, metrics in per_step.items()
        }
        self.epoch = epoch
        self.step = step
        self.stop_reason = stop_reason
        self.commands = [dict(command) for command in commands]

    @classmethod
    @entry_point
    def of(cls, cbstate: Mapping[str, Any], *, epoch: int, step: int, stop_reason: str | None) -> History:
        """Copy the metrics that `Metrics` has stored in the shared state, and the commands of a `ControlFile`.

        Args:
            cbstate: The shared state; `metrics_epoch`, `metrics_step` and `commands` may be missing.
            epoch: Number of the last epoch.
            step: Number of finished training steps.
            stop_reason: Why the last fit ended early, or None.
        """
        # Without `Metrics`, these entries do not exist.
        by_epoch, by_step = cbstate.get("metrics_epoch", {}), cbstate.get("metrics_step", {})
        history = cls(
            # The lists are copied, so that later fits do not change the history.
            {phase: {name: list(values[name]) for name in values} for phase, values in by_epoch.items()},
            {},
            epoch=epoch,
            step=step,
            stop_reason=stop_reason,
            commands=cbstate.get("commands", ()),
        )
        # Every fit returns a history of all steps so far. Copying two lists is several times faster than pairing them.
        history._step_columns = {
            phase: {name: (list(values.steps), list(values[name])) for name in values}
            for phase, values in by_step.items()
        }
        return history

    @functools.cached_property
    def per_step(self) -> Series:
        """`per_step[phase][metric]` is a list of `(step, value)`."""
        return _by_name(
            {
                phase: {name: list(zip(steps, values, strict=True)) for name, (steps, values) in metrics.items()}
                for phase, metrics in self._step_columns.items()
            }
        )

    if not TYPE_CHECKING:  # type checkers must report unknown attributes

        @entry_point
        def __getattr__(self, name: str) -> Any:
            # Copying and pickling look up such names, before the attributes exist.
            if name.startswith("_") or name in _ATTRIBUTES:
                return object.__getattribute__(self, name)  # raises the usual error
            what, fix = f"A History has no attribute `{name}`.", 'write e.g. `history["training/loss"]`'
            if name == "history":  # the name in Keras
                what = "A History has no attribute `history`, because it is the mapping itself."
            elif name in ("best", "best_epoch"):
                fix = 'write e.g. `min(history["validation/loss"])`, or `max(...)` for a metric such as the accuracy'
            elif name in ("save", "to_csv", "to_json"):
                fix = "write e.g. `json.dump(history.per_epoch, file)`"
            elif name in ("epochs", "n_epochs", "current_epoch"):
                fix = "read `history.epoch`"
            elif name in ("steps", "global_step"):
                fix = "read `history.step`"
            elif found := self._named(name):
                fix = f'write `history["{found}"]`'
            elif near := nearest(name, _ATTRIBUTES):
                what, fix = f"{what} Did you mean `{near}`?", f"write `history.{near}`"
            elif name != "metrics":
                return object.__getattribute__(self, name)  # raises the usual error
            raise AttributeError(str(DeclarationError(what, fix=fix)), name=name)

        def _named(self, name: str) -> str:
            """Return the entry that a name such as `loss`, `val_loss` or `training` means, or an empty string."""
            phases = {"val": "validation", "train": "training"}
            first, _, rest = name.partition("_")
            wanted = f"{phases[first]}/{rest}" if first in phases else name
            found = next((entry for entry in self if wanted == entry or wanted in entry.split("/", 1)), "")
            metric = nearest(wanted, [entry.split("/", 1)[1] for entry in self])
            return found or next((entry for entry in self if metric and entry.endswith(f"/{metric}")), "")

    # -- the mapping ------------------------------------------------------------------------

    @entry_point
    def __getitem__(self, name: str) -> list[Any]:
        phase, _, metric = name.partition("/") if isinstance(name, str) else ("", "", "")
        found = self.per_epoch.get(phase, {}).get(metric)
        if found is None:
            # A KeyError instead of a FluxcbError, because `Mapping.get` and `in` expect it.
            if not any(self):
                raise KeyError(f"{name!r}: the history has no metrics. Add `Metrics()` to the callbacks.")
            raise KeyError(f"{name!r} is not among {list(self)}.{self._hint(str(name))}")
        return [value for _, value in found]

    def _hint(self, name: str) -> str:
        fitting = [f"`{known}`" for known in self if known.endswith(f"/{name}")]  # a metric without its phase
        return f" Did you mean {' or '.join(fitting)}?" if fitting else did_you_mean(name, self)

    def __iter__(self) -> Iterator[str]:
        return (f"{phase}/{metric}" for phase, metrics in self.per_epoch.items() for metric in metrics)

    def __len__(self) -> int:
        return sum(map(len, self.per_epoch.values()))

    # -- other forms ------------------------------------------------------------------------

    @entry_point
    def to_dict(self) -> dict[str, Any]:
        """Return the history as plain data that `json.dumps` accepts.

        Returns:
            A dict with the keys `epoch`, `step`, `stop_reason`, `commands`, `per_epoch` and `per_step`. `per_epoch`
            contains, by phase and metric, `{"epochs": [n], "values": [x]}`, and `per_step`
            `{"steps": [n], "values": [x]}`. Arrays become nested lists.
        """
        return {
            "epoch": self.epoch,
            "step": self.step,
            "stop_reason": self.stop_reason,
            "commands": [dict(command) for command in self.commands],
            "per_epoch": _columns(self.per_epoch, "epochs"),
            "per_step": _columns(self.per_step, "steps"),
        }

    @entry_point
    def to_dataframe(self, per: Literal["epoch", "step"] = "epoch") -> Any:
        """Return a pandas DataFrame with a column for each metric.

        Args:
            per: "epoch" for a row per epoch, "step" for a row per training step.

        Returns:
            The DataFrame; its index is the number of the epoch or step, and its columns are named like
            `validation/loss`. Missing values are NaN. If a phase ran several times in one epoch, its last value is
            used. Metrics whose values are arrays have no column; `history[name]` returns the arrays.

        Raises:
            DeclarationError: `per` is neither "epoch" nor "step", or pandas is not installed.
        """
        if per not in ("epoch", "step"):
            raise DeclarationError(
                f'`per` of `History.to_dataframe` must be "epoch" or "step", not {per!r}.', fix='write `per="step"`'
            )
        try:
            # Not a dependency of fluxcb, because only this method needs it.
            import pandas
        except ImportError:
            raise DeclarationError(
                "`History.to_dataframe` needs pandas, which is not installed.",
                fix=["run `pip install pandas`", "use `history.to_dict()`, which needs no other package"],
            ) from None
        series = self.per_epoch if per == "epoch" else self.per_step
        columns = {
            # A phase can run several times in an epoch. `dict` keeps its last value.
            f"{phase}/{name}": dict(pairs)
            for phase, metrics in series.items()
            for name, pairs in metrics.items()
            if not _has_arrays(pairs)
        }
        index = sorted({number for pairs in columns.values() for number in pairs})
        return pandas.DataFrame(
            # Phases can run in different epochs, so a column can have gaps.
            {name: [pairs.get(number, float("nan")) for number in index] for name, pairs in columns.items()},
            index=pandas.Index(index, name=per),
        )

    @entry_point
    def plot(self, *names: str, ax: Any = None) -> Any:
        """Draw metrics over epochs or steps; equivalent to `fluxcb.plots.plot_metrics(history, *names, ax=ax)`."""
        from fluxcb.plots import plot_metrics

        return plot_metrics(self, *names, ax=ax)

    def __repr__(self) -> str:
        last = []
        for phase, metrics in self.per_epoch.items():
            for name, pairs in metrics.items():
                epoch, value = pairs[-1]
                if not _is_array(value):
                    # Without the number, an old value would pass for that of the last epoch.
                    of = "" if epoch == self.epoch else f" (epoch {epoch})"
                    last.append(f"{phase}/{name}={value:.4g}{of}")
        stopped = [f"stop_reason={self.stop_reason!r}"] if self.stop_reason is not None else []
        return f"History({', '.join([f'epoch={self.epoch}', f'step={self.step}', *last, *stopped])})"


def _plain(value: Any) -> Any:
    return value.tolist() if _is_array(value) else value


def _has_arrays(pairs: list[tuple[int, Any]]) -> bool:
    return any(_is_array(value) for _, value in pairs)


def _columns(series: Series, number: str) -> dict[str, Any]:
    return {
        phase: {
            name: {
                number: [n for n, _ in pairs],
                "values": [_plain(value) for _, value in pairs],
            }
            for name, pairs in metrics.items()
        }
        for phase, metrics in series.items()
    }


def _is_array(value: Any) -> bool:
    # NumPy scalars have a shape as well, which is empty.
    return getattr(value, "shape", ()) != ()
