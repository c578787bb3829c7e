"""`LoggerBackend`: where values go, and `log_to`, which sends one there by hand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from fluxcb._errors import DeclarationError
from fluxcb.logging.loggables import Loggable

__all__ = ["LoggerBackend", "log_to"]


class LoggerBackend(ABC):
    """Base of what keeps or shows logged values: a file, a console, a service.

    `Monitors` opens a backend when the first fit begins, hands it what was put, in order, and lets it flush now and
    then, when an epoch ends and when the fit ends. A backend that raises is switched off with a warning, and training
    goes on. Only `log` must be defined.

    Attributes:
        loggables: The kinds that it takes; others are not handed to it.
        name: What messages call it, and its state is saved under: it says where the values go.

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

    def open(self, *, resumes: bool) -> None:  # noqa: B027 - optional, as are the others
        """Get ready; called before the first `log`, and again after `close`.

        Args:
            resumes: Whether the run goes on that an existing log is of. If not, an existing log is an error.

        Raises:
            DeclarationError: The user has to decide something; anything else that is raised switches the backend off.
        """

    @abstractmethod
    def log(self, name: str, loggable: Loggable, *, step: int, epoch: int, seconds: float) -> None:
        """Take one thing, of a kind in `loggables`; it may be held back until `flush`.

        Args:
            name: Its name, e.g. `training/loss`.
            loggable: The thing.
            step: Finished training steps when it was put.
            epoch: Number of the epoch in which it was put.
            seconds: When it was put (Unix time, s).
        """

    def flush(self) -> None:  # noqa: B027
        """Push what was taken to where it belongs: after this, a killed process does not lose it."""

    def end_epoch(self, epoch: int) -> None:  # noqa: B027
        """Learn that an epoch's values are complete, validation included; called behind `flush`, and at a fit's end."""

    def close(self) -> None:  # noqa: B027
        """Let go of files and connections; called once after each `open`, also if the backend failed."""

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to go on with the same log: where it ended, what a service called the run."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Take back what `state_dict` returned; the next `open` cuts off what was logged later, where it can."""

    def __enter__(self) -> LoggerBackend:
        self.open(resumes=False)
        return self

    def __exit__(self, *_: object) -> None:
        self.flush()
        self.close()

    def __repr__(self) -> str:
        return self.name


def log_to(
    backends: LoggerBackend | Iterable[LoggerBackend],
    name: str,
    loggable: Loggable,
    *,
    step: int,
    epoch: int = 0,
) -> None:
    """Log one thing to each backend that takes its kind; each is open, e.g. by `with`.

    Args:
        backends: The backend, or several.
        name: Its name.
        loggable: The thing.
        step: Finished training steps.
        epoch: Number of the epoch.

    Raises:
        DeclarationError: It is no loggable, or one of them no backend.

    Source:
        FluxTraining.jl, `log_to`.
    """
    import time

    if not isinstance(loggable, Loggable):
        raise DeclarationError(
            f"`log_to` logs a Value, Text, Image or another loggable, not {type(loggable).__name__} {loggable!r}.",
            fix="e.g. `log_to(backend, 'loss', Value(0.5), step=1)`",
        )
    each = list(backends) if isinstance(backends, Iterable) else [backends]
    for backend in each:
        if not isinstance(backend, LoggerBackend):
            raise DeclarationError(
                f"`log_to` logs to backends, and {backend!r} is none.", fix='e.g. `JSONLinesBackend("log.jsonl")`'
            )
    if not isinstance(name, str) or not name:
        raise DeclarationError(f"`log_to` logs under a name, not {name!r}.", fix='e.g. "loss"')
    for backend in each:
        if isinstance(loggable, backend.loggables):
            backend.log(name, loggable, step=step, epoch=epoch, seconds=time.time())
