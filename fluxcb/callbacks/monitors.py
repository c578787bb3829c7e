"""`Monitors`: the hub that callbacks log to, and the backends behind it."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from fluxcb._declare.access import Append, Read
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import EpochEnd, Event, FitBegin, FitEnd, StepEnd, Trigger
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import EverySeconds
from fluxcb._declare.signatures import explained
from fluxcb._errors import DeclarationError
from fluxcb.logging.backend import LoggerBackend
from fluxcb.logging.delivery import Delivery
from fluxcb.logging.hub import MonitorHub, Put

__all__ = ["Monitors"]

SECONDS = 2.0
"""How long values wait at most while steps run (seconds)."""

# To read makes it run behind all who append at the same moment. The hub itself is asked for, not a view of it: taking
# what was put is no change that anybody else sees.
_BEHIND = {"cbstate": {"monitors": Read(borrow=True)}}


class Monitors(Callback):
    """Give callbacks `cbstate.monitors` to log to, and hand what they put to backends.

    A callback that logs declares `Append()` on `cbstate.monitors`, and calls its `put_scalar`, `put_image`,
    `put_histogram`, `put_text` or `put`; one that looks up what was logged declares `Read()`, and calls `latest`,
    `history` or `names`. What was put at a step reaches the backends when more steps have run, about 2 s later;
    everything reaches them at Trigger and at FitEnd, also when the fit ends with an error.

    A backend that fails is switched off with a warning, and training goes on. A run resumes if steps have been trained
    already, or saved state was loaded: then logs are appended to, and cut back to what they were when that state was
    saved. Otherwise a log that exists is an error when the fit begins.

    Args:
        *backends: Where it goes: `JSONLinesBackend(path)`, `TensorBoardBackend(folder)`, or others of `fluxcb.logging`.
            Without any, there are `latest` and `history`.
        history: How many of the last values of each name are kept, at least.

    Access:
        cbstate.monitors: Append.

    Runs:
        FitBegin x Phase (host).
        StepEnd x Phase (host, every 2 seconds).
        EpochEnd x Phase, Trigger x AbstractTrainingPhase, FitEnd x Phase (host).

    Cost:
        Reads the clock once per step. Fetches nothing, and bounds no window. A put costs about a microsecond.

    Raises:
        DeclarationError: Something given is no backend, or two have one name; when a fit begins, there are two
            `Monitors`, or a log of another run.

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

    @explained()
    def __init__(self, *backends: LoggerBackend, history: int = 10_000) -> None:
        self._delivery = Delivery(backends)
        self._hub = MonitorHub(history)
        self._began_at = 0
        # Also at the interpreter's exit: services want to be told that a run has ended, and loops written by hand have
        # no end that would be known otherwise. The hub itself would keep the Learner alive, whose clock it has.
        weakref.finalize(self, _finish, self._delivery, self._hub.pending)

    @property
    def backends(self) -> tuple[LoggerBackend, ...]:
        """The backends."""
        return self._delivery.backends

    def output_locations(self) -> Iterable[Path | str]:
        """Return the locations that the backends write to."""
        return [place for backend in self.backends for place in backend.output_locations()]

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return {"cbstate": {"monitors": Append()}}

    def logged_names(self, metrics: Mapping[type[Phase], Collection[str]]) -> Collection[str]:
        """Return no names, because `Monitors` does not log values itself."""
        return ()

    def init(self, learner: Any) -> None:
        """Create `cbstate.monitors`; from another instance, which this one replaces, what was put is taken over."""
        if "monitors" in learner.cbstate:
            found = learner.cbstate.monitors
            another = isinstance(found, MonitorHub) and found.pending is not self._hub.pending
            if another and not len(self._hub):
                self._hub.load_state_dict(found.state_dict())
        self._hub.forget_users()
        learner.cbstate.monitors = self._hub
        progress = learner.progress
        self._hub.follow(lambda: (progress.step, progress.epoch))
        self._began_at = progress.step

    @on(FitBegin, Phase, access=_BEHIND)
    def begin_fit(self, event: Event, phase: Phase, learner: Any) -> None:
        """Open the backends."""
        hub, step = self._own(learner), learner.progress.step
        hub.cut(step)
        self._delivery.open(resumes=step > 0)

    @on(StepEnd, Phase, access=_BEHIND, when=EverySeconds(SECONDS))
    def now_and_then(self, event: Event, phase: Phase, learner: Any) -> None:
        """Hand over what was put at earlier steps."""
        self._hand_over(learner, whole_steps=True)

    @on(EpochEnd, Phase, access=_BEHIND)
    def end_phase(self, event: Event, phase: Phase, learner: Any) -> None:
        """Hand over what was put at earlier steps; the last one's values wait for those of the validation."""
        self._hand_over(learner, whole_steps=True)

    @on(Trigger, AbstractTrainingPhase, access=_BEHIND)
    def end_epoch(self, event: Event, phase: Phase, learner: Any) -> None:
        """Hand over everything."""
        self._hand_over(learner)
        self._delivery.end_epoch(learner.progress.epoch)

    @on(FitEnd, Phase, access=_BEHIND)
    def end_fit(self, event: Event, phase: Phase, learner: Any) -> None:
        """Hand over what was put since the last Trigger, or by handlers of FitEnd."""
        self._hand_over(learner)
        self._delivery.end_epoch(learner.progress.epoch)

    def _hand_over(self, learner: Any, *, whole_steps: bool = False) -> None:
        puts = self._own(learner).take(whole_steps=whole_steps)
        if puts:
            self._delivery.open(resumes=self._began_at > 0)  # for loops written by hand, which have no FitBegin
            self._delivery.send(puts)

    def _own(self, learner: Any) -> MonitorHub:
        if learner.cbstate.monitors is not self._hub:
            raise DeclarationError(
                "There are two `Monitors` among the callbacks, or `cbstate.monitors` is another callback's.",
                why="what is put goes to one of them only",
                fix="give all backends to one: `Monitors(JSONLinesBackend(...), TensorBoardBackend(...))`",
            )
        return self._hub

    def close(self) -> None:
        """Hand over everything and close the backends, as the program's end does; another fit goes on with the logs."""
        _finish(self._delivery, self._hub.pending)

    def state_dict(self) -> dict[str, Any]:
        """Return what was put, what of it the logs do not have yet, and where they end."""
        if self._delivery.is_open:
            # Few are left. Those of the step at hand wait for more: they are one record.
            self._delivery.send(self._hub.take(whole_steps=True))
        return {
            "values": self._hub.state_dict(),
            "pending": self._hub.pending_state(),
            "logs": self._delivery.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back; the next fit cuts the logs to where they ended, and appends."""
        self._hub.load_state_dict(state["values"])
        self._hub.load_pending(state["pending"])
        self._delivery.load_state_dict(state["logs"])

    def __repr__(self) -> str:
        return f"Monitors({', '.join(map(repr, self.backends))})"


def _finish(delivery: Delivery, pending: list[Put]) -> None:
    if delivery.is_open:
        delivery.send(pending)
        pending.clear()
        delivery.close()
