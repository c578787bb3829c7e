"""`MetricsPrinter`: print a table of the metrics with one row per epoch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any

from fluxcb._declare.access import Read
from fluxcb._declare.callback import Callback, unwrap
from fluxcb._declare.events import EpochBegin, Event, FitBegin, FitEnd, Trigger
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb.callbacks.gradients.average import StochasticWeightAveraging
from fluxcb.callbacks.progress.console import console_for
from fluxcb.callbacks.progress.epoch_table import EpochTable, open_table
from fluxcb.logging.consoles import text_file

__all__ = ["MetricsPrinter"]


_SHORT = {"training": "train", "validation": "valid"}

_METRICS = {"cbstate": {"metrics_epoch": Read()}}
_WHAT_RUNS = {"callbacks": Read(), "data": Read(previous=True)}


class MetricsPrinter(Callback):
    """Print a table of the metrics, with one row per epoch for training and the validation that follows it.

    The header is printed when the fit begins, with the metrics that the callbacks declare (`provided_metrics`). No
    header is printed if a fit resumes a run that is complete or was stopped, because no step will run. If a row has
    additional metrics, a new header is printed before it. A metric without a value in this epoch is shown as `-`.
    Metrics whose values are arrays have no column.

    If a callback such as `ParameterEMA` replaces the parameters for validation, a line above the header names the
    average that the validation uses. If the fit resumes a run, another line tells where.

    A row is printed at Trigger, which is emitted after the epoch's validation. If the fit is cancelled within an epoch,
    the row of that epoch is printed at FitEnd. The column `time` is the time since the previous row (seconds).

    In a notebook, the table is a single output that is updated in place. It shows the last 50 rows while the fit runs,
    and up to 1,000 rows at its end.

    Args:
        file: Where to print; standard output by default. A `ProgressBar` of the same file stays below the table.

    Access:
        cbstate.metrics_epoch: Read.
        callbacks: Read.
        data: Read (from an earlier moment).

    Runs:
        FitBegin x Phase, Trigger x AbstractTrainingPhase, FitEnd x Phase (host).

    Cost:
        Prints one line per epoch.

    Raises:
        MissingStateError: There is no `Metrics` (when the Learner is built).

    Example:
        >>> import io, jax.numpy as jnp, optax, fluxcb
        >>> from fluxcb.callbacks import Metrics, MetricsPrinter
        >>> learner = fluxcb.Learner.from_loss(
        ...     {"w": jnp.ones(())},
        ...     lambda params, batch, key: jnp.mean(params["w"] * batch),
        ...     optax.sgd(0.5),
        ...     data=([jnp.ones(2)], [jnp.ones(2)]),
        ...     callbacks=[Metrics(), MetricsPrinter(file := io.StringIO())],
        ...     default_callbacks=False,
        ... )
        >>> history = learner.fit(2)
        >>> print(file.getvalue().rstrip())
        epoch  train loss  valid loss     time
            1      1.0000      0.5000 ...
            2      0.5000      0.0000 ...

    Source:
        FluxTraining.jl, `MetricsPrinter`; tensorpack, `ScalarPrinter`.
    """

    chief_only = True  # one process prints

    def __init__(self, file: IO[str] | None = None) -> None:
        self.file = text_file(file, "MetricsPrinter")
        self._table: EpochTable | None = None

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the declared access; see the class docstring."""
        return {**_METRICS, **_WHAT_RUNS}

    @on(FitBegin, Phase)
    def begin_fit(self, event: FitBegin, phase: Phase, learner: LearnerView) -> None:
        """Begin a table, and print its header if the names of the metrics are known."""
        progress = learner.progress
        # An epoch in which the fit resumes has no row yet, or only one without the values of its validation.
        printed = progress.epoch - 1 if event.within_epoch else progress.epoch
        self._table = open_table(console_for(self.file), of_fit=True, printed=printed, epochs=progress.epochs)
        if event.complete or 0 < progress.epochs <= printed:  # no row will be added
            return
        self._table.begin(_expected(learner, type(phase)), [*_resumed(event, progress), *_averages(learner)])

    @on(Trigger, AbstractTrainingPhase, access=_METRICS)
    def print_row(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Print the epoch's row."""
        if self._table is None or self._table.over:  # a hand-written loop
            printed = learner.progress.epoch - 1
            self._table = open_table(console_for(self.file), of_fit=False, printed=printed, epochs=0)
        self._table.add(learner.progress.epoch, _values(learner))

    @on(FitEnd, Phase, access=_METRICS)
    def end_fit(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Print the row of the epoch in which the fit was cancelled."""
        if self._table is not None:
            self._table.add(learner.progress.epoch, _values(learner))
            self._table.close()
            self._table = None


def _values(learner: LearnerView) -> dict[str, float]:
    """Return the metrics of the epoch, keyed by the titles of their columns."""
    return {
        _title(phase, name): value
        for phase, epochs in learner.cbstate.metrics_epoch.items()
        for name, value in epochs.at(learner.progress.epoch).items()
    }


def _resumed(event: FitBegin, progress: Any) -> list[str]:
    """Return a note on where a fit resumes."""
    if not event.resumes:
        return []
    where = f"in epoch {progress.epoch}" if event.within_epoch else f"after epoch {progress.epoch}"
    return [f"training resumes {where}, step {progress.step}"]


def _averages(learner: LearnerView) -> list[str]:
    """Return a note for each phase whose metrics are those of an average of the parameters."""
    graph, notes = learner.callbacks.graph, []
    for phase in graph.phases:
        if phase.trains or phase.name not in learner.data:
            continue
        replacing = [unwrap(handler.declared.callback) for handler in graph.handlers(EpochBegin, phase)]
        replacing = [callback for callback in replacing if callback.validates_with is not None]
        if replacing:  # the last one to run decides
            used, since = replacing[-1], ""
            if isinstance(used, StochasticWeightAveraging) and used.start > 1:
                since = f" from update {used.start} on, and the trained parameters before"
            notes.append(f"{phase.name} uses the average `{used.validates_with}` of {used!r}{since}")
    return notes


def _expected(learner: LearnerView, trained: type[Phase]) -> list[str]:
    """Return the titles of the columns that a fit will have, as far as the callbacks know them."""
    callbacks = list(learner.callbacks)
    run = [p for p in learner.callbacks.graph.phases if p is trained or p.name in learner.data]
    pairs = [(p, c) for p in run for c in callbacks]
    pairs += [(p, c) for c in callbacks for p in c.metric_phases()]  # only the callback itself knows these phases
    names = [
        _title(p.name, name) for p, c in pairs for name in c.provided_metrics(p) or () if name not in c.array_metrics(p)
    ]
    return list(dict.fromkeys(names))


def _title(phase: str, metric: str) -> str:
    return f"{_SHORT.get(phase, phase)} {metric}"
