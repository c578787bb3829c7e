"""`InjectShell`: open a shell in a running training when a file appears."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
from bdb import BdbQuit
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fluxcb._declare.access import Read
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, FitEnd, Trigger
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._errors import DeclarationError
from fluxcb._interruptions import ctrl_c_handled_by
from fluxcb.callbacks.arguments import choice, file_path
from fluxcb.callbacks.inspect.own_file import OwnFile, UntrustedFileError
from fluxcb.callbacks.logging.statistics_sent import warn_once

__all__ = ["InjectShell"]


class InjectShell(Callback):
    """Open a shell in the running training at the end of an epoch in which a file was created.

    Create the file with `touch INJECT_SHELL.tmp`. In the shell, `learner` gives read access to the whole state.
    Training continues when you leave the shell: press Ctrl-D in IPython, or enter `c` in pdb. Ctrl-C interrupts the
    command in the shell and not the training. The callback then removes the file, so that one file opens one shell. It
    also removes the file when the fit ends.

    To change state from the shell, declare the writes in the `stateaccess` of a subclass, and set `chief_only = False`.
    Otherwise only process 0 would change its state, and the processes of a multi-host run would diverge.

    The file opens a shell only if no other user can have created it. It must be a regular file with one name that
    belongs to the user who runs the program. Its directory must also belong to this user. Others must not have write
    permission for either of them. Parent directories are not checked. If a file does not meet these requirements, or
    the training has no terminal, the callback issues a warning once.

    Args:
        file: The file. A relative path is resolved against the current working directory.
        shell: `"ipython"` or `"pdb"`; by default IPython if it is installed, else pdb.

    Access:
        All state: Read.

    Runs:
        Trigger x AbstractTrainingPhase, FitEnd x Phase (host), on process 0 only.

    Cost:
        One file system lookup per epoch.

    Raises:
        DeclarationError: `file` is not a file path, `shell` is not one of these values or is not installed, or files
            have no owners on this platform.

    Example:
        >>> from fluxcb.callbacks import InjectShell
        >>> from fluxcb.testing import testlearner
        >>> learner = testlearner(InjectShell("open.tmp"))
        >>> history = learner.fit(1)  # there is no file

    Source:
        tensorpack, `InjectShell`, which accepts a file from any user and opens a shell after each epoch while the file
        exists.
    """

    chief_only = True
    main_thread = True

    def __init__(
        self,
        file: str | os.PathLike[str] = "INJECT_SHELL.tmp",
        shell: str | None = None,
    ) -> None:
        file_path(file, "`file` of `InjectShell`", 'file="INJECT_SHELL.tmp"')
        choice(shell, ("pdb", "ipython", None), "`shell` of `InjectShell`")
        installed = importlib.util.find_spec("IPython") is not None
        if shell == "ipython" and not installed:
            raise DeclarationError(
                "`InjectShell` needs the package `IPython` for this shell, which is not installed.",
                fix=["run `pip install ipython`", 'write `shell="pdb"`'],
            )
        self.file = Path(file).absolute()
        self.shell = shell or ("ipython" if installed else "pdb")
        OwnFile.require_owners("InjectShell")
        self._own = OwnFile(self.file)
        self._warned: set[str] = set()

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the declared access; see the class docstring."""
        return {"*": Read()}

    @on(Trigger, AbstractTrainingPhase)
    def look(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Open a shell if the file exists and can be trusted."""
        refusal = "" if _has_terminal() else "standard input is not a terminal"
        try:
            self._own.require_alone()
        except FileNotFoundError:
            return
        except UntrustedFileError as error:
            refusal = str(error)
        if refusal:
            warn_once(self._warned, self, f"{self.file} did not open a shell: {refusal}.")
            return
        try:
            # The shell needs the KeyboardInterrupt of Python, whichever signal handler the training has installed.
            with ctrl_c_handled_by(signal.default_int_handler):
                _SHELLS[self.shell](learner)
        finally:
            self._own.remove()

    @on(FitEnd, Phase, access={})
    def end(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Remove a file that was created too late, because it would open a shell in the next training."""
        self._own.remove()

    def __repr__(self) -> str:
        return f"InjectShell({self.file.name!r})"


def _ipython(learner: LearnerView) -> None:
    from IPython.terminal.embed import embed

    embed(banner1=f"{learner!r}\nPress Ctrl-D to continue the training.", confirm_exit=False)


def _pdb(learner: LearnerView) -> None:
    from pdb import Pdb

    with contextlib.suppress(BdbQuit):  # `q` leaves the shell, not the training
        # Without `nosigint`, pdb would keep its own handler of Ctrl-C after the shell is left.
        Pdb(nosigint=True).set_trace()
        del learner  # the debugger stops on this line, because `learner` must still be a local variable here


_SHELLS = {"ipython": _ipython, "pdb": _pdb}


def _has_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()
