"""Cancelling: how a host handler ends a step, an epoch or the whole fit early.

| raised | skipped | still happens |
|---|---|---|
| `CancelStep` at StepBegin | the step, its StepEnd; the batch is consumed, `progress.step` stays | the next step |
| `CancelStep` at StepEnd | the moment's remaining handlers | the update stays; the next step |
| `CancelEpoch` | the epoch's remaining steps | EpochEnd; the next epoch |
| `CancelFitting` | everything that remains | EpochEnd of a running epoch, FitStopping, FitEnd; `fit` returns |
| a cancel of what is not running, e.g. `CancelStep` at EpochBegin | the moment's remaining handlers | all else |

They are control flow, not errors. Traced handlers cannot raise on values: they write `step.skip`
or `step.stop`.
"""

__all__ = ["Cancel", "CancelEpoch", "CancelFitting", "CancelStep"]


class Cancel(Exception):  # noqa: N818 - control flow, not an error
    """Base of the three cancels; the message, if any, ends up in `learner.stop_reason`."""


class CancelStep(Cancel):
    """Raise in a host handler to skip the rest of this step."""


class CancelEpoch(Cancel):
    """Raise in a host handler to end this epoch."""


class CancelFitting(Cancel):
    """Raise in a host handler to end training; `fit` returns normally."""
