"""`LogVisualization`: log images that a function computes from named values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fluxcb._declare.access import Append
from fluxcb._declare.handlers import Handler
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import EverySteps, positive
from fluxcb.callbacks.arguments import nonempty_text
from fluxcb.callbacks.inspect.process_arrays import NamedValuesCallback, require_takes
from fluxcb.logging.loggables import Loggable

__all__ = ["LogVisualization"]


class LogVisualization(NamedValuesCallback):
    """Log an image that a function computes from named values.

    The function is called every `freq` training steps if at least one path begins with `step`, and at Trigger
    otherwise. It returns an image in a format that `cbstate.monitors.put_image` accepts, or an object of
    `fluxcb.logging` that can be logged.

    Args:
        fn: `fn(*values)`, with the values in the order of the names. It runs on the host.
        names: One path or several, such as `step.xs`, `step.outputs` or `params.conv.kernel`.
        freq: Period (steps), if a path begins with `step`.
        name: The name to log the image under.

    Access:
        The paths in `names`: Read.
        cbstate.monitors: Append.

    Runs:
        StepEnd x AbstractTrainingPhase (host, every `freq` steps, if a path begins with `step`).
        Trigger x AbstractTrainingPhase (host, otherwise).

    Cost:
        The function, and fetching the values at the steps where it is due. Large values end a window there.

    Raises:
        DeclarationError: A path is invalid, `fn` does not take one argument per name, or `freq` is not a positive
            integer. During training: `fn` does not return an image.
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

    chief_only = False  # all processes must log the same values

    def __init__(
        self, fn: Callable[..., Any], names: str | Sequence[str], *, freq: int = 100, name: str = "visualization"
    ) -> None:
        super().__init__(names)
        require_takes(fn, "LogVisualization", len(self.names))
        self.fn = fn
        self.freq = positive(freq, "`freq` of LogVisualization (steps)")
        nonempty_text(name, "`name` of LogVisualization", "a name to log under", 'name="kernels"')
        self.logged_as = name

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the declared access; see the class docstring."""
        access = self._values.access()
        return {**access, "cbstate": {**access.get("cbstate", {}), "monitors": Append()}}

    def logged_names(self, metrics: Mapping[type[Phase], Collection[str]]) -> Collection[str]:
        """Return the name of the image."""
        return (self.logged_as,)

    def handlers(self) -> list[Handler]:
        """Return the handler of this instance with its period."""
        period = EverySteps(self.freq)
        return [replace(handler, when=period) if self._values.of_steps else handler for handler in super().handlers()]

    def process(self, learner: LearnerView, values: Mapping[str, Any]) -> None:
        """Call the function, and log its result."""
        result = self.fn(*values.values())
        put = learner.cbstate.monitors.put if isinstance(result, Loggable) else learner.cbstate.monitors.put_image
        put(self.logged_as, result)
