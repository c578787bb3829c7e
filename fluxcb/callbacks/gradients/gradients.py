"""`ClipGradients` and `GradientNoise`, which change the gradients before the update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxcb._calls import entry_point
from fluxcb._declare.access import Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import BackwardEnd, Event
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb.callbacks.arguments import finite_number
from fluxcb.callbacks.gradients.accumulate import AccumulateGradients

__all__ = ["ClipGradients", "GradientNoise"]


class ClipGradients(Callback):
    """Clip the gradients by their global norm.

    If `|grads| >= max_norm`, then `grads <- grads * max_norm / |grads|`, where `|grads|` is the Euclidean norm over all
    gradients. Clipping runs after `AccumulateGradients` and `DynamicLossScale`, and before `GradientNoise`. For other
    ways to clip, add an Optax transformation to the optimizer, such as
    `optax.chain(optax.clip(1.0), optax.adam(1e-3))` or `optax.adaptive_grad_clip`.

    Args:
        max_norm: The maximum norm, above 0.

    Access:
        step.grads: Write.

    Runs:
        BackwardEnd x AbstractTrainingPhase (traced).

    Cost:
        One pass over the gradients inside the step.

    Raises:
        DeclarationError: `max_norm` is not a number above 0.

    Example:
        >>> from fluxcb.callbacks import ClipGradients
        >>> ClipGradients(1.0)
        ClipGradients(1.0)

    Source:
        Pascanu, Mikolov and Bengio (2013), algorithm 1; `optax.clip_by_global_norm`, which this callback calls.
    """

    @entry_point(
        fixes=dict.fromkeys(
            ("value", "clip_value", "clipvalue", "max_value"),
            "write `max_norm=...` to limit the norm of all gradients; to limit each element, chain `optax.clip(value)` "
            "with the optimizer",
        )
    )
    def __init__(self, max_norm: float) -> None:
        self.max_norm = finite_number(max_norm, "`max_norm` of ClipGradients", above=0)

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the paths that the callback reads and writes."""
        return {"step": {"grads": Write()}}

    def runafter(self) -> tuple[type[Callback], ...]:
        """Return `AccumulateGradients`, so that clipping applies to the mean gradient that the optimizer gets."""
        return (AccumulateGradients,)

    @on(BackwardEnd, AbstractTrainingPhase)
    def clip(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Clip the gradients."""
        import optax

        clipped, _ = optax.clip_by_global_norm(self.max_norm).update(learner.step.grads, optax.EmptyState())
        learner.step.grads = clipped

    def __repr__(self) -> str:
        return f"ClipGradients({self.max_norm})"


class GradientNoise(Callback):
    """Add Gaussian noise with a decaying variance to the gradients.

    `grads <- grads + N(0, eta / (1 + t)**gamma)`, where `t` is the number of finished training steps. The noise
    is added after `ClipGradients` has run, so it is not clipped.

    Args:
        eta: Variance at the first step, above 0. The paper uses 0.01, 0.3 or 1.0.
        gamma: Decay exponent, at least 0; with 0, the variance is constant.

    Access:
        step.grads: Write.

    Runs:
        BackwardEnd x AbstractTrainingPhase (traced).

    Cost:
        One random number per parameter inside the step.

    Raises:
        DeclarationError: `eta` is not a number above 0, or `gamma` is not a number of at least 0.

    Example:
        >>> from fluxcb.callbacks import GradientNoise
        >>> GradientNoise(0.3)
        GradientNoise(0.3, gamma=0.55)

    Source:
        Neelakantan et al. (2015), Adding Gradient Noise Improves Learning for Very Deep Networks, equation 1,
        arXiv:1511.06807.
    """

    def __init__(self, eta: float, gamma: float = 0.55) -> None:
        self.eta = finite_number(eta, "`eta` of GradientNoise", above=0)
        self.gamma = finite_number(gamma, "`gamma` of GradientNoise", least=0)

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the paths that the callback reads and writes."""
        return {"step": {"grads": Write()}}

    def runafter(self) -> tuple[type[Callback], ...]:
        """Return the callbacks that compute the gradient to which the noise is added."""
        return (AccumulateGradients, ClipGradients)

    @on(BackwardEnd, AbstractTrainingPhase)
    def add(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Add the noise."""
        import jax
        import jax.numpy as jnp

        finished = jnp.asarray(learner.progress.step, jnp.float32)
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
