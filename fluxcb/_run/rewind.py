"""Rewinding a fit to an earlier checkpoint, without moving the data back.

A rewind is a restore without the data. Whatever resumes exactly therefore also rewinds exactly, including logs and
counters, and callbacks need no extra code. The data keeps its position, because the same batches would lead to the same
failure again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fluxcb._declare.control import RewindFitting
from fluxcb._declare.phases import Phase
from fluxcb._run.learner_core import LearnerCore
from fluxcb._run.resume import restore_checkpoint, run_savers
from fluxcb._run.run_changes import DIFFERENCES
from fluxcb._tracebacks import warn_user
from fluxcb.checkpoints.run_folder import ResumeWarning
from fluxcb.checkpoints.savers import RunSaver, StoredCheckpoint

__all__ = ["RewindTarget", "Rewinding"]


@dataclass(frozen=True)
class RewindTarget:
    """The checkpoint that a run goes back to.

    Attributes:
        request: The exception that a handler raised.
        saver: The callback that wrote the checkpoint.
        checkpoint: The checkpoint.
    """

    request: RewindFitting
    saver: RunSaver
    checkpoint: StoredCheckpoint


class Rewinding:
    """Rewinds the current fit if a handler requests it and there is a checkpoint to go back to.

    Args:
        core: The core of the Learner.
        phases: The training phases, in order.

    Attributes:
        refusal: The reason that the fit ends instead, in the form of `learner.stop_reason`.
    """

    def __init__(self, core: LearnerCore, phases: Sequence[Phase]) -> None:
        self._core, self._phases = core, phases
        self._request: RewindFitting | None = None
        self._target: RewindTarget | None = None
        self.refusal = ""

    def can_rewind(self, request: RewindFitting) -> bool:
        """Return whether the run goes back; otherwise the fit ends.

        Raises:
            CheckpointError: The last checkpoint could not be written.
        """
        return self.target_of(request) is not None

    def target_of(self, request: RewindFitting) -> RewindTarget | None:
        """Return the checkpoint to go back to, or None. Repeated calls for one request return the same checkpoint.

        Raises:
            CheckpointError: The last checkpoint could not be written.
        """
        # The engine asks at the step, and `fit` asks again afterwards. Both must get the same checkpoint.
        if request is not self._request:
            self._request, self._target = request, self._find(request)
        return self._target

    def _find(self, request: RewindFitting) -> RewindTarget | None:
        done = self._core.state.fit.rewinds
        if done >= request.at_most:
            return self._refuse(request, f"the run has gone back {done} times before")
        savers = run_savers(self._core)
        if len(savers) != 1:
            return self._refuse(request, "there is not exactly one Checkpointer to go back with")
        # Savers verify a checkpoint when they yield it, so the iterator is advanced only as far as needed.
        earlier = iter(savers[0].stored_checkpoints(request.before))
        found = next(earlier, None)
        if found is None:
            return self._refuse(request, f"there is no good checkpoint of step {request.before} or before")
        if found.step == self._core.state.fit.rewound_to:  # a rewind to it did not help before
            found = next(earlier, found)
        return RewindTarget(request, savers[0], found)

    def _refuse(self, request: RewindFitting, why: str) -> None:
        self.refusal = f"{request} ({why})"

    def rewind(self, target: RewindTarget) -> None:
        """Restore the checkpoint, after all handlers have ended the fit. The data keeps its position.

        Raises:
            FluxcbError: The checkpoint cannot be restored.
        """
        state, fit = self._core.state, self._core.state.fit
        names = [type(phase).name for phase in self._phases]
        streams = [self._core.streams.get(type(phase).name) for phase in self._phases]
        # These values belong to the running fit and not to the checkpoint.
        began, rewinds, step, epoch = (fit.epoch, fit.step), fit.rewinds, state.progress.step, state.progress.epoch
        # The run that wrote the checkpoint may itself have been restored with `allow`.
        restore_checkpoint(self._core, target.checkpoint, allow=DIFFERENCES, staying=names)
        at = names.index(fit.at.phase) if fit.at is not None and fit.at.phase in names else None
        # All phases of an `InTurn` continue if one of them does.
        is_current = {
            at,
            *(names.index(name) for name in (fit.at.in_turn if fit.at is not None else ()) if name in names),
        }
        for index, stream in enumerate(streams):
            if stream is None:  # a hand-written loop has its own data
                continue
            # Phases after the continuing one begin their epoch with the same number next.
            last = state.progress.epoch - (at is not None and index > at and index not in is_current)
            stream.continue_pass(last, is_current=index in is_current, over=epoch != state.progress.epoch)
        # The number of rewinds is not restored, because a run could then rewind forever.
        (fit.epoch, fit.step), fit.rewinds, fit.rewound_to = began, rewinds + 1, target.checkpoint.step
        target.saver.discard_after(target.checkpoint)
        warn_user(
            f"The run goes back from step {step} to the checkpoint {target.checkpoint}: {target.request}",
            ResumeWarning,
        )
