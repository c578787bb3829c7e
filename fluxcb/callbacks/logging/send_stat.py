"""`SendStat`: run a command with the latest values of statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fluxcb._declare.access import Read
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, Trigger
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb.callbacks.arguments import finite_number
from fluxcb.callbacks.logging.statistics_sent import latest_of, statistic_names, warn_once
from fluxcb.callbacks.system.command import Command
from fluxcb.callbacks.system.process import run_command

__all__ = ["SendStat"]


class SendStat(Callback):
    """Run a command with the latest values of statistics after each epoch, for example to send a notification.

    The command is a list of arguments. `{name}` or `{name:.3f}` is replaced with the latest value that was logged under
    that name. Write `{{` and `}}` for literal braces. A value is always part of a single argument, whichever characters
    it contains. With `shell=True`, the command is a string for `/bin/sh`, and values are passed as environment
    variables, so that the shell does not run them as commands.

    The command can still pass a value to something that runs it as code: `eval`, `$(( ))`, `ssh`, or a nested `sh -c`
    or `python -c`. A number is harmless there. If `SendStat` recognizes such a command, it does not pass text to it. It
    cannot know whether another program runs its arguments as code. To use a text in a nested shell, pass it as a
    positional argument: `["sh", "-c", 'echo "$1"', "sh", "{note}"]`.

    Training waits for the command. If the command cannot be started, fails, takes too long, or lacks a value, the
    callback issues a warning once, and training continues. The warning contains the name of the program and the end of
    its output. It does not contain the arguments, because they may contain tokens.

    Args:
        command: The program and its arguments; a string if `shell=True`.
        names: Name of one statistic, or several names. Each must appear in the command.
        shell: Whether to run the command in a shell, which allows pipes and redirections.
        timeout: Time after which the command is killed (seconds).

    Access:
        cbstate.monitors: Read.

    Runs:
        Trigger x AbstractTrainingPhase (host), on process 0 only.

    Cost:
        The runtime of the command. Fetches nothing.

    Raises:
        DeclarationError: `command` is not a list of arguments, a placeholder is not in `names`, a statistic has no
            placeholder, or `timeout` is not a positive number.
        MissingStateError: There is no `Monitors`, or no callback logs a statistic (when the Learner is built).

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
        tensorpack, `SendStat`, which passes the values to a shell without quotes, and ends training if a value is
        missing.
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
        self.timeout = finite_number(timeout, "`timeout` of `SendStat` (seconds)", above=0)
        self._warned: set[str] = set()

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the declared access; see the class docstring."""
        return {"cbstate": {"monitors": Read()}}

    def watched_names(self) -> tuple[str, ...]:
        """Return the names of the statistics."""
        return self.names

    @on(Trigger, AbstractTrainingPhase)
    def send(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Run the command."""
        values, missing = latest_of(learner.cbstate.monitors, self.names)
        if missing:
            warn_once(self._warned, self, f"did not run the command: {missing}")
            return
        code = self.command.text_run_as_code(values)
        if code is not None:
            text = f"did not run the command: `{code}` is a text, and the command would run it as code."
            warn_once(self._warned, self, text)
            return
        failure = run_command(*self.command.filled(values), self.timeout)
        if failure:
            warn_once(self._warned, self, f"`{self.command.program}`: {failure}.")

    def __repr__(self) -> str:
        return f"SendStat({', '.join(self.names)})"
