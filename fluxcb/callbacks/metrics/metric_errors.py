"""Exceptions of metrics, which name the metric, and a warning about metrics that change themselves."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

from fluxcb._declare.signatures import line_of
from fluxcb._errors import FluxcbError
from fluxcb._tracebacks import innermost_user_frame, warn_user
from fluxcb._traced_values import USE_JNP, needs_value, needs_value_error

__all__ = ["Computing", "numbers_of", "warn_about_changed_fields"]


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


def numbers_of(metric: object) -> dict[str, int | float]:
    """Return the fields of a metric that hold numbers."""
    return {name: value for name, value in vars(metric).items() if isinstance(value, int | float)}


def warn_about_changed_fields(metric: object, name: str, before: Mapping[str, int | float]) -> None:
    """Warn about fields that a metric has changed while the step was traced.

    Args:
        metric: The metric.
        name: Its name.
        before: What `numbers_of` returned before.
    """
    for field, value in numbers_of(metric).items():
        old = before.get(field, value)
        if old is not value and old != value:  # the same NaN is not equal to itself
            warn_user(
                f"The metric `{name}` changed `self.{field}`. The change happens once, while the step is traced, and "
                "not at each step. Keep the value in the state of the metric: `init` creates it, and `update` returns "
                "the next one.",
                UserWarning,
            )
