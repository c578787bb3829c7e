"""What host handlers can read while they run: the step, how far the device is, and the values lent to them."""

from __future__ import annotations

from fluxcb._compile.lent_values import LentValues
from fluxcb._run.window import Window

__all__ = ["Moment"]


class Moment:
    """The moment at which host handlers run.

    `StepLoop` sets it around the handlers of a step. `run_epoch` saves and restores it for an epoch that runs inside a
    handler.

    Args:
        lent: Values that handlers get.

    Attributes:
        window: The window with the values of the step whose handlers run; None between two steps.
        batch_size: Number of examples in the batch of that step; 0 between two steps.
        ahead: Whether the device has already run later steps, so that the train state is not that of the handler's
            step.
        inside_window: Whether later steps of the same window follow. Clocks are not read there, because all steps of a
            window are replayed at the same time.
        lent: See the argument.
    """

    def __init__(self, lent: LentValues) -> None:
        self.window: Window | None = None
        self.batch_size = 0
        self.ahead = self.inside_window = False
        self.lent = lent

    def end_step(self) -> None:
        """Reset the moment, because no handler of a step runs any more."""
        self.window, self.batch_size, self.ahead, self.inside_window = None, 0, False, False
