"""Warnings about epochs that do not end or have no Trigger: endless data, and loops of single steps or epochs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fluxcb._declare.callback import unwrap
from fluxcb._declare.events import Trigger
from fluxcb._declare.phases import Phase
from fluxcb._run.learner_core import LearnerCore
from fluxcb._tracebacks import warn_user
from fluxcb.checkpoints.savers import RunSaver

__all__ = [
    "warn_of_metrics_without_epochs",
    "warn_of_missing_trigger",
    "warn_of_restarted_data",
    "warn_of_single_epoch",
]


def warn_of_single_epoch(core: LearnerCore, steps: int) -> None:
    """Warn that a fit of a number of steps may be a single epoch, if something waits for the end of an epoch.

    The data of a phase may be endless if it has no length. An earlier epoch shows that the data ends.
    """
    trained = [phase for phase in core.phase_set.training() if core.stream(phase).batches is None]
    if not trained or core.state.progress.epoch > 0:
        return
    # A callback with handlers for several training phases is named once.
    waiting = list(dict.fromkeys(_waiting(core)))
    if waiting:
        wait = f"{' and '.join(waiting)} {'waits' if len(waiting) == 1 else 'wait'}"
        # The suggested call has ten epochs. With fewer than ten steps, `steps_per_epoch` is 1, because `fit` refuses 0.
        warn_user(
            f"`data.{type(trained[0]).name}` has no length. If it never ends, `fit(steps={steps})` is a single epoch, "
            f"and {wait} for its end. To end epochs earlier, pass `steps_per_epoch=`, e.g. "
            f"`fit(steps={steps}, steps_per_epoch={max(1, steps // 10)})`.",
            UserWarning,
        )


def warn_of_restarted_data(core: LearnerCore, phases: Sequence[Phase], call: str) -> None:
    """Warn that a fit of a number of steps trains on the first batches again, if the data may be endless.

    Args:
        core: The core of the Learner.
        phases: The training phases.
        call: A call of `fit` that continues the data.
    """
    for phase in phases:
        stream = core.stream(phase)
        if stream.cut_short and stream.batches is None:
            warn_user(
                f"`{stream.name}` has no length, and its last epoch did not read it to its end. This fit starts it "
                f"again from its first batch. To continue it instead, pass `steps_per_epoch=` to every fit, e.g. "
                f"`{call}`.",
                UserWarning,
            )


def _waiting(core: LearnerCore) -> Iterator[str]:
    """Yield what acts only after an epoch: validation, watchers of metrics, and savers of checkpoints."""
    # A phase without data is not validated; see `_validate` in `fit_loop.py`.
    if any(not type(phase).trains and type(phase).name in core.streams for phase in core.phases):
        yield "validation"
    yield from _waiting_callbacks(core)


def _waiting_callbacks(core: LearnerCore) -> Iterator[str]:
    for phase in core.phase_set.training():
        for handler in core.graph.handlers(Trigger, type(phase)):
            declared = handler.declared
            acts = isinstance(unwrap(declared.callback), RunSaver) or any(declared.callback.watched_metrics())
            # A schedule without `after_epoch` has a period in steps or seconds, so its handler also runs within epochs.
            within = any(schedule.after_epoch() is None for schedule in handler.schedules)
            if acts and not within and not declared.disabled:
                yield declared.label


def warn_of_missing_trigger(core: LearnerCore, phase: Phase) -> None:
    """Warn that a hand-written loop runs a second epoch of a phase without a Trigger, for which callbacks wait."""
    # Trigger follows an epoch of training, so a loop may validate several times in between.
    if not type(phase).trains:
        return
    untriggered = core.engine.untriggered
    # After its first epoch, the loop may still call `trigger`. Its second epoch shows that the call is missing.
    if phase in untriggered and (waiting := list(dict.fromkeys(_waiting_callbacks(core)))):
        warn_user(
            f"The loop runs `learner.run_epoch` of the phase `{type(phase).name}` again without `learner.trigger()` in "
            f"between, so {' and '.join(waiting)} {'does' if len(waiting) == 1 else 'do'} nothing. Call "
            "`learner.trigger()` at the end of each epoch, after the validation.",
            UserWarning,
        )
    untriggered.add(phase)


def warn_of_metrics_without_epochs(core: LearnerCore) -> None:
    """Warn that a watched training metric has no value, because the program only runs single steps."""
    # `run_epoch` gives training metrics their values. Before the first step, a missing value is no mistake.
    if core.state.progress.epoch > 0 or core.state.progress.step == 0:
        return
    trained = {type(phase).name for phase in core.phase_set.training()}
    for declared in core.graph.declared:
        for watched in declared.callback.watched_metrics():
            if watched.phase in trained and not declared.disabled:
                warn_user(
                    f"{declared.label} watches `{watched}`, which has no value: `learner.run_step` belongs to no "
                    "epoch, and training metrics are means over epochs. Train with `learner.run_epoch(phase)`, or "
                    "watch a metric of a validation phase.",
                    UserWarning,
                )
