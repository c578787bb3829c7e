"""`CheckNumerics`: name the parameters and gradients that are no longer finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from fluxcb._declare.access import Append, Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.dispatch import Entry
from fluxcb._declare.events import BackwardEnd, Event, StepEnd, Trigger, UpdateEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.resolution import Resolution, RunFirst
from fluxcb._declare.schedules import Schedule
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.accumulate import AccumulateGradients
from fluxcb.callbacks.finite import finite_leaves
from fluxcb.callbacks.gradients import ClipGradients, GradientNoise
from fluxcb.callbacks.loss_scale import DynamicLossScale
from fluxcb.callbacks.loss_spikes import LossSpikeGuard
from fluxcb.callbacks.skip import SkipNonFinite

__all__ = ["CheckNumerics"]

_SHOWN = 5


class CheckNumerics(Callback):
    """End training with an error that names the leaves where a gradient or a parameter is NaN or infinite.

    At every step, gradients are checked before the update, which is not applied if one is bad: the parameters stay
    those of the last good step. Parameters are checked after it. Steps that `SkipNonFinite`, `DynamicLossScale` or
    `LossSpikeGuard` skip are in their hands, and no error. At a `Trigger`, only the parameters are looked at.

    The check runs before `AccumulateGradients`, `ClipGradients` and `GradientNoise`, so that it can name the leaf and
    the batch that are not finite. A sum over batches would keep the NaN, and clipping by the global norm would spread
    it to all leaves.

    Args:
        at: `"step"` for every step, or `"trigger"` for every `Trigger`, after each epoch unless a schedule says
            otherwise.

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
        At steps, a pass over gradients and parameters; fetches two flags per leaf, and bounds no window: the device
        stops by itself. At a trigger, one wait for the device.

    Raises:
        DeclarationError: `at` is neither.
        FloatingPointError: In training; a number is not finite.

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
        tensorpack, `CheckNumerics`, which checks the trainable variables at triggers.
    """

    def __init__(self, at: Literal["step", "trigger"] = "step") -> None:
        if at not in ("step", "trigger"):
            raise DeclarationError(
                f'`at` of CheckNumerics must be "step" or "trigger", not {at!r}.',
                fix='write `CheckNumerics(at="trigger")`',
            )
        self.at = at
        self.leaves: tuple[str, ...] = ()

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
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
        """Return those whose skipped steps are no error; their flags have to stand first."""
        return (SkipNonFinite, DynamicLossScale, LossSpikeGuard)

    def resolveconflict(self, other: Callback) -> Resolution:
        """Run before the callbacks that would accumulate a NaN or spread it to other leaves."""
        changes = isinstance(other, AccumulateGradients | ClipGradients | GradientNoise)
        return RunFirst(self) if changes else super().resolveconflict(other)

    # The handlers of the other way are not there at all, so that they order, fetch and wait for nothing.

    def handlers(self) -> list[Entry]:
        """Return the handlers that this instance has."""
        return [entry for entry in super().handlers() if self._has(entry.event)]

    def entry_for(self, event: type[Event], phase: type[Phase]) -> tuple[Callback, Entry, tuple[Schedule, ...]] | None:
        """Return who handles a moment."""
        return super().entry_for(event, phase) if self._has(event) else None

    def _has(self, event: type[Event]) -> bool:
        return issubclass(event, Trigger) == (self.at == "trigger")

    def init(self, learner: Any) -> None:
        """Note the leaves' names."""
        import jax

        paths = jax.tree_util.tree_flatten_with_path(learner.params)[0]
        self.leaves = tuple(jax.tree_util.keystr(path) for path, _ in paths)

    @on(
        BackwardEnd,
        AbstractTrainingPhase,
        access={"step": {"grads": Read(), "skip": Append(), "stop": Append(), "finite_grads": Write()}},
    )
    def check_grads(self, event: Event, phase: Phase, learner: Any) -> None:
        """Flag gradients that are not finite, unless somebody else skips the step because of them."""
        finite = finite_leaves(learner.step.grads)
        handled = learner.step.skip & ~learner.step.stop
        finite = finite | handled
        learner.step.finite_grads = finite
        learner.step.skip = ~finite.all()
        learner.step.stop = ~finite.all()

    @on(
        UpdateEnd,
        AbstractTrainingPhase,
        access={"params": Read(), "step": {"stop": Append(), "finite_params": Write()}},
    )
    def check_params(self, event: Event, phase: Phase, learner: Any) -> None:
        """Flag parameters that are not finite."""
        finite = finite_leaves(learner.params)
        learner.step.finite_params = finite
        learner.step.stop = ~finite.all()

    @on(
        StepEnd,
        AbstractTrainingPhase,
        access={"step": {"stop": Read(), "finite_grads": Read(), "finite_params": Read()}},
    )
    def tell(self, event: Event, phase: Phase, learner: Any) -> None:
        """Raise the error, if there is one (others may stop the window, too)."""
        if learner.step.stop:
            self._raise(learner, "the gradient of ", learner.step.finite_grads)
            self._raise(learner, "the parameter ", learner.step.finite_params)

    @on(Trigger, AbstractTrainingPhase, access={"params": Read()})
    def look(self, event: Event, phase: Phase, learner: Any) -> None:
        """Look at the parameters."""
        import numpy as np

        self._raise(learner, "the parameter ", np.asarray(finite_leaves(learner.params)))

    def _raise(self, learner: Any, what: str, finite: Any) -> None:
        bad = [name for name, fine in zip(self.leaves, finite, strict=True) if not fine]
        if bad:
            rest = f" and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
            names = ", ".join(bad[:_SHOWN])
            raise FloatingPointError(f"not finite at step {learner.progress.step}: {what}{names}{rest}")

    def __repr__(self) -> str:
        return f"CheckNumerics({self.at!r})" if self.at != "step" else "CheckNumerics()"
