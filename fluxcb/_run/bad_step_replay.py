"""Replaying a skipped step of a run, and comparing it with its record."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from fluxcb._calls import Constructed
from fluxcb._declare.access import Read
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, StepEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._errors import CheckpointError, DeclarationError
from fluxcb._run.learner_core import LearnerCore
from fluxcb._typing import Batch, PyTree
from fluxcb.checkpoints.bad_steps import BAD_STEPS, batch_checksum, read_bad_steps
from fluxcb.checkpoints.naming import named

if TYPE_CHECKING:  # `replay.py` imports this file
    from fluxcb._run.replay import Replay

__all__ = ["BadStep", "find_record", "replay_bad_step"]

Prepare = Callable[[LearnerCore], None]
ReplayOnce = Callable[[list[Callback], Prepare], "Replay"]


@dataclass(frozen=True)
class BadStep(Constructed):
    """A replayed step that a callback has skipped. Prints as a report.

    Attributes:
        record: The record that `BadSteps` wrote.
        values: What the replay computed: for each callback that set `step.skip`, the values that it used.
        differences: One line for each difference between the record and the replay.
        batch: The batch of the step, as NumPy arrays.
        grads: `step.grads` after all handlers, as NumPy arrays; None if the phase has no such value.
    """

    record: Mapping[str, Any]
    values: Mapping[str, Mapping[str, Any]]
    differences: tuple[str, ...]
    batch: Batch
    grads: PyTree | None

    @property
    def gradient_norms(self) -> dict[str, float]:
        """The norm of the gradient of each parameter, by the name of the parameter."""
        return {".".join(name): _norm(leaf) for name, leaf in named(self.grads).items()} if self.grads else {}

    def __str__(self) -> str:
        record, data = self.record, self.record["data"]
        place = f"batch {data['batch']} of pass {data['pass']} of data.{data['source']}"
        lines = [f"Step {record['step']} (epoch {record['epoch']}), {place}, was skipped by {', '.join(record['by'])}."]
        rows = [("value", "recorded", "replayed")]
        for writer, values in record["by"].items():
            now = self.values.get(writer, {})
            rows += [(f"{writer}: {name}", _shown(value), _shown(now.get(name))) for name, value in values.items()]
        lines += _table(rows)
        if norms := self.gradient_norms:
            lines += _table([("gradient", "norm"), *((name, f"{norm:.4g}") for name, norm in norms.items())])
        leaves = jax.tree_util.tree_leaves_with_path(self.batch)
        rows = [("batch", "type", "min", "max", "not finite")]
        # The path is empty if the batch is a single array.
        rows += [
            (jax.tree_util.keystr(path, simple=True, separator=".") or "-", *_summary(leaf)) for path, leaf in leaves
        ]
        lines += _table(rows)
        if self.differences:
            lines += ["The replay differs from the record:", *(f"  {line}" for line in self.differences)]
        else:
            lines.append("The replayed values are the same as the recorded ones, bit for bit.")
        return "\n".join(lines)


def find_record(folder: Path, step: Any) -> tuple[dict[str, Any], list[tuple[int, int]]]:
    """Return the newest record of a skipped step, and the batches that the run may have left out before.

    Raises:
        DeclarationError: `step` is not the number of a recorded step.
        CheckpointError: The run has no records, or the batch of the step has no position.
    """
    records = read_bad_steps(folder / BAD_STEPS)
    if not records:
        raise CheckpointError(
            f"There is no record of a skipped step in {folder}.",
            why=f"`bad_step` needs the file {BAD_STEPS}, which the callback `BadSteps` writes",
            fix=f"add `BadSteps({str(folder)!r})` to the callbacks of the run; to replay other steps, pass `steps`",
        )
    # After a rewind, the run reaches the same number again.
    numbers = [number for number, record in enumerate(records) if record["step"] == step]
    # `7.0` and `True` equal the numbers of steps, but are mistakes.
    if not numbers or type(step) is not int:
        known = ", ".join(map(str, sorted({record["step"] for record in records})))
        raise DeclarationError(
            f"`bad_step` of `replay` is the number of a recorded step, not {step!r}.",
            where=str(folder / BAD_STEPS),
            fix=f"pass one of the recorded steps: {known}",
        )
    found, earlier = records[numbers[-1]], records[: numbers[-1]]
    if found["data"] is None:
        raise CheckpointError(
            f"Step {step} cannot be replayed, because its batch has no position in a data source.",
            where=str(folder / BAD_STEPS),
            why="`run_step` or a hand-written loop provided the batch",
            fix="train with `fit`, which takes the batches from the data of the Learner",
        )
    # The run had gone back before it reached the step, and has left these batches out or had used them before.
    undone = [r["data"] for r in earlier if r["data"] and r["undone"] and r["undone"]["records"] < found["number"]]
    return found, [(data["pass"], data["batch"]) for data in undone if data["source"] == found["data"]["source"]]


def replay_bad_step(
    core: LearnerCore,
    record: Mapping[str, Any],
    left_out: list[tuple[int, int]],
    once: ReplayOnce,
    observers: list[Callback],
) -> Replay:
    """Replay a skipped step.

    Args:
        core: The core of the Learner.
        record: The record.
        left_out: The batches that the run may have left out before the step.
        once: Replays the step with observers, after calling a function for the restored core.
        observers: Observers of the user.

    Raises:
        CheckpointError: The batch of the record cannot be found.
    """
    data = record["data"]
    if data["source"] not in core.streams:
        raise _other_batch(record, f"this Learner has no `data.{data['source']}`")
    # A replay that begins at step 0 restores no checkpoint.
    initial = core.snapshots.take(None)
    probe, first = _Probe(), _Aligned(record, left_out)
    replayed = once([probe], first)
    aligned = first
    if probe.position != data and record["phase"] in first.phases:
        # The run has gone back to this checkpoint and has continued with later batches.
        aligned = _Aligned(record, left_out, moves=True)
        core.snapshots.restore(initial)
        probe = _Probe()
        replayed = once([probe], aligned)
    if probe.position != data:
        raise _other_batch(record, f"the replay reaches {_place(probe.position)}" if probe.position else "")
    # The data can have changed although the position is the recorded one.
    if probe.checksum != record["checksum"]:
        raise _other_batch(record, "its checksum differs")
    # Gradients are read in another replay, because reading them could change the last bits of what was compared.
    phase = next(phase for phase in core.phases if type(phase).name == record["phase"])
    step = core.traced(phase)
    # A phase of the user may train without gradients, and reading them would then be an error.
    details = _Details(has_grads=step is not None and "grads" in step.step_specs)
    core.snapshots.restore(initial)
    once([details, *observers], aligned)
    bad = BadStep(record, probe.by, tuple(_differences(record, probe)), details.batch, details.grads)
    return replace(replayed, bad_step=bad)


class _Aligned:
    """Prepares the data of a restored run, so that the step of a record gets the batch of the record.

    Args:
        record: The record.
        left_out: The batches that the run may have left out before the step.
        moves: Whether to move the data to where it was when the run had gone back to the checkpoint.
    """

    def __init__(self, record: Mapping[str, Any], left_out: list[tuple[int, int]], *, moves: bool = False) -> None:
        self._record, self._left_out, self._moves = record, left_out, moves
        self.phases: tuple[str, ...] = ()

    def __call__(self, core: LearnerCore) -> None:
        data = self._record["data"]
        stream = core.streams[data["source"]]
        position = stream.position()
        left_out = sorted({*self._left_out, *((number, at) for number, at in position.get("left_out", ()))})
        training = core.phase_set.training()
        # The steps of several phases do not tell how many batches each of them has used.
        self.phases = tuple(type(phase).name for phase in training) if len(training) == 1 else ()
        if self._moves:
            # Every step takes one batch that is not left out.
            steps, consumed = self._record["step"] - 1 - core.state.progress.step, data["batch"]
            while steps > 0:
                consumed -= 1
                steps -= (data["pass"], consumed) not in left_out
            if consumed < 0:
                raise _other_batch(self._record, "the run has begun another pass over the data since its checkpoint")
            # The iterator state of the checkpoint leads to another batch, so the pass is read again from its beginning.
            position |= {"open": True, "pass": data["pass"], "consumed": consumed, "total": consumed}
            # The pass continues, even if the step is the first one of an epoch.
            stream.seek({**position, "state": None, "ahead": 0, "rewound": [0, True, False]})
        # After `seek`, which restores only the batches that the checkpoint leaves out.
        stream.leave_out(left_out)


class _Probe(Callback):
    """Keeps the record of the replayed step. It reads only what `BadSteps` also reads."""

    name = "bad_step"

    def __init__(self) -> None:
        self.position: dict[str, Any] | None = None
        self.checksum: int | None = None
        self.key: list[int] = []
        self.by: dict[str, dict[str, Any]] = {}

    def stateaccess(self) -> Mapping[str, Any]:
        """Declare what it reads."""
        return {"step": {name: Read() for name in ("skip", "skips", "data_position", "batch")}}

    @on(StepEnd, AbstractTrainingPhase)
    def keep(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Keep the values of the step."""
        position, skips = learner.step.data_position, learner.step.skips
        self.position = None if position is None else {name: position[name] for name in ("source", "pass", "batch")}
        self.checksum = batch_checksum(jax.tree.leaves(learner.step.batch))
        # `BadSteps` also records an empty list if the step has no records of skips, and so no key.
        self.key = [int(word) for word in (() if skips["key"] is None else skips["key"])]
        self.by = {
            writer: {name: value.item() for name, value in entry["values"].items()}
            for writer, entry in skips["by"].items()
            if entry["skip"]
        }


class _Details(Callback):
    """Keeps the batch and the gradients of the replayed step."""

    name = "bad_step"

    def __init__(self, *, has_grads: bool) -> None:
        self._has_grads = has_grads
        self.batch: Batch = None
        self.grads: PyTree | None = None

    def stateaccess(self) -> Mapping[str, Any]:
        """Declare what it reads."""
        return {"step": {"batch": Read(), **({"grads": Read()} if self._has_grads else {})}}

    @on(StepEnd, AbstractTrainingPhase)
    def keep(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Keep copies."""
        self.batch = jax.tree.map(np.array, learner.step.batch)
        if self._has_grads:
            self.grads = jax.tree.map(np.array, learner.step.grads)


def _differences(record: Mapping[str, Any], probe: _Probe) -> Iterator[str]:
    if probe.key != record["key"]:
        yield f"the random key was {record['key']}, and is {probe.key}"
    # A callback that skips only the replayed step differs as well.
    for writer in [*record["by"], *(writer for writer in probe.by if writer not in record["by"])]:
        then, now = record["by"].get(writer), probe.by.get(writer)
        if then is None or now is None:
            yield f"{writer} {'skipped the step' if now is None else 'did not skip the step'}, and does " + (
                "not skip it now" if now is None else "skip it now"
            )
            continue
        for name in {**then, **now}:
            if repr(then.get(name)) != repr(now.get(name)):  # NaN equals NaN here
                yield f"{writer}: {name} was {then.get(name)!r}, and is {now.get(name)!r}"


def _other_batch(record: Mapping[str, Any], why: str) -> CheckpointError:
    return CheckpointError(
        f"The batch of step {record['step']} is not the recorded one, {_place(record['data'])}.",
        where=why or "the replay ends before the step",
        why="the data has changed since the run, or no checkpoint precedes the step in the pass of its batch",
        fix=[
            "build the Learner with the data of the run",
            "let the `Checkpointer` save more often, so that a checkpoint lies between a rewind and such a step",
        ],
    )


def _place(data: Mapping[str, Any]) -> str:
    return f"batch {data['batch']} of pass {data['pass']} of `data.{data['source']}`"


def _norm(leaf: Any) -> float:
    # `abs`, because the gradients of complex parameters are complex.
    return float(np.sqrt(np.sum(np.square(np.abs(np.asarray(leaf)).astype(np.float32)))))


def _summary(leaf: Any) -> tuple[str, str, str, str]:
    """Return the type, the smallest and the largest finite number, and the count of others, as texts."""
    array = np.asarray(leaf)
    text = f"{array.dtype}[{', '.join(map(str, array.shape))}]"
    if array.dtype.kind not in "biuf" or not array.size:
        return text, "-", "-", "-"
    finite = array[np.isfinite(array)]
    if not finite.size:
        return text, "-", "-", str(array.size)
    return text, f"{finite.min():.4g}", f"{finite.max():.4g}", str(array.size - finite.size)


def _shown(value: Any) -> str:
    return "-" if value is None else f"{value:.6g}" if type(value) is float else str(value)


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
