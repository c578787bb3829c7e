"""The callbacks that a Learner has unless it is told otherwise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fluxcb._declare.callback import Callback, unwrap
from fluxcb._declare.resolution import InOrder
from fluxcb.callbacks.fit_summary import FitSummary
from fluxcb.callbacks.log_metrics import LogMetrics
from fluxcb.callbacks.metrics import Metrics
from fluxcb.callbacks.monitors import Monitors
from fluxcb.callbacks.nan_loss import StopOnNaNLoss
from fluxcb.callbacks.printer import MetricsPrinter
from fluxcb.callbacks.progress import ProgressBar
from fluxcb.callbacks.recorder import Recorder

__all__ = ["default_callbacks", "with_defaults"]


def default_callbacks() -> list[Callback]:
    """Return new instances of the default callbacks.

    Example:
        >>> default_callbacks()
        [Metrics(), Recorder(), ProgressBar(), MetricsPrinter(), StopOnNaNLoss(), FitSummary()]
    """
    return [Metrics(), Recorder(), ProgressBar(), MetricsPrinter(), StopOnNaNLoss(), FitSummary()]


def with_defaults(callbacks: Any) -> Any:
    """Return a list of callbacks, followed by the default callbacks whose class it does not contain.

    Wrappers and `in_order` groups are searched, and subclasses count. If there is a `Monitors`, `LogMetrics` is one of
    the defaults. An argument that is not a list of callbacks is returned unchanged, so that the check of the
    declarations can report it.

    Args:
        callbacks: Callback instances, and `in_order(...)` groups of them.

    Example:
        >>> with_defaults([Recorder(), Metrics()])
        [Recorder(), Metrics(), ProgressBar(), MetricsPrinter(), StopOnNaNLoss(), FitSummary()]
        >>> with_defaults([Monitors()])[-1]
        LogMetrics()
    """
    if not isinstance(callbacks, Iterable) or isinstance(callbacks, str | Callback):
        return callbacks
    items = list(callbacks)
    flat = [member for item in items for member in (item if isinstance(item, InOrder) else (item,))]
    if not all(isinstance(member, Callback) for member in flat):
        return items
    present = [unwrap(member) for member in flat]
    defaults = default_callbacks()
    if any(isinstance(callback, Monitors) for callback in present):
        defaults.append(LogMetrics())  # without it, no metrics would be logged
    return items + [d for d in defaults if not any(isinstance(callback, type(d)) for callback in present)]
