"""Going back: in the middle of a fit to an earlier checkpoint, with the data where it is."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from fluxcb._declare.control import RewindFitting
from fluxcb._declare.phases import Phase
from fluxcb._errors import CheckpointCorruptError
from fluxcb._run.assembly import Assembly
from fluxcb._run.resuming import own_checkpointer, restore_run
from fluxcb._run.snapshots import DIFFERENCES
from fluxcb._tracebacks import stacklevel_of_user
from fluxcb.callbacks.checkpointer import Checkpointer
from fluxcb.checkpoints.run_folder import Entry, ResumeWarning, whole

__all__ = ["Rewinding", "WayBack"]


@dataclass(frozen=True)
class WayBack:
    """Where a run goes back to.

    Attributes:
        asked: What a handler has raised.
        saver: The callback that has written the checkpoint.
        entry: The checkpoint.
    """

    asked: RewindFitting
    saver: Checkpointer
    entry: Entry


class Rewinding:
    """Goes back, if a handler of the fit at hand asks for it and there is something to go back to.

    Args:
        parts: The parts of the Learner.
        phase: The phase that is trained.

    Attributes:
        refusal: Why the fit ends instead, as `learner.stop_reason` says it.
    """

    def __init__(self, parts: Assembly, phase: Phase) -> None:
        self._parts, self._phase = parts, phase
        self._asked: RewindFitting | None = None
        self._way: WayBack | None = None
        self.refusal = ""

    def accepts(self, asked: RewindFitting) -> bool:
        """Tell whether the run goes back; if not, the fit ends.

        Raises:
            CheckpointError: The last checkpoint could not be written.
        """
        return self.way_back(asked) is not None

    def way_back(self, asked: RewindFitting) -> WayBack | None:
        """Return where the run goes back to, or None; the same however often the same is asked.

        Raises:
            CheckpointError: The last checkpoint could not be written.
        """
        if asked is not self._asked:
            self._asked, self._way = asked, self._find(asked)
        return self._way

    def _find(self, asked: RewindFitting) -> WayBack | None:
        done = self._parts.state.fit.rewinds
        if done >= asked.at_most:
            return self._refuse(asked, f"the run has gone back {done} times before")
        saver = own_checkpointer(self._parts)
        if saver is None:
            return self._refuse(asked, "no Checkpointer says where to go back to")
        saver.wait()
        entries = [entry for entry in saver.entries() if entry.step <= asked.before and _is_whole(entry)]
        if not entries:
            return self._refuse(asked, f"there is no good checkpoint of step {asked.before} or before")
        again = entries[-1].step == self._parts.state.fit.rewound_to
        return WayBack(asked, saver, entries[-2] if again and len(entries) > 1 else entries[-1])

    def _refuse(self, asked: RewindFitting, why: str) -> None:
        self.refusal = f"{asked} ({why})"

    def go(self, way: WayBack) -> None:
        """Put back what the checkpoint says, once all handlers have ended the fit; the data stays where it is.

        Raises:
            FluxcbError: It cannot be put back.
        """
        state, feed = self._parts.state, self._parts.feed(self._phase)
        fit, name = state.fit, type(self._phase).name
        began, rewinds, step, epoch = (fit.epoch, fit.step), fit.rewinds, state.step, state.epoch
        restore_run(self._parts, way.entry.path, DIFFERENCES, staying=(name,))  # it may have been restored with some
        at_hand = fit.at is not None and fit.at.phase == name
        feed.keep_on(state.epoch, at_hand=at_hand, over=epoch != state.epoch)
        (fit.epoch, fit.step), fit.rewinds, fit.rewound_to = began, rewinds + 1, way.entry.step
        way.saver.forget_after(way.entry)
        warnings.warn(
            f"The run goes back from step {step} to the checkpoint {way.entry.path}: {way.asked}",
            ResumeWarning,
            stacklevel=stacklevel_of_user(),
        )


def _is_whole(entry: Entry) -> bool:
    try:
        whole(entry.path)
    except CheckpointCorruptError:
        return False
    return True
