"""A check that training resumes exactly: it resumes a run from every possible point and compares the results."""

from __future__ import annotations

import inspect
import shutil
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fluxcb._declare.access import Read
from fluxcb._declare.callback import Callback, unwrap
from fluxcb._declare.events import Event, FitBegin, FitStopping, Trigger
from fluxcb._declare.handlers import Handler, on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import Always, EverySteps, Schedule
from fluxcb._errors import CheckError, DeclarationError, FluxcbError
from fluxcb._tools.comparing import leaves
from fluxcb._tools.raised import problems_of
from fluxcb._tools.trials import shorten_validation
from fluxcb.checkpoints.run_folder import RunFolder
from fluxcb.checkpoints.savers import RunLock, RunSaver
from fluxcb.checkpoints.snapshot import Snapshot

if TYPE_CHECKING:
    from fluxcb._run.learner import Learner

__all__ = ["Make", "audit_resume", "resume_differences", "state_of"]

Make = Callable[[], "Learner"] | Callable[[Path], "Learner"]


class _Each(EverySteps):
    """Due after each step and after each epoch."""

    def after_epoch(self) -> Schedule:
        """Return the schedule that is due after each epoch."""
        return Always()


class _Boundaries(Callback):
    """Save the state at each point where a run can be resumed, with a copy of the run's directory at that point."""

    name = "boundaries"
    main_thread = True

    def __init__(self, run: Path, saves: Path | None) -> None:
        self.run, self.saves = run, saves
        self.points: list[tuple[str, Path, Path]] = []

    def stateaccess(self) -> Mapping[str, Any]:
        """Declare that it reads all state."""
        return {"*": Read()}

    def handlers(self) -> list[Handler]:
        """Return the handlers, with a Trigger after each step and each epoch."""
        return [replace(h, when=_Each(1)) if h.event is Trigger else h for h in super().handlers()]

    @on(FitBegin | Trigger | FitStopping, AbstractTrainingPhase)
    def look(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Request a snapshot."""
        if self.saves is not None:
            learner.snapshots.request(self._keep)

    def _keep(self, snapshot: Snapshot) -> None:
        from fluxcb.checkpoints.saving import save

        number = len(self.points)
        folder = RunFolder(self.saves / f"{number}")  # pyright: ignore[reportOptionalOperand]  # only called if set
        folder.lock()
        entry = save(folder, snapshot, run="proof", value=None)
        folder.unlock()
        copy = self.saves / f"{number}-run"  # pyright: ignore[reportOptionalOperand]
        try:
            _copy_run(self.run, copy)
        except shutil.Error:  # the thread of a saver has deleted an old checkpoint meanwhile
            shutil.rmtree(copy)
            _copy_run(self.run, copy)
        at, ended = snapshot.host["at"], snapshot.host["fit"]["ended"]
        where = f"after step {snapshot.step} (epoch {snapshot.epoch})"
        if at is None:
            step = f"step {snapshot.step}, the end of the fit" if ended else f"step {snapshot.step}"
            where = f"after epoch {snapshot.epoch} ({step})"
        self.points.append((where, entry.path if entry is not None else folder.path, copy))


def _copy_run(run: Path, copy: Path) -> None:
    # Unfinished saves and deletions change while they are copied. A run that resumes only deletes them.
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns(".saving-*", ".trash-*"))


def resume_differences(make: Make, fit: Mapping[str, Any], ignore: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """Resume a run from every possible point with a new Learner, and compare the results with the uninterrupted run.

    After a kill, the last checkpoint is at one of these points, so they cover all cases.

    Args:
        make: Returns a new Learner each time. It may take the directory of the run.
        fit: The arguments of `learner.fit`.
        ignore: Names of callbacks whose own state may differ, such as clocks.

    Yields:
        For each point with differences: its location, and one line per difference.

    Raises:
        DeclarationError: `make` returns the same Learner again.
    """
    with tempfile.TemporaryDirectory() as folder:
        run, saves = Path(folder, "run"), Path(folder, "saves")
        run.mkdir()
        saves.mkdir()
        boundaries = _Boundaries(run, saves)
        first = _made(make, run, boundaries)
        first.fit(**fit)
        expected = state_of(first, ignore)
        for where, checkpoint, copy in boundaries.points:
            second = _made(make, copy, _Boundaries(copy, None))
            if second is first:
                raise DeclarationError(
                    "The function returned the same Learner twice, so the resumed run cannot be compared.",
                    fix="pass a function that builds a new Learner at each call",
                )
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The run resumes from")  # a plain iterable is read again
                second.restore(checkpoint)
                second.fit(**fit, resume=True)
            yield where, _differing(expected, state_of(second, ignore))


def _made(make: Any, folder: Path, boundaries: _Boundaries) -> Learner:
    parameters = inspect.signature(make).parameters.values()
    takes_folder = any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters
    )
    learner = make(folder) if takes_folder else make()
    learner.callbacks.add(boundaries)
    return learner


def audit_resume(make: Callable[[], Learner], *, steps: int = 2) -> list[FluxcbError]:
    """Resume a run of two short epochs from every possible point, and return each difference as a problem.

    Args:
        make: Returns a new Learner with new callbacks each time it is called. The check trains these Learners.
        steps: Number of steps in an epoch, and maximum number of validation steps.
    """

    def short() -> Learner:
        learner = make()
        shorten_validation(learner, steps)
        return learner

    length = {"steps": 2 * steps, "steps_per_epoch": steps}
    try:
        found = [(moment, lines) for moment, lines in resume_differences(short, length, ()) if lines]
    except Exception as error:
        return problems_of(error, f"Training for {2 * steps} steps, interrupted and resumed,")
    if not found:
        return []
    moment, lines = found[0]
    return [
        CheckError(
            f"A run that is resumed {moment} differs from an uninterrupted run.",
            where=lines[:10],
            why=f"a checkpoint does not contain all of the state; the results differ at {len(found)} points of "
            f"{2 * steps} steps",
            fix=[
                "return the missing state from `state_dict`, and restore it in `load_state_dict`",
                "in handlers of FitBegin, do not reset state if `event.resumes` is true",
            ],
        )
    ]


def state_of(learner: Learner, ignore: Collection[str] = ()) -> dict[str, Any]:
    """Return everything that a Learner holds, by name, in a form that can be compared. Arrays are given by their bits.

    Args:
        learner: The Learner.
        ignore: Names of callbacks whose own state is omitted. The state of checkpoint callbacks is always omitted.
    """
    snapshot = learner._core.snapshots.take(None)
    host, arrays = snapshot.host, dict(leaves(dict(snapshot.arrays)))
    left_out = {d.name for d in learner.callbacks.graph.declared if isinstance(unwrap(d.callback), RunLock | RunSaver)}
    left_out |= {*ignore, _Boundaries.name}
    parts = {
        "progress": host["progress"],
        "cbstate": host["cbstate"],
        "callbacks": {name: held for name, held in host["callbacks"].items() if name not in left_out},
    }
    found = {f"{part}{path}": value for part in parts for path, value in _flat(parts[part], arrays)}
    found |= {name: bits for tree, held in snapshot.trees.items() for name, bits in _named(tree, held)}
    found["key"] = leaves(learner.state["key"])
    found["stop_reason"] = learner.stop_reason
    return found


def _named(tree: str, held: Any) -> Iterator[tuple[str, Any]]:
    return ((f"{tree}{name}", bits) for name, bits in leaves(held))


def _flat(held: Any, arrays: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(held, dict):
        if "at" in held and "$" in held:
            yield path, (held["$"], arrays[f"['{held['at']}']"])
            return
        for key, item in held.items():
            yield from _flat(item, arrays, f"{path}[{key!r}]")
    elif isinstance(held, list):
        yield f"{path}.length", len(held)
        for number, item in enumerate(held):
            yield from _flat(item, arrays, f"{path}[{number}]")
    else:
        yield path, repr(held)


def _differing(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    lines = [f"{name} is missing" for name in expected if name not in found]
    lines += [f"{name} is new" for name in found if name not in expected]
    for name, value in expected.items():
        if name in found and found[name] != value:
            shown = f": {value!r} became {found[name]!r}"
            lines.append(name + (shown if len(shown) < 120 else " differs in its bits"))
    return lines
