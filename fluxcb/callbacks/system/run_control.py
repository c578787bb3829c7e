"""`RunControl`, which sends commands to a running training, and the files that carry the commands and their answers."""

from __future__ import annotations

import json
import math
import os
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fluxcb._calls import Constructed
from fluxcb._declare.state import RATE_WHY, is_negative_rate
from fluxcb._errors import DeclarationError, PeerError
from fluxcb.callbacks.hyperparams.setters import FLOAT32_MAX
from fluxcb.callbacks.inspect.own_file import OwnFile, UntrustedFileError

__all__ = [
    "ACTIONS",
    "ANSWERS",
    "COMMANDS",
    "LONGEST",
    "REPEATED",
    "SWITCHES",
    "Command",
    "RunControl",
    "lines_of",
    "parse_command",
]

COMMANDS, ANSWERS = "control.jsonl", "control-answers.jsonl"
ACTIONS = ("set", "disable", "enable", "save", "stop")
SWITCHES = ("disable", "enable")
REPEATED = ("set", *SWITCHES)
"""The actions that change the training, so that a resumed run repeats them after the same step."""
LONGEST = 1 << 20  # bytes
_POLL = 0.05  # seconds


@dataclass(frozen=True)
class Command:
    """A command to a running training.

    Attributes:
        id: Identifies the answer.
        action: One of `ACTIONS`.
        name: The hyperparameter to set, the callback to disable or enable, or an empty string.
        value: Its new value, or None.
    """

    id: str
    action: str
    name: str = ""
    value: float | None = None


def parse_command(line: str) -> Command | None:
    """Return the command in a line, or None if there is none. A command is data, and nothing in it is executed."""
    try:
        content = json.loads(line)
        command = Command(**content)
    except (ValueError, TypeError, RecursionError):
        return None
    texts = all(isinstance(text, str) for text in (command.id, command.action, command.name))
    number = isinstance(command.value, int | float) and not isinstance(command.value, bool)
    if not texts or command.action not in ACTIONS:
        return None
    if command.action != "set":
        named = command.action in SWITCHES
        return command if bool(command.name) == named and command.value is None else None
    return command if number and abs(command.value or 0) <= FLOAT32_MAX else None  # NaN fails the comparison


def lines_of(path: Path) -> Iterator[str]:
    """Yield the complete lines of a file that only this user can have written.

    Raises:
        FileNotFoundError: The file does not exist.
        UntrustedFileError: Another user can have written the file, or it is too long.
    """
    content = OwnFile(path).read(LONGEST) or b""  # None while it is being written
    yield from content.decode(errors="replace").split("\n")[:-1]


class RunControl(Constructed):
    """Control a training that runs in another process of the same user on the same machine.

    The training needs a `ControlFile` with the same folder. Each method waits until the training has applied the
    command, and returns the training step after which it did.

    Args:
        folder: The directory of the run.
        wait: How long to wait for the answer (seconds). With 0, the methods return None at once.

    Raises:
        DeclarationError: No training reads commands in the folder, or it refuses the command.
        PeerError: The training does not answer in time.

    Example:
        >>> import tempfile, fluxcb
        >>> from fluxcb.callbacks import RunControl
        >>> try:
        ...     step = RunControl(tempfile.mkdtemp()).stop()
        ... except fluxcb.DeclarationError as error:
        ...     print(error.what)
        No training reads commands in ...
    """

    def __init__(self, folder: str | os.PathLike[str], *, wait: float = 60.0) -> None:
        self.folder = Path(folder)
        self.wait = wait

    def set(self, name: str, value: float) -> int | None:
        """Set a hyperparameter.

        Args:
            name: A name that the `ControlFile` declares.
            value: A finite number. A learning rate must not be negative.
        """
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise DeclarationError(
                f"A hyperparameter is a finite number, not {value!r}.",
                fix=f"write e.g. `RunControl({str(self.folder)!r}).set({name!r}, 1e-4)`",
            )
        if is_negative_rate(name, value):
            raise DeclarationError(
                f"`{name}` is a number that is not negative, not {value!r}.",
                why=RATE_WHY,
                fix=f"write e.g. `RunControl({str(self.folder)!r}).set({name!r}, 1e-4)`",
            )
        return self._send(Command(uuid.uuid4().hex, "set", name, float(value)))

    def disable(self, name: str) -> int | None:
        """Disable a callback after the current epoch; see `learner.callbacks.disable`.

        Args:
            name: The name of the callback in the training.
        """
        return self._send(Command(uuid.uuid4().hex, "disable", _name(name, "disable")))

    def enable(self, name: str) -> int | None:
        """Enable a callback again after the current epoch; see `learner.callbacks.enable`.

        Args:
            name: The name of the callback in the training.
        """
        return self._send(Command(uuid.uuid4().hex, "enable", _name(name, "enable")))

    def save(self) -> int | None:
        """Save a checkpoint."""
        return self._send(Command(uuid.uuid4().hex, "save"))

    def stop(self) -> int | None:
        """End the fit as SIGTERM does: the state is saved, and the run can be resumed."""
        return self._send(Command(uuid.uuid4().hex, "stop"))

    def _send(self, command: Command) -> int | None:
        path = self.folder / COMMANDS
        if self.folder.exists() and not self.folder.is_dir():
            raise DeclarationError(
                f"{self.folder} is not a directory.",
                fix="pass the directory of the run, which contains its checkpoints",
            )
        text = json.dumps(asdict(command)) + "\n"
        try:
            next(lines_of(path), None)  # the training would not read a file that another user can write
            # The file belongs to the running training, so a missing one must not be created. A single write with
            # O_APPEND keeps the lines of several senders apart.
            handle = os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0))
        except FileNotFoundError:
            raise DeclarationError(
                f"No training reads commands in {self.folder}.",
                why=f"a running training with a `ControlFile` has a file {COMMANDS} there",
                fix=f'add `ControlFile("{self.folder}")` to the callbacks, and start the training',
            ) from None
        except UntrustedFileError as error:
            raise DeclarationError(
                f"{path} is not used for commands: {error}.", fix=f"restart the training, which creates {COMMANDS}"
            ) from None
        try:
            os.write(handle, text.encode())
        finally:
            os.close(handle)
        return self._answer(command) if self.wait > 0 else None

    def _answer(self, command: Command) -> int:
        deadline = time.monotonic() + self.wait
        while time.monotonic() < deadline:
            for answer in self._answers():
                if answer.get("id") == command.id:
                    if answer["error"]:
                        raise DeclarationError(answer["error"], fix=answer["fix"])
                    return answer["step"]
            time.sleep(_POLL)
        raise PeerError(
            f"The training in {self.folder} has not answered within {self.wait:g} s.",
            why="a training answers between two windows of steps, so a long step or a long handler delays the answer",
            fix=[
                "wait longer; the command is still in effect if the training is alive",
                f"if the training was killed, delete {self.folder / COMMANDS}",
            ],
        )

    def _answers(self) -> Iterator[dict[str, Any]]:
        try:
            for line in lines_of(self.folder / ANSWERS):
                yield json.loads(line)
        except FileNotFoundError:
            return

    def __repr__(self) -> str:
        return f"RunControl({str(self.folder)!r})"


def _name(name: str, action: str) -> str:
    if not isinstance(name, str) or not name:
        raise DeclarationError(
            f"`RunControl.{action}` takes the name of a callback, not {name!r}.",
            fix=f'write e.g. `RunControl("runs/1").{action}("ThroughputTracker")`',
        )
    return name
