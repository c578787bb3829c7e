"""Cancelling: how a host handler ends a step, an epoch or the whole fit early.

| raised | skipped | still happens |
|---|---|---|
| `CancelStep` at StepBegin | the step, its StepEnd; the batch is consumed, `progress.step` stays | the next step |
| `CancelStep` at StepEnd | the moment's remaining handlers | the update stays; the next step |
| `CancelEpoch` | the epoch's remaining steps | EpochEnd; the next epoch |
| `CancelFitting` | everything that remains | EpochEnd of a running epoch, FitStopping, FitEnd; `fit` returns |
| `PauseFitting` | the epoch's remaining steps | the moment's other handlers, FitStopping, EpochEnd, FitEnd |
| `RewindFitting` | the epoch's rest, its EpochEnd | FitEnd, FitBegin; the run goes on from an earlier checkpoint |
| a cancel of what is not running, e.g. `CancelStep` at EpochBegin | the moment's remaining handlers | all else |

They are control flow, not errors. Traced handlers cannot raise on values: they write `step.skip`
or `step.stop`.
"""

__all__ = ["Cancel", "CancelEpoch", "CancelFitting", "CancelStep", "PauseFitting", "RewindFitting"]


class Cancel(Exception):  # noqa: N818 - control flow, not an error
    """Base of the three cancels; the message, if any, ends up in `learner.stop_reason`."""


class CancelStep(Cancel):
    """Raise in a host handler to skip the rest of this step."""


class CancelEpoch(Cancel):
    """Raise in a host handler to end this epoch."""


class CancelFitting(Cancel):
    """Raise in a host handler to end training; `fit` returns normally.

    Args:
        reason: The reason the fit ends, which becomes `learner.stop_reason`.
        advice: A sentence that begins with a verb and tells the user what to do next. `FitSummary` prints it.
    """

    def __init__(self, reason: str = "", *, advice: str = "") -> None:
        super().__init__(reason)
        self.advice = advice

    def __str__(self) -> str:
        return str(self.args[0])


class PauseFitting(CancelFitting):
    """Raise in a host handler to end training as SIGTERM does, so that `fit(..., resume=True)` goes on from there.

    A run that `CancelFitting` has ended is done, and ends again when it is resumed. This one is interrupted between two
    steps, for a time limit or a machine that is needed elsewhere. In loops written by hand, both are the same.
    """


class RewindFitting(CancelFitting):
    """Raise in a host handler to go back to an earlier checkpoint, and to train on from there with other batches.

    The fit goes on as if it had been killed and resumed: FitEnd, then all state as the checkpoint has it (parameters,
    optimizer, counters, callbacks, logs), then `FitBegin(resumes=True)`. Only the data goes on where it is: the batches
    since the checkpoint are left out. Later checkpoints are deleted.

    It takes the newest good checkpoint of the Learner's `Checkpointer` that is allowed, or, if the run has just gone
    back to that one, the one before it. If there is none, or the run has gone back often enough, the fit ends as by
    `CancelFitting`; so do loops written by hand.

    Args:
        reason: Why; `learner.stop_reason`, if the fit ends.
        before: The checkpoint is of this step or of an earlier one (finished training steps).
        at_most: How often the run may go back in all, whoever asks.
    """

    def __init__(self, reason: str, before: int, at_most: int = 3) -> None:
        super().__init__(reason)
        self.args = (reason, before, at_most)  # all arguments, so that pickling works
        self.reason, self.before, self.at_most = reason, before, at_most
