"""`AccumulateGradients`, which makes one update from the gradients of several batches."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from fluxcb._declare.access import Append, Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import BackwardEnd, Event, FitEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import positive
from fluxcb._errors import TraceError
from fluxcb._tracebacks import warn_user
from fluxcb.callbacks.metrics.padding import examples_in

__all__ = ["AccumulateGradients"]

# For each instance, the batch of the step that was traced last, and the event at which its gradients were added. Not in
# fields of the instance, because a callback can be copied, and a field must not keep a traced value alive.
_TRACED: weakref.WeakKeyDictionary[Callback, tuple[weakref.ref[Any], Event]] = weakref.WeakKeyDictionary()


class AccumulateGradients(Callback):
    """Update the parameters once every `steps` steps, with the mean gradient over the examples of these batches.

    If the loss is a mean over examples, the update equals that of one large batch, even if batch sizes differ.
    `ClipGradients` and `GradientNoise` see the mean. A skipped step (`step.skip`) adds nothing and does not count
    toward `steps`. Gradients that are left over at the end of an epoch are carried into the next epoch.

    Counters and schedules inside the optimizer count updates, as do averages of the parameters. `progress.step` counts
    steps, so a `Scheduler` advances `steps` times per update by default. `model_state` changes at every step.

    Args:
        steps: Number of steps per update, at least 1.

    Access:
        step.batch, step.skip: Read.
        step.grads: Write.
        step.hold: Append.
        params: Read.
        cbstate.accumulation: Write. `grads` (sums, weighted by examples), `examples`, `steps`, and `updates` so far.

    Runs:
        BackwardEnd x AbstractTrainingPhase (traced).
        FitEnd x Phase (host).

    Cost:
        A copy of the gradients in the carry, in float32 or higher precision. The optimizer runs at every step, but its
        result is used only once per `steps`. Does not shorten windows.

    Raises:
        DeclarationError: `steps` is not an integer of at least 1.
        TraceError: A phase emits BackwardEnd twice per step, or with the gradients of only some of the parameters (when
            the Learner is built).

    Warns:
        UserWarning: `fit(epochs)` ran all its epochs, and the training has not had a single update yet. With
            `fit(steps=...)`, which can train a few steps at a time, there is no warning.

    Example:
        >>> from fluxcb.callbacks import AccumulateGradients
        >>> from fluxcb.testing import testlearner
        >>> learner = testlearner(AccumulateGradients(4), batch_size=8)
        >>> history = learner.fit(3)
        >>> learner.step, learner.cbstate["accumulation"]["updates"].item()
        (12, 3)

    Source:
        `optax.MultiSteps`, which wraps an optimizer. It gives batches of different sizes the same weight, and with it,
        `ClipGradients` clips the gradient of each batch instead of the mean.
    """

    def __init__(self, steps: int) -> None:
        self.steps = positive(steps, "`steps` of AccumulateGradients")

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the paths that the callback reads and writes."""
        step = {"batch": Read(), "skip": Read(), "grads": Write(), "hold": Append()}
        return {"step": step, "params": Read(), "cbstate": {"accumulation": Write()}}

    def init(self, learner: LearnerView) -> None:
        """Create `cbstate.accumulation`."""
        import jax
        import jax.numpy as jnp

        def zeros(p: Any) -> Any:
            # `jnp.zeros_like` compiles a program for each shape, but keeps the placement that the user has chosen.
            dtype = jnp.promote_types(p.dtype, jnp.float32)
            return jnp.zeros_like(p, dtype) if p.committed else jax.device_put(np.zeros(p.shape, dtype))

        if "accumulation" not in learner.cbstate:
            learner.cbstate.accumulation = {
                "grads": jax.tree.map(zeros, learner.params),
                **{name: jnp.zeros((), jnp.int32) for name in ("examples", "steps", "updates")},
            }

    @on(BackwardEnd, AbstractTrainingPhase)
    def add(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Add the gradients to the sums, write their mean, and hold the update unless the sums are complete."""
        import jax
        import jax.numpy as jnp

        old, grads = learner.cbstate.accumulation, learner.step.grads
        if jax.tree.structure(grads) != jax.tree.structure(old["grads"]):
            raise TraceError(
                f"{self!r} got gradients of only some of the parameters from `{type(phase).__name__}`.",
                why="it sums the gradients of all parameters, once per step",
                fix="in the step of the phase, assign the gradients of all parts to `learner.step.grads`, with the "
                "structure of `params`, and emit BackwardEnd once",
            )
        if self._repeats(event, learner.step.batch):
            raise TraceError(
                f"{self!r} got gradients twice in one step of `{type(phase).__name__}`.",
                why="it counts steps, and `step.hold` applies to the whole step, so the parameters may never be "
                "updated",
                fix="in the step of the phase, assign the sum or the mean of the gradients to `learner.step.grads`, "
                "and emit BackwardEnd once",
            )
        size = examples_in(learner.step.batch)
        new = {
            "grads": jax.tree.map(lambda s, g: s + size * g.astype(s.dtype), old["grads"], grads),
            "examples": old["examples"] + size,
            "steps": old["steps"] + 1,
        }
        if "skip" in learner.step:
            new = jax.tree.map(functools.partial(jnp.where, learner.step.skip), {name: old[name] for name in new}, new)
        complete = new["steps"] == self.steps
        # If the first step is skipped, no examples are counted. The update is not applied, but 0 / 0 would be NaN.
        examples = jnp.maximum(new["examples"], 1)
        learner.step.grads = jax.tree.map(
            lambda s, g: (s / examples.astype(s.dtype)).astype(g.dtype), new["grads"], grads
        )
        learner.step.hold = ~complete
        learner.cbstate.accumulation = {
            **jax.tree.map(lambda x: jnp.where(complete, jnp.zeros_like(x), x), new),
            "updates": old["updates"] + complete.astype(jnp.int32),
        }

    def _repeats(self, event: Event, batch: Any) -> bool:
        """Return whether this is another BackwardEnd of the step that is being traced."""
        import jax

        leaf = jax.tree.leaves(batch)[0]
        previous = _TRACED.get(self)
        _TRACED[self] = weakref.ref(leaf), event
        # A handler with a schedule can be traced twice for one event. Each trace has its own batch.
        return previous is not None and previous[0]() is leaf and previous[1] is not event

    @on(FitEnd, Phase, access={"cbstate": {"accumulation": {"steps": Read(), "updates": Read()}}})
    def warn_without_updates(self, event: FitEnd, phase: Phase, learner: LearnerView) -> None:
        """Give a warning if all epochs of the fit have run, and no update was ever made."""
        # `epochs` is 0 in a fit of a number of steps, after which the user may train the missing steps.
        if event.outcome != "finished" or not learner.progress.epochs:
            return
        steps, updates = (int(learner.cbstate.accumulation[name]) for name in ("steps", "updates"))
        # Skipped steps do not count, so `steps` is 0 if all of them were skipped, which has other causes.
        if steps and not updates:
            warn_user(
                f"{self!r} has made no update, because the training has had only {steps} "
                f"step{'' if steps == 1 else 's'} so far. The parameters are unchanged. Train for at least "
                f"{self.steps} steps, or write `AccumulateGradients({steps})` or less.",
                UserWarning,
            )

    def __repr__(self) -> str:
        return f"AccumulateGradients({self.steps})"
