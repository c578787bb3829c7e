"""`MetricsPrinter`: a table of the metrics, a row per epoch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import IO, Any

from fluxcb._declare.access import Read
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, FitBegin, FitEnd, Trigger
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb.callbacks.console import aligned, console_for, is_plain, print_line
from fluxcb.logging.consoles import text_file

__all__ = ["MetricsPrinter"]

_SHORT = {"training": "train", "validation": "valid"}


class MetricsPrinter(Callback):
    """Print the metrics of each epoch: those of training and those of the validation behind it, in one row.

    A row is printed at Trigger, which follows the epoch's validation; an epoch in which the fit was cancelled gets its
    row at FitEnd. The time is that since the row before (seconds).

    Args:
        file: Where to print; standard output by default. A `ProgressBar` of the same file stays below the table.

    Access:
        cbstate.metrics_epoch: Read.

    Runs:
        FitBegin x Phase, Trigger x AbstractTrainingPhase, FitEnd x Phase (host).

    Cost:
        One line per epoch.

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
        self._table: _Table | None = None

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return {"cbstate": {"metrics_epoch": Read()}}

    @on(FitBegin, Phase, access={})
    def begin_fit(self, event: Event, phase: Phase, learner: Any) -> None:
        """Begin a table."""
        self._table = _Table(console_for(self.file), learner.progress.epoch)

    @on(Trigger, AbstractTrainingPhase)
    def print_row(self, event: Event, phase: Phase, learner: Any) -> None:
        """Print the epoch's row."""
        if self._table is None:  # a loop written by hand
            self._table = _Table(console_for(self.file), learner.progress.epoch - 1)
        self._table.print(learner.cbstate.metrics_epoch, learner.progress.epoch)

    @on(FitEnd, Phase)
    def end_fit(self, event: Event, phase: Phase, learner: Any) -> None:
        """Print the row of the epoch in which the fit was cancelled."""
        if self._table is not None:
            self._table.print(learner.cbstate.metrics_epoch, learner.progress.epoch)
            self._table = None


class _Table:
    """The rows of one fit."""

    def __init__(self, console: Any, printed: int) -> None:
        self.console = console
        self.printed = printed
        self.columns: tuple[str, ...] = ()
        self.last_row = time.monotonic()

    def print(self, metrics: Any, epoch: int) -> None:
        """Print an epoch's row, once, if it has values."""
        values = {
            f"{_SHORT.get(phase, phase)} {name}": value
            for phase, epochs in metrics.items()
            for name, value in epochs.at(epoch).items()
        }
        if epoch <= self.printed or not values:
            return
        now = time.monotonic()
        cells = [str(epoch), *(_number(value) for value in values.values()), f"{now - self.last_row:.1f} s"]
        self.printed, self.last_row = epoch, now
        columns = ("epoch", *values, "time")
        widths = [max(len(column), 8 if column != "epoch" else 0) for column in columns]
        if columns != self.columns:  # at first, and again where other metrics turn up
            self.columns = columns
            print_line(self.console, _row(columns, widths), None if is_plain(self.console) else "bold")
        print_line(self.console, _row(cells, widths))


def _row(cells: Any, widths: list[int]) -> str:
    return aligned(["", *cells], [0, *widths])[2:]


def _number(value: float) -> str:
    return f"{value:.4f}" if value == 0 or 1e-3 <= abs(value) < 1e4 or value != value else f"{value:.3e}"
