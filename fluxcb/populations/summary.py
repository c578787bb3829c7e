"""The lines at the end of a population's fit: how it ended, what was written, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from fluxcb._declare.callback import unwrap
from fluxcb._errors import as_sentence
from fluxcb._run.fit_loop import describe_error
from fluxcb._run.interrupts import PREEMPTED
from fluxcb._run.learner import Learner
from fluxcb.callbacks.progress.fit_summary import written_locations
from fluxcb.checkpoints.savers import RunSaver

__all__ = ["ending_lines"]

_SHOWN = 5  # stopped members, and locations


def ending_lines(
    members: Sequence[Learner],
    labels: Sequence[str],
    errors: Sequence[BaseException | None],
    *,
    interrupted: Literal["Ctrl-C", "SIGTERM"] | None,
    since: Sequence[int],
    seconds: float,
    best: str,
) -> list[str]:
    """Return the lines that a population prints after a fit.

    Args:
        members: The members.
        labels: Their names, such as `member 2 (learning_rate=0.01)`.
        errors: For each member, the exception that ended its fit, or None.
        interrupted: The signal that ended the fits, or None.
        since: The last step of each member before the fit.
        seconds: The duration of the fit (s).
        best: The call that returns the number of the best member.
    """
    trained = list(since) != [learner.step for learner in members]
    failed = [
        (label, learner, error)
        for label, learner, error in zip(labels, members, errors, strict=True)
        if error is not None and not isinstance(error, KeyboardInterrupt)
    ]
    if failed:
        label, learner, error = failed[0]
        reason = describe_error(error).partition("\n")[0]
        lines = [as_sentence(f"Training failed in {label}, {_place(learner)}: {reason}")]
    else:
        longest = max(members, key=lambda learner: learner.step)
        if interrupted:
            lines = [f"Training was interrupted {_place(longest)}: {interrupted}."]
        elif trained:
            lines = [f"Training finished after epoch {longest.epoch}, step {longest.step} ({seconds:.1f} s)."]
        else:
            lines = [f"Training was complete at epoch {longest.epoch}, step {longest.step}."]
        # The first line already names the signal, which has ended the fits of these members.
        by_signal = (KeyboardInterrupt.__name__, PREEMPTED) if interrupted else ()
        stopped = [
            as_sentence(f"{label[0].upper()}{label[1:]} stopped in epoch {learner.epoch}: {learner.stop_reason}")
            for label, learner in zip(labels, members, strict=True)
            if learner.stop_reason not in (None, *by_signal)
        ]
        lines += stopped[:_SHOWN]
        if len(stopped) > _SHOWN:
            lines.append(f"{len(stopped) - _SHOWN} more members stopped; see `stop_reason` of each history.")
    if trained:
        places = (
            place
            for learner, step in zip(members, since, strict=True)
            for place in written_locations(learner.callbacks, since=step)
        )
        written = list(dict.fromkeys(places))
        more = f" and {len(written) - _SHOWN} more" if len(written) > _SHOWN else ""
        lines += [f"Wrote {', '.join(written[:_SHOWN])}{more}."] if written else []
    return [*lines, *_advice(members, ended=not failed and not interrupted, best=best)]


def _place(learner: Learner) -> str:
    return f"in epoch {learner.epoch}, after step {learner.step}"


def _advice(members: Sequence[Learner], *, ended: bool, best: str) -> Iterator[str]:
    if ended:
        yield f"Next: `population[{best}]` is the Learner of the best member."
    elif all(any(isinstance(unwrap(callback), RunSaver) for callback in learner.callbacks) for learner in members):
        yield "Next: `population.fit(..., resume=True)` continues from the newest step that all members have saved."
    else:
        yield (
            "Next: with a `Checkpointer` among the callbacks of each member, `population.fit(..., resume=True)` "
            "continues, also in a new process."
        )
