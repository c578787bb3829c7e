"""`Monitors`: create `cbstate.monitors`, which other callbacks log to, and send the values to backends."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluxcb._declare.access import Append, Read
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import EpochEnd, Event, FitBegin, FitEnd, StepEnd, Trigger
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.resolution import Resolution
from fluxcb._declare.schedules import EverySeconds
from fluxcb._errors import ConflictError, DeclarationError
from fluxcb.logging.backend import LoggerBackend
from fluxcb.logging.backend_group import BackendGroup
from fluxcb.logging.hub import MonitorHub, Put

__all__ = ["Monitors"]

SECONDS = 2.0
"""Maximum time for which values are buffered while steps run (seconds)."""

# `Read` makes these handlers run after all handlers that append at the same moment. `borrow=True` gives access to the
# hub itself instead of a read-only view, because `take` removes the pending values. No other callback can see them.
_AFTER_APPENDS = {"cbstate": {"monitors": Read(borrow=True)}}


class Monitors(Callback):
    """Create `cbstate.monitors`, which other callbacks log to, and send the logged values to backends.

    A callback that logs declares `Append()` on `cbstate.monitors` and calls its methods `put_scalar`, `put_image`,
    `put_histogram`, `put_text` or `put`. A callback that reads logged values declares `Read()` and calls `latest`,
    `history` or `names`. Values reach the backends after about 2 s, and only when later steps have run. All values
    reach them at Trigger and at FitEnd, even if the fit ends with an error.

    With several processes, only process 0 opens the backends, so each value is logged once. Every process has the
    values that its own handlers log.

    If a backend fails, it is disabled with a warning, and training continues. A run resumes if it has already trained
    steps or loaded saved state. In this case, the backends truncate existing logs to their state at the time of the
    save, and append to them. Otherwise, backends that write files rename an existing log and start a new one.

    Args:
        *backends: Backends of `fluxcb.logging`, such as `JSONLinesBackend(path)` or `TensorBoardBackend(folder)`.
            Without a backend, values are only available from `latest` and `history`.
        history: Minimum number of recent values to keep for each name.

    Access:
        cbstate.monitors: Append.

    Runs:
        FitBegin x Phase (host).
        StepEnd x Phase (host, every 2 seconds).
        EpochEnd x Phase, Trigger x AbstractTrainingPhase, FitEnd x Phase (host).

    Cost:
        Reads the clock once per step. Fetches nothing. Does not shorten windows. Each `put` takes about a microsecond.

    Raises:
        DeclarationError: An argument is not a backend, or two backends have the same name. When a fit begins: another
            callback has replaced `cbstate.monitors`.
        ConflictError: There are two `Monitors` in the list.

    Example:
        >>> from pathlib import Path
        >>> from fluxcb import Append, Callback, on
        >>> from fluxcb.callbacks import Monitors
        >>> from fluxcb.events import EpochEnd
        >>> from fluxcb.logging import JSONLinesBackend
        >>> from fluxcb.phases import TrainingPhase
        >>> from fluxcb.testing import testlearner
        >>> class LogSteps(Callback):
        ...     def stateaccess(self):
        ...         return {"cbstate": {"monitors": Append()}}
        ...
        ...     @on
        ...     def log(self, event: EpochEnd, phase: TrainingPhase, learner):
        ...         learner.cbstate.monitors.put_scalar("steps", learner.progress.step_in_epoch)
        >>> learner = testlearner(Monitors(JSONLinesBackend("log.jsonl")), LogSteps())
        >>> history = learner.fit(2)
        >>> learner.cbstate["monitors"].history("steps")
        [(4, 4.0), (8, 4.0)]
        >>> print(Path("log.jsonl").read_text().rstrip())
        {"step": 4, "epoch": 1, "time": ..., "steps": 4.0}
        {"step": 8, "epoch": 2, "time": ..., "steps": 4.0}

    Source:
        tensorpack, `Monitors`; FluxTraining.jl, `LoggerBackend`.
    """

    def __init__(self, *backends: LoggerBackend, history: int = 10_000) -> None:
        self._group = BackendGroup(backends)
        self._hub = MonitorHub(history)
        self._began = _Began()
        # The finalizer also runs when the interpreter exits. It sends the rest of the values and tells services that
        # the run has ended, which is the only signal in a hand-written loop. It must not reference the hub, because the
        # hub references the Learner, which would then never be collected.
        weakref.finalize(self, _finish, self._group, self._hub.pending, self._began)

    @property
    def backends(self) -> tuple[LoggerBackend, ...]:
        """The backends."""
        return self._group.backends

    def output_locations(self) -> Iterable[Path | str]:
        """Return the locations that the backends write to."""
        return [location for backend in self.backends for location in backend.output_locations()]

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the declared access; see the class docstring."""
        return {"cbstate": {"monitors": Append()}}

    def resolveconflict(self, other: Callback) -> Resolution:
        """Refuse a second `Monitors`, because callbacks can log to only one of them."""
        if isinstance(other, Monitors):
            # A backend may be in both of them.
            backends = dict.fromkeys(map(repr, (*self.backends, *other.backends)))
            raise ConflictError(
                "The callbacks list contains more than one `Monitors`.",
                where=[repr(self), repr(other)],
                why="both would create `cbstate.monitors`, and callbacks can log to only one of them",
                fix=f"pass all backends to one: `Monitors({', '.join(backends)})`",
            )
        return super().resolveconflict(other)

    def logged_names(self, metrics: Mapping[type[Phase], Collection[str]]) -> Collection[str]:
        """Return no names, because `Monitors` does not log values itself."""
        return ()

    def init(self, learner: LearnerView) -> None:
        """Create `cbstate.monitors`. If this instance replaces another one, take over the values of that one."""
        if "monitors" in learner.cbstate:
            existing = learner.cbstate.monitors
            replaces = isinstance(existing, MonitorHub) and existing.pending is not self._hub.pending
            if replaces and not len(self._hub):
                self._hub.load_state_dict(existing.state_dict())
        self._hub.forget_users()
        learner.cbstate.monitors = self._hub
        progress = learner.progress
        self._hub.follow(lambda: (progress.step, progress.epoch))
        self._began.step = progress.step

    @on(FitBegin, Phase, access=_AFTER_APPENDS)
    def begin_fit(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Open the backends."""
        hub, step = self._checked_hub(learner), learner.progress.step
        hub.cut(step)  # after a rewind, the hub still has values of later steps
        self._group.open(resumes=step > 0)
        self._began.restored = 0  # from now on, the finalizer sends all that is left

    @on(StepEnd, Phase, access=_AFTER_APPENDS, when=EverySeconds(SECONDS))
    def flush_steps(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Send the values of earlier steps."""
        self._send(learner, complete_steps=True)

    @on(EpochEnd, Phase, access=_AFTER_APPENDS)
    def end_phase(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Send the values of earlier steps. The last step may still get values from the validation."""
        self._send(learner, complete_steps=True)

    @on(Trigger, AbstractTrainingPhase, access=_AFTER_APPENDS)
    def end_epoch(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Send all values."""
        self._send(learner)
        self._group.end_epoch(learner.progress.epoch)

    @on(FitEnd, Phase, access=_AFTER_APPENDS)
    def end_fit(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Send the values since the last Trigger, including those of other handlers of FitEnd."""
        if isinstance(event, FitEnd) and event.outcome == "failed" and learner.progress.step == 0:
            self._checked_hub(learner).take()  # a run that cannot begin must not replace the log of another run
            return
        self._send(learner)
        self._group.end_epoch(learner.progress.epoch)

    def _send(self, learner: LearnerView, *, complete_steps: bool = False) -> None:
        puts = self._checked_hub(learner).take(whole_steps=complete_steps)
        if puts:
            self._group.open(resumes=self._began.step > 0)  # hand-written loops do not emit FitBegin
            self._group.send(puts)

    def _checked_hub(self, learner: LearnerView) -> MonitorHub:
        if learner.cbstate.monitors is not self._hub:
            raise DeclarationError(
                f"Another callback has replaced the `cbstate.monitors` that {self!r} created.",
                why="the other callbacks log to the new one, so the backends would get no values",
                fix="do not assign `learner.cbstate.monitors` in another callback",
            )
        return self._hub

    def close(self) -> None:
        """Send all values and close the backends, as at the end of the program. A later fit reopens the logs."""
        _finish(self._group, self._hub.pending, self._began)

    def state_dict(self) -> dict[str, Any]:
        """Return the logged values, the values that are not in the logs yet, and the lengths of the logs."""
        if self._group.is_open:
            # Send as much as possible, so that the saved state is small. The values of the current step stay pending,
            # because all values of a step must be sent as one record.
            self._group.send(self._hub.take(whole_steps=True))
        return {
            "values": self._hub.state_dict(),
            "pending": self._hub.pending_state(),
            "logs": self._group.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the values. The next fit truncates the logs to the saved lengths and appends to them."""
        self._hub.load_state_dict(state["values"])
        self._hub.load_pending(state["pending"])
        self._began.restored = len(self._hub.pending)
        self._group.load_state_dict(state["logs"])

    def __repr__(self) -> str:
        return f"Monitors({', '.join(map(repr, self.backends))})"


@dataclass
class _Began:
    """Where the training of a Learner began. The finalizer reads it.

    Attributes:
        step: The step at which the callback was initialized.
        restored: The number of values that were waiting in a checkpoint when it was restored.
    """

    step: int = 0
    restored: int = 0


def _finish(group: BackendGroup, pending: list[Put], began: _Began) -> None:
    # A short loop of `run_step` has sent nothing yet. Restored values alone must not change the logs of their run.
    if len(pending) > began.restored:
        group.open(resumes=began.step > 0)
    if group.is_open:
        group.send(pending)
        pending.clear()
        group.close()
