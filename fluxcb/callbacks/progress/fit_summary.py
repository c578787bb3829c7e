"""`FitSummary`: prints how a fit ended, which files were written, and what to do next."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from fluxcb._declare.access import Read, writes
from fluxcb._declare.callback import Callback, unwrap
from fluxcb._declare.events import FitBegin, FitEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import Phase
from fluxcb._declare.signatures import shown_path
from fluxcb._errors import as_sentence
from fluxcb._tracebacks import warn_user
from fluxcb.callbacks.gradients.average import ParameterEMA
from fluxcb.callbacks.metrics.metrics import Metrics
from fluxcb.callbacks.progress.console import console_for, show_block
from fluxcb.callbacks.progress.printer import MetricsPrinter
from fluxcb.callbacks.progress.progress import ProgressBar
from fluxcb.callbacks.saving.snapshot_saver import SnapshotSaver
from fluxcb.callbacks.stopping.nan_loss import StopOnNaNLoss
from fluxcb.checkpoints.savers import RunSaver
from fluxcb.logging.consoles import text_file

__all__ = ["FitSummary", "written_locations"]

# `previous=True` means that the values come from earlier moments. The access covers all of `cbstate`, because the entry
# `metrics_epoch` may be missing.
_METRICS = {"cbstate": Read(previous=True)}

_COUNTS_SKIPPED = {
    "DynamicLossScale": ("loss_scale", "overflows"),
    "LossSpikeGuard": ("loss_spikes", "skipped"),
    "SkipNonFinite": ("non_finite", "skipped"),
}
"""Callbacks that skip steps, each with the entry in `cbstate` and its item that count these steps."""


class _Beginning(NamedTuple):
    """The state at the beginning of a fit.

    Attributes:
        time: The time (s).
        step: Number of finished steps.
        epoch: The last epoch that has metrics.
        skipped: The number of steps that callbacks had skipped, by the callback's name.
        is_first: Whether no other fit had trained before.
    """

    time: float
    step: int
    epoch: int
    skipped: Mapping[str, int]
    is_first: bool


class FitSummary(Callback):
    """Print at the end of a fit why it ended, which files the callbacks have written, and what to do next.

    A metric that was NaN or infinite in an epoch of the fit is named. If it is the loss of a phase, the callback also
    issues a warning, because training continues after a validation loss that is not finite.

    If `SkipNonFinite`, `LossSpikeGuard` or `DynamicLossScale` has skipped steps, their number is printed. A warning is
    printed if all steps of the fit were skipped, and if the average of a `ParameterEMA`, which validation uses, mainly
    consists of the initial parameters.

    The files are those that callbacks return from `output_locations`. The last line is the advice of the callback that
    ended the fit (`CancelFitting(reason, advice=...)`). Without such advice, it tells how to use the trained model or
    continue the training.

    Args:
        file: Where to print; standard output by default.

    Access:
        callbacks: Read.
        model: Read.
        cbstate: Read (from an earlier moment). Only `metrics_epoch`, the numbers of skipped steps, and the number of
            updates of a `ParameterEMA` are used, if they exist.

    Runs:
        FitBegin, FitEnd x Phase (host).

    Cost:
        Prints a few lines per fit. Fetches the numbers of skipped steps at the beginning and at the end of the fit, and
            at its end how often each average was updated. `Metrics` keeps the values of epochs on the host.

    Warns:
        RuntimeWarning: A loss was NaN or infinite in an epoch of the fit.

    Example:
        >>> import io, jax.numpy as jnp, optax, fluxcb
        >>> from fluxcb.callbacks import FitSummary
        >>> learner = fluxcb.Learner.from_loss(
        ...     {"w": jnp.ones(())},
        ...     lambda params, batch, key: jnp.mean(params["w"] * batch),
        ...     optax.sgd(0.1),
        ...     data=[jnp.ones(2)] * 3,
        ...     callbacks=[FitSummary(file := io.StringIO())],
        ...     default_callbacks=False,
        ... )
        >>> history = learner.fit(2)
        >>> print(file.getvalue().rstrip())
        Training finished after epoch 2, step 6 (... s).
        Next: `learner.params` has the trained parameters, `learner.fit(n)` trains further.
    """

    chief_only = True  # one process prints

    def __init__(self, file: IO[str] | None = None) -> None:
        self.file = text_file(file, "FitSummary")
        self._began: _Beginning | None = None

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the declared access; see the class docstring."""
        return {"callbacks": Read(), "model": Read(), **_METRICS}

    def runafter(self) -> tuple[type[Callback], ...]:
        """Return the other default callbacks that print, so that the summary is printed last."""
        return (MetricsPrinter, ProgressBar)

    @on(FitBegin, Phase, access=_METRICS)
    def begin_fit(self, event: FitBegin, phase: Phase, learner: LearnerView) -> None:
        """Record the time."""
        if self._began is None:  # FitBegin is emitted again when the run rewinds
            known = max((epoch for _, pairs in _metrics(learner) for epoch, _ in pairs[-1:]), default=0)
            step = learner.progress.step
            is_first = step == 0 or event.resumes
            self._began = _Beginning(time.monotonic(), step, known, _skipped(learner), is_first)

    @on(FitEnd, Phase)
    def end_fit(self, event: FitEnd, phase: Phase, learner: LearnerView) -> None:
        """Print the summary."""
        began = self._began
        if event.outcome != "rewinding":
            self._began = None
        steps = learner.progress.step - began.step if began is not None else 0
        trained = steps > 0
        seconds = time.monotonic() - began.time if began is not None else 0.0
        lines = [_ending(event, learner.progress, seconds, trained)]
        # The message of an error before the first step already tells what to do.
        not_finite = [] if began is None or event.outcome == "rewinding" else list(_not_finite(learner, began.epoch))
        lines += [f"Warning: {text}." for _, text in not_finite]
        if began is not None and event.outcome != "failed":  # after an error, the train state may be inconsistent
            counts = {name: total - began.skipped.get(name, 0) for name, total in _skipped(learner).items()}
            lines += [f"{name} skipped {count} of {steps} steps." for name, count in counts.items() if count > 0]
            if trained and event.outcome != "rewinding":
                lines += _without_updates(learner, phase, steps, began.epoch)
                lines += _young_averages(learner)
        if event.outcome != "rewinding" and (trained or event.outcome != "failed"):
            locations = list(written_locations(learner.callbacks, since=began.step)) if began and trained else []
            lines += [f"Wrote {', '.join(locations)}."] if locations else []
            lines.append(f"Next: {_advice(event, learner, is_first=began is None or began.is_first)}.")
        show_block(console_for(self.file), lines)
        if event.outcome in ("finished", "stopped"):
            for name, text in not_finite:
                if name.endswith("/loss"):
                    warn_user(f"{text}.", RuntimeWarning)


def _ending(event: FitEnd, progress: Any, seconds: float, trained: bool) -> str:
    """Return how the fit ended, as one sentence."""
    end = f"epoch {progress.epoch}, step {progress.step}"
    if event.outcome == "finished":
        return f"Training finished after {end} ({seconds:.1f} s)." if trained else f"Training was complete at {end}."
    reason = (event.reason or "").partition("\n")[0].removesuffix(".")
    if event.outcome == "failed" and not trained:
        return as_sentence(f"Training failed before its first step: {reason}")
    of = f" of {progress.epochs}" if progress.epochs else ""
    where = f"in epoch {progress.epoch}{of}, after step {progress.step}"
    if event.outcome == "stopped" and not trained:
        return as_sentence(f"Training had stopped {where}: {reason}")
    if event.outcome == "interrupted":
        reason = {"KeyboardInterrupt": "Ctrl-C", "preempted": "SIGTERM"}.get(reason, reason)
    verb = {"interrupted": "was interrupted", "rewinding": "rewinds"}.get(event.outcome, event.outcome)
    return as_sentence(f"Training {verb} {where}: {reason}")


def _metrics(learner: LearnerView) -> Iterator[tuple[str, list[tuple[int, float]]]]:
    """Yield the name of each metric with its pairs of an epoch and a value, except metrics whose values are arrays.

    An array may contain NaN for a reason: `PerClassAccuracy` has no value for a class without examples.
    """
    if "metrics_epoch" in learner.cbstate:
        for phase, metrics in learner.cbstate.metrics_epoch.items():
            for metric in metrics:
                if isinstance(metrics[metric][-1][1], float):
                    yield f"{phase}/{metric}", metrics[metric]


def _skipped(learner: LearnerView) -> dict[str, int]:
    """Return the total number of steps that each callback has skipped, by the callback's name."""
    totals = {}
    for name, (entry, item) in _COUNTS_SKIPPED.items():
        counts = learner.cbstate.get(entry)
        if isinstance(counts, Mapping) and item in counts:  # a user's callback may have an entry of the same name
            totals[name] = int(counts[item])
    return totals


def _not_finite(learner: LearnerView, known: int) -> Iterator[tuple[str, str]]:
    """Yield the names of metrics that were not finite in an epoch after the known ones, each with a sentence."""
    for name, pairs in _metrics(learner):
        fitted = [(epoch, value) for epoch, value in pairs if epoch > known]
        bad = [(epoch, value) for epoch, value in fitted if not math.isfinite(value)]
        if len(bad) == 1:
            yield name, f"{name} was {bad[0][1]} in epoch {bad[0][0]}"
        elif bad:
            yield name, f"{name} was not finite in {len(bad)} of {len(fitted)} epochs, first in epoch {bad[0][0]}"


def _without_updates(learner: LearnerView, phase: Phase, steps: int, known: int) -> Iterator[str]:
    """Yield a line if all steps of a fit were skipped, which the lack of training metrics shows."""
    values = [pairs for name, pairs in _metrics(learner) if name.startswith(f"{phase.name}/")]
    if any(pairs[-1][0] > known for pairs in values):
        return
    if not any(isinstance(unwrap(callback), Metrics) for callback in learner.callbacks):
        return
    skipping = [
        declared.label
        for declared in learner.callbacks.graph.declared
        if not isinstance(unwrap(declared.callback), StopOnNaNLoss)
        and any(path == ("step", "skip") and writes(permission) for path, permission in declared.access.items())
    ]
    if skipping:
        yield (
            f"Warning: all {steps} steps were skipped, so the parameters have not changed. "
            f"`step.skip` is set by {' and '.join(skipping)}."
        )


def _young_averages(learner: LearnerView) -> Iterator[str]:
    """Yield a line for each average that validation uses and that mainly consists of the initial parameters."""
    for callback in map(unwrap, learner.callbacks):
        if not isinstance(callback, ParameterEMA) or not callback.validate or callback.debias:
            continue
        updates = int(learner.cbstate[callback.entry]["updates"])
        share = callback.decay**updates
        if share > 0.5:
            yield (
                f"Warning: after only {updates} updates, the initial parameters still make up {share:.0%} of the "
                f"average that validation and `learner.model` use. Write `{type(callback).__name__}({callback.decay}, "
                "debias=True)`, or train longer."
            )


def written_locations(callbacks: Any, *, since: int) -> Iterator[str]:
    """Yield the locations that the callbacks have written to in a fit, without duplicates.

    Args:
        callbacks: The callbacks.
        since: The last step before the fit.
    """
    seen: set[str] = set()
    for callback in callbacks:
        saver = unwrap(callback)
        if isinstance(saver, SnapshotSaver) and not saver.has_checkpoint(after=since):
            continue  # a `MaxSaver` only writes to its directory if the metric is better than before
        for location in callback.output_locations():
            shown = shown_path(str(location)) if isinstance(location, Path) else location
            if shown not in seen and (not isinstance(location, Path) or location.exists()):
                seen.add(shown)
                yield f"{shown} ({type(unwrap(callback)).__name__})"


def _advice(event: FitEnd, learner: LearnerView, *, is_first: bool) -> str:
    """Return what to do next, as a clause without a period."""
    if event.advice:
        return event.advice
    saves = any(isinstance(unwrap(callback), RunSaver) for callback in learner.callbacks)
    if event.outcome in ("failed", "interrupted"):
        if saves:
            # The program of a new process repeats the earlier fits, whose checkpoint would end this one.
            also = ", also in a new process" if is_first else ""
            return f"`learner.fit(..., resume=True)` continues from the last checkpoint{also}"
        return (
            f"{_next_fit(learner.progress)}; with a `Checkpointer` among the callbacks, "
            "`learner.fit(..., resume=True)` continues exactly, also in a new process"
        )
    if learner.model is None:  # built with `Learner.from_loss`
        return "`learner.params` has the trained parameters, `learner.fit(n)` trains further"
    return "`learner.predict(data)` applies the model, `learner.fit(n)` trains further"


def _next_fit(progress: Any) -> str:
    """Return what a fit without `resume=True` does after an interruption, as a clause without a period."""
    epoch, expected = progress.epoch, progress.steps_in_epoch
    if epoch == 0:
        return "`learner.fit(n)` continues in this process"
    if 0 < expected <= progress.step_in_epoch:
        return f"`learner.fit(n)` continues with epoch {epoch + 1} in this process"
    # Data without a length may have ended.
    remaining = "the remaining batches" if expected else "any remaining batches"
    return f"`learner.fit(n)` begins epoch {epoch + 1} in this process, without {remaining} of epoch {epoch}"
