"""`InjectShell`: open a shell in a running training by making a file."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import sys
import threading
from bdb import BdbQuit
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fluxcb._declare.access import Read
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, FitEnd, Trigger
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.own_file import OwnFile
from fluxcb.callbacks.statistics_sent import warn_once

__all__ = ["InjectShell"]


class InjectShell(Callback):
    """Open a shell in the running training after an epoch in which somebody made a file: `touch INJECT_SHELL.tmp`.

    In the shell, `learner` shows everything. The training goes on when the shell is left: IPython by Ctrl-D, pdb by
    `c`. Ctrl-C stops what runs in the shell, not the training. The file is removed then, and when the fit ends, so it
    asks for one shell. To change something there, declare it in a subclass's `stateaccess`, with `chief_only = False`:
    processes that train together would else train with different states.

    A file is obeyed only if it is a regular one, belongs to the user whose program this is, has no other name, and
    nobody else may write to it: else anybody who can write to the folder could stop the training. Another file, or a
    training without a terminal, gives a warning once.

    Args:
        file: The file; a relative path counts from the working directory at this moment.
        shell: `"ipython"` or `"pdb"`; by default IPython if it is installed, else pdb.

    Access:
        Everything: Read.

    Runs:
        Trigger x AbstractTrainingPhase, FitEnd x Phase (host), on process 0 only.

    Cost:
        A look for the file per epoch.

    Raises:
        DeclarationError: `file` is no path of a file, `shell` is none of these or not installed, or the platform does
            not know whose a file is.

    Example:
        >>> from fluxcb.callbacks import InjectShell
        >>> from fluxcb.testing import testlearner
        >>> learner = testlearner(InjectShell("open.tmp"))
        >>> history = learner.fit(1)  # there is no file

    Source:
        tensorpack, `InjectShell`, which obeys any file, again after each epoch.
    """

    chief_only = True
    main_thread = True

    def __init__(
        self,
        file: str | os.PathLike[str] = "INJECT_SHELL.tmp",
        shell: str | None = None,
    ) -> None:
        if not isinstance(file, str | os.PathLike) or not os.fspath(file):
            raise DeclarationError(
                f"`file` of `InjectShell` must be a path, not {file!r}.", fix='e.g. `file="INJECT_SHELL.tmp"`'
            )
        if Path(file).is_dir():
            raise DeclarationError(f"`file` of `InjectShell` is a folder: {file}.", fix="name a file in it")
        if shell not in (None, *_SHELLS):
            raise DeclarationError(
                f'`shell` of `InjectShell` is "ipython" or "pdb", not {shell!r}.', fix="leave it out"
            )
        installed = importlib.util.find_spec("IPython") is not None
        if shell == "ipython" and not installed:
            raise DeclarationError(
                "`InjectShell` needs the package `IPython` for this shell, which is not installed.",
                fix=["`pip install ipython`", '`shell="pdb"`'],
            )
        self.file = Path(file).absolute()
        self.shell = shell or ("ipython" if installed else "pdb")
        self._own = OwnFile(self.file, "InjectShell")
        self._said: set[str] = set()

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return {"*": Read()}

    @on(Trigger, AbstractTrainingPhase)
    def look(self, event: Event, phase: Phase, learner: Any) -> None:
        """Open a shell if there is a file that asks for it."""
        refusal = self._own.refusal()
        if refusal is None:
            return
        if not refusal and not _has_terminal():
            refusal = "there is no terminal that it could be opened in"
        if refusal:
            warn_once(self._said, self, f"no shell is opened for {self.file}: {refusal}.")
            return
        try:
            with _own_interrupts():
                _SHELLS[self.shell](learner)
        finally:
            self._own.remove()

    @on(FitEnd, Phase, access={})
    def end(self, event: Event, phase: Phase, learner: Any) -> None:
        """Remove a file that came too late, which would open a shell in the next training."""
        self._own.remove()

    def __repr__(self) -> str:
        return f"InjectShell({self.file.name!r})"


def _ipython(learner: Any) -> None:
    from IPython.terminal.embed import embed

    embed(banner1=f"{learner!r}\nCtrl-D goes on with the training.", confirm_exit=False)


def _pdb(learner: Any) -> None:
    from pdb import Pdb

    with contextlib.suppress(BdbQuit):  # `q` leaves the shell, not the training
        # nosigint: else Ctrl-C would be pdb's from then on.
        Pdb(nosigint=True).set_trace()
        del learner  # here the debugger stops: `learner` is there, `c` goes on with the training


_SHELLS = {"ipython": _ipython, "pdb": _pdb}


def _has_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


@contextlib.contextmanager
def _own_interrupts() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt, whatever it means to the training."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
