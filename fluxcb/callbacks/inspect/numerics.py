"""`CheckNumerics`: end training when a parameter or a gradient is not finite, and name it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from fluxcb._declare.access import Append, Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import BackwardEnd, Event, StepEnd, Trigger, UpdateEnd
from fluxcb._declare.handlers import Handler, on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.resolution import Resolution, RunFirst
from fluxcb.callbacks.arguments import choice
from fluxcb.callbacks.gradients.accumulate import AccumulateGradients
from fluxcb.callbacks.gradients.finite import finite_leaves
from fluxcb.callbacks.gradients.gradients import ClipGradients, GradientNoise
from fluxcb.callbacks.gradients.loss_scale import DynamicLossScale
from fluxcb.callbacks.gradients.loss_spikes import LossSpikeGuard
from fluxcb.callbacks.gradients.skip import SkipNonFinite

__all__ = ["CheckNumerics"]

_MOST_NAMES = 5  # in an error message


class CheckNumerics(Callback):
    """End training with an error that names the leaves whose gradient or parameter is NaN or infinite.

    At every step, the callback checks the gradients before the update and the parameters after it. If a gradient is not
    finite, the update is not applied, so the parameters remain those of the last good step. A step that
    `SkipNonFinite`, `DynamicLossScale` or `LossSpikeGuard` skips is not an error. With `at="trigger"`, the callback
    only checks the parameters.

    The check runs before `AccumulateGradients`, `ClipGradients` and `GradientNoise`, so that it can name the leaf and
    the batch that are not finite. A sum over batches would keep the NaN, and clipping by the global norm would spread
    it to all leaves.

    Args:
        at: When to check: `"step"` for every step, or `"trigger"` for every `Trigger`, which is emitted after each
            epoch by default.

    Access:
        step.grads: Read.
        step.skip: Append.
        step.stop: Append (traced), Read (host).
        step.finite_grads, step.finite_params: Write (traced), Read (host). bool[leaves].
        params: Read.

    Runs:
        BackwardEnd, UpdateEnd x AbstractTrainingPhase (traced, at steps).
        StepEnd x AbstractTrainingPhase (host, at steps).
        Trigger x AbstractTrainingPhase (host, at triggers).

    Cost:
        At steps: one pass over the gradients and the parameters. Fetches two flags per leaf. Does not shorten windows,
            because the compiled step stops the window itself. At triggers: one wait for the device.

    Raises:
        DeclarationError: `at` is not one of these values.
        FloatingPointError: During training, a gradient or a parameter is not finite.

    Example:
        >>> import jax.numpy as jnp, optax, fluxcb
        >>> from fluxcb.callbacks import CheckNumerics
        >>> learner = fluxcb.Learner.from_loss(
        ...     {"scale": jnp.ones(()), "root": jnp.zeros(())},
        ...     lambda params, batch, key: jnp.mean(params["scale"] * batch) + jnp.sqrt(params["root"]),
        ...     optax.sgd(0.1),
        ...     data=[jnp.ones(2)],
        ...     callbacks=[CheckNumerics()],
        ...     default_callbacks=False,
        ... )
        >>> history = learner.fit(1)
        Traceback (most recent call last):
        FloatingPointError: not finite at step 1: the gradient of ['root']...

    Source:
        tensorpack, `CheckNumerics`, which only checks the trainable variables, at triggers.
    """

    def __init__(self, at: Literal["step", "trigger"] = "step") -> None:
        choice(at, ("step", "trigger"), "`at` of CheckNumerics")
        self.at = at
        self.leaves: tuple[str, ...] = ()

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the declared access; see the class docstring."""
        if self.at == "trigger":
            return {"params": Read()}
        step = {
            "grads": Read(),
            "skip": Append(),
            "stop": Append(),
            "finite_grads": Write(),
            "finite_params": Write(),
        }
        return {"step": step, "params": Read()}

    def runafter(self) -> tuple[type[Callback], ...]:
        """Return the callbacks that skip steps, because their flags must be set before the check."""
        return (SkipNonFinite, DynamicLossScale, LossSpikeGuard)

    def resolveconflict(self, other: Callback) -> Resolution:
        """Run before the callbacks that would accumulate a NaN or spread it to other leaves."""
        changes = isinstance(other, AccumulateGradients | ClipGradients | GradientNoise)
        return RunFirst(self) if changes else super().resolveconflict(other)

    # The unused handlers are removed instead of disabled, so that they cause no ordering constraints, fetches or waits.

    def handlers(self) -> list[Handler]:
        """Return the handlers for the chosen `at`."""
        return [handler for handler in super().handlers() if self._has(handler.event)]

    def _has(self, event: type[Event]) -> bool:
        return issubclass(event, Trigger) == (self.at == "trigger")

    def init(self, learner: LearnerView) -> None:
        """Record the names of the leaves."""
        import jax

        paths = jax.tree_util.tree_flatten_with_path(learner.params)[0]
        self.leaves = tuple(jax.tree_util.keystr(path) for path, _ in paths)

    @on(
        BackwardEnd,
        AbstractTrainingPhase,
        access={"step": {"grads": Read(), "skip": Append(), "stop": Append(), "finite_grads": Write()}},
    )
    def check_grads(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Flag gradients that are not finite, unless another callback already skips the step because of them."""
        finite = finite_leaves(learner.step.grads)
        handled = learner.step.skip & ~learner.step.stop
        finite = finite | handled
        learner.step["finite_grads"] = finite
        learner.step.skip = ~finite.all()
        learner.step.stop = ~finite.all()

    @on(
        UpdateEnd,
        AbstractTrainingPhase,
        access={"params": Read(), "step": {"stop": Append(), "finite_params": Write()}},
    )
    def check_params(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Flag parameters that are not finite."""
        finite = finite_leaves(learner.params)
        learner.step["finite_params"] = finite
        learner.step.stop = ~finite.all()

    @on(
        StepEnd,
        AbstractTrainingPhase,
        access={"step": {"stop": Read(), "finite_grads": Read(), "finite_params": Read()}},
    )
    def tell(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Raise the error if a value was not finite."""
        if learner.step.stop:  # another callback may have set it, in which case all flags are true
            self._raise(learner, "the gradient of ", learner.step["finite_grads"])
            self._raise(learner, "the parameter ", learner.step["finite_params"])

    @on(Trigger, AbstractTrainingPhase, access={"params": Read()})
    def look(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Check the parameters."""
        import numpy as np

        self._raise(learner, "the parameter ", np.asarray(finite_leaves(learner.params)))

    def _raise(self, learner: LearnerView, what: str, finite: Any) -> None:
        bad = [name for name, is_finite in zip(self.leaves, finite, strict=True) if not is_finite]
        if bad:
            rest = f" and {len(bad) - _MOST_NAMES} more" if len(bad) > _MOST_NAMES else ""
            names = ", ".join(bad[:_MOST_NAMES])
            raise FloatingPointError(f"not finite at step {learner.progress.step}: {what}{names}{rest}")

    def __repr__(self) -> str:
        return f"CheckNumerics({self.at!r})" if self.at != "step" else "CheckNumerics()"
