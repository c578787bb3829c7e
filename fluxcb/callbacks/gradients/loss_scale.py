"""`DynamicLossScale`, which prevents float16 gradients from underflowing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxcb._declare.access import Append, Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import BackwardBegin, BackwardEnd, Event
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.resolution import Resolution, RunFirst, Unresolvable
from fluxcb._declare.schedules import positive
from fluxcb.callbacks.arguments import finite_number
from fluxcb.callbacks.gradients.finite import all_finite
from fluxcb.callbacks.gradients.step_writers import writes_step

__all__ = ["DynamicLossScale"]


class DynamicLossScale(Callback):
    """Scale the gradients during backpropagation to avoid underflow in float16, and unscale them afterward.

    In float16, gradients below 6e-8 are 0. A large scale preserves small gradients, but if it is too large, some
    gradients overflow to infinity. When that happens, the update is skipped and the scale is divided by `factor`. After
    `period` consecutive steps without overflow, the scale is multiplied by `factor`.

    `step.loss` keeps its value; only its gradient is scaled. `StopOnNaNLoss` therefore still ends a fit whose loss is
    NaN, but never because of the scale. Among the callbacks that write `step.loss`, this one runs last, and among those
    that write `step.grads`, it runs first. Of the built-in callbacks, only `SkipNonFinite`, which checks whether the
    gradients are finite, sees scaled gradients.

    The model must cast its parameters to float16 itself. bfloat16 needs no loss scale. A custom phase must emit
    BackwardBegin inside the function that it differentiates, and return `step.loss` from that function.

    Args:
        initial: Initial scale, at least `minimum`.
        period: Number of consecutive steps without overflow after which the scale grows (steps).
        factor: Factor by which the scale grows and shrinks, above 1.
        minimum: Lower bound of the scale, above 0.

    Access:
        step.loss: Write (at BackwardBegin).
        step.grads: Write (at BackwardEnd).
        step.skip: Append.
        cbstate.loss_scale: Write. `scale` (float32[]); `good_steps`, the consecutive steps without overflow, and
            `overflows`, the total (int32[]).

    Runs:
        BackwardBegin, BackwardEnd x AbstractTrainingPhase (traced).

    Cost:
        Two passes over the gradients inside the step. Fetches nothing and does not shorten windows.

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
        Micikevicius et al. (2018), Mixed Precision Training, section 3.2, arXiv:1710.03740. The scale grows after
        exactly `period` steps, as in jmp and PyTorch; `flax.training.dynamic_scale` needs one step more.
    """

    def __init__(
        self, initial: float = 2.0**15, *, period: int = 2000, factor: float = 2.0, minimum: float = 1.0
    ) -> None:
        self.minimum = finite_number(minimum, "`minimum` of DynamicLossScale", above=0)
        self.initial = finite_number(initial, "`initial` of DynamicLossScale", least=self.minimum)
        self.period = positive(period, "`period` of DynamicLossScale (steps)")
        self.factor = finite_number(factor, "`factor` of DynamicLossScale", above=1)

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the paths that the callback reads and writes."""
        step = {"loss": Write(), "grads": Write(), "skip": Append()}
        return {"step": step, "cbstate": {"loss_scale": Write()}}

    def resolveconflict(self, other: Callback) -> Resolution:
        """Run after callbacks that write the loss and before those that write the gradients. Refuse its own class."""
        if isinstance(other, DynamicLossScale):
            return Unresolvable()
        loss, grads = writes_step(other, "loss"), writes_step(other, "grads")
        if loss == grads:  # a resolution holds for all moments, so one for a callback that writes both would be wrong
            return super().resolveconflict(other)
        return RunFirst(other if loss else self)

    def init(self, learner: LearnerView) -> None:
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
    def scale(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Scale the gradient of the loss."""
        learner.step.loss = _with_scaled_gradient(learner.step.loss, learner.cbstate.loss_scale["scale"])

    @on(
        BackwardEnd,
        AbstractTrainingPhase,
        access={"step": {"grads": Write(), "skip": Append()}, "cbstate": {"loss_scale": Write()}},
    )
    def unscale(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Unscale the gradients, skip the update if one of them is not finite, and adjust the scale."""
        import jax
        import jax.numpy as jnp

        old = learner.cbstate.loss_scale
        scale = old["scale"]
        # Divide in float32, because the scale may exceed the range of float16.
        grads = jax.tree.map(lambda g: (g.astype(jnp.float32) / scale).astype(g.dtype), learner.step.grads)
        finite = all_finite(grads)
        good_steps = jnp.where(finite, old["good_steps"] + 1, 0)
        due = good_steps == self.period
        higher, lower = scale * self.factor, jnp.maximum(scale / self.factor, self.minimum)
        grown = jnp.where(due & jnp.isfinite(higher), higher, scale)  # the scale itself may overflow float32
        learner.cbstate.loss_scale = {
            "scale": jnp.where(finite, grown, lower),
            "good_steps": jnp.where(due, 0, good_steps),
            "overflows": old["overflows"] + (~finite).astype(jnp.int32),
        }
        learner.step.grads = grads
        learner.step.skip = ~finite

    def __repr__(self) -> str:
        return f"DynamicLossScale({self.initial}, period={self.period})"


def _with_scaled_gradient(value: Any, scale: Any) -> Any:
    """Return `value` unchanged, but multiply its gradient by `scale`.

    If the value itself were multiplied, other callbacks would see a scaled loss, which can overflow to infinity.
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
