"""`PopulationTable`: one line per epoch about all members."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import median
from typing import IO, Any, Literal

from fluxcb._declare.access import Read
from fluxcb._declare.events import Event, Trigger
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb.callbacks.progress.console import aligned
from fluxcb.callbacks.watched import Watched, resolved_mode
from fluxcb.logging.consoles import console_for, print_line, text_file
from fluxcb.populations.callback import PopulationCallback
from fluxcb.populations.ranking import ranked

__all__ = ["PopulationTable"]

_NAME = "PopulationTable"
_WIDTHS = (5, 8, 6, 8, 8, 8)


class PopulationTable(PopulationCallback):
    """Print a line per epoch: the best, the median and the worst value of a metric, and how many members train.

    A `Population` adds it by default, with the validation loss, or the training loss if there is no validation.

    Args:
        metric: The metric: its name, such as `loss`, or its name in logs, such as `training/loss`.
        phase: The phase of the metric if its name does not contain it. `ValidationPhase` by default.
        mode: `max` if high values of `metric` are good, `min` if low values are good. If None, the name of the metric
            decides; see `Watched.default_mode`. A UserWarning is issued for a mode that the name contradicts, and
            without a mode for a name that implies none (when the members are built).
        file: Where to print; standard output by default.

    Access:
        cbstate.metrics_epoch: Read.

    Runs:
        Trigger x AbstractTrainingPhase (host).

    Cost:
        Prints a line per epoch. Fetches nothing, because `Metrics` keeps the values of epochs on the host.

    Raises:
        DeclarationError: An argument is not valid.

    Example:
        >>> import io, fluxcb
        >>> from fluxcb.callbacks import Metrics
        >>> from fluxcb.populations import PopulationTable
        >>> from fluxcb.testing import testlearner
        >>> def make_learner(learning_rate):
        ...     return testlearner(Metrics(), learning_rate=learning_rate)
        >>> population = fluxcb.Population(
        ...     make_learner,
        ...     learning_rate=[0.01, 0.02, 0.04],
        ...     callbacks=[PopulationTable(file=(file := io.StringIO()))],
        ...     default_callbacks=False,
        ... )
        >>> histories = population.fit(1)
        >>> print(file.getvalue().splitlines()[0])
        epoch  validation/loss  member    median     worst  training
    """

    def __init__(
        self,
        metric: str = "loss",
        *,
        phase: Phase | type[Phase] | str | None = None,
        mode: Literal["min", "max", "auto"] | None = None,
        file: IO[str] | None = None,
    ) -> None:
        self._mode: Literal["min", "max"]
        self._watched, self._mode = resolved_mode(mode, Watched.named(metric, phase, _NAME))
        self.file = text_file(file, _NAME)
        self._has_header = False

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the paths that the callback reads."""
        return {"cbstate": {"metrics_epoch": Read()}}

    def watched_metrics(self) -> Iterable[Watched]:
        """Return the metric that the table shows."""
        return (self._watched,)

    def call_of_best(self) -> str:
        """Return the call that gives the number of the best member by this metric: `population.best()`."""
        name = str(self._watched)
        arguments = [] if name == "validation/loss" else [f'"{name}"']
        if self._mode != self._watched.default_mode:
            arguments.append(f'mode="{self._mode}"')
        return f"population.best({', '.join(arguments)})"

    @on(Trigger, AbstractTrainingPhase)
    def show(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Print the line of an epoch, in the first member that trains."""
        epoch = learner.progress.epoch
        shared = self.share(self._watched.at(learner.cbstate.metrics_epoch, epoch))
        # Every copy knows that there is a header, because another member prints after the first one has ended.
        has_header, self._has_header = self._has_header, True
        if self.member != min(shared):
            return
        console = console_for(self.file)
        name = str(self._watched)
        widths = (_WIDTHS[0], max(_WIDTHS[1], len(name)), *_WIDTHS[2:])
        if not has_header:
            print_line(console, aligned(("epoch", name, "member", "median", "worst", "training"), widths), "bold")
        scores = {member: value for member, value in shared.items() if value is not None}
        values = sorted(value for value in scores.values() if not math.isnan(value))
        order = ranked(scores, self._mode)
        best, worst = (scores[order[0]], scores[order[-1]]) if order else (math.nan, math.nan)
        cells = [_number(best), str(order[0]) if order else "", _number(median(values) if values else math.nan)]
        print_line(
            console,
            aligned((str(epoch), *cells, _number(worst), f"{len(shared)} of {self.members}"), widths),
        )

    def __repr__(self) -> str:
        return f"{_NAME}({str(self._watched)!r})"


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e4 or math.isnan(value) else f"{value:.1e}"
