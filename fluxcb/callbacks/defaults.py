"""The default callbacks of a Learner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from fluxcb._calls import entry_point
from fluxcb._declare.callback import Callback, unwrap
from fluxcb._declare.resolution import InOrder
from fluxcb.callbacks.logging.log_metrics import LogMetrics
from fluxcb.callbacks.logging.monitors import Monitors
from fluxcb.callbacks.metrics.metrics import Metrics
from fluxcb.callbacks.metrics.recorder import Recorder
from fluxcb.callbacks.progress.fit_summary import FitSummary
from fluxcb.callbacks.progress.printer import MetricsPrinter
from fluxcb.callbacks.progress.progress import ProgressBar
from fluxcb.callbacks.stopping.nan_loss import StopOnNaNLoss

__all__ = ["default_callbacks", "with_defaults", "without_output"]

_prints: ContextVar[bool] = ContextVar("prints", default=True)


@contextmanager
def without_output() -> Iterator[None]:
    """Leave out the default callbacks that print, in all Learners that are built in this context."""
    token = _prints.set(False)
    try:
        yield
    finally:
        _prints.reset(token)


@entry_point
def default_callbacks() -> list[Callback]:
    """Return new instances of the default callbacks.

    Example:
        >>> default_callbacks()
        [Metrics(), Recorder(), ProgressBar(), MetricsPrinter(), StopOnNaNLoss(), FitSummary()]
    """
    return [Metrics(), Recorder(), ProgressBar(), MetricsPrinter(), StopOnNaNLoss(), FitSummary()]


@entry_point
def with_defaults(callbacks: Any) -> Any:
    """Return a list of callbacks, followed by the default callbacks whose class it does not contain.

    A default callback is left out if the list contains an instance of its class or of a subclass, also inside wrappers
    and `in_order` groups. If the list contains a `Monitors`, `LogMetrics` is also a default callback. An argument that
    is not a list of callbacks is returned unchanged, so that the check of the declarations reports it.

    Args:
        callbacks: Callback instances, and `in_order(...)` groups of callbacks.

    Example:
        >>> with_defaults([Recorder(), Metrics()])
        [Recorder(), Metrics(), ProgressBar(), MetricsPrinter(), StopOnNaNLoss(), FitSummary()]
        >>> with_defaults([Monitors()])[-1]
        LogMetrics()
    """
    if not isinstance(callbacks, Iterable) or isinstance(callbacks, str | Callback | Set | Mapping):
        return callbacks
    items = list(callbacks)
    flat = [member for item in items for member in (item if isinstance(item, InOrder) else (item,))]
    if not all(isinstance(member, Callback) for member in flat):
        return items
    present = [unwrap(member) for member in flat]
    defaults = default_callbacks()
    if any(isinstance(callback, Monitors) for callback in present):
        defaults.append(LogMetrics())  # a `Monitors` alone logs no metrics
    if not _prints.get():
        defaults = [d for d in defaults if not isinstance(d, ProgressBar | MetricsPrinter | FitSummary)]
    return items + [d for d in defaults if not any(isinstance(callback, type(d)) for callback in present)]
