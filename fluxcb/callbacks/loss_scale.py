"""`DynamicLossScale`: keep small gradients of half precision from vanishing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxcb._declare.access import Append, Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import BackwardBegin, BackwardEnd, Event
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.resolution import Resolution, RunFirst
from fluxcb._declare.schedules import positive
from fluxcb.callbacks.arguments import number_above, number_from
from fluxcb.callbacks.finite import all_finite
from fluxcb.callbacks.step_writers import writes_step

__all__ = ["DynamicLossScale"]


class DynamicLossScale(Callback):
    """Scale the gradients up on their way back through the model, and down again before anybody sees them.

    In float16, gradients below 6e-8 are 0. Scaled up, fewer are; scaled too far, some are infinite. Such a step is
    skipped and the scale is divided by `factor`; after `period` steps in a row without, it is multiplied by it.

    `step.loss` keeps its value: only what flows back from it is scaled. So `StopOnNaNLoss` still ends a fit whose loss
    itself is NaN, and never because of the scale. Losses change before they are scaled, and gradients after: it runs
    last of those that write `step.loss`, and first of those that write `step.grads`.

    The model casts parameters to float16 by itself; bfloat16 needs no scale. A phase of your own emits BackwardBegin
    inside the function that it differentiates, and returns `step.loss` from it.

    Args:
        initial: Scale at first, at least `minimum`.
        period: Steps in a row without overflow after which it grows.
        factor: What it grows and shrinks by, above 1.
        minimum: What it does not fall below, above 0.

    Access:
        step.loss: Write (at BackwardBegin).
        step.grads: Write (at BackwardEnd).
        step.skip: Append.
        cbstate.loss_scale: Write. `scale` (float32[]), `good_steps` in a row, `overflows` in all (int32[]).

    Runs:
        BackwardBegin, BackwardEnd x AbstractTrainingPhase (traced).

    Cost:
        Two passes over the gradients, inside the step. Fetches nothing, and bounds no window.

    Raises:
        DeclarationError: An argument is outside its range.

    Example:
        >>> from fluxcb.callbacks import DynamicLossScale
        >>> from fluxcb.testing import testlearner
        >>> learner = testlearner(DynamicLossScale(2.0**15, period=4))
        >>> history = learner.fit(2)  # 8 steps: it doubles twice
        >>> learner.cbstate["loss_scale"]["scale"].item()
        131072.0

    Source:
        Micikevicius et al. (2018), Mixed Precision Training, section 3.2, arXiv:1710.03740. Numbers as in jmp and
        PyTorch, which grow the scale after `period` steps; `flax.training.dynamic_scale` takes one more.
    """

    def __init__(
        self, initial: float = 2.0**15, *, period: int = 2000, factor: float = 2.0, minimum: float = 1.0
    ) -> None:
        self.minimum = number_above(0, minimum, "`minimum` of DynamicLossScale")
        self.initial = number_from(self.minimum, initial, "`initial` of DynamicLossScale")
        self.period = positive(period, "`period` of DynamicLossScale (steps)")
        self.factor = number_above(1, factor, "`factor` of DynamicLossScale")

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        step = {"loss": Write(), "grads": Write(), "skip": Append()}
        return {"step": step, "cbstate": {"loss_scale": Write()}}

    def resolveconflict(self, other: Callback) -> Resolution:
        """Run behind whoever writes the loss, and before whoever writes the gradients."""
        loss, grads = writes_step(other, "loss"), writes_step(other, "grads")
        if loss == grads:  # neither, or both: nobody can tell for all moments
            return super().resolveconflict(other)
        return RunFirst(other if loss else self)

    def init(self, learner: Any) -> None:
        """Create `cbstate.loss_scale`."""
        import jax.numpy as jnp

        if "loss_scale" not in learner.cbstate:
            counts = {name: jnp.zeros((), jnp.int32) for name in ("good_steps", "overflows")}
            learner.cbstate.loss_scale = {"scale": jnp.float32(self.initial), **counts}

    @on(
        BackwardBegin,
        AbstractTrainingPhase,
        access={"step": {"loss": Write()}, "cbstate": {"loss_scale": Read()}},
    )
    def scale(self, event: Event, phase: Phase, learner: Any) -> None:
        """Scale what flows back from the loss."""
        learner.step.loss = _with_scaled_gradient(learner.step.loss, learner.cbstate.loss_scale["scale"])

    @on(
        BackwardEnd,
        AbstractTrainingPhase,
        access={"step": {"grads": Write(), "skip": Append()}, "cbstate": {"loss_scale": Write()}},
    )
    def unscale(self, event: Event, phase: Phase, learner: Any) -> None:
        """Scale the gradients down, skip the update if one is not finite, and adjust the scale."""
        import jax
        import jax.numpy as jnp

        held = learner.cbstate.loss_scale
        scale = held["scale"]
        # In float32, because the scale itself may be beyond float16.
        grads = jax.tree.map(lambda g: (g.astype(jnp.float32) / scale).astype(g.dtype), learner.step.grads)
        fine = all_finite(grads)
        good_steps = jnp.where(fine, held["good_steps"] + 1, 0)
        due = good_steps == self.period
        higher, lower = scale * self.factor, jnp.maximum(scale / self.factor, self.minimum)
        grown = jnp.where(due & jnp.isfinite(higher), higher, scale)
        learner.cbstate.loss_scale = {
            "scale": jnp.where(fine, grown, lower),
            "good_steps": jnp.where(due, 0, good_steps),
            "overflows": held["overflows"] + ~fine,
        }
        learner.step.grads = grads
        learner.step.skip = ~fine

    def __repr__(self) -> str:
        return f"DynamicLossScale({self.initial}, period={self.period})"


def _with_scaled_gradient(value: Any, scale: Any) -> Any:
    """Return `value`, whose gradient arrives multiplied by `scale`.

    Multiplying the value instead would show everybody a scaled loss, which may be infinite where the loss is not.
    """
    import jax
    import jax.numpy as jnp

    @jax.custom_vjp
    def identity(value: Any, scale: Any) -> Any:
        return value

    def forward(value: Any, scale: Any) -> Any:
        return value, scale

    def backward(scale: Any, gradient: Any) -> Any:
        return (gradient * scale).astype(gradient.dtype), jnp.zeros_like(scale)

    identity.defvjp(forward, backward)
    return identity(value, scale)
