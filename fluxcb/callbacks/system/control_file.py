"""`ControlFile`, which applies commands that arrive during a training."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fluxcb._declare.access import Read, Write
from fluxcb._declare.callback import Callback, unwrap
from fluxcb._declare.control import PauseFitting
from fluxcb._declare.events import Event, FitBegin, FitEnd, Trigger
from fluxcb._declare.handlers import Handler, on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import EverySeconds
from fluxcb._declare.state import RATE_FIX, is_negative_rate
from fluxcb._errors import CheckpointError, DeclarationError, did_you_mean
from fluxcb.callbacks.arguments import finite_number, run_folder
from fluxcb.callbacks.hyperparams.hyperparameter import hyperparameter_name, shown_hyperparameter
from fluxcb.callbacks.inspect.own_file import UntrustedFileError
from fluxcb.callbacks.logging.statistics_sent import warn_once
from fluxcb.callbacks.saving.checkpointer import Checkpointer
from fluxcb.callbacks.system.run_control import (
    ANSWERS,
    COMMANDS,
    REPEATED,
    SWITCHES,
    Command,
    lines_of,
    parse_command,
)

__all__ = ["ControlFile"]


class ControlFile(Callback):
    """Obey commands from other processes of the same user during a training.

    Commands set a hyperparameter, disable or enable a callback, save a checkpoint, or stop the fit.

    `fluxcb control RUN` and `RunControl` write the commands to the file `control.jsonl` in the directory of the run.
    The training applies them between two windows of steps, or after an epoch. It then writes an answer with the step to
    `control-answers.jsonl`. Commands are data: nothing in the file is executed. A file that another user can have
    written is not used. The callback creates the file when a fit begins, and removes it when the fit ends.

    Each applied command is added to `cbstate.commands`, which checkpoints contain. If a run is killed and
    resumes from a checkpoint that precedes a command, it sets the hyperparameter, or disables or enables the callback,
    again after the same step. Commands to save and to stop are not repeated.

    Args:
        folder: The directory of the run, usually that of the `Checkpointer`.
        hyperparams: The hyperparameters that commands may set: `HyperParameter` classes or names.
        seconds: Period at which the file is looked up (seconds).

    Access:
        hyperparams.<name>: Write, for each name in `hyperparams`.
        cbstate.commands: Write. A list of dicts with `id`, `action`, `name`, `value` and `step`.
        callbacks, snapshots: Read.

    Runs:
        FitBegin, FitEnd x Phase (host).
        Trigger x AbstractTrainingPhase (host, when there is a command).

    Cost:
        Asks the file system for the size of the file once in `seconds`, between two windows. A window ends early only
        if there is a command. Fetches nothing.

    Raises:
        DeclarationError: `folder` is not a path, a name is not that of a hyperparameter, `seconds` is not positive, or
            several processes train together.
        ConflictError: Another callback sets one of the hyperparameters.
        MissingStateError: The optimizer does not have one of the hyperparameters (when the Learner is built).

    Example:
        >>> import tempfile
        >>> from fluxcb.callbacks import ControlFile, CustomCallback, RunControl
        >>> from fluxcb.events import EpochBegin
        >>> from fluxcb.testing import testlearner
        >>> folder = tempfile.mkdtemp()
        >>> other = CustomCallback(lambda *_: RunControl(folder, wait=0).stop(), EpochBegin)  # as another process
        >>> learner = testlearner(ControlFile(folder), other)
        >>> history = learner.fit(100)
        >>> history.stop_reason, [command["action"] for command in learner.cbstate["commands"]]
        ('stopped by a command', ['stop'])
    """

    def __init__(
        self, folder: str | os.PathLike[str], hyperparams: Iterable[Any] = (), *, seconds: float = 1.0
    ) -> None:
        self.folder = run_folder(folder, "ControlFile")
        finite_number(seconds, "`seconds` of `ControlFile`", above=0)
        if isinstance(hyperparams, str | type):
            raise DeclarationError(
                f"`hyperparams` of `ControlFile` is a list, not {hyperparams!r}.",
                fix=f"write `hyperparams=({shown_hyperparameter(hyperparameter_name(hyperparams))},)`",
            )
        self._passed_folder = os.fspath(folder)  # for labels
        self.hyperparams = tuple(map(hyperparameter_name, hyperparams))
        self._commands = _Commands(self.folder, seconds)
        self._warned: set[str] = set()

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the paths that the callback reads and writes."""
        setting = {"hyperparams": {name: Write() for name in self.hyperparams}} if self.hyperparams else {}
        return {**setting, "cbstate": {"commands": Write()}, "callbacks": Read(), "snapshots": Read()}

    def handlers(self) -> list[Handler]:
        """Return the handlers; that of Trigger is due when there is a command."""
        due = _WhenCommanded(self._commands.seconds, commands=self._commands, moment="step")
        return [replace(h, when=(due,)) if h.event is Trigger else h for h in super().handlers()]

    def init(self, learner: LearnerView) -> None:
        """Create the list of commands."""
        if "commands" not in learner.cbstate:
            learner.cbstate.commands = []

    @on(FitBegin, Phase, access={"cbstate": {"commands": Read()}})
    def begin(self, event: FitBegin, phase: Phase, learner: LearnerView) -> None:
        """Create the file, and find the commands to repeat: those that followed the checkpoint.

        A replay repeats all of them, and leaves the files to the run.
        """
        import jax

        if jax.process_count() > 1:
            raise DeclarationError(
                "`ControlFile` does not work if several processes train together.",
                why="the processes would read a command at different steps",
                fix="leave it out, and end the training with SIGTERM",
            )
        done = {command["id"] for command in learner.cbstate.commands}
        if event.replays:
            self._commands.begin_replay(done)
        else:
            self._commands.begin(done, forgets=not event.resumes and learner.progress.step == 0)

    @on(Trigger, AbstractTrainingPhase)
    def apply(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Apply all commands that have arrived."""
        stops = False
        for command in self._commands.repeated(learner.progress.step):
            self._change(command, learner)
        try:
            commands = self._commands.new()
        except UntrustedFileError as error:
            warn_once(self._warned, self, f"{self._commands.path} is not read: {error}.")
            return
        for command in commands:
            error, fix = self._refusal(command, learner)
            self._commands.answer(command, learner.progress.step, error, fix)
            if error:
                continue
            if command.action in REPEATED:
                self._change(command, learner)
                continue
            self._note(command, learner)
            if command.action in ("save", "stop"):
                for saver, disabled in _savers(learner):
                    # At a stop, the enabled ones save in their own handlers.
                    if command.action == "save" or disabled:
                        saver.request_save(learner.snapshots)
            stops |= command.action == "stop"
        if stops:
            raise PauseFitting("stopped by a command")

    def _change(self, command: Command, learner: LearnerView) -> None:
        if command.action == "set":
            learner.hyperparams[command.name] = command.value or 0.0  # a command to set has a value
        else:
            _switch(command, learner)
        self._note(command, learner)

    def _note(self, command: Command, learner: LearnerView) -> None:
        entry = {**vars(command), "step": learner.progress.step}
        learner.cbstate.commands = [*learner.cbstate.commands, entry]

    def _refusal(self, command: Command, learner: LearnerView) -> tuple[str, Sequence[str]]:
        """Return why a command is refused, and the fixes; an empty string and no fixes if it is not."""
        if command.action == "set" and command.name not in self.hyperparams:
            return self._refused_setting(command.name, learner)
        if command.action == "set" and is_negative_rate(command.name, command.value or 0.0):
            what = f"`hyperparams.{command.name}` cannot be set to {command.value:g}, which is negative."
            return what, [f"set it to {RATE_FIX}"]
        if command.action == "save" and not _savers(learner):
            return "The training has no `Checkpointer`.", ['add `Checkpointer("runs/1")` to the callbacks']
        if command.action in SWITCHES:
            if command.action == "disable" and command.name == self._own_name(learner):
                return (
                    f"{self!r} cannot be disabled by a command.",
                    ["leave it enabled, because a disabled one would not read further commands"],
                )
            try:
                _switch(command, learner)  # only registers the change, and so does `_change`
            except DeclarationError as refusal:
                return refusal.what, refusal.fix
        return "", ()

    def _refused_setting(self, name: str, learner: LearnerView) -> tuple[str, Sequence[str]]:
        what = f"Commands cannot set `hyperparams.{name}` in this training.{did_you_mean(name, self.hyperparams)}"
        settable = " or ".join(f"`{known}`" for known in self.hyperparams)
        fixes = [f"set {settable}"] if settable else []
        if name in learner.hyperparams:
            names = ", ".join(map(shown_hyperparameter, (*self.hyperparams, name)))
            fixes.append(f"pass `hyperparams=[{names}]` to the `ControlFile`, and restart the training")
        elif not settable:
            fixes.append("pass the hyperparameters to set to the `ControlFile`, and restart the training")
        return what, fixes

    def _own_name(self, learner: LearnerView) -> str:
        return next(d.name for d in learner.callbacks.graph.declared if unwrap(d.callback) is self)

    @on(FitEnd, Phase, access={})
    def end(self, event: FitEnd, phase: Phase, learner: LearnerView) -> None:
        """Remove the file, unless the run goes back to a checkpoint and continues."""
        if event.outcome != "rewinding":
            self._commands.end()

    def __repr__(self) -> str:
        return f"ControlFile({self._passed_folder!r})"


def _switch(command: Command, learner: LearnerView) -> None:
    switch = learner.callbacks.disable if command.action == "disable" else learner.callbacks.enable
    switch(command.name)


def _savers(learner: LearnerView) -> list[tuple[Checkpointer, bool]]:
    """Return the callbacks that save checkpoints, and whether each is disabled."""
    declared = learner.callbacks.graph.declared
    return [(saver, d.disabled) for d in declared if isinstance(saver := unwrap(d.callback), Checkpointer)]


class _Commands:
    """The commands that are in the file, and those that have to be repeated because the run was killed.

    Args:
        folder: The directory of the files.
        seconds: Period at which the file is looked up (seconds).
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        self.path, self._answers, self.seconds = folder / COMMANDS, folder / ANSWERS, seconds
        self._lines = self._size = 0
        self._looked = float("-inf")
        self._open = self._found = False
        self._repeats: list[dict[str, Any]] = []
        self.moment = "step"  # set by the schedule that is due

    def begin(self, done: set[str], *, forgets: bool) -> None:
        """Create an empty file.

        Args:
            done: The commands of the restored checkpoint, which are not repeated.
            forgets: Whether a new run begins.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if forgets:  # a new run in a directory that an earlier one has used
            self._answers.unlink(missing_ok=True)
        self.begin_replay(done)
        if not self._open:  # a run that has gone back keeps its file
            self.path.unlink(missing_ok=True)
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
            self._open, self._lines, self._size, self._found = True, 0, 0, False

    def begin_replay(self, done: set[str]) -> None:
        """Find the commands that have to be repeated, without changing a file.

        Args:
            done: The commands of the restored checkpoint, which are not repeated.
        """
        self._repeats = [a for a in self._known() if a["action"] in REPEATED and not a["error"] and a["id"] not in done]

    def _known(self) -> list[dict[str, Any]]:
        """Return the answers of the run so far.

        Raises:
            CheckpointError: Another user can have written them.
        """
        try:
            return [json.loads(line) for line in lines_of(self._answers)]
        except FileNotFoundError:
            return []
        except (UntrustedFileError, ValueError) as error:
            raise CheckpointError(
                f"{self._answers} cannot be used: {error}.",
                why="it says which commands the run repeats after it was killed",
                fix="delete the file; commands that followed the last checkpoint are then not repeated",
            ) from None

    def end(self) -> None:
        """Remove the file."""
        if self._open:
            self._open = False
            self.path.unlink(missing_ok=True)

    def look(self) -> bool:
        """Return whether there is a new command."""
        with contextlib.suppress(OSError):  # a missing file has no commands
            self._found |= self._open and self.path.stat().st_size > self._size
        self._looked = time.monotonic()
        return self._found

    def look_periodically(self) -> bool:
        """Return whether there was a new command at the last look."""
        return self._found or (time.monotonic() - self._looked >= self.seconds and self.look())

    def next_repeat(self, step: int, *, moment: str | None = None) -> int | None:
        """Return the first step from `step` on after which a command has to be repeated, or None."""
        steps = (a["step"] for a in self._repeats if a["step"] >= step and moment in (None, a["moment"]))
        return min(steps, default=None)

    def repeated(self, step: int) -> list[Command]:
        """Return the commands that have to be repeated now."""
        now = [a for a in self._repeats if (a["step"], a["moment"]) == (step, self.moment)]
        self._repeats = [a for a in self._repeats if a not in now]
        return [Command(a["id"], a["action"], a["name"], a["value"]) for a in now]

    def new(self) -> list[Command]:
        """Return the commands that have arrived; a line that is not a command is ignored."""
        self._found = False
        lines = list(lines_of(self.path)) if self._open and self.path.exists() else []
        self._size = sum(len(line.encode()) + 1 for line in lines)
        new, self._lines = lines[self._lines :], len(lines)
        return [command for line in new if (command := parse_command(line)) is not None]

    def answer(self, command: Command, step: int, error: str, fix: Sequence[str]) -> None:
        """Record what has become of a command, before any further step runs."""
        content = {**vars(command), "step": step, "moment": self.moment, "error": error, "fix": [*fix]}
        handle = os.open(self._answers, os.O_CREAT | os.O_APPEND | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0), 0o600)
        try:
            os.write(handle, (json.dumps(content) + "\n").encode())
        finally:
            os.close(handle)


@dataclass(frozen=True)
class _WhenCommanded(EverySeconds):
    """Due when a command has arrived, or when a command of a killed run has to be repeated.

    Args:
        commands: The commands.
        moment: "step" within an epoch, "epoch" after it.
    """

    commands: _Commands = field(kw_only=True, repr=False, compare=False)
    moment: str = field(kw_only=True)

    def __str__(self) -> str:
        return "when there is a command"

    __repr__ = __str__

    def due(self, step: int, epoch: int, learner: LearnerView) -> bool:
        """Return whether there is a command for this moment."""
        commands = self.commands
        found = commands.look() if self.moment == "epoch" else commands.look_periodically()
        due = found or commands.next_repeat(step, moment=self.moment) == step
        if due:
            commands.moment = self.moment
        return due

    def next_due(self, step: int, epoch: int) -> int | None:
        """Return the next step if there is a command, or the step after which a command has to be repeated."""
        if self.commands.look_periodically():
            return step + 1
        return self.commands.next_repeat(step + 1, moment="step")

    def for_handler(self) -> _WhenCommanded:
        """Return the schedule itself, because a callback has one handler with it."""
        return self

    def after_epoch(self) -> _WhenCommanded:
        """Return the schedule of the Trigger after an epoch."""
        return replace(self, moment="epoch")
