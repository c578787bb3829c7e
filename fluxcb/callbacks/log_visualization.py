"""`LogVisualization`: images that a function makes of values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fluxcb._declare.access import Append
from fluxcb._declare.callback import Callback
from fluxcb._declare.dispatch import Entry
from fluxcb._declare.events import Event
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import EverySteps, Schedule, positive
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.process_arrays import LooksAtValues, require_takes
from fluxcb.logging.loggables import Loggable

__all__ = ["LogVisualization"]


class LogVisualization(LooksAtValues):
    """Log what a function makes of values: after every `freq` training steps if one is the step's, else at Trigger.

    What it returns is an image as `cbstate.monitors.put_image` takes it, or anything of `fluxcb.logging` that can be
    logged.

    Args:
        fn: `fn(*values)`, in the order of the names, on the host.
        names: Path or paths of the values: `step.xs`, `step.outputs`, `params.conv.kernel`.
        freq: Period (steps), where one of the values is the step's.
        name: What is logged under.

    Access:
        What the names say: Read.
        cbstate.monitors: Append.

    Runs:
        StepEnd x AbstractTrainingPhase (host, every `freq` steps, if a name is a step's).
        Trigger x AbstractTrainingPhase (host, if none is).

    Cost:
        Fetches the values where it is due; larger ones end a window there. The function's own time.

    Raises:
        DeclarationError: A name is no path, `fn` does not take as many arguments as there are names, or `freq` is no
            whole number above 0; while training, it returns no image.
        MissingStateError: There is no `Monitors` (when the Learner is built).

    Example:
        >>> import numpy as np
        >>> from fluxcb.callbacks import LogVisualization, Monitors
        >>> from fluxcb.testing import testlearner
        >>> def side_by_side(outputs, ys):
        ...     return np.clip(np.hstack([outputs, ys]), 0, 1)
        >>> show = LogVisualization(side_by_side, ["step.outputs", "step.ys"], freq=4)
        >>> learner = testlearner(show, Monitors())
        >>> history = learner.fit(1)
        >>> learner.cbstate["monitors"].latest("visualization").data.shape
        (1, 8, 2, 1)

    Source:
        FluxTraining.jl, `LogVisualization`, whose function gets all of `learner.step`.
    """

    chief_only = False  # what is put is the same on all processes

    def __init__(
        self, fn: Callable[..., Any], names: str | Sequence[str], *, freq: int = 100, name: str = "visualization"
    ) -> None:
        super().__init__(names)
        require_takes(fn, "LogVisualization", len(self.names))
        self.fn = fn
        self.freq = positive(freq, "`freq` of LogVisualization (steps)")
        if not isinstance(name, str) or not name.strip():
            raise DeclarationError(f"`name` of LogVisualization must be a name to log under, not {name!r}.")
        self.logged_as = name

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        access = self._values.access()
        return {**access, "cbstate": {**access.get("cbstate", {}), "monitors": Append()}}

    def handlers(self) -> list[Entry]:
        """Return the handler that this instance has, with its period."""
        return [self._own(entry) for entry in super().handlers()]

    def entry_for(self, event: type[Event], phase: type[Phase]) -> tuple[Callback, Entry, tuple[Schedule, ...]] | None:
        """Return who handles a moment, and when it is due."""
        found = super().entry_for(event, phase)
        if found is None or not self._values.of_steps:
            return found
        return found[0], self._own(found[1]), (EverySteps(self.freq),)

    def _own(self, entry: Entry) -> Entry:
        return replace(entry, when=EverySteps(self.freq)) if self._values.of_steps else entry

    def process(self, learner: Any, values: Mapping[str, Any]) -> None:
        """Call the function, and log what it returns."""
        made = self.fn(*values.values())
        put = learner.cbstate.monitors.put if isinstance(made, Loggable) else learner.cbstate.monitors.put_image
        put(self.logged_as, made)
