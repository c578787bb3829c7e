"""Replaying steps of a recorded run with additional observers, and comparing the result with the recorded one."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from fluxcb._calls import Constructed, entry_point
from fluxcb._compile.arrays import is_key
from fluxcb._compile.lineage import LineageProbe
from fluxcb._declare.access import Append, Read, dotted, writes
from fluxcb._declare.callback import Callback
from fluxcb._declare.declared import Declared, declare
from fluxcb._declare.events import Event, FitStopping, StepBegin, StepEnd, TracedEvent, Trigger
from fluxcb._declare.handlers import Handler, on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import EverySteps, Schedule, StepRange
from fluxcb._declare.state import ENGINE_STEP_NAMES, step_names
from fluxcb._declare.wrappers import Scheduled
from fluxcb._errors import CheckpointCorruptError, CheckpointError, DeclarationError
from fluxcb._paths import fix_of_path, why_impossible
from fluxcb._run.bad_step_replay import BadStep, find_record, replay_bad_step
from fluxcb._run.encoding import Decoder
from fluxcb._run.history import History
from fluxcb._run.learner_core import LearnerCore
from fluxcb._run.lineage import Lineage, LineageObserver, parse_path
from fluxcb._run.resume import restore_run
from fluxcb._run.switches import set_disabled, silent_names
from fluxcb._tracebacks import warn_user
from fluxcb.checkpoints.host_file import read_host
from fluxcb.checkpoints.naming import named
from fluxcb.checkpoints.reading import FolderCheckpoint
from fluxcb.checkpoints.run_folder import ResumeWarning, entries_of
from fluxcb.checkpoints.snapshot import Snapshot
from fluxcb.checkpoints.verification import verify_checkpoint

if TYPE_CHECKING:
    from fluxcb._run.learner import Learner

__all__ = ["Replay", "Replaying"]

_METRICS = ("metrics_step", "metrics_epoch")  # which `History.of` reads


@dataclass(frozen=True)
class Replay(Constructed):
    """The result of a replay. Prints as a short report.

    Attributes:
        steps: The first and the last replayed step at which the observers ran.
        began: The checkpoint that was restored, or None if the replay began at step 0.
        compared: The recorded checkpoint with which the replayed state was compared, or None if there is none.
        losses: The replayed training losses of `steps`, as pairs of a step and a value. Empty without `Metrics`.
        differences: One line for each difference from the recorded run.
        lineage: The writes to the path that was passed as `lineage`, or None.
        bad_step: The skipped step that was passed as `bad_step`, with its record, or None.
        newest: The step of the newest checkpoint of the run.
    """

    steps: tuple[int, int]
    began: Path | None
    compared: Path | None
    losses: tuple[tuple[int, float], ...]
    differences: tuple[str, ...]
    lineage: Lineage | None = None
    bad_step: BadStep | None = None
    newest: int = 0

    @property
    def identical(self) -> bool | None:
        """Whether the replay is the same as the recorded run bit for bit, or None if there was nothing to compare.

        For a bad step, whether it is the same as its record.
        """
        if self.bad_step is not None:
            return not self.bad_step.differences
        return None if self.compared is None else not self.differences

    def __str__(self) -> str:
        return "\n".join(str(part) for part in (self._report(), self.lineage, self.bad_step) if part is not None)

    def _report(self) -> str:
        began = f"the checkpoint {self.began}" if self.began is not None else "the beginning of the run"
        if self.bad_step is not None:
            return f"Replayed step {self.steps[0]} from {began}."
        first = f"Replayed steps {self.steps[0]} to {self.steps[1]} from {began}."
        if self.compared is None:
            return (
                f"{first}\nNothing was compared: the newest checkpoint is of step {self.newest}. "
                f"The run may have ended before step {self.steps[1]}."
            )
        if not self.differences:
            return f"{first}\nThe losses and the state at {self.compared} are the same, bit for bit."
        count = len(self.differences)
        found = f"{count} difference{'s' if count > 1 else ''} from {self.compared}:"
        return "\n".join([first, found, *(f"  {line}" for line in self.differences)])


class Replaying:
    """The method `replay` of a Learner.

    Attributes:
        _core: The core of the Learner.
    """

    _core: LearnerCore

    @entry_point
    def replay(
        self,
        path: str | os.PathLike[str],
        *,
        steps: tuple[int, int] | None = None,
        bad_step: int | None = None,
        callbacks: Iterable[Callback] = (),
        lineage: str | None = None,
        steps_per_epoch: int | None = None,
    ) -> Replay:
        """Train steps of a recorded run again with additional observers, and compare the result with the run.

        The newest checkpoint before the first step is restored, with this Learner, which must be the one that wrote
        the run, or one built in the same way. Training then continues to the next checkpoint at or after the last step,
        where metrics, parameters, model state, optimizer state, and carried `cbstate` are compared with the recorded
        ones bit for bit. Printers, savers, and other callbacks of the run that only produce output are disabled.
        Afterwards, the Learner has its own callbacks again, and the state of the replay.

        On CPU, observers of the train state can change its last bits unless both Learners have `exact_observers=True`.

        Args:
            path: The directory of the run.
            steps: The first and the last step (inclusive) at which the handlers of the observers run.
            bad_step: The number of a step that `BadSteps` has recorded, instead of `steps`. The result has its record,
                and compares it with the values that the replay computes. The step is replayed twice.
            callbacks: The observers. They may read everything, and write only entries of their own in `cbstate`.
            lineage: A path of state whose writes are listed in the result, e.g. `step.grads`. The replayed steps
                measure the value before and after each write by their phase and by traced handlers.
            steps_per_epoch: See `fit`; the number with which the run was trained.

        Returns:
            The losses, and the differences from the recorded run.

        Raises:
            DeclarationError: An observer is not read-only, or an argument is invalid.
            CheckpointError: There is no checkpoint to begin with, the run was stopped before the last step, or the
                batch of the bad step cannot be found.
            ResumeError: The run belongs to a different Learner.

        Example:
            >>> from fluxcb.callbacks import Checkpointer, ProcessArrays
            >>> from fluxcb.testing import testlearner
            >>> def make():
            ...     return testlearner(Checkpointer("runs/1"), exact_observers=True)
            >>> history = make().fit(3)
            >>> seen = []
            >>> watch = ProcessArrays("step.loss", lambda loss: seen.append(round(float(loss), 3)))
            >>> make().replay("runs/1", steps=(6, 7), callbacks=[watch]).identical, seen
            (True, [1.72, 0.752])
        """
        self._core.refuse_while_running("replay(...)")
        self._core.ensure_built(self._core.phase_set.training()[0])  # a restore needs a train state to replace
        learner, observers = cast("Learner", self), list(callbacks)
        if bad_step is None:
            pair = _range(steps)
            _refuse_unreached(Path(path), *pair)
            return _replay(learner, path, pair, observers, lineage, steps_per_epoch)
        if steps is not None or lineage is not None:
            raise DeclarationError(
                f"`replay` takes either `bad_step` or `{'steps' if steps is not None else 'lineage'}`.",
                why="a bad step is compared with its record, and nothing else must be computed in it",
                fix=f"to observe the step, write `steps=({bad_step}, {bad_step})` instead of `bad_step`",
            )
        record, left_out = find_record(Path(path), bad_step)
        # A step that was undone followed a checkpoint of its own branch.
        before = record["undone"]["to"] + 1 if record["undone"] else bad_step

        def replay_step(callbacks: list[Callback], prepare: Callable[[LearnerCore], None]) -> Replay:
            return _replay(learner, path, (bad_step, bad_step), callbacks, None, steps_per_epoch, (before, prepare))

        return replay_bad_step(self._core, record, left_out, replay_step, observers)


def _replay(
    learner: Learner,
    path: str | os.PathLike[str],
    steps: tuple[int, int],
    callbacks: list[Callback],
    lineage: str | None,
    steps_per_epoch: int | None,
    bad_step: tuple[int, Callable[[LearnerCore], None]] | None = None,
) -> Replay:
    """Replay steps of a run; see `Learner.replay`.

    With `bad_step`, the replay begins at a checkpoint before the step in it, calls the function in it after the
    restore, ends after the last step, and compares nothing.
    """
    core = learner._core
    first, last = steps
    observers = _observers(core, callbacks)  # before the restore, so that an invalid argument changes nothing
    probe = LineageProbe(parse_path(lineage)) if lineage is not None else None
    writes = LineageObserver(probe, first, last) if probe is not None else None
    began, recorded = _checkpoints(Path(path), first if bad_step is None else bad_step[0], last)
    if began is not None:  # before the observers are added, with which it would be another run
        restore_run(core, began.path, ())
    elif core.state.progress.step:
        raise CheckpointError(
            f"There is no checkpoint before step {first} in {path}.",
            why=f"this Learner is at step {core.state.progress.step}, so the replay cannot begin at step 0",
            fix="replay with a new Learner, or replay later steps",
        )
    if bad_step is not None:
        bad_step[1](core)
        recorded = None  # a later checkpoint may belong to another branch of the run
    start, end = core.state.progress.step, recorded.step if recorded is not None else last
    # A checkpoint that was written within an epoch has a position. The replay takes its snapshot at the same moment.
    at_step = recorded is not None and recorded.read(core.snapshots.trees()).host["at"] is not None
    capture = _Capture(end, at_step=at_step)
    items = learner.callbacks._items  # with the `in_order` groups, which iterating would flatten
    disabled = {declared.name for declared in core.graph.declared if declared.disabled}
    additions = [*(_InSteps(observer, first, last) for observer in observers), *([writes] if writes else []), capture]
    try:
        core.lineage = probe  # before `add`, which traces the steps with the probe
        learner.callbacks.add(*additions)
        if writes is not None:
            writes.require_writers()
        added = {declared.name for declared in core.graph.declared[-len(additions) :]}  # names can be numbered
        set_disabled(core, disabled.union(silent_names(core.graph, keep=added)))
        core.state.fit.replays = True
        learner.fit(steps=end - start, steps_per_epoch=steps_per_epoch)
        replayed = learner.history
    finally:
        core.lineage, core.state.fit.replays = None, False  # before `set`, whose traces must not contain the probe
        learner.callbacks.set(items)
        set_disabled(core, disabled)
    # The replay also runs the steps from the checkpoint to `first`, and from `last` to the next checkpoint.
    losses = [pair for pair in replayed.per_step.get("training", {}).get("loss", []) if first <= pair[0] <= last]
    differences: list[str] = []
    if recorded is not None:
        differences += _other_losses(core, Path(path), replayed, start)
        if capture.snapshot is None:  # a cancel or SIGTERM has ended the fit before
            differences.append(f"the replay ended at step {core.state.progress.step}: {learner.stop_reason}")
        else:
            differences += _differences(core, recorded, capture.snapshot)
    return Replay(
        (first, last),
        began.path if began is not None else None,
        recorded.path if recorded is not None else None,
        tuple((step, float(value)) for step, value in losses),
        tuple(differences),
        writes.result() if writes is not None else None,
        newest=entries_of(Path(path))[-1].step,
    )


class _InSteps(Scheduled):
    """An observer whose handlers of training steps run in a range of steps only."""

    def __init__(self, callback: Callback, first: int, last: int) -> None:
        super().__init__(callback)
        self.schedule = StepRange(first, last)

    def __repr__(self) -> str:
        return repr(self.callback)

    def schedule_for(self, event: type[Event], phase: type[Phase]) -> Schedule | None:
        """Return the range for handlers of training steps."""
        of_steps = issubclass(event, StepBegin | StepEnd | Trigger | TracedEvent)
        return self.schedule if of_steps and phase.trains else None


class _Capture(Callback):
    """Takes a snapshot at the moment at which the recorded checkpoint was written."""

    name = "replay"

    def __init__(self, step: int, *, at_step: bool) -> None:
        self.step, self.at_step = step, at_step
        self.snapshot: Any = None

    def __repr__(self) -> str:
        return "replay"

    def stateaccess(self) -> Mapping[str, Any]:
        """Declare that it reads all state."""
        return {"*": Read()}

    def handlers(self) -> list[Handler]:
        """Return the handlers. Within an epoch, Trigger is emitted only for handlers with a period."""
        when = (EverySteps(self.step),) if self.at_step else ()
        return [replace(handler, when=when) if handler.event is Trigger else handler for handler in super().handlers()]

    @on(Trigger | FitStopping, AbstractTrainingPhase)
    def request(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Request a snapshot."""
        if learner.progress.step == self.step and self.snapshot is None:
            learner.snapshots.request(self._keep)

    def _keep(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot


def _range(steps: Any) -> tuple[int, int]:
    numbers = list(steps) if isinstance(steps, list | tuple) else []
    if len(numbers) != 2 or not all(type(n) is int for n in numbers) or not 1 <= numbers[0] <= numbers[1]:
        raise DeclarationError(
            f"`steps` of `replay` is a pair of step numbers (first, last), not {steps!r}.",
            why="step 1 is the first step of the run, and both steps are replayed",
            fix="write e.g. `steps=(800, 820)`",
        )
    return numbers[0], numbers[1]


def _observers(core: LearnerCore, callbacks: list[Any]) -> list[Any]:
    """Return the observers, after checking that they only read.

    Raises:
        DeclarationError: One of them may write state that the training has without it, or cancel.
    """
    for declared in declare(callbacks)[0]:
        for path, permission, where in declared.accesses():
            if writes(permission) and not _is_own(core, declared, path, isinstance(permission, Append)):
                raise DeclarationError(
                    f"{declared.label} cannot observe a replay, because it may write `{dotted(path)}`.",
                    where=where,
                    why="a replay must run the recorded steps without any change",
                    fix=[f"declare `Read()` for `{dotted(path)}`", "leave the callback out of `replay`"],
                )
    return callbacks


def _is_own(core: LearnerCore, declared: Declared, path: Sequence[str], appends: bool) -> bool:
    """Return whether a path is a log, or a value that only this callback creates."""
    if len(path) < 2:  # a whole part, such as `params` or `control`
        return False
    if path[0] == "cbstate":
        train = core.state.train
        return appends or not (path[1] in core.state.cbstate or train.in_carry(path[1]))
    engine = {*step_names(core.graph.phases), *ENGINE_STEP_NAMES}
    others = {p[1] for d in core.graph.declared for p, _, _ in d.accesses() if p[0] == "step" and len(p) > 1}
    return path[0] == "step" and path[1] not in engine | others


def _checkpoints(folder: Path, first: int, last: int) -> tuple[FolderCheckpoint | None, FolderCheckpoint | None]:
    """Return the newest good checkpoint before the first step, and the oldest one at or after the last step.

    Raises:
        CheckpointError: There are no checkpoints.
    """
    if not (entries := entries_of(folder)):
        raise CheckpointError(
            f"There is no checkpoint in {folder}, so there is no run to replay.",
            why=why_impossible(folder),
            fix=fix_of_path(folder, "pass the directory that was passed to `Checkpointer`"),
        )
    before = next(_good(entry.path for entry in reversed(entries) if entry.step < first), None)
    return before, next(_good(entry.path for entry in entries if entry.step >= last), None)


def _refuse_unreached(folder: Path, first: int, last: int) -> None:
    """Raise an error for steps after the end of a run that a callback stopped.

    A run that was killed may have trained steps after its newest checkpoint, so only the end of a stopped run is known.

    Raises:
        CheckpointError: The run was stopped before the last step.
    """
    newest = max(entries_of(folder), key=lambda entry: entry.step, default=None)
    if newest is None or last <= newest.step:
        return
    checkpoint = next(_good([newest.path]), None)
    if checkpoint is not None and checkpoint.manifest.ended is not None:
        raise CheckpointError(
            f"The run in {folder} has no step {last}, because it ended at step {newest.step}.",
            why=f"it was stopped: {checkpoint.manifest.ended}",
            fix=f"replay earlier steps, e.g. `steps=({min(first, newest.step)}, {newest.step})`",
        )


def _good(paths: Iterable[Path]) -> Iterator[FolderCheckpoint]:
    for path in paths:
        try:
            yield FolderCheckpoint(path, verify_checkpoint(path))
        except CheckpointCorruptError as error:
            warn_user(f"The replay skips a damaged checkpoint: {error.what}", ResumeWarning)


def _other_losses(core: LearnerCore, folder: Path, replayed: History, start: int) -> Iterator[str]:
    """Iterate over the metrics of steps that differ from those of the run, one line for each metric."""
    # The newest checkpoint has the metrics of all steps, also of an epoch that was unfinished at earlier ones.
    newest = next(_good(entry.path for entry in reversed(entries_of(folder))))
    for phase, metrics in _history(core, *read_host(newest.path, newest.step)).per_step.items():
        for name, pairs in metrics.items():
            found = dict(replayed.per_step.get(phase, {}).get(name, []))
            for step, value in pairs:
                # The restored metrics also contain the steps before the checkpoint, which were not replayed.
                if step > start and step in found and _bits(found[step]) != _bits(value):
                    yield f"{phase}/{name} of step {step} was {value!r}, and is {found[step]!r}"
                    break  # later steps follow from this one


def _differences(core: LearnerCore, recorded: FolderCheckpoint, replayed: Snapshot) -> Iterator[str]:
    """Iterate over the differences between a recorded and a replayed state, one line for each."""
    expected = recorded.read(core.snapshots.trees())
    now = _history(core, replayed.host, replayed.arrays)
    for name, value in _history(core, expected.host, expected.arrays).items():
        if _bits(value) != _bits(now.get(name)):
            yield f"{name} of the epochs differs"
    for part, tree in expected.trees.items():
        live = named(replayed.trees[part])
        for name, leaf in named(tree).items():
            if _bits(leaf) != _bits(live.get(name)):
                yield f"{part}.{'.'.join(name)} differs{_size(leaf, live.get(name))}"


def _history(core: LearnerCore, host: Mapping[str, Any], arrays: Mapping[str, Any]) -> History:
    """Return the metrics in the host state of a checkpoint."""
    decoder, entries, progress = Decoder(arrays), host["cbstate"], host["progress"]
    # The state of these objects is restored into copies, because the Learner keeps its own.
    metrics = {
        name: decoder.decode(entries[name], copy.deepcopy(core.state.cbstate[name]), f"`cbstate.{name}`")
        for name in _METRICS
        if name in entries and name in core.state.cbstate
    }
    return History.of(metrics, epoch=progress["epoch"], step=progress["step"], stop_reason=None)


def _array(value: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(value) if is_key(value) else value)  # NumPy cannot hold typed keys


def _bits(value: Any) -> Any:
    if value is None:
        return None
    array = _array(value)
    return array.shape, array.tobytes()  # as numbers, NaN would differ from itself, and -0.0 would equal 0.0


def _size(then: Any, now: Any) -> str:
    """Return the largest difference of two arrays of numbers in words, or an empty string."""
    if now is None or not jnp.issubdtype(_array(then).dtype, jnp.inexact):
        return ""
    return f" by up to {np.max(np.abs(_array(then).astype(np.float64) - _array(now).astype(np.float64))):.2g}"
