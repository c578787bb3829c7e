"""`AccumulateGradients`: one update from the gradients of several batches."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from fluxcb._declare.access import Append, Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import BackwardEnd, Event
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import positive
from fluxcb.callbacks.recorder import leading_axis

__all__ = ["AccumulateGradients"]


class AccumulateGradients(Callback):
    """Update the parameters once every few steps, with the mean gradient over the examples of all their batches.

    For a loss that is a mean over examples, the update is that of one large batch, also where batches differ in size.
    `ClipGradients` and `GradientNoise` see the mean. Steps that are skipped (`step.skip`) add nothing, and do not count
    among the `steps`. What is left over at the end of an epoch goes on into the next one.

    The optimizer's own counts and schedules count updates, as do averages of the parameters. `progress.step`, and so a
    `Scheduler`, counts steps, `steps` of them to an update. `model_state` follows every step, as without accumulation.

    Args:
        steps: Batches to an update.

    Access:
        step.batch, step.skip: Read.
        step.grads: Write.
        step.hold: Append.
        params: Read.
        cbstate.accumulation: Write. `grads` (sums, weighted by examples), `examples`, `steps`, and `updates` so far.

    Runs:
        BackwardEnd x AbstractTrainingPhase (traced).

    Cost:
        A copy of the gradients in the carry (float32 at least). The optimizer computes in every step; its result counts
        in one of `steps`. Bounds no window.

    Raises:
        DeclarationError: `steps` is no whole number of at least 1.

    Example:
        >>> from fluxcb.callbacks import AccumulateGradients
        >>> from fluxcb.testing import testlearner
        >>> learner = testlearner(AccumulateGradients(4), batch_size=8)
        >>> history = learner.fit(3)
        >>> learner.step, learner.cbstate["accumulation"]["updates"].item()
        (12, 3)

    Source:
        `optax.MultiSteps` does the same inside an optimizer, where batches of different sizes count alike, and where
        callbacks clip each batch's gradient instead of the mean.
    """

    def __init__(self, steps: int) -> None:
        self.steps = positive(steps, "`steps` of AccumulateGradients")

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        step = {"batch": Read(), "skip": Read(), "grads": Write(), "hold": Append()}
        return {"step": step, "params": Read(), "cbstate": {"accumulation": Write()}}

    def init(self, learner: Any) -> None:
        """Create `cbstate.accumulation`."""
        import jax
        import jax.numpy as jnp

        if "accumulation" not in learner.cbstate:
            learner.cbstate.accumulation = {
                "grads": jax.tree.map(
                    lambda p: jnp.zeros_like(p, jnp.promote_types(p.dtype, jnp.float32)), learner.params
                ),
                **{name: jnp.zeros((), jnp.int32) for name in ("examples", "steps", "updates")},
            }

    @on(BackwardEnd, AbstractTrainingPhase)
    def add(self, event: Event, phase: Phase, learner: Any) -> None:
        """Add the gradients to the sum; where it is complete, the optimizer gets the mean, and the sum begins anew."""
        import jax
        import jax.numpy as jnp

        held, grads = learner.cbstate.accumulation, learner.step.grads
        size = leading_axis(learner.step.batch)
        new = {
            "grads": jax.tree.map(lambda s, g: s + size * g.astype(s.dtype), held["grads"], grads),
            "examples": held["examples"] + size,
            "steps": held["steps"] + 1,
        }
        if "skip" in learner.step:
            new = jax.tree.map(functools.partial(jnp.where, learner.step.skip), {name: held[name] for name in new}, new)
        complete = new["steps"] == self.steps
        examples = jnp.maximum(new["examples"], 1)
        learner.step.grads = jax.tree.map(
            lambda s, g: (s / examples.astype(s.dtype)).astype(g.dtype), new["grads"], grads
        )
        learner.step.hold = ~complete
        learner.cbstate.accumulation = {
            **jax.tree.map(lambda x: jnp.where(complete, jnp.zeros_like(x), x), new),
            "updates": held["updates"] + complete,
        }

    def __repr__(self) -> str:
        return f"AccumulateGradients({self.steps})"
