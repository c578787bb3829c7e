"""`Freeze`, which keeps parameters constant during the whole training, or during its first epochs or steps."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from fluxcb._declare.access import Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import BackwardEnd, Event, UpdateEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.resolution import NoConflict, NotDefined, Resolution
from fluxcb._declare.schedules import positive
from fluxcb._errors import DeclarationError, did_you_mean
from fluxcb._tracebacks import warn_user
from fluxcb.callbacks.arguments import at_most_one, require

__all__ = ["Freeze"]


class Freeze(Callback):
    """Freeze parameters, either permanently or for the first epochs or steps.

    After each update, the frozen parameters are restored, bit for bit. Setting only their gradients to zero would not
    be enough, because weight decay and momentum would still change them.

    The gradients of frozen parameters are still computed. They are part of norms (`ClipGradients`), and the optimizer
    still updates its state from them. When parameters are unfrozen, their momentum is therefore already up to date,
    and their first updates have the usual size. To start them from a fresh optimizer state instead, or to save the
    memory of that state, use `optax.multi_transform` with `optax.set_to_zero`.

    The model state, such as the running averages of batch normalization, is not frozen. If the training changes the
    state of a frozen part, `fit` warns. To keep it as well, call its layers in evaluation mode.

    Use several `Freeze` callbacks to unfreeze parts of a model one after another.

    Args:
        *paths: Dotted paths in `params`. `encoder` selects everything below `encoder`. Wildcards work as in file
            names: `*.bias` selects all biases.
        epochs: Number of epochs from the start of training in which the parameters are frozen (epochs).
        steps: Number of steps from the start of training in which the parameters are frozen (steps).

    Access:
        params: Write.
        step.params_before: Write; the parameters before the update.

    Runs:
        BackwardEnd, UpdateEnd x AbstractTrainingPhase (traced).

    Cost:
        A copy of the frozen parameters inside the step. Unfreezing does not recompile.

    Raises:
        DeclarationError: No path is given; both `epochs` and `steps` are given; or one of them is not a positive
            integer. When the Learner is built: a path does not match any parameter.

    Warns:
        UserWarning: All parameters are frozen throughout the training, or the epochs or steps have already passed.

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
        fits = bool(paths) and all(isinstance(path, str) and path for path in paths)
        require(fits, paths, "The arguments of `Freeze`", "paths of parameters", 'Freeze("encoder", "*.bias")')
        at_most_one("Freeze", 'Freeze("encoder", epochs=3)', epochs=epochs, steps=steps)
        self.paths = paths
        self.epochs = epochs if epochs is None else positive(epochs, "`epochs` of `Freeze`")
        self.steps = steps if steps is None else positive(steps, "`steps` of `Freeze`")
        self._is_new = True

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the paths that the callback reads and writes."""
        return {"params": Write(), "step": {"params_before": Write()}}

    def resolveconflict(self, other: Callback) -> Resolution:
        """Allow several `Freeze` callbacks in any order, because each restores only its own parameters."""
        return NoConflict() if isinstance(other, Freeze) else NotDefined()

    def init(self, learner: LearnerView) -> None:
        """Check that each path matches a parameter. Warn if all parameters are frozen, or none will ever be."""
        known = [path for path, _ in _leaves(learner.params)]
        for path in self.paths:
            if not any(_matches(path, leaf) for leaf in known):
                shown = ", ".join(f"`{leaf}`" for leaf in known[:10]) + (", ..." if len(known) > 10 else "")
                parents = {leaf[: position + 1].rstrip(".") for leaf in known for position in _dots(leaf)}
                raise DeclarationError(
                    f"{self!r}: no parameter matches `{path}`.{did_you_mean(path, [*parents, *known])}",
                    why="nothing would be frozen",
                    fix=f"use the path of a parameter: {shown}",
                )
        # `init` is called again when other callbacks are added, and the time of this one may then have passed.
        is_new, self._is_new = self._is_new, False
        unit, limit, past = "epoch", self.epochs, learner.progress.epoch
        if self.steps is not None:
            unit, limit, past = "step", self.steps, learner.progress.step
        if is_new and limit is not None and past >= limit:
            warn_user(
                f"{self!r} freezes nothing after {unit} {limit}, which the training has reached, because it counts "
                f"from the start of the training. For the next {limit} {unit}s, write `{unit}s={past + limit}`.",
                UserWarning,
            )
        if self.epochs is None and self.steps is None and all(self.selects(leaf) for leaf in known):
            warn_user(
                f"{self!r} freezes all parameters, so training changes none of them. Name only those that must stay "
                "constant, or limit the time with `epochs=` or `steps=`.",
                UserWarning,
            )

    @on(BackwardEnd, AbstractTrainingPhase, access={"params": Read(), "step": {"params_before": Write()}})
    def keep(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Store the parameters as they are before the first update of the step."""
        if "params_before" not in learner.step:  # a phase may emit BackwardEnd before each of several updates
            learner.step["params_before"] = learner.params

    @on(UpdateEnd, AbstractTrainingPhase, access={"params": Write(), "step": {"params_before": Read()}})
    def put_back(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Restore the frozen parameters."""
        import jax
        import jax.numpy as jnp

        before = jax.tree.leaves(learner.step["params_before"])
        new = learner.params
        frozen = self._frozen(learner)
        leaves = [
            leaf if not self.selects(path) else jnp.where(frozen, old, leaf)
            for (path, leaf), old in zip(_leaves(new), before, strict=True)
        ]
        learner.params = jax.tree.unflatten(jax.tree.structure(new), leaves)

    def selects(self, leaf: str) -> bool:
        """Return whether the callback freezes a parameter, which is given by its dotted path."""
        return any(_matches(path, leaf) for path in self.paths)

    def _frozen(self, learner: LearnerView) -> Any:
        """Return whether the parameters are frozen at this step: `bool[]`, or True if they always are."""
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


def _matches(pattern: str, leaf: str) -> bool:
    return leaf.startswith(f"{pattern}.") or fnmatch.fnmatchcase(leaf, pattern)


def _dots(leaf: str) -> list[int]:
    return [position for position, letter in enumerate(leaf) if letter == "."]
