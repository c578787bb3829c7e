"""Handing what was put to backends, none of which can stop the training or the others."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fluxcb._errors import DeclarationError, FluxcbError
from fluxcb.logging.backend import LoggerBackend
from fluxcb.logging.hub import Put

__all__ = ["Delivery"]


class Delivery:
    """The backends of a run, as one.

    A backend that raises is switched off with one warning; it is closed with the others, and the others go on. Only
    what a user has to decide before the training begins (an existing log, for one) is raised.

    Args:
        backends: The backends.

    Raises:
        DeclarationError: One of them is no backend, or two have one name.
    """

    def __init__(self, backends: Iterable[LoggerBackend]) -> None:
        self.backends = tuple(backends)
        for backend in self.backends:
            if not isinstance(backend, LoggerBackend):
                given = f"the class {backend.__name__}" if isinstance(backend, type) else repr(backend)
                raise DeclarationError(
                    f"`Monitors` takes backends, not {given}.", fix='e.g. `Monitors(JSONLinesBackend("log.jsonl"))`'
                )
        names = [backend.name for backend in self.backends]
        for name in names:
            if names.count(name) > 1:
                raise DeclarationError(
                    f"Two backends are called {name}.",
                    why="they would write to one place, and their states are kept by name",
                    fix="leave one out, or give it another place",
                )
        self._open: set[str] = set()
        self._off: set[str] = set()
        self._states: dict[str, dict[str, Any]] = {}
        self._was_open = False
        self._unfinished_epoch = False

    @property
    def is_open(self) -> bool:
        """Whether the backends have been opened."""
        return bool(self._open)

    def open(self, *, resumes: bool) -> None:
        """Open the backends that are not open.

        Args:
            resumes: Whether the run goes on; it does, too, if they were open before, or have got their state back.

        Raises:
            FluxcbError: The user has to decide something.
        """
        resumes = resumes or self._was_open
        for backend in self.backends:
            if backend.name in self._open or backend.name in self._off:
                continue
            try:
                backend.open(resumes=resumes)
            except FluxcbError:
                raise
            except Exception as error:
                self._switch_off(backend, error)
                with contextlib.suppress(Exception):  # why it could not be opened has been told
                    backend.close()
            else:
                self._open.add(backend.name)
        self._was_open = True

    def send(self, puts: Sequence[Put]) -> None:
        """Hand over what was put, and let each backend flush."""
        if puts:
            self._unfinished_epoch = True
            self._each(lambda backend: _send(backend, puts))

    def end_epoch(self, epoch: int) -> None:
        """Tell that an epoch's values are complete, if there were some since the last time."""
        if self._unfinished_epoch:
            self._unfinished_epoch = False
            self._each(lambda backend: backend.end_epoch(epoch))

    def close(self) -> None:
        """Close all backends; `open` goes on with the same logs."""
        self.state_dict()
        for backend in self.backends:
            if backend.name in self._open:
                self._open.discard(backend.name)
                try:
                    backend.close()
                except Exception as error:
                    self._switch_off(backend, error)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each backend, by name."""

        def keep(backend: LoggerBackend) -> None:
            self._states[backend.name] = backend.state_dict()

        self._each(keep)
        return {name: dict(state) for name, state in self._states.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give each backend its state back; what was logged later is cut off when it is opened again."""
        self.close()
        self._states = {name: dict(saved) for name, saved in state.items()}
        self._was_open = self._unfinished_epoch = True
        for backend in self.backends:
            backend.load_state_dict(self._states.get(backend.name, {}))

    def _each(self, call: Callable[[LoggerBackend], None]) -> None:
        for backend in self.backends:
            if backend.name in self._open and backend.name not in self._off:
                try:
                    call(backend)
                except Exception as error:
                    self._switch_off(backend, error)

    def _switch_off(self, backend: LoggerBackend, error: Exception) -> None:
        if backend.name in self._off:
            return
        self._off.add(backend.name)
        warnings.warn(
            f"{backend.name} failed, and is switched off while training goes on: {type(error).__name__}: {error}",
            stacklevel=2,
        )


def _send(backend: LoggerBackend, puts: Sequence[Put]) -> None:
    for name, loggable, step, epoch, seconds in puts:
        if isinstance(loggable, backend.loggables):
            backend.log(name, loggable, step=step, epoch=epoch, seconds=seconds)
    backend.flush()
