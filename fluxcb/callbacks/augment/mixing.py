"""`MixUp` and `CutMix`, which train on mixtures of two examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxcb._declare.access import Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import BackwardBegin, Event, ForwardBegin
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.resolution import Resolution, Unresolvable
from fluxcb._errors import DeclarationError, TraceError
from fluxcb.callbacks.arguments import finite_number
from fluxcb.callbacks.augment.soft_labels import all_float, blended, is_float
from fluxcb.callbacks.metrics.recorder import leading_axis

__all__ = ["CutMix", "MixUp"]

_MIXING = {"step": {"xs": Write(), "ys": Write(), "mixed": Write()}}


class _BatchMixing(Callback):
    """Mix each example of a batch with another example of the same batch. Subclasses implement `mix`."""

    def __init__(self, alpha: float) -> None:
        self.alpha = finite_number(alpha, f"`alpha` of {type(self).__name__}", above=0)

    def mix(self, x: Any, others: Any, weight: Any, key: Any) -> tuple[Any, Any]:
        """Mix one array of the inputs.

        Args:
            x: The examples, along the first axis.
            others: The examples to mix in, in the order of `x`.
            weight: The requested weight of `x` in the mixture (float32[]).
            key: Random key, the same for all arrays.

        Returns:
            The mixtures, and the actual weight of `x` in them. For `CutMix`, the actual weight differs from `weight`
            because boxes have whole pixels and are clipped at the edges.
        """
        raise NotImplementedError

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the paths that the callback reads and writes."""
        return {"step": {**_MIXING["step"], "outputs": Read(), "loss": Write()}, "loss_fn": Read()}

    def resolveconflict(self, other: Callback) -> Resolution:
        """Refuse a second mixing callback, which would mix examples that are mixtures already."""
        # Both would also write `step.mixed`, so the losses would be mixed with the labels of the second one only.
        return Unresolvable() if isinstance(other, _BatchMixing) else super().resolveconflict(other)

    @on(ForwardBegin, AbstractTrainingPhase, access=_MIXING)
    def mix_batch(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Mix the inputs and the floating-point labels."""
        import jax
        import jax.numpy as jnp

        xs, ys = learner.step.xs, learner.step.ys
        weight_key, order_key, key = jax.random.split(learner.key, 3)
        weight = jax.random.beta(weight_key, self.alpha, self.alpha)
        # One permutation for inputs and labels, so that the mixed-in labels belong to the mixed-in inputs.
        order = jax.random.permutation(order_key, leading_axis(xs))
        leaves, structure = jax.tree.flatten(xs)
        mixed = [self.mix(x, jnp.take(x, order, axis=0), weight, key) for x in leaves]
        share = mixed[0][1]
        others = jax.tree.map(lambda y: jnp.take(y, order, axis=0), ys)
        learner.step.xs = jax.tree.unflatten(structure, [x for x, _ in mixed])
        learner.step.ys = jax.tree.map(lambda y, o: blended(share, y, o) if is_float(y) else y, ys, others)
        learner.step["mixed"] = {"ys": others, "share": share}

    @on(
        BackwardBegin,
        AbstractTrainingPhase,
        access={
            "step": {"ys": Read(), "mixed": Read(), "outputs": Read(), "loss": Write()},
            "loss_fn": Read(),
        },
    )
    def mix_losses(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Mix the losses for the two labels if labels are class indices."""
        import jax

        ys, mixed = learner.step.ys, learner.step["mixed"]
        if not all_float(ys):
            # Floating-point labels in the same pytree are mixed already, so they are the same in both losses.
            others = jax.tree.map(lambda y, o: y if is_float(y) else o, ys, mixed["ys"])
            loss = learner.loss_fn(learner.step.outputs, others)
            learner.step.loss = blended(mixed["share"], learner.step.loss, loss)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.alpha})"


class MixUp(_BatchMixing):
    """Train on weighted means of pairs of examples and of their labels.

    Each example becomes `w * x_i + (1 - w) * x_j`. The weight `w ~ Beta(alpha, alpha)` is drawn once per step, and the
    partner `j` at random for each example.

    Floating-point labels are mixed in the same way. If labels are class indices (integers), the losses are mixed
    instead: `w * loss(outputs, y_i) + (1 - w) * loss(outputs, y_j)`. For a cross-entropy, the result is the same.
    `step.ys` keeps the class indices, so the training accuracy compares with the labels of `x_i`. Validation does not
    mix.

    Args:
        alpha: Parameter of the beta distribution, above 0. With 0.2, most mixtures are close to one of the two
            examples. With 1.0, the weight is uniform in [0, 1].

    Access:
        step.xs, step.ys, step.mixed: Write (at ForwardBegin).
        step.outputs, loss_fn: Read (at BackwardBegin).
        step.loss: Write (at BackwardBegin).

    Runs:
        ForwardBegin, BackwardBegin x AbstractTrainingPhase (traced).

    Cost:
        A copy of the batch inside the step. If labels are class indices, a second evaluation of the loss function, but
        not of the model. Does not shorten windows.

    Raises:
        DeclarationError: `alpha` is not a number above 0.
        TraceError: The inputs are not floating-point numbers.

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
        """Return the weighted means, and the weight."""
        if not is_float(x):
            raise TraceError(
                f"MixUp({self.alpha}) cannot mix `step.xs`: it contains {x.dtype}[{', '.join(map(str, x.shape))}], "
                "expected floating-point numbers.",
                why="the weighted mean of two integers is not an integer, and the mean of two token ids has no meaning",
                fix="convert images to floating point in the data source, e.g. with "
                "`fluxcb.data.map(lambda batch: ..., source)`, or use CutMix",
            )
        return blended(weight, x, others), weight


class CutMix(_BatchMixing):
    """Replace a box in each image by the same box of another image, and mix the labels by area.

    The box has the area fraction `1 - w`, with `w ~ Beta(alpha, alpha)` drawn once per step. Its center is uniform in
    the image, and the box is clipped at the edges. Labels or losses are mixed as in `MixUp`, with the fraction of the
    image outside the clipped box as the weight.

    Args:
        alpha: Parameter of the beta distribution, above 0. With 1.0, the area of the box is uniform.
        axes: The axes of height and width. The default is for channels-last images; use `(2, 3)` for channels-first.

    Access:
        step.xs, step.ys, step.mixed: Write (at ForwardBegin).
        step.outputs, loss_fn: Read (at BackwardBegin).
        step.loss: Write (at BackwardBegin).

    Runs:
        ForwardBegin, BackwardBegin x AbstractTrainingPhase (traced).

    Cost:
        A copy of the batch inside the step. If labels are class indices, a second evaluation of the loss function, but
        not of the model. Does not shorten windows.

    Raises:
        DeclarationError: `alpha` is not a number above 0, or `axes` are not two different axes after the first.
        TraceError: The inputs do not have these axes.

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
                why="axis 0 is the axis of the examples",
                fix="write `axes=(1, 2)` for images [n, h, w, c], and `axes=(2, 3)` for images [n, c, h, w]",
            )
        self.axes = axes

    def mix(self, x: Any, others: Any, weight: Any, key: Any) -> tuple[Any, Any]:
        """Return the images with boxes, and the fraction of the area outside the box."""
        import jax
        import jax.numpy as jnp

        if x.ndim <= max(self.axes):
            raise TraceError(
                f"{self!r} cannot cut `step.xs`, which contains {x.dtype}[{', '.join(map(str, x.shape))}].",
                why=f"the axes {self.axes} should be height and width, but the array does not have them",
                fix="pass the axes of height and width as `axes=`, or use MixUp",
            )
        outside, area = jnp.bool_(False), jnp.float32(1.0)
        for axis, axis_key in zip(self.axes, jax.random.split(key), strict=True):
            size = x.shape[axis]
            half = jnp.int32(size * jnp.sqrt(1 - weight)) // 2
            center = jax.random.randint(axis_key, (), 0, size)
            low, high = jnp.maximum(center - half, 0), jnp.minimum(center + half, size)
            # The positions along this axis, shaped to broadcast against `x`.
            index = jax.lax.broadcasted_iota(jnp.int32, [size if a == axis else 1 for a in range(x.ndim)], axis)
            outside = outside | (index < low) | (index >= high)
            area = area * (high - low).astype(jnp.float32) / size
        return jnp.where(outside, x, others), 1 - area

    def __repr__(self) -> str:
        return f"CutMix({self.alpha}, axes={self.axes})"
