"""One fit of a population: the members take turns, and wait for each other where one program serves all of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from fluxcb._errors import DeclarationError
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

    def __init__(self, members: Sequence[Learner], labels: Sequence[str], steps: JointSteps, meeting: Meeting) -> None:
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
            Turn(functools.partial(fit, learner), f"fluxcb member {member}")
            for member, learner in enumerate(self._members)
        ]
        # A single member runs its own programs, so it computes the bits of a Learner that is trained alone.
        for member, core in enumerate(self._cores if len(self._cores) > 1 else ()):
            wait = self._turns[member].park
            core.engine.run_with(functools.partial(JointRunner, member=member, steps=self._steps, wait_for=wait))
        self._meeting.open([turn.park for turn in self._turns])
        try:
            self._take_turns(interrupt)
        except BaseException:  # a second Ctrl-C, while a member runs or the device is busy
            for turn in self._turns:
                turn.abandon()
            raise
        finally:
            self._meeting.close()
            self._steps.end()
            for core in self._cores:
                core.engine.run_with(ProgramRunner)
        return [turn.error for turn in self._turns]

    def _take_turns(self, interrupt: Interrupt) -> None:
        live = dict(enumerate(self._turns))
        answers: dict[int, Any] = dict.fromkeys(live)
        failures: dict[int, BaseException] = {}
        while live:
            for member in sorted({*answers, *failures}):
                live[member].resume(answers.get(member), failures.get(member))
                if live[member].ended:
                    turn = live.pop(member)
                    self._steps.carry.release(member)  # from here on, nothing changes this member
                    reason = self._members[member].stop_reason
                    if reason is not None:
                        self._meeting.ended[member] = reason
                    if turn.error is not None and not interrupt.requested:
                        # The other members end between two steps, so that they can be saved and resumed.
                        interrupt.pause(f"{self._labels[member]} failed: {type(turn.error).__name__}: {turn.error}")
            if interrupt.requested:
                for member in live:
                    self._forward(interrupt, member)
            answers, failures = self._serve(live)

    def _serve(self, live: dict[int, Turn]) -> tuple[dict[int, Any], dict[int, BaseException]]:
        """Return the answers to the members that can continue, by member, and the exceptions of their steps."""
        waiting = {member: turn.waits_for for member, turn in live.items()}
        requests = [request for request in waiting.values() if isinstance(request, StepRequest)]
        if requests:  # members that wait to share a value stay parked
            failures = self._steps.run(requests)
            return {request.member: None for request in requests if request.member not in failures}, failures
        shares: dict[int, Share] = waiting
        owners = {share.owner: member for member, share in shares.items()}
        if len(owners) > 1:
            return {}, {member: _out_of_step(owners) for member in shares}
        # A mapping for each member, because a callback may change it.
        return {member: {other: of.value for other, of in shares.items()} for member in shares}, {}

    def _forward(self, interrupt: Interrupt, member: int) -> None:
        # All members see the request after the same window, whenever the signal arrived.
        own = self._cores[member].engine.emitter.interrupt
        own.requested, own.preempted, own.paused = True, interrupt.preempted, interrupt.paused


def _out_of_step(owners: dict[str, int]) -> DeclarationError:
    shown = " and ".join(f"member {member} in {owner}" for owner, member in owners.items())
    return DeclarationError(
        f"The members of a population share values in different callbacks: {shown}.",
        why="each callback compares all members, so all of them have to call `share` equally often",
        fix=[
            "train all members to the same epoch before",
            "call `share` whether or not the member has a value, and share None",
        ],
    )
