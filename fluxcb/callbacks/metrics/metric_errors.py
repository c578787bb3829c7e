"""Exceptions of metrics: they name the metric."""

from __future__ import annotations

from types import TracebackType

from fluxcb._declare.signatures import line_of
from fluxcb._errors import FluxcbError
from fluxcb._tracebacks import innermost_user_frame
from fluxcb._traced_values import USE_JNP, needs_value, needs_value_error

__all__ = ["Computing"]


class Computing:
    """A context that names a metric in the exceptions of its functions.

    It is a class, because a new exception that a generator with `contextlib.contextmanager` raises would have frames of
    contextlib in its traceback.

    Args:
        metric: The name of the metric.
    """

    def __init__(self, metric: str) -> None:
        self._metric = metric

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not isinstance(error, Exception) or isinstance(error, FluxcbError):  # errors of fluxcb name the metric
            return
        if not needs_value(error):
            error.add_note(f"while computing the metric `{self._metric}`")
            return
        frame = innermost_user_frame(error)
        raise needs_value_error(
            f"The metric `{self._metric}`",
            error,
            where=[] if frame is None else [line_of(frame)],
            why="metrics are computed by the compiled step, and values are not known yet while it is traced",
            fix=[USE_JNP],
        ) from error
