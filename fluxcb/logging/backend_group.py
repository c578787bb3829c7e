"""`BackendGroup`: send logged values to backends. A failing backend cannot stop the training or other backends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fluxcb._errors import DeclarationError, FluxcbError
from fluxcb._tracebacks import warn_user
from fluxcb.logging.backend import LoggerBackend
from fluxcb.logging.hub import Put, article
from fluxcb.logging.loggables import Loggable

__all__ = ["BackendGroup"]


class BackendGroup:
    """The backends of a run.

    A backend that raises an error is disabled with one warning. The other backends continue, and all are closed at the
    end. The only errors that are raised are those that require a decision by the user before the training begins, such
    as a table with different columns. With several processes, only those of process 0 are opened.

    Args:
        backends: The backends.

    Raises:
        DeclarationError: One of them is not a backend, or two have the same name or write to the same place.
    """

    def __init__(self, backends: Iterable[LoggerBackend]) -> None:
        self.backends = tuple(backends)
        for backend in self.backends:
            if not isinstance(backend, LoggerBackend):
                given = f"the class {backend.__name__}" if isinstance(backend, type) else repr(backend)
                raise DeclarationError(
                    f"`Monitors` takes backends, not {given}.",
                    fix='write e.g. `Monitors(JSONLinesBackend("log.jsonl"))`',
                )
        names = [backend.name for backend in self.backends]
        for name in names:
            if names.count(name) > 1:
                raise DeclarationError(
                    f"Two backends are called {name}.",
                    why="they would write to the same place, and their states are stored by name",
                    fix="remove one of them, or give it another place",
                )
        _refuse_shared_files(self.backends)
        self._open: set[str] = set()
        self._off: set[str] = set()
        self._kinds: set[type[Loggable]] = set()  # the types of all values so far, each checked once
        self._states: dict[str, dict[str, Any]] = {}
        self._was_open = False
        self._unfinished_epoch = False

    @property
    def is_open(self) -> bool:
        """Whether the backends have been opened."""
        return bool(self._open)

    def open(self, *, resumes: bool) -> None:
        """Open the backends that are not open, in process 0.

        Args:
            resumes: Whether the fit resumes a run. A run also counts as resumed if the backends were open before or
                their state was restored.

        Raises:
            FluxcbError: The user has to make a decision.
        """
        import jax

        resumes = resumes or self._was_open
        for backend in self.backends if jax.process_index() == 0 else ():
            if backend.name in self._open or backend.name in self._off:
                continue
            try:
                backend.open(resumes=resumes)
            except FluxcbError:
                raise
            except Exception as error:
                self._switch_off(backend, error)
                with contextlib.suppress(Exception):  # the reason for the failure has already been reported
                    backend.close()
            else:
                self._open.add(backend.name)
        self._was_open = True

    def send(self, puts: Sequence[Put]) -> None:
        """Pass values to each backend, and flush it."""
        if puts:
            self._unfinished_epoch = True
            if self._open:  # with several processes, those of process 0 only
                self._warn_of_lost(puts)
            self._each(lambda backend: _send(backend, puts))

    def _warn_of_lost(self, puts: Sequence[Put]) -> None:
        """Warn once for each type of value that no backend takes, because a log without these values looks complete."""
        for name, loggable, *_ in puts:
            kind = type(loggable)
            if kind in self._kinds:
                continue
            self._kinds.add(kind)
            if not any(issubclass(kind, backend.loggables) for backend in self.backends):
                backends = ", ".join(backend.name for backend in self.backends)
                warn_user(
                    f"`{name}` is {article(kind)}, which no backend takes: {backends}. Values of this type are not "
                    f"written.\n  fix:   {_how_to_log(kind)}",
                    UserWarning,
                )

    def end_epoch(self, epoch: int) -> None:
        """Report the end of an epoch to each backend, if values were logged since the last report."""
        if self._unfinished_epoch:
            self._unfinished_epoch = False
            self._each(lambda backend: backend.end_epoch(epoch))

    def close(self) -> None:
        """Close all backends. `open` continues the same logs."""
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
        """Restore the state of each backend. A backend removes later values when it is opened again."""
        self.close()
        self._states = {name: dict(saved) for name, saved in state.items()}
        self._was_open = self._unfinished_epoch = True
        for backend in self.backends:
            if backend.name not in self._states:
                self._rename_state(backend)
            backend.load_state_dict(self._states.get(backend.name, {}))

    def _rename_state(self, backend: LoggerBackend) -> None:
        """Give a backend the state of the only saved log of its class, if its own log exists.

        A backend is named by its path. The run may have been moved or copied, or the program may write another path to
        the same place. Without the state, records after the checkpoint would stay and be written again.
        """
        names = {other.name for other in self.backends}
        saved = [name for name in self._states if name not in names and _class_in(name) == _class_in(backend.name)]
        places = [place for place in backend.output_locations() if isinstance(place, Path)]
        if len(saved) == 1 and any(place.exists() for place in places):
            self._states[backend.name] = self._states.pop(saved[0])

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
        warn_user(
            f"{backend.name} failed and is disabled for the rest of the fit: {type(error).__name__}: {error}",
            UserWarning,
        )


def _class_in(name: str) -> str:
    return name.partition("(")[0]


def _how_to_log(kind: type[Loggable]) -> str:
    """Return the edit with which a type of value reaches a backend."""
    import fluxcb.logging as logging

    shipped = [getattr(logging, name) for name in logging.__all__ if name.endswith("Backend")]
    takers = [cls.__name__ for cls in shipped if issubclass(kind, getattr(cls, "loggables", ()))]
    if not takers:
        return f"add a backend of your own to `Monitors`, with {kind.__name__} in its `loggables`"
    takers.sort(key=lambda name: name != "TensorBoardBackend")  # first the one that needs no account
    *first, last = [f"`{name}`" for name in takers]
    return f"add a backend that takes them to `Monitors`: {', '.join(first)}{' or ' if first else ''}{last}"


def _send(backend: LoggerBackend, puts: Sequence[Put]) -> None:
    for name, loggable, step, epoch, seconds in puts:
        if isinstance(loggable, backend.loggables):
            backend.log(name, loggable, step=step, epoch=epoch, seconds=seconds)
    backend.flush()


def _refuse_shared_files(backends: Sequence[LoggerBackend]) -> None:
    """Check that no two backends write to the same file or folder, however its path is written."""
    owners: dict[Path, LoggerBackend] = {}
    for backend in backends:
        for path in (Path(place).resolve() for place in backend.output_locations() if isinstance(place, Path)):
            other = owners.setdefault(path, backend)
            if other is not backend:
                raise DeclarationError(
                    f"{other.name} and {backend.name} write to the same place, {path}.",
                    why="each of them would damage what the other has written",
                    fix="use another path for one of them",
                )
