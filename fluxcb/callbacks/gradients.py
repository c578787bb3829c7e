"""`ClipGradients` and `GradientNoise`: what is done to the gradients before the update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxcb._declare.access import Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import BackwardEnd, Event
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb.callbacks.accumulate import AccumulateGradients
from fluxcb.callbacks.arguments import number_above, number_from

__all__ = ["ClipGradients", "GradientNoise"]


class ClipGradients(Callback):
    """Scale the gradients down where their global norm exceeds a bound.

    `grads <- grads * max_norm / |grads|` if `|grads| >= max_norm`, with the Euclidean norm over all of them. It runs
    after `AccumulateGradients` and `DynamicLossScale`, and before `GradientNoise`. Other ways to clip are optax's, in
    the optimizer: `optax.chain(optax.clip(1.0), optax.adam(1e-3))`, `optax.adaptive_grad_clip`.

    Args:
        max_norm: The bound, above 0.

    Access:
        step.grads: Write.

    Runs:
        BackwardEnd x AbstractTrainingPhase (traced).

    Cost:
        One pass over the gradients, inside the step.

    Raises:
        DeclarationError: `max_norm` is not a number above 0.

    Example:
        >>> from fluxcb.callbacks import ClipGradients
        >>> ClipGradients(1.0)
        ClipGradients(1.0)

    Source:
        Pascanu, Mikolov and Bengio (2013), algorithm 1; `optax.clip_by_global_norm`, whose code runs.
    """

    def __init__(self, max_norm: float) -> None:
        self.max_norm = number_above(0, max_norm, "`max_norm` of ClipGradients")

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return {"step": {"grads": Write()}}

    def runafter(self) -> tuple[type[Callback], ...]:
        """Return `AccumulateGradients`: what is clipped is the gradient that the optimizer gets."""
        return (AccumulateGradients,)

    @on(BackwardEnd, AbstractTrainingPhase)
    def clip(self, event: Event, phase: Phase, learner: Any) -> None:
        """Clip."""
        import optax

        clipped, _ = optax.clip_by_global_norm(self.max_norm).update(learner.step.grads, optax.EmptyState())
        learner.step.grads = clipped

    def __repr__(self) -> str:
        return f"ClipGradients({self.max_norm})"


class GradientNoise(Callback):
    """Add Gaussian noise to the gradients, less and less of it.

    `grads <- grads + N(0, eta / (1 + t)**gamma)`, with `t` the number of finished training steps. It runs after
    `ClipGradients`, which would take the noise for gradient.

    Args:
        eta: Variance at the first step, above 0; the paper chooses among 0.01, 0.3 and 1.0.
        gamma: How fast it falls, at least 0; 0 for constant noise.

    Access:
        step.grads: Write.

    Runs:
        BackwardEnd x AbstractTrainingPhase (traced).

    Cost:
        A random number for each parameter, inside the step.

    Raises:
        DeclarationError: `eta` is not a number above 0, or `gamma` not one of at least 0.

    Example:
        >>> from fluxcb.callbacks import GradientNoise
        >>> GradientNoise(0.3)
        GradientNoise(0.3, gamma=0.55)

    Source:
        Neelakantan et al. (2015), Adding Gradient Noise Improves Learning for Very Deep Networks, equation 1,
        arXiv:1511.06807.
    """

    def __init__(self, eta: float, gamma: float = 0.55) -> None:
        self.eta = number_above(0, eta, "`eta` of GradientNoise")
        self.gamma = number_from(0, gamma, "`gamma` of GradientNoise")

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return {"step": {"grads": Write()}}

    def runafter(self) -> tuple[type[Callback], ...]:
        """Return the callbacks that shape the gradient to which the noise is added."""
        return (AccumulateGradients, ClipGradients)

    @on(BackwardEnd, AbstractTrainingPhase)
    def add(self, event: Event, phase: Phase, learner: Any) -> None:
        """Add the noise."""
        import jax
        import jax.numpy as jnp

        finished = learner.progress.step.astype(jnp.float32)
        deviation = jnp.sqrt(self.eta / (1 + finished) ** self.gamma)
        leaves, structure = jax.tree.flatten(learner.step.grads)
        keys = jax.random.split(learner.key, len(leaves))
        noisy = [
            (g + deviation * jax.random.normal(key, g.shape)).astype(g.dtype)
            for key, g in zip(keys, leaves, strict=True)
        ]
        learner.step.grads = jax.tree.unflatten(structure, noisy)

    def __repr__(self) -> str:
        return f"GradientNoise({self.eta}, gamma={self.gamma})"
