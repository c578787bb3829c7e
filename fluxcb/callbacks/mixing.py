"""`MixUp` and `CutMix`: train on mixtures of two examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxcb._declare.access import Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import BackwardBegin, Event, ForwardBegin
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.resolution import Resolution, Unresolvable
from fluxcb._errors import DeclarationError, TraceError
from fluxcb.callbacks.arguments import number_above
from fluxcb.callbacks.recorder import leading_axis
from fluxcb.callbacks.soft_labels import all_float, blended, is_float

__all__ = ["CutMix", "MixUp"]

_MIXING = {"step": {"xs": Write(), "ys": Write(), "mixed": Write()}}


class _BatchMixing(Callback):
    """Mixes every example of a batch with another one of it; subclasses say how in `mix`."""

    def __init__(self, alpha: float) -> None:
        self.alpha = number_above(0, alpha, f"`alpha` of {type(self).__name__}")

    def mix(self, x: Any, others: Any, weight: Any, key: Any) -> tuple[Any, Any]:
        """Mix one array of the inputs.

        Args:
            x: The examples, along the first axis.
            others: For each example, the one it is mixed with.
            weight: Share that the example itself should have (float32[]).
            key: Random key, the same for all arrays.

        Returns:
            The mixtures, and the share that the example itself really has.
        """
        raise NotImplementedError

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return {"step": {**_MIXING["step"], "outputs": Read(), "loss": Write()}, "loss_fn": Read()}

    def resolveconflict(self, other: Callback) -> Resolution:
        """Refuse a second mixture, which would take the first one's for plain examples."""
        return Unresolvable() if isinstance(other, _BatchMixing) else super().resolveconflict(other)

    @on(ForwardBegin, AbstractTrainingPhase, access=_MIXING)
    def mix_batch(self, event: Event, phase: Phase, learner: Any) -> None:
        """Mix the inputs, and the labels that are floating-point numbers."""
        import jax
        import jax.numpy as jnp

        xs, ys = learner.step.xs, learner.step.ys
        weight_key, order_key, key = jax.random.split(learner.key, 3)
        weight = jax.random.beta(weight_key, self.alpha, self.alpha)
        order = jax.random.permutation(order_key, leading_axis(xs))
        leaves, structure = jax.tree.flatten(xs)
        mixed = [self.mix(x, jnp.take(x, order, axis=0), weight, key) for x in leaves]
        share = mixed[0][1]
        others = jax.tree.map(lambda y: jnp.take(y, order, axis=0), ys)
        learner.step.xs = jax.tree.unflatten(structure, [x for x, _ in mixed])
        learner.step.ys = jax.tree.map(lambda y, o: blended(share, y, o) if is_float(y) else y, ys, others)
        learner.step.mixed = {"ys": others, "share": share}

    @on(
        BackwardBegin,
        AbstractTrainingPhase,
        access={
            "step": {"ys": Read(), "mixed": Read(), "outputs": Read(), "loss": Write()},
            "loss_fn": Read(),
        },
    )
    def mix_losses(self, event: Event, phase: Phase, learner: Any) -> None:
        """Mix the losses of both labels, where labels are classes."""
        import jax

        ys, mixed = learner.step.ys, learner.step.mixed
        if not all_float(ys):
            others = jax.tree.map(lambda y, o: y if is_float(y) else o, ys, mixed["ys"])
            loss = learner.loss_fn(learner.step.outputs, others)
            learner.step.loss = blended(mixed["share"], learner.step.loss, loss)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.alpha})"


class MixUp(_BatchMixing):
    """Train on weighted means of two examples of the batch, and of their labels.

    `x <- w * x_i + (1 - w) * x_j`, with one `w ~ Beta(alpha, alpha)` a step and a random `j` for each example. Labels
    that are floating-point numbers are mixed in the same way. Where they are classes (integers), the losses are:
    `w * loss(outputs, y_i) + (1 - w) * loss(outputs, y_j)`, which is the same for a cross-entropy. So `step.ys` keeps
    classes as they are, and so does what the training's accuracy compares with. Validation is left alone.

    Args:
        alpha: How even the mixtures are, above 0; 0.2 for little, 1.0 for any weight alike.

    Access:
        step.xs, step.ys, step.mixed: Write (at ForwardBegin).
        step.outputs, loss_fn: Read (at BackwardBegin).
        step.loss: Write (at BackwardBegin).

    Runs:
        ForwardBegin, BackwardBegin x AbstractTrainingPhase (traced).

    Cost:
        A copy of the batch in the step; a second loss (not a second model) where labels are classes. Bounds no window.

    Raises:
        DeclarationError: `alpha` is not a number above 0.
        TraceError: The inputs are integers.

    Example:
        >>> from fluxcb.callbacks import MixUp
        >>> from fluxcb.testing import testlearner
        >>> learner = testlearner(MixUp(0.2))
        >>> history = learner.fit(1)
        >>> learner.step
        4

    Source:
        Zhang et al. (2018), mixup: Beyond Empirical Risk Minimization, section 2, arXiv:1710.09412.
    """

    def __init__(self, alpha: float = 0.2) -> None:
        super().__init__(alpha)

    def mix(self, x: Any, others: Any, weight: Any, key: Any) -> tuple[Any, Any]:
        """Return the weighted means."""
        if not is_float(x):
            raise TraceError(
                f"MixUp({self.alpha}) mixes `step.xs`, which holds {x.dtype}[{', '.join(map(str, x.shape))}].",
                why="the mean of two integers is none; images would lose what mixing adds, tokens are no amounts",
                fix="convert in the data source, e.g. `fluxcb.data.map(source, lambda batch: ...)`, or use CutMix",
            )
        return blended(weight, x, others), weight


class CutMix(_BatchMixing):
    """Train on images with a box of another image of the batch in them, and on both labels.

    The box covers a share `1 - w` of the image, `w ~ Beta(alpha, alpha)`, one a step; its centre is anywhere, and what
    lies outside is cut off. Labels are mixed by the areas that are left, as in `MixUp`.

    Args:
        alpha: How even the areas are, above 0.
        axes: The axes of height and width; `(2, 3)` where channels come first.

    Access:
        step.xs, step.ys, step.mixed: Write (at ForwardBegin).
        step.outputs, loss_fn: Read (at BackwardBegin).
        step.loss: Write (at BackwardBegin).

    Runs:
        ForwardBegin, BackwardBegin x AbstractTrainingPhase (traced).

    Cost:
        A copy of the batch in the step; a second loss (not a second model) where labels are classes. Bounds no window.

    Raises:
        DeclarationError: `alpha` is not a number above 0, or `axes` are no two different axes behind the first.
        TraceError: The inputs have no such axes.

    Example:
        >>> from fluxcb.callbacks import CutMix
        >>> CutMix(), CutMix(0.5, axes=(2, 3))
        (CutMix(1.0, axes=(1, 2)), CutMix(0.5, axes=(2, 3)))

    Source:
        Yun et al. (2019), CutMix, equations 1 and 2, arXiv:1905.04899.
    """

    def __init__(self, alpha: float = 1.0, *, axes: tuple[int, int] = (1, 2)) -> None:
        super().__init__(alpha)
        fits = isinstance(axes, tuple) and len(axes) == 2 and all(type(a) is int and a > 0 for a in axes)
        if not fits or axes[0] == axes[1]:
            raise DeclarationError(
                f"`axes` of CutMix must be the axes of height and width, not {axes!r}.",
                why="axis 0 counts the examples",
                fix="(1, 2) for images as Flax has them, (2, 3) where channels come first",
            )
        self.axes = axes

    def mix(self, x: Any, others: Any, weight: Any, key: Any) -> tuple[Any, Any]:
        """Return the images with boxes, and the share of the area outside."""
        import jax
        import jax.numpy as jnp

        if x.ndim <= max(self.axes):
            raise TraceError(
                f"{self!r} cuts `step.xs`, which holds {x.dtype}[{', '.join(map(str, x.shape))}].",
                why="it has no axes of height and width there",
                fix="give `axes=`, or use MixUp",
            )
        outside, area = jnp.bool_(False), jnp.float32(1.0)
        for axis, axis_key in zip(self.axes, jax.random.split(key), strict=True):
            size = x.shape[axis]
            half = jnp.int32(size * jnp.sqrt(1 - weight)) // 2
            centre = jax.random.randint(axis_key, (), 0, size)
            low, high = jnp.maximum(centre - half, 0), jnp.minimum(centre + half, size)
            at = jax.lax.broadcasted_iota(jnp.int32, [size if a == axis else 1 for a in range(x.ndim)], axis)
            outside = outside | (at < low) | (at >= high)
            area = area * (high - low) / size
        return jnp.where(outside, x, others), 1 - area

    def __repr__(self) -> str:
        return f"CutMix({self.alpha}, axes={self.axes})"
