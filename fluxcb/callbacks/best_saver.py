"""`MinSaver`, `MaxSaver`: keep the checkpoint with the best value of a metric."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

from fluxcb._declare.events import Event, Trigger
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.signatures import explained
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.snapshot_saver import SnapshotSaver, better
from fluxcb.callbacks.watched import Watched
from fluxcb.checkpoints.manifest import Manifest
from fluxcb.checkpoints.run_folder import Entry
from fluxcb.checkpoints.snapshot import Snapshot

__all__ = ["MaxSaver", "MinSaver"]


class BestSaver(SnapshotSaver):
    """Base of `MinSaver` and `MaxSaver`."""

    mode: ClassVar[str]

    @explained()
    def __init__(
        self,
        folder: str | os.PathLike[str],
        metric: str = "loss",
        *,
        name: str | None = None,
    ) -> None:
        owner = type(self).__name__
        self._watched = Watched.named(metric, None, owner)
        super().__init__(folder, owner)
        if name is not None and not (isinstance(name, str) and re.match(r"[^\W\d]", name)):
            raise DeclarationError(
                f"`name` of {owner} must begin with a letter, and not be {name!r}.",
                why="it is the name of a directory inside the run's, where numbers are checkpoints",
                fix=f'e.g. `{owner}("runs/1", {metric!r}, name="best")`',
            )
        inner = name if name is not None else f"{self.mode}-{self._watched}"
        self.folder = self._files.path = self.folder / re.sub(r"[^\w.-]+", "-", inner)
        self.best: tuple[int, float] | None = None

    def stateaccess(self) -> dict[str, Any]:
        """Return what it reads: everything, so it runs after all who write."""
        access = super().stateaccess()
        return {**access, "cbstate": {"metrics_epoch": access["*"]}}

    def watched_metrics(self) -> Iterable[Watched]:
        """Return the metric that decides which checkpoint is the best."""
        return (self._watched,)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far with its step; its checkpoint is on disk before any later one says so."""
        self.wait()
        return {**super().state_dict(), "best": list(self.best) if self.best is not None else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from that value."""
        super().load_state_dict(state)
        self.best = (state["best"][0], state["best"][1]) if state["best"] is not None else None

    def begun(self, learner: Any, kept: list[tuple[Entry, Manifest]]) -> None:
        """Save what a kill may have kept from being saved: the best is the state at hand, and is not on disk."""
        best = self.best[0] if self.best is not None else None
        if best == learner.progress.step and all(entry.step != best for entry, _ in kept):
            learner.snapshots.request(self._take)

    @on(Trigger, AbstractTrainingPhase)
    def save(self, event: Event, phase: Phase, learner: Any) -> None:
        """Ask for a snapshot if the epoch's value is better than all before it."""
        self.wait()  # the best is what could be written
        value = self._watched.at(learner.cbstate.metrics_epoch, learner.progress.epoch)
        if value is not None and better(value, self.best[1] if self.best is not None else None, self.mode):
            self.best = (learner.progress.step, value)
            learner.snapshots.request(self._take)

    def _take(self, snapshot: Snapshot) -> None:
        # `load_model` and `load_params` must read the parameters that this value was measured with.
        measured = replace(snapshot, average=snapshot.averages.get(self._watched.phase))
        self.write(measured, self.best[1] if self.best is not None else None)

    def unsaved(self) -> None:
        """Take the best that is on disk for the best again."""
        super().unsaved()
        saved = [(manifest.step, manifest.value) for _, manifest in self._files.kept()[0] if manifest.value is not None]
        self.best = saved[-1] if saved else None

    def dispensable(self, kept: list[tuple[Entry, Manifest]]) -> Iterable[Entry]:
        """Return all but the newest, which is the best."""
        return [entry for entry, _ in kept[:-1]]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({os.fspath(self.folder.parent)!r}, {str(self._watched)!r})"


class MinSaver(BestSaver):
    """Keep the checkpoint with the smallest value of a metric, beside the regular ones and independent of them.

    It looks when the epoch's values are known, wherever it stands in the list, and saves the state at hand. Only a
    value that is smaller than all before it is saved: of equal ones the first, and never NaN. What was the best is part
    of a run's checkpoints, so a resumed run does not overwrite a better one.

    `fluxcb.checkpoints.load_model("runs/1/min-validation-loss", model)` returns the model, and `load_params` returns
    its parameters. Both use the parameters that were measured. If a `ParameterEMA` validates with its average, these
    are the average.

    Args:
        folder: The directory of the run; the checkpoint is in `min-validation-loss` in it.
        metric: The metric: `validation/loss`, or `loss` for that of the validation.
        name: Another name for the directory inside.

    Attributes:
        best: Step and value of the best so far, or None.

    Access:
        *: Read.
        cbstate.metrics_epoch: Read.

    Runs:
        FitBegin, EpochBegin, EpochEnd, FitEnd x Phase (host).
        StepEnd x Phase (host, at the ends of windows).
        Trigger x AbstractTrainingPhase (host).

    Cost:
        A copy of the train state on the host for each save; see `Checkpointer`.

    Raises:
        DeclarationError: `folder` is not a path, or `metric` is not the name of a metric.
        MissingStateError: No callback provides the metric, or its phase has no data (when the Learner is built).
        CheckpointError: The directory is another run's, or cannot be written to; a save failed.

    Example:
        >>> import tempfile, jax.numpy as jnp, optax, fluxcb
        >>> from fluxcb.callbacks import Metrics, MinSaver
        >>> folder = tempfile.mkdtemp()
        >>> learner = fluxcb.Learner.from_loss(
        ...     {"w": jnp.float32(4.0)},
        ...     lambda params, batch, key: jnp.mean((params["w"] - batch) ** 2),
        ...     optax.sgd(0.25),  # halves the distance to 0: 2, 1, 0.5; the best for validation is 1
        ...     data=([jnp.zeros(1)], [jnp.ones(1)]),
        ...     callbacks=[MinSaver(folder), Metrics()],
        ...     default_callbacks=False,
        ... )
        >>> history = learner.fit(3)
        >>> learner.callbacks.get(MinSaver).best
        (2, 0.0)
        >>> fluxcb.checkpoints.load_params(folder + "/min-validation-loss")["w"].item()
        1.0

    Source:
        tensorpack, `MinSaver`, which copies the newest regular checkpoint, if that is of the same step.
    """

    mode = "min"


class MaxSaver(BestSaver):
    """Keep the checkpoint with the largest value of a metric; in all else `MinSaver`.

    Args:
        folder: The directory of the run; the checkpoint is in `max-validation-accuracy`, for example, in it.
        metric: The metric: `validation/accuracy`, or `accuracy` for that of the validation. It has no default, because
            the default of `MinSaver` is a loss.
        name: Another name for the directory inside.

    Attributes:
        best: Step and value of the best so far, or None.

    Access:
        *: Read.
        cbstate.metrics_epoch: Read.

    Runs:
        FitBegin, EpochBegin, EpochEnd, FitEnd x Phase (host).
        StepEnd x Phase (host, at the ends of windows).
        Trigger x AbstractTrainingPhase (host).

    Cost:
        See `MinSaver`.

    Raises:
        DeclarationError: No metric; otherwise see `MinSaver`.
        MissingStateError: See `MinSaver`.
        CheckpointError: See `MinSaver`.

    Example:
        >>> from fluxcb.callbacks import MaxSaver, Metrics, accuracy
        >>> callbacks = [Metrics(accuracy), MaxSaver("runs/1", "accuracy")]

    Source:
        tensorpack, `MaxSaver`.
    """

    mode = "max"

    @explained({"metric": 'give the folder first and then the metric: `MaxSaver("runs/1", "accuracy")`'})
    def __init__(self, folder: str | os.PathLike[str], metric: str, *, name: str | None = None) -> None:
        super().__init__(folder, metric, name=name)
