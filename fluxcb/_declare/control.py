"""Exceptions with which a host handler ends a step, an epoch or the whole fit early.

| raised | skipped | still happens |
|---|---|---|
| `CancelStep` at StepBegin | the step and its StepEnd; the batch is consumed but not counted | the next step |
| `CancelStep` at StepEnd | the remaining handlers of the moment | the next step; the update of this step is kept |
| `CancelEpoch` | the remaining steps of the epoch | EpochEnd; the next epoch |
| `CancelFitting` | everything else | EpochEnd of the current epoch, FitStopping, FitEnd; `fit` returns |
| `PauseFitting` | the remaining steps of the epoch | the other handlers of the moment, FitStopping, EpochEnd, FitEnd |
| `RewindFitting` | the rest of the epoch and its EpochEnd | FitEnd, FitBegin at an earlier checkpoint |
| one that does not apply, such as `CancelStep` at EpochBegin | the remaining handlers of the moment | everything else |

These exceptions are control flow, not errors. A traced handler cannot raise an exception that depends on a value.
It writes `step.skip` or `step.stop` instead.
"""

import ast
import inspect
import textwrap
from typing import Any

from fluxcb._declare.signatures import source_of
from fluxcb._errors import DeclarationError

__all__ = [
    "Cancel",
    "CancelEpoch",
    "CancelFitting",
    "CancelStep",
    "PauseFitting",
    "RewindFitting",
    "refuse_unraised",
]


class Cancel(Exception):  # noqa: N818 - control flow, not an error
    """Base class of these exceptions. The message, if any, becomes `learner.stop_reason`."""


class CancelStep(Cancel):
    """Raise this exception in a host handler to skip the rest of the current step."""


class CancelEpoch(Cancel):
    """Raise this exception in a host handler to end the current epoch."""


class CancelFitting(Cancel):
    """Raise this exception in a host handler to end training. `fit` returns normally.

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
    """Raise this exception in a host handler to interrupt training as SIGTERM does. The run can be resumed.

    A run that `CancelFitting` ended is complete, and ends again immediately when it is resumed. `PauseFitting` only
    interrupts the run between two steps, for example at a time limit or when the machine is needed elsewhere. In
    hand-written loops, the two have the same effect.
    """


class RewindFitting(CancelFitting):
    """Raise this exception in a host handler to return to an earlier checkpoint and continue with other batches.

    The fit continues as if it had been killed and resumed. It emits FitEnd, restores all state of the checkpoint
    (parameters, optimizer, counters, callbacks, logs), and emits `FitBegin(resumes=True)`. Only the data does not
    return: training continues with the next batch, so the batches since the checkpoint are skipped. Later checkpoints
    are deleted.

    The run returns to the newest good checkpoint of the Learner's `Checkpointer` that `before` allows. If the run has
    just returned to that checkpoint, it returns to the one before it. If there is none, or the run has already returned
    `at_most` times, the fit ends as with `CancelFitting`. Hand-written loops always end.

    Args:
        reason: The reason for the rewind. It becomes `learner.stop_reason` if the fit ends.
        before: The latest step at which the checkpoint may have been saved (finished training steps).
        at_most: The maximum number of rewinds of the run, counting those of all callbacks.
    """

    def __init__(self, reason: str, before: int, at_most: int = 3) -> None:
        super().__init__(reason)
        self.args = (reason, before, at_most)  # all arguments, so that pickling works
        self.reason, self.before, self.at_most = reason, before, at_most


_NAMES = frozenset(cls.__name__ for cls in (CancelStep, CancelEpoch, CancelFitting, PauseFitting, RewindFitting))


def refuse_unraised(function: Any) -> None:
    """Check that a handler raises these exceptions where it creates them. `CancelFitting("...")` alone does nothing.

    Raises:
        DeclarationError: A statement only creates or names such an exception.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or not _NAMES.intersection(code.co_names):  # parsing the source takes long
        return
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError, TypeError):  # there is no source, or it is only a part of a line, such as a lambda
        return
    for statement in ast.walk(tree):
        if not isinstance(statement, ast.Expr):
            continue
        value = statement.value.func if isinstance(statement.value, ast.Call) else statement.value
        name = value.attr if isinstance(value, ast.Attribute) else value.id if isinstance(value, ast.Name) else ""
        if name in _NAMES:
            raise DeclarationError(
                f"`{function.__name__}` has a statement `{ast.unparse(statement)}`, which does not end anything.",
                where=f"{function.__qualname__}  {source_of(function)}",
                why=f"`{name}` is an exception, which takes effect when it is raised",
                fix=f"write `raise {ast.unparse(statement)}`",
            )
