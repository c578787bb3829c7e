"""`LabelSmoothing`, which trains on a mixture of each label and the uniform distribution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxcb._declare.access import Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import BackwardBegin, Event, ForwardBegin
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._errors import TraceError
from fluxcb.callbacks.arguments import finite_number
from fluxcb.callbacks.augment.mixing import CutMix, MixUp
from fluxcb.callbacks.augment.soft_labels import all_float, blended, is_float, shown

__all__ = ["LabelSmoothing"]


class LabelSmoothing(Callback):
    """Smooth the labels in training: move a fraction of each label's weight to a uniform distribution over classes.

    Floating-point labels become `(1 - alpha) * y + alpha / classes`. If labels are class indices (integers), the loss
    becomes `(1 - alpha) * loss(outputs, y) + alpha * mean_k loss(outputs, k)`, with the mean over all classes `k`. For
    a cross-entropy, the result is the same. The loss function itself does not change, so validation measures the
    unsmoothed loss. The classes are the last axis of `step.ys` or, for class indices, of `step.outputs`. Indices
    outside the classes, such as -1 for examples that the loss function ignores, stay as they are.

    The labels of one example must be alternatives. If each label is a decision of its own (multilabel targets), smooth
    in the loss function: `ys * (1 - alpha) + alpha / 2`.

    Args:
        alpha: The fraction to move, at least 0 and below 1.

    Access:
        step.ys: Write (at ForwardBegin).
        step.outputs, loss_fn: Read (at BackwardBegin).
        step.loss: Write (at BackwardBegin).

    Runs:
        ForwardBegin, BackwardBegin x AbstractTrainingPhase (traced).

    Cost:
        If labels are class indices, one evaluation of the loss per class, vectorized; its intermediate values can be as
        large as `step.outputs`. Does not shorten windows.

    Raises:
        DeclarationError: `alpha` is outside [0, 1).
        TraceError: The targets or outputs have no axis with at least two classes.

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
        `optax.smooth_labels`, which is called for floating-point labels.
    """

    def __init__(self, alpha: float = 0.1) -> None:
        self.alpha = finite_number(alpha, "`alpha` of LabelSmoothing", least=0, below=1)

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the paths that the callback reads and writes."""
        return {"step": {"ys": Write(), "outputs": Read(), "loss": Write()}, "loss_fn": Read()}

    def runafter(self) -> tuple[type[Callback], ...]:
        """Return the callbacks that mix labels, so that the mixture is smoothed and not only one of its labels."""
        return (MixUp, CutMix)

    @on(ForwardBegin, AbstractTrainingPhase, access={"step": {"ys": Write()}})
    def smooth_labels(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Smooth floating-point labels."""
        import jax
        import optax

        for y in jax.tree.leaves(learner.step.ys):
            if is_float(y) and (y.ndim < 2 or y.shape[-1] < 2):  # the last axis would be that of the examples
                raise self._without_classes(f"`step.ys` contains {shown(y)}")

        def smooth(y: Any) -> Any:
            return optax.smooth_labels(y, self.alpha).astype(y.dtype) if is_float(y) else y

        learner.step.ys = jax.tree.map(smooth, learner.step.ys)

    @on(
        BackwardBegin,
        AbstractTrainingPhase,
        access={"step": {"ys": Read(), "outputs": Read(), "loss": Write()}, "loss_fn": Read()},
    )
    def smooth_loss(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Smooth the loss if labels are class indices."""
        import jax
        import jax.numpy as jnp

        ys, outputs, loss_fn = learner.step.ys, learner.step.outputs, learner.loss_fn
        if all_float(ys):
            return
        labels = [y for y in jax.tree.leaves(ys) if not is_float(y)]
        if not any(_fits(y, outputs) for y in labels):
            both = f"`step.ys` contains {shown(labels[0])} and `step.outputs` is {shown(outputs)}"
            raise self._without_classes(both, outputs)
        classes = outputs.shape[-1]

        def replaced(y: Any, k: Any) -> Any:
            # The loss function may ignore examples whose label is not a class, such as -1 or 255.
            return y if is_float(y) else jnp.where((y < 0) | (y >= classes), y, jnp.full_like(y, k))

        def loss_of(k: Any) -> Any:
            return loss_fn(outputs, jax.tree.map(lambda y: replaced(y, k), ys))

        # `outputs` is not batched by `vmap`, so the parts of the loss that depend only on it, such as a log-softmax,
        # are computed once.
        losses = jax.vmap(loss_of)(jnp.arange(classes))
        learner.step.loss = blended(1 - self.alpha, learner.step.loss, losses.mean())

    def _without_classes(self, what: str, outputs: Any = None) -> TraceError:
        fixes = [
            f"for a binary loss, remove LabelSmoothing and smooth in the loss function: "
            f"`ys = ys * (1 - {self.alpha}) + {self.alpha} / 2`",
            "for targets that are not classes, such as those of a regression, remove LabelSmoothing",
        ]
        if outputs is not None and outputs.ndim > 1 and outputs.shape[-1] > 1:
            fixes.append("for one-hot targets, pass floating-point numbers: `ys.astype(np.float32)`")
            fixes.append("for classes along another axis, let the model return outputs with the classes as last axis")
        return TraceError(
            f"{self!r} finds no classes in the targets: {what}.",
            why="the classes are the last axis of one-hot targets [..., classes], or of the outputs [..., classes] of "
            "class numbers [...], and there are at least 2",
            fix=fixes,
        )

    def __repr__(self) -> str:
        return f"LabelSmoothing({self.alpha})"


def _fits(labels: Any, outputs: Any) -> bool:
    """Return whether the last axis of the outputs can be that of the classes, for labels that are class numbers."""
    if outputs.ndim == 0 or outputs.shape[-1] < 2 or outputs.shape == labels.shape:
        return False
    moved = (*outputs.shape[:1], *outputs.shape[2:])  # the form of the labels if the classes are axis 1
    return outputs.shape[:-1] == labels.shape or outputs.ndim < 3 or moved != labels.shape
