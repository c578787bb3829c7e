"""`StopOnNaNLoss`: end a training whose loss is no longer a number."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from fluxcb._declare.access import Append, Read
from fluxcb._declare.callback import Callback
from fluxcb._declare.control import CancelFitting
from fluxcb._declare.events import BackwardEnd, Event, StepEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import AtWindowEnds
from fluxcb._tracebacks import stacklevel_of_user

__all__ = ["DIVERGED", "StopOnNaNLoss"]

DIVERGED = (
    "lower the learning rate, add `ClipGradients(1.0)` to the callbacks, or add `CheckNumerics()` to find the gradient "
    "that is not finite. The parameters are those after the last good step"
)
"""Advice for a training run whose loss or gradients are no longer finite."""


class StopOnNaNLoss(Callback):
    """End the fit, with a warning, at the first step whose loss is NaN or infinite.

    The update of that step is not applied, so the parameters are those after the last finite step.
    `learner.stop_reason` names the step.

    Access:
        step.loss: Read.
        step.skip: Append.
        step.stop: Append (traced), Read (host).
        control: Append.

    Runs:
        BackwardEnd x AbstractTrainingPhase (traced).
        StepEnd x AbstractTrainingPhase (host, at the ends of windows).

    Cost:
        Fetches the loss. Bounds no window: the device stops by itself, and the host looks once per window.

    Warns:
        RuntimeWarning: The callback ends the fit.

    Example:
        >>> import warnings
        >>> import jax.numpy as jnp, optax, fluxcb
        >>> from fluxcb.callbacks import StopOnNaNLoss
        >>> learner = fluxcb.Learner.from_loss(
        ...     {"w": jnp.ones(())},
        ...     lambda params, batch, key: jnp.mean(params["w"] * batch),
        ...     optax.sgd(0.1),
        ...     data=[jnp.ones(2), jnp.array([1.0, jnp.nan]), jnp.ones(2)],
        ...     callbacks=[StopOnNaNLoss()],
        ...     default_callbacks=False,
        ... )
        >>> with warnings.catch_warnings(action="ignore"):
        ...     history = learner.fit(5)
        >>> learner.stop_reason, f"{learner.params['w']:.1f}"
        ('the loss was nan at step 2', '0.9')

    Source:
        FluxTraining.jl, `StopOnNaNLoss`.
    """

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return {"step": {"loss": Read(), "skip": Append(), "stop": Append()}, "control": Append()}

    @on(BackwardEnd, AbstractTrainingPhase, access={"step": {"loss": Read(), "skip": Append(), "stop": Append()}})
    def mark(self, event: Event, phase: Phase, learner: Any) -> None:
        """Skip the update and stop the window if the loss is not finite."""
        import jax.numpy as jnp

        bad = ~jnp.isfinite(learner.step.loss)
        learner.step.skip = bad
        learner.step.stop = bad

    @on(
        StepEnd,
        AbstractTrainingPhase,
        access={"step": {"loss": Read(), "stop": Read()}, "control": Append()},
        when=AtWindowEnds(),  # a step that was stopped is the last of its window
    )
    def cancel(self, event: Event, phase: Phase, learner: Any) -> None:
        """End the fit if this step was stopped because of its loss (others may stop, too)."""
        if learner.step.stop and not math.isfinite(learner.step.loss):
            reason = f"the loss was {float(learner.step.loss)} at step {learner.progress.step}"
            warnings.warn(f"Training stopped: {reason}.", RuntimeWarning, stacklevel=stacklevel_of_user())
            raise CancelFitting(reason, advice=DIVERGED)
