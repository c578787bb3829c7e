"""`Freeze`: parameters that do not train, always or for a while."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from fluxcb._declare.access import Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import BackwardEnd, Event, UpdateEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.resolution import NoConflict, NotDefined, Resolution
from fluxcb._declare.schedules import positive
from fluxcb._errors import DeclarationError, did_you_mean

__all__ = ["Freeze"]


class Freeze(Callback):
    """Keep some parameters as they are, for good or for the first epochs or steps.

    After each update they are put back, bit for bit, so that weight decay and momentum do not move them either, as they
    would if only their gradients were zero. Gradients are computed all the same: norms (`ClipGradients`) count them,
    and the optimizer's state goes on for frozen parameters, too. When they are freed, momentum or Adam's moments have
    followed their gradients already, and the first updates are as large as in the midst of a training. To train them
    from a fresh optimizer state, or to save its memory, use `optax.multi_transform` with `optax.set_to_zero`.

    Several may stand in a list, to free one part after the other.

    Args:
        *paths: Which parameters: dotted paths in `params`. `encoder` means all below it, `*.bias` is matched as file
            names are.
        epochs: Freeze them in that many first epochs of the training (epochs).
        steps: Freeze them in that many first steps of the training (steps).

    Access:
        params: Write.
        step.params_before: Write; the parameters before the update.

    Runs:
        BackwardEnd, UpdateEnd x AbstractTrainingPhase (traced).

    Cost:
        A copy of what is frozen, inside the step. Freeing recompiles nothing.

    Raises:
        DeclarationError: No path is given, both epochs and steps are, or one that is no whole number above 0; when the
            Learner is built, also a path that fits no parameter.

    Example:
        >>> from fluxcb.callbacks import Freeze
        >>> from fluxcb.testing import testlearner
        >>> learner = testlearner(Freeze("b", epochs=2))
        >>> history = learner.fit(2)
        >>> float(learner.params["b"])
        0.0
        >>> history = learner.fit(1)
        >>> float(learner.params["b"]) < 0
        True

    Source:
        fastai, `Learner.freeze_to`; Keras, `trainable`.
    """

    def __init__(self, *paths: str, epochs: int | None = None, steps: int | None = None) -> None:
        if not paths or not all(isinstance(path, str) and path for path in paths):
            raise DeclarationError(
                f"`Freeze` takes paths of parameters, not {', '.join(map(repr, paths)) or 'nothing'}.",
                fix='e.g. `Freeze("encoder", "*.bias")`',
            )
        if epochs is not None and steps is not None:
            raise DeclarationError(
                "`Freeze` takes epochs or steps, not both.", fix='e.g. `Freeze("encoder", epochs=3)`'
            )
        self.paths = paths
        self.epochs = epochs if epochs is None else positive(epochs, "`epochs` of `Freeze`")
        self.steps = steps if steps is None else positive(steps, "`steps` of `Freeze`")

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return {"params": Write(), "step": {"params_before": Write()}}

    def resolveconflict(self, other: Callback) -> Resolution:
        """Say that any order of two of them is fine: each puts its own parameters back."""
        return NoConflict() if isinstance(other, Freeze) else NotDefined()

    def init(self, learner: Any) -> None:
        """Check that each path fits a parameter."""
        known = [path for path, _ in _leaves(learner.params)]
        for path in self.paths:
            if not any(_fits(path, leaf) for leaf in known):
                shown = ", ".join(f"`{leaf}`" for leaf in known[:10]) + (", ..." if len(known) > 10 else "")
                parents = {leaf[: position + 1].rstrip(".") for leaf in known for position in _dots(leaf)}
                raise DeclarationError(
                    f"{self!r}: no parameter fits `{path}`.{did_you_mean(path, [*parents, *known])}",
                    why="nothing would be frozen",
                    fix=f"the parameters are {shown}",
                )

    @on(BackwardEnd, AbstractTrainingPhase, access={"params": Read(), "step": {"params_before": Write()}})
    def keep(self, event: Event, phase: Phase, learner: Any) -> None:
        """Keep the parameters as they are before the update."""
        learner.step.params_before = learner.params

    @on(UpdateEnd, AbstractTrainingPhase, access={"params": Write(), "step": {"params_before": Read()}})
    def put_back(self, event: Event, phase: Phase, learner: Any) -> None:
        """Put the frozen ones back."""
        import jax
        import jax.numpy as jnp

        before = jax.tree.leaves(learner.step.params_before)
        new = learner.params
        frozen = self._frozen(learner)
        leaves = [
            leaf if not any(_fits(pattern, path) for pattern in self.paths) else jnp.where(frozen, old, leaf)
            for (path, leaf), old in zip(_leaves(new), before, strict=True)
        ]
        learner.params = jax.tree.unflatten(jax.tree.structure(new), leaves)

    def _frozen(self, learner: Any) -> Any:
        """Return whether this step is one of the first: `bool[]`, or True for good."""
        if self.epochs is not None:
            return learner.progress.epoch <= self.epochs
        return True if self.steps is None else learner.progress.step < self.steps

    def __repr__(self) -> str:
        until = f", epochs={self.epochs}" if self.epochs else f", steps={self.steps}" if self.steps else ""
        return f"Freeze({', '.join(map(repr, self.paths))}{until})"


def _leaves(params: Any) -> list[tuple[str, Any]]:
    """Return the dotted path and the value of each parameter."""
    import jax

    with_paths = jax.tree_util.tree_flatten_with_path(params)[0]
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in with_paths]


def _fits(pattern: str, leaf: str) -> bool:
    return leaf.startswith(f"{pattern}.") or fnmatch.fnmatchcase(leaf, pattern)


def _dots(leaf: str) -> list[int]:
    return [position for position, letter in enumerate(leaf) if letter == "."]
