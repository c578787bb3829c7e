"""`MinSaver` and `MaxSaver`: keep the checkpoint with the best value of a metric."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

from fluxcb._calls import entry_point
from fluxcb._declare.events import Event, Trigger
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._errors import DeclarationError
from fluxcb._keyword_fixes import name_of_metric
from fluxcb._tracebacks import warn_user
from fluxcb.callbacks.keyword_fixes import best_saver_fixes
from fluxcb.callbacks.saving.snapshot_saver import SnapshotSaver, better
from fluxcb.callbacks.watched import Watched, is_metric_name, note_of_changed_metric
from fluxcb.checkpoints.manifest import Manifest
from fluxcb.checkpoints.run_folder import Entry
from fluxcb.checkpoints.snapshot import Snapshot

__all__ = ["MaxSaver", "MinSaver"]


def _metric_of(name: str) -> str:
    """Return fluxcb's name of a metric whose name may be that of Keras or Lightning: `val_loss` is `loss`."""
    return name_of_metric(name) if re.match("(val|valid|validation|eval|train|training)_", name) else name


class BestSaver(SnapshotSaver):
    """Base class of `MinSaver` and `MaxSaver`."""

    mode: ClassVar[str]

    @entry_point(fixes=best_saver_fixes("min"))  # of `MinSaver`; `MaxSaver` has a constructor of its own
    def __init__(
        self,
        folder: str | os.PathLike[str],
        metric: str = "loss",
        *,
        name: str | None = None,
    ) -> None:
        owner = type(self).__name__
        # `MaxSaver("r2", "accuracy")` is right, but `MaxSaver("r2")` is not.
        named = metric != "loss" and is_metric_name(metric)
        if is_metric_name(folder) and not named and not os.path.isdir(folder):
            raise DeclarationError(
                f'`{owner}` received "{folder}" as its folder, which is the name of a metric.',
                why="the first argument is the directory of the run, and the second one is the metric",
                fix=[
                    f'write `{owner}("runs/1", "{_metric_of(os.fspath(folder))}")`',
                    f'write "./{folder}" if you mean a directory',
                ],
            )
        self._watched = Watched.named(metric, None, owner)
        known = self._watched.certain_mode
        if known not in (None, self.mode):
            other, size = ("MinSaver", "largest") if known == "min" else ("MaxSaver", "smallest")
            warn_user(
                f'`{owner}(..., "{metric}")` keeps the checkpoint with the {size} `{self._watched}`, which is usually '
                f'the worst one. To keep the best one, write `{other}(..., "{metric}")`.',
                UserWarning,
            )
        super().__init__(folder, owner)
        if name is not None and not (isinstance(name, str) and re.match(r"[^\W\d]", name)):
            raise DeclarationError(
                f"`name` of {owner} must begin with a letter, but is {name!r}.",
                why="it names a subdirectory of the run, where directories with numeric names are checkpoints",
                fix=f'write e.g. `{owner}("runs/1", {metric!r}, name="best")`',
            )
        subdirectory = name if name is not None else f"{self.mode}-{self._watched}"
        self.folder = self._files.path = self.folder / re.sub(r"[^\w.-]+", "-", subdirectory)
        self._metric = str(self._watched)
        self.best: tuple[int, float] | None = None

    def stateaccess(self) -> dict[str, Any]:
        """Return the declared access: all state, so that the saver runs after every callback that writes."""
        access = super().stateaccess()
        return {**access, "cbstate": {"metrics_epoch": access["*"]}}

    def watched_metrics(self) -> Iterable[Watched]:
        """Return the metric that decides which checkpoint is the best."""
        return (self._watched,)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value so far, its step, and the metric."""
        self.wait()  # no other checkpoint may refer to a best checkpoint that is not on disk
        best = list(self.best) if self.best is not None else None
        return {**super().state_dict(), "best": best, "watched": self._metric}

    def load_state_dict(self, state: dict[str, Any]) -> str | None:
        """Restore the best value and its step, unless they are those of another metric."""
        super().load_state_dict(state)
        note = note_of_changed_metric(state.get("watched"), str(self._watched), "the best value starts")
        self.best = (state["best"][0], state["best"][1]) if state["best"] is not None and note is None else None
        return note

    def prepare_fit(self, learner: LearnerView, kept: list[tuple[Entry, Manifest]]) -> None:
        """Save the current state if it is the best one, but its checkpoint is missing because the run was killed."""
        best = self.best[0] if self.best is not None else None
        if best == learner.progress.step and all(entry.step != best for entry, _ in kept):
            learner.snapshots.request(self._take, prepare=self.wait)

    @on(Trigger, AbstractTrainingPhase)
    def save(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Request a snapshot if the value of this epoch is better than all earlier ones."""
        self.wait()  # if the last save failed, its value does not count as the best
        value = self._watched.at(learner.cbstate.metrics_epoch, learner.progress.epoch)
        if value is not None and better(value, self.best[1] if self.best is not None else None, self.mode):
            self.best = (learner.progress.step, value)
            learner.snapshots.request(self._take, prepare=self.wait)

    def _take(self, snapshot: Snapshot) -> None:
        # `load_model` and `load_params` must return the parameters that this value was measured with.
        measured = replace(snapshot, average=snapshot.averages.get(self._watched.phase))
        self.write(measured, self.best[1] if self.best is not None else None)

    def forget_unsaved(self) -> None:
        """Reset the best value to that of the checkpoint on disk."""
        super().forget_unsaved()
        saved = [(entry.step, value) for entry, value in self.values_of(self._files.kept()[0])]
        self.best = saved[-1] if saved else None

    def to_delete(self, kept: list[tuple[Entry, Manifest]]) -> Iterable[Entry]:
        """Return all checkpoints but the newest one, which is the best."""
        return [entry for entry, _ in kept[:-1]]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._passed_folder!r}, {str(self._watched)!r})"


class MinSaver(BestSaver):
    """Keep the checkpoint with the smallest value of a metric, in addition to regular checkpoints.

    After the validation of an epoch, the callback saves the current state if the value is smaller than all earlier
    ones. It does not save equal values or NaN. The order of the callbacks in the list does not matter. Because the best
    value is part of the regular checkpoints of a run, a resumed run does not overwrite a better checkpoint.

    `fluxcb.checkpoints.load_model("runs/1/min-validation-loss", model)` returns the model, and `load_params` returns
    its parameters. Both use the parameters that were measured. If a `ParameterEMA` validates with its average, these
    are the average.

    A UserWarning is issued if high values of the metric are good according to its name, for example for `accuracy`.

    Args:
        folder: The directory of the run. The checkpoint is written to a subdirectory, e.g. `min-validation-loss`.
        metric: The metric, e.g. `validation/loss`. A name without a phase, such as `loss`, means the metric of the
            validation phase.
        name: The name of the subdirectory, if it should differ from the default.

    Attributes:
        best: The step and the value of the best checkpoint so far, or None.

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
        DeclarationError: `folder` is not a path or has the name of a common metric, or `metric` is not the name of a
            metric.
        MissingStateError: No callback provides the metric, or its phase has no data (when the Learner is built).
        CheckpointError: The directory belongs to another run or is not writable, or a save failed.

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
        tensorpack, `MinSaver`, which copies the newest regular checkpoint if it is from the same step.
    """

    mode = "min"


class MaxSaver(BestSaver):
    """Keep the checkpoint with the largest value of a metric. Otherwise, this callback is the same as `MinSaver`.

    A UserWarning is issued if low values of the metric are good according to its name, for example for `loss`.

    Args:
        folder: The directory of the run. The checkpoint is written to a subdirectory, e.g. `max-validation-accuracy`.
        metric: The metric, e.g. `validation/accuracy`. A name without a phase, such as `accuracy`, means the metric
            of the validation phase. There is no default, because the default of `MinSaver` is a loss.
        name: The name of the subdirectory, if it should differ from the default.

    Attributes:
        best: The step and the value of the best checkpoint so far, or None.

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
        DeclarationError: `metric` is missing; see also `MinSaver`.
        MissingStateError: See `MinSaver`.
        CheckpointError: See `MinSaver`.

    Example:
        >>> from fluxcb.callbacks import MaxSaver, Metrics, accuracy
        >>> callbacks = [Metrics(accuracy), MaxSaver("runs/1", "accuracy")]

    Source:
        tensorpack, `MaxSaver`.
    """

    mode = "max"

    @entry_point(
        fixes={
            **best_saver_fixes("max"),
            "metric": 'pass the folder first and then the metric: `MaxSaver("runs/1", "accuracy")`',
        }
    )
    def __init__(self, folder: str | os.PathLike[str], metric: str, *, name: str | None = None) -> None:
        super().__init__(folder, metric, name=name)
