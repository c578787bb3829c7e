"""The writers of a path of state in replayed steps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fluxcb._calls import Constructed, entry_point
from fluxcb._compile.lineage import LINEAGE, LineageProbe
from fluxcb._declare.access import Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import ComputeEnd, Event, StepEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._errors import DeclarationError

__all__ = ["Lineage", "LineageObserver", "PathWrite", "parse_path"]

_ROOTS = ("step", "params", "model_state", "opt_state", "cbstate")


@dataclass(frozen=True)
class PathWrite(Constructed):
    """One write to a path of state in a training step.

    Attributes:
        step: Number of the step.
        writer: The callback and its handler, or the step of the phase.
        event: The event of the handler, or e.g. `before BackwardEnd` for a phase.
        before: The norm of the value before the write (square root of the sum of squares over all leaves), or None if
            the write created the value.
        after: The norm of the value after the write.
        changed: Whether a number changed. A handler may also write the same numbers.
        finite: Whether all numbers were finite after the write.
    """

    step: int
    writer: str
    event: str
    before: float | None
    after: float
    changed: bool
    finite: bool


@dataclass(frozen=True)
class Lineage(Constructed):
    """The writes to a path of state in replayed steps, in the order of their execution. Prints as a table.

    Attributes:
        path: The path, e.g. `step.grads`.
        writes: The writes.
    """

    path: str
    writes: tuple[PathWrite, ...]

    @property
    def first_non_finite(self) -> PathWrite | None:
        """The first write after which the value was not finite, or None."""
        return next((write for write in self.writes if not write.finite), None)

    @entry_point
    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the writes as plain data that `json.dumps` accepts. NaN and infinity become strings."""
        return [{name: _plain(value) for name, value in dataclasses.asdict(w).items()} for w in self.writes]

    def __str__(self) -> str:
        rows = [("step", "writer", "event", "before", "after", "")]
        rows += [
            (str(w.step), w.writer, w.event, "-" if w.before is None else f"{w.before:.4g}", f"{w.after:.4g}", _note(w))
            for w in self.writes
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        right = (True, False, False, True, True, False)
        lines = [
            "  ".join(
                cell.rjust(width) if is_right else cell.ljust(width)
                for cell, width, is_right in zip(row, widths, right, strict=True)
            ).rstrip()
            for row in rows
        ]
        bad = self.first_non_finite
        end = "All values were finite."
        if bad is not None:
            end = f"The first value that was not finite: step {bad.step}, after {bad.writer} ({bad.event})."
        return "\n".join([f"Writes to `{self.path}`, with the norms before and after each:", *lines, end])


class LineageObserver(Callback):
    """Collects the measurements of a probe from a range of steps.

    Args:
        probe: The probe.
        first: The first step.
        last: The last step.
    """

    name = "lineage"

    def __init__(self, probe: LineageProbe, first: int, last: int) -> None:
        self._probe, self._first, self._last = probe, first, last
        self._collected: list[PathWrite] = []

    def stateaccess(self) -> Mapping[str, Any]:
        """Declare the measurements, which the traced step creates."""
        return {"step": {LINEAGE[1]: Write()}}

    # A new traced handler makes the engine trace the step again, now with the probe.
    @on(ComputeEnd, AbstractTrainingPhase)
    def trace_again(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Do nothing."""

    @on(StepEnd, AbstractTrainingPhase, access={"step": {LINEAGE[1]: Read()}})
    def collect(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Collect the measurements of the step."""
        step = learner.progress.step
        if self._first <= step <= self._last:
            self._collected += _writes(step, phase, self._probe, learner.step[LINEAGE[1]])

    def result(self) -> Lineage:
        """Return the writes of all collected steps."""
        return Lineage(".".join(self._probe.path), tuple(self._collected))

    def require_writers(self) -> None:
        """Check that the traced steps write the path.

        Raises:
            DeclarationError: No step writes it.
        """
        # The trace of a step fills `writers`, so the caller adds the observer to the Learner first.
        if not any(self._probe.writers.values()):
            path = ".".join(self._probe.path)
            raise DeclarationError(
                f"`lineage` of `replay` is `{path}`, which no training step of this Learner writes.",
                why="a lineage lists the writes of the phase and of traced handlers",
                fix="name a value that the step writes, e.g. `step.grads`, `step.loss` or `params`",
            )


def parse_path(lineage: Any) -> tuple[str, ...]:
    """Return the path that the user passed as `lineage`.

    Raises:
        DeclarationError: It is not the text of a path of state that a step can write.
    """
    parts = tuple(lineage.split(".")) if isinstance(lineage, str) else ()
    # A part is empty if the text has a doubled or final dot. `step` and `cbstate` alone name no value.
    if not all(parts) or parts[:1] not in {(root,) for root in _ROOTS} or parts in (("step",), ("cbstate",)):
        raise DeclarationError(
            f"`lineage` of `replay` is a path of state, not {lineage!r}.",
            why="the steps of a training write `step.NAME`, `cbstate.NAME`, `params`, `model_state` and `opt_state`",
            fix='write e.g. `lineage="step.grads"`',
        )
    return parts


def _writes(step: int, phase: Phase, probe: LineageProbe, measured: Any) -> Iterator[PathWrite]:
    # `LineageProbe.compare` appends to `writers` and to the measurements at the same time, so their orders agree.
    for at, ((handler, event), values) in enumerate(zip(probe.writers[type(phase)], measured, strict=True)):
        changed = bool(values["changed"])
        # A gradient returns new tracers for the values that were written inside it. Nothing has written them again.
        if handler is None and not changed:
            continue
        writer = f"{type(phase).__name__}.step" if handler is None else f"{handler.declared.name}.{handler.name}"
        # The carry has its value before the step. A value of the step is created by its first write.
        before = None if at == 0 and probe.path[0] == "step" else float(values["before"])
        when = f"before {event!r}" if handler is None else repr(event)
        yield PathWrite(step, writer, when, before, float(values["after"]), changed, bool(values["finite"]))


def _note(write: PathWrite) -> str:
    return "not finite" if not write.finite else "" if write.changed else "unchanged"


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
