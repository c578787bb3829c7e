"""`LabelSmoothing`: train on labels that are not quite sure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxcb._declare.access import Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import BackwardBegin, Event, ForwardBegin
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb.callbacks.arguments import number_between
from fluxcb.callbacks.mixing import CutMix, MixUp
from fluxcb.callbacks.soft_labels import all_float, blended, is_float

__all__ = ["LabelSmoothing"]


class LabelSmoothing(Callback):
    """Give a part of each label's weight to all classes alike, in training only.

    Labels that are floating-point numbers become `(1 - alpha) * y + alpha / classes`. Where they are classes (one
    array of integers), the loss becomes `(1 - alpha) * loss(outputs, y) + alpha * mean_k loss(outputs, k)`, the mean
    over all classes `k`; this is the same for a cross-entropy. So the loss function stays as it is, and validation
    measures with it. Classes lie along the last axis, of `step.ys` or of `step.outputs`.

    Args:
        alpha: The part, at least 0 and below 1.

    Access:
        step.ys: Write (at ForwardBegin).
        step.outputs, loss_fn: Read (at BackwardBegin).
        step.loss: Write (at BackwardBegin).

    Runs:
        ForwardBegin, BackwardBegin x AbstractTrainingPhase (traced).

    Cost:
        Where labels are classes, the loss of every class, as many numbers as `step.outputs` has. Bounds no window.

    Raises:
        DeclarationError: `alpha` is outside [0, 1).

    Example:
        >>> import jax.numpy as jnp, optax, fluxcb
        >>> from fluxcb.callbacks import LabelSmoothing
        >>> def loss_fn(logits, ys):
        ...     return optax.softmax_cross_entropy_with_integer_labels(logits, ys).mean()
        >>> learner = fluxcb.Learner(
        ...     (lambda key, xs: {"b": jnp.zeros(2)}, lambda params, xs: xs[:, None] + params["b"]),
        ...     loss_fn,
        ...     optax.sgd(1.0),
        ...     data=[(jnp.zeros(4), jnp.zeros(4, int))],
        ...     callbacks=[LabelSmoothing(0.2)],
        ...     default_callbacks=False,
        ... )
        >>> history = learner.fit(200)
        >>> [round(float(p), 2) for p in jnp.exp(learner.params["b"]) / jnp.exp(learner.params["b"]).sum()]
        [0.9, 0.1]

    Source:
        Szegedy et al. (2016), Rethinking the Inception Architecture, section 7, arXiv:1512.00567;
        `optax.smooth_labels`, whose code runs for labels that are numbers.
    """

    def __init__(self, alpha: float = 0.1) -> None:
        self.alpha = number_between(0, 1, alpha, "`alpha` of LabelSmoothing")

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return {"step": {"ys": Write(), "outputs": Read(), "loss": Write()}, "loss_fn": Read()}

    def runafter(self) -> tuple[type[Callback], ...]:
        """Return who mixes labels: the mixture is smoothed, not one part of it."""
        return (MixUp, CutMix)

    @on(ForwardBegin, AbstractTrainingPhase, access={"step": {"ys": Write()}})
    def smooth_labels(self, event: Event, phase: Phase, learner: Any) -> None:
        """Smooth labels that are floating-point numbers."""
        import jax
        import optax

        def smooth(y: Any) -> Any:
            return optax.smooth_labels(y, self.alpha).astype(y.dtype) if is_float(y) else y

        learner.step.ys = jax.tree.map(smooth, learner.step.ys)

    @on(
        BackwardBegin,
        AbstractTrainingPhase,
        access={"step": {"ys": Read(), "outputs": Read(), "loss": Write()}, "loss_fn": Read()},
    )
    def smooth_loss(self, event: Event, phase: Phase, learner: Any) -> None:
        """Smooth the loss where labels are classes."""
        import jax
        import jax.numpy as jnp

        ys, outputs, loss_fn = learner.step.ys, learner.step.outputs, learner.loss_fn
        if all_float(ys):
            return

        def loss_of(k: Any) -> Any:
            return loss_fn(outputs, jax.tree.map(lambda y: y if is_float(y) else jnp.full_like(y, k), ys))

        # The outputs are the same for all classes, so what the loss makes of them alone is computed once.
        losses = jax.vmap(loss_of)(jnp.arange(outputs.shape[-1]))
        learner.step.loss = blended(1 - self.alpha, learner.step.loss, losses.mean())

    def __repr__(self) -> str:
        return f"LabelSmoothing({self.alpha})"
