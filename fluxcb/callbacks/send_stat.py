"""`SendStat`: run a command with the latest values of statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fluxcb._declare.access import Read
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, Trigger
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb.callbacks.arguments import number_above
from fluxcb.callbacks.command import Command
from fluxcb.callbacks.process import run_command
from fluxcb.callbacks.statistics_sent import latest_of, statistic_names, warn_once

__all__ = ["SendStat"]


class SendStat(Callback):
    """Run a command with the latest values of statistics after each epoch: notify somebody, tell a scheduler.

    The command is a list of arguments, in which `{name}`, or `{name:.3f}`, stands for the latest value that was put
    into `cbstate.monitors` under that name. `{{` and `}}` are braces. No shell reads it, so a value is part of one
    argument, whatever characters it has. With `shell=True` the command is a string for `/bin/sh`; values are handed
    over as variables of the environment, and are not read as commands there either.

    The training waits for the command. One that cannot be started, fails, takes too long or lacks a value gives a
    warning, the same one once, and training goes on.

    Args:
        command: Program and arguments; a string with `shell=True`.
        names: The statistic, or several; each has its place in the command.
        shell: Whether a shell runs it, for pipes and redirections.
        timeout: How long the command may take (seconds). Then it is killed.

    Access:
        cbstate.monitors: Read.

    Runs:
        Trigger x AbstractTrainingPhase (host), on process 0 only.

    Cost:
        What the command takes. Fetches nothing.

    Raises:
        DeclarationError: `command` is no list of arguments, a placeholder names no statistic, a statistic has no
            placeholder, or `timeout` is no number above 0.
        MissingStateError: There is no `Monitors` (when the Learner is built).

    Example:
        >>> from pathlib import Path
        >>> from fluxcb.callbacks import Monitors, SendStat, ThroughputTracker
        >>> from fluxcb.testing import testlearner
        >>> command = ["touch", "{Throughput (steps/sec):.0f} steps per second"]
        >>> learner = testlearner(Monitors(), ThroughputTracker(), SendStat(command, "Throughput (steps/sec)"))
        >>> history = learner.fit(1)
        >>> [path.name for path in Path().glob("* steps per second")]
        ['... steps per second']

    Source:
        tensorpack, `SendStat`, which gives the values to a shell, unquoted, and stops the training at a missing one.
    """

    chief_only = True

    def __init__(
        self,
        command: Sequence[str] | str,
        names: str | Sequence[str],
        *,
        shell: bool = False,
        timeout: float = 30.0,
    ) -> None:
        self.names = statistic_names(names, "SendStat")
        self.command = Command(command, self.names, shell=shell, owner="SendStat")
        self.timeout = number_above(0, timeout, "`timeout` of `SendStat` (seconds)")
        self._said: set[str] = set()

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return {"cbstate": {"monitors": Read()}}

    @on(Trigger, AbstractTrainingPhase)
    def send(self, event: Event, phase: Phase, learner: Any) -> None:
        """Run the command."""
        values, missing = latest_of(learner.cbstate.monitors, self.names)
        if missing:
            warn_once(self._said, self, f"nothing is sent: {missing}")
            return
        failure = run_command(*self.command.filled(values), self.timeout)
        if failure:
            warn_once(self._said, self, f"`{self.command.text}`: {failure}.")

    def __repr__(self) -> str:
        return f"SendStat({', '.join(self.names)})"
