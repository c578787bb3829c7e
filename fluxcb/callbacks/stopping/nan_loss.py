"""`StopOnNaNLoss`, which ends a fit if the loss is NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fluxcb._declare.access import Append, Read
from fluxcb._declare.callback import Callback
from fluxcb._declare.control import CancelFitting
from fluxcb._declare.events import BackwardEnd, Event, StepEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import AtWindowEnds
from fluxcb._tracebacks import warn_user

__all__ = ["DIVERGED", "StopOnNaNLoss"]

DIVERGED = (
    "check the batch of that step for NaN and infinite values. If it has none, lower the learning rate, or limit the "
    "norm of the gradients with `ClipGradients`, to a smaller value if it is in the callbacks already. `CheckNumerics` "
    "names a gradient that is not finite. The parameters are those after the last good step"
)
"""Advice for a training run whose loss or gradients are no longer finite."""

_NEVER_FINITE = (
    "check the first batch for NaN, infinite values, and class numbers for which the model has no output, and check "
    "the initial parameters. No update has been applied, so the learning rate is not the cause"
)
"""Advice for a training run whose first loss is not finite."""


class StopOnNaNLoss(Callback):
    """End the fit with a warning at the first step whose loss is NaN or infinite.

    The update of that step is not applied, so the parameters are those after the last good step. If a phase computes
    several losses per step, such as the phase of a GAN, all of them are checked. `learner.stop_reason` names the step.

    Access:
        step.loss, step.earlier_losses: Read.
        step.skip: Append.
        step.stop: Append (traced), Read (host).
        control: Append.

    Runs:
        BackwardEnd x AbstractTrainingPhase (traced).
        StepEnd x AbstractTrainingPhase (host, at the ends of windows).

    Cost:
        Fetches the loss. Does not shorten windows: the device itself decides when to stop, and the host checks once per
        window.

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
        """Return the paths that the callback reads and writes."""
        step = {"loss": Read(), "earlier_losses": Read(), "skip": Append(), "stop": Append()}
        return {"step": step, "control": Append()}

    @on(
        BackwardEnd,
        AbstractTrainingPhase,
        access={"step": {"loss": Read(), "earlier_losses": Read(), "skip": Append(), "stop": Append()}},
    )
    def mark(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Skip the update and stop the window if a loss is not finite."""
        import jax.numpy as jnp

        bad = ~jnp.isfinite(learner.step.loss)
        for loss in learner.step.earlier_losses:
            bad |= ~jnp.isfinite(loss)
        learner.step.skip = bad
        learner.step.stop = bad

    @on(
        StepEnd,
        AbstractTrainingPhase,
        access={"step": {"loss": Read(), "earlier_losses": Read(), "stop": Read()}, "control": Append()},
        when=AtWindowEnds(),  # `step.stop` ends the window, so no stopped step is missed
    )
    def cancel(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """End the fit if a loss of this step is not finite."""
        if not learner.step.stop:
            return
        # Another callback may also have set `step.stop`, so the losses decide.
        losses = [float(loss) for loss in (*learner.step.earlier_losses, learner.step.loss)]
        for number, loss in enumerate(losses, start=1):
            if not math.isfinite(loss):
                what = "the loss" if len(losses) == 1 else f"loss {number} of {len(losses)}"
                reason = f"{what} was {loss} at step {learner.progress.step}"
                warn_user(f"Training stopped: {reason}.", RuntimeWarning)
                # A later loss of the same step may be computed after an update, for example in the phase of a GAN.
                first = number == 1 and learner.progress.step == 1
                raise CancelFitting(reason, advice=_NEVER_FINITE if first else DIVERGED)
