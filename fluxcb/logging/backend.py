"""`LoggerBackend`, the base class of logging backends, and `log_to`, which logs one value without callbacks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from fluxcb._calls import Constructed, entry_point
from fluxcb._errors import DeclarationError
from fluxcb.logging.loggables import Loggable

__all__ = ["LoggerBackend", "log_to"]


class LoggerBackend(Constructed, ABC):
    """Base class of logging backends, which write values to a file, a console or a service.

    `Monitors` opens a backend when the first fit begins, and passes logged values to it in order. It flushes the
    backend from time to time, at the end of each epoch, and at the end of the fit. If a backend raises an error,
    `Monitors` disables it with a warning, and training continues. A subclass must define `log` only.

    Attributes:
        loggables: The types that the backend accepts. Values of other types are not passed to it.
        name: The name of the backend in messages and in saved state. It should contain the destination.

    Example:
        >>> from fluxcb.logging import Value, log_to
        >>> class ListBackend(LoggerBackend):
        ...     loggables = (Value,)
        ...
        ...     def __init__(self):
        ...         self.name = "ListBackend()"
        ...         self.seen = []
        ...
        ...     def log(self, name, loggable, *, step, epoch, seconds):
        ...         self.seen.append((step, name, loggable.data))
        >>> backend = ListBackend()
        >>> log_to(backend, "loss", Value(0.5), step=3)
        >>> backend.seen
        [(3, 'loss', 0.5)]

    Source:
        FluxTraining.jl, `LoggerBackend`; tensorpack, `MonitorBase`.
    """

    loggables: ClassVar[tuple[type[Loggable], ...]]
    name: str

    def output_locations(self) -> Iterable[Path | str]:
        """Return the paths of files and directories that are written, or the addresses of services as text."""
        return ()

    def open(self, *, resumes: bool) -> None:
        """Prepare for logging. Called before the first `log`, and again after `close`.

        Args:
            resumes: Whether an existing log is the log of this run. If not, the backend must not overwrite it.

        Raises:
            DeclarationError: The user has to make a decision. Any other exception disables the backend.
        """

    @abstractmethod
    def log(self, name: str, loggable: Loggable, *, step: int, epoch: int, seconds: float) -> None:
        """Log one value of a type in `loggables`. The backend may delay writing it until `flush`.

        Args:
            name: Its name, e.g. `training/loss`.
            loggable: The value.
            step: Number of finished training steps when the value was logged.
            epoch: Number of the epoch in which the value was logged.
            seconds: When the value was logged (Unix time, s).
        """

    def flush(self) -> None:
        """Write all values to their destination, so that they are not lost if the process is killed."""

    def end_epoch(self, epoch: int) -> None:
        """Handle the end of an epoch, including its validation. Called after `flush`, and at the end of a fit."""

    def close(self) -> None:
        """Close files and connections. Called once after each `open`, even if the backend failed."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is needed to continue the log: its end, or the run's id in a service."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned. The next `open` removes later values if the log allows it."""

    def __enter__(self) -> LoggerBackend:
        self.open(resumes=False)
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()
        self.close()

    def __repr__(self) -> str:
        return self.name


@entry_point
def log_to(
    backends: LoggerBackend | Iterable[LoggerBackend],
    name: str,
    loggable: Loggable,
    *,
    step: int,
    epoch: int = 0,
) -> None:
    """Log one value to each backend that accepts its type. The backends must be open, e.g. in a `with` block.

    Args:
        backends: One backend or several.
        name: Name of the value.
        loggable: The value.
        step: Number of finished training steps.
        epoch: Number of the epoch.

    Raises:
        DeclarationError: `loggable` is not a `Loggable`, or one of `backends` is not a backend.

    Source:
        FluxTraining.jl, `log_to`.
    """
    import time

    if not isinstance(loggable, Loggable):
        raise DeclarationError(
            f"`log_to` logs a Value, Text, Image or another loggable, not {type(loggable).__name__} {loggable!r}.",
            fix="write e.g. `log_to(backend, 'loss', Value(0.5), step=1)`",
        )
    each = list(backends) if isinstance(backends, Iterable) else [backends]
    for backend in each:
        if not isinstance(backend, LoggerBackend):
            raise DeclarationError(
                f"`log_to` logs to backends, but {backend!r} is not a backend.",
                fix='write e.g. `JSONLinesBackend("log.jsonl")`',
            )
    if not isinstance(name, str) or not name:
        raise DeclarationError(f"`log_to` logs under a name, not {name!r}.", fix='write e.g. "loss"')
    for backend in each:
        if isinstance(loggable, backend.loggables):
            backend.log(name, loggable, step=step, epoch=epoch, seconds=time.time())
