"""One fit of a population: the members take turns, and wait for each other where one program serves all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from fluxcb._run.interrupts import Interrupt
from fluxcb._run.learner import Learner
from fluxcb._run.program_runner import ProgramRunner
from fluxcb.populations.joint_runner import JointRunner, JointSteps, StepRequest
from fluxcb.populations.meeting import Meeting, Share
from fluxcb.populations.turns import Turn

__all__ = ["Session"]


class Session:
    """Runs the fits of all members until each has ended.

    Each member runs the ordinary loop of its Learner on its own thread. It parks when it has steps to run
    (`StepRequest`), or when a population callback shares a value with the other members (`Share`). As soon as all
    members that have not ended are parked, their steps run in one program. If none of them has steps to run, the shared
    values are exchanged. The members then continue one after the other, in the order of their numbers, so that two runs
    of the same program do the same in the same order.

    Args:
        members: The members.
        labels: Their names, for messages.
        steps: The joint programs.
        meeting: Connects the population callbacks of the members.
    """

    def __init__(
        self, members: Sequence[Learner], labels: Sequence[str], steps: JointSteps, meeting: Meeting
    ) -> None:
        self._members, self._labels, self._steps, self._meeting = list(members), labels, steps, meeting
        self._cores = [learner._core for learner in members]
        self._turns: list[Turn] = []

    def run(self, fit: Callable[[Learner], Any], interrupt: Interrupt) -> list[BaseException | None]:
        """Call a function for each member, which calls its `fit`.

        Args:
            fit: The function.
            interrupt: A request of the caller to end all fits.

        Returns:
            For each member, the exception that ended its fit, or None.
        """
        self._steps.begin()
        self._turns = [
            Turn(functools.partial(fit, learner), f"fluxcb member {row}") for row, learner in enumerate(self._members)
        ]
        for row, core in enumerate(self._cores):
            wait = self._turns[row].park
            core.engine.run_with(functools.partial(JointRunner, row=row, steps=self._steps, wait_for=wait))
        self._meeting.open([turn.park for turn in self._turns])
        try:
            self._take_turns(interrupt)
        except BaseException:  # a second Ctrl-C, while a member runs or the device is busy
            for turn in self._turns:
                turn.abandon()
            raise
        finally:
            self._meeting.close()
            for row, core in enumerate(self._cores):
                core.engine.run_with(ProgramRunner)
        return [turn.error for turn in self._turns]

    def _take_turns(self, interrupt: Interrupt) -> None:
        live = dict(enumerate(self._turns))
        answers: dict[int, Any] = dict.fromkeys(live)
        failures: dict[int, BaseException] = {}
        while live:
            for row in sorted({*answers, *failures}):
                live[row].resume(answers.get(row), failures.get(row))
                if live[row].ended:
                    turn = live.pop(row)
                    self._steps.carry.release(row)  # from here on, nothing changes this member
                    reason = self._members[row].stop_reason
                    if reason is not None:
                        self._meeting.ended[row] = reason
                    if turn.error is not None and not interrupt.requested:
                        # The other members end between two steps, so that they can be saved and resumed.
                        interrupt.pause(f"{self._labels[row]} failed: {type(turn.error).__name__}: {turn.error}")
            if interrupt.requested:
                for row in live:
                    self._forward(interrupt, row)
            answers, failures = self._serve(live)

    def _serve(self, live: dict[int, Turn]) -> tuple[dict[int, Any], dict[int, BaseException]]:
        """Return the answers to the members that can continue, by row, and the exceptions of their steps."""
        waiting = {row: turn.waits_for for row, turn in live.items()}
        requests = [request for request in waiting.values() if isinstance(request, StepRequest)]
        if requests:  # members that wait to share a value stay parked
            failures = self._steps.run(requests)
            return {request.row: None for request in requests if request.row not in failures}, failures
        shares = {row: share for row, share in waiting.items() if isinstance(share, Share)}
        return dict.fromkeys(shares, {row: share.value for row, share in shares.items()}), {}

    def _forward(self, interrupt: Interrupt, row: int) -> None:
        # All members see the request after the same window, whenever the signal arrived.
        own = self._cores[row].engine.emitter.interrupt
        own.requested, own.preempted, own.paused = True, interrupt.preempted, interrupt.paused
