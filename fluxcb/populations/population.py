"""`Population`: several Learners that train in one compiled program."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

from fluxcb._calls import Constructed, entry_point
from fluxcb._declare.uncopied import Uncopied
from fluxcb._errors import DeclarationError
from fluxcb._importing import refuse_while_importing
from fluxcb._run.fit_loop import FitLength
from fluxcb._run.history import History
from fluxcb._run.interrupts import Interrupt, caught_interrupts
from fluxcb._run.keyword_fixes import POPULATION_FIT_FIXES
from fluxcb._run.learner import Learner
from fluxcb._run.resume import unlock_run
from fluxcb._run.run_changes import check_allowed, check_resume
from fluxcb._tracebacks import calling_line, warn_user
from fluxcb.callbacks.arguments import flag
from fluxcb.callbacks.progress.console import console_for, show_block
from fluxcb.callbacks.watched import Watched, resolved_mode
from fluxcb.plots.panel import Panel
from fluxcb.plots.picture import Picture
from fluxcb.populations.callback import PopulationCallback
from fluxcb.populations.joint_runner import JointSteps
from fluxcb.populations.meeting import Meeting
from fluxcb.populations.members import (
    check_members,
    check_outputs,
    make_members,
    member_arguments,
    member_label,
)
from fluxcb.populations.ranking import ranked
from fluxcb.populations.record import PopulationRecord
from fluxcb.populations.resume import resume_members
from fluxcb.populations.session import Session
from fluxcb.populations.summary import ending_lines
from fluxcb.populations.table import PopulationTable

__all__ = ["Population"]


class Population(Constructed, Uncopied):
    """Train several Learners of the same structure in one compiled program, such as a sweep over learning rates.

    The factory is called once per member, and returns the member's Learner. Each member has its own callbacks, metrics,
    history, checkpoints, logs and early stopping, as if it were trained alone. The steps of all members run in one
    program, which applies `jax.vmap` to the traced step. A member that has stopped keeps its state bit for bit, while
    the others continue.

    Because all members run one program, they need the same structure: the same model shapes, callbacks, and batch
    shapes. Numbers may differ, whether they are hyperparameters, arguments of traced callbacks, or constants of the
    loss. Random keys and the order of the data may differ as well. If the members get the same batch objects, the
    program reads each batch once; otherwise it stacks the batches of the members.

    The default callbacks that print (`ProgressBar`, `MetricsPrinter`, `FitSummary`) are left out in the members. The
    population prints one table instead.

    Members agree with the same Learners trained alone up to rounding, because XLA orders the sums of a batched
    operation differently. Two runs of the same population are equal bit for bit.

    Args:
        learner_factory: A function that builds and returns a Learner from the keyword arguments of a member. If it has
            a parameter `member`, it gets the number of the member, which it can use in paths of files.
        callbacks: Callbacks that compare the members: `PopulationBasedTraining`, `SuccessiveHalving`, or your own
            subclasses of `PopulationCallback`. Each member gets a copy.
        default_callbacks: Whether to add a `PopulationTable`, which prints a line per epoch.
        **arguments: The arguments of the factory by name. A list, a tuple, a range or an array has one value for each
            member; all of them have the same length. Every other value is the same for all members.

    Raises:
        DeclarationError: The factory has no parameter of this name, the members differ in structure, two members write
            to the same files, the lengths of the sequences differ, or a member needs something that several members
            cannot share, such as a mesh.
        TraceError: The step has an operation that `jax.vmap` does not support.

    Example:
        >>> import fluxcb
        >>> from fluxcb.callbacks import Metrics
        >>> from fluxcb.testing import testlearner
        >>> def make_learner(learning_rate):
        ...     return testlearner(Metrics(), learning_rate=learning_rate)
        >>> population = fluxcb.Population(make_learner, learning_rate=[1e-4, 1e-3, 1e-2], default_callbacks=False)
        >>> histories = population.fit(2)
        >>> best = population.best("validation/loss")
        >>> best, population.arguments[best]
        (2, {'learning_rate': 0.01})
        >>> population[best].step
        8
    """

    def __init__(
        self,
        learner_factory: Callable[..., Learner],
        *,
        callbacks: Iterable[PopulationCallback] = (),
        default_callbacks: bool = True,
        **arguments: Any,
    ) -> None:
        flag(default_callbacks, "`default_callbacks` of `Population`")
        self._arguments = member_arguments(learner_factory, arguments, ("callbacks", "default_callbacks"))
        templates = _as_callbacks(callbacks)
        self._labels = [member_label(index, own) for index, own in enumerate(self._arguments)]
        self._members = make_members(learner_factory, self._arguments)
        self._cores = [learner._core for learner in self._members]
        check_outputs(self._members, self._labels)
        self._checked: set[Any] = set()
        check_members(self._cores, self._labels, self._checked)
        if default_callbacks and not any(isinstance(callback, PopulationTable) for callback in templates):
            templates += _default_table(self._members)
        self._meeting = Meeting()
        self._callbacks = self._add_callbacks([*templates, PopulationRecord()])
        self._steps = JointSteps(self._cores, self._labels)

    def _add_callbacks(self, templates: list[PopulationCallback]) -> list[list[Any]]:
        copies = [
            [template.for_member(index, len(self), self._meeting) for template in templates]
            for index in range(len(self))
        ]
        for learner, own in zip(self._members, copies, strict=True):
            learner.callbacks.add(*own)
        return copies

    # -- the members ------------------------------------------------------------------------

    @property
    def members(self) -> tuple[Learner, ...]:
        """The Learners, in the order of the arguments."""
        return tuple(self._members)

    @property
    def arguments(self) -> tuple[Mapping[str, Any], ...]:
        """The keyword arguments of the factory, for each member."""
        return tuple(self._arguments)

    @property
    def callbacks(self) -> tuple[Any, ...]:
        """The callbacks that compare the members: of each, the copy of the member that has trained longest."""
        longest = max(range(len(self)), key=lambda index: (self._members[index].step, -index))
        return tuple(self._callbacks[longest])

    @entry_point
    def best(
        self, metric: str = "loss", *, phase: Any = None, mode: Literal["min", "max", "auto"] | None = None
    ) -> int:
        """Return the number of the member with the best last value of a metric.

        Args:
            metric: The metric: its name, such as `loss`, or its name in logs, such as `training/loss`.
            phase: The phase of the metric if its name does not contain it. `ValidationPhase` by default.
            mode: `max` if high values are good, `min` if low values are good. If None, the name of the metric decides;
                see `Watched.default_mode`. A UserWarning is issued for a mode that the name contradicts, and without a
                mode for a name that implies none.

        Raises:
            DeclarationError: No member has a value of the metric.
        """
        watched = Watched.named(metric, phase, "Population.best")
        histories = enumerate(self._histories(watched))
        values = {member: float(history[str(watched)][-1]) for member, history in histories if history is not None}
        watched, resolved = resolved_mode(mode, watched)
        if watched.mode_warning is not None:
            warn_user(watched.mode_warning, UserWarning)
        return ranked(values, resolved)[0]

    @entry_point
    def plot(self, metric: str = "loss", *, phase: Any = None) -> Picture:
        """Draw the epoch values of a metric, with a curve for each member.

        Args:
            metric: The metric: its name, such as `loss`, or its name in logs, such as `training/loss`.
            phase: The phase of the metric if its name does not contain it. `ValidationPhase` by default.

        Raises:
            DeclarationError: No member has a value of the metric.
        """
        watched = Watched.named(metric, phase, "Population.plot")
        curves = {
            label: history.per_epoch[watched.phase][watched.metric]
            for label, history in zip(self._labels, self._histories(watched), strict=True)
            if history is not None
        }
        return Picture(Panel(curves, "epoch", str(watched)))

    def _histories(self, watched: Watched) -> list[History | None]:
        """Return the histories of the members that have a value of a metric, and None for the others.

        Raises:
            DeclarationError: No member has one.
        """
        histories = [learner.history for learner in self._members]
        if not any(str(watched) in history for history in histories):
            known = sorted({name for history in histories for name in history})
            raise DeclarationError(
                f"No member has a value of `{watched}`.",
                where=f"available metrics: {', '.join(f'`{name}`' for name in known) or 'none'}",
                fix="name one of these" if known else "train the population first, with `Metrics` in each Learner",
            )
        return [history if str(watched) in history else None for history in histories]

    def __len__(self) -> int:
        return len(self._members)

    @entry_point
    def __getitem__(self, index: int) -> Learner:
        return self._members[index]

    def __iter__(self) -> Iterator[Learner]:
        return iter(self._members)

    def __repr__(self) -> str:
        return f"<Population of {len(self)} member{'' if len(self) == 1 else 's'}>"

    @property
    def compile_counts(self) -> dict[str, int]:
        """The number of compiled joint programs, and of their calls: `{"compiles": 2, "calls": 40}`."""
        return {"compiles": self._steps.compiles, "calls": self._steps.calls}

    # -- training ---------------------------------------------------------------------------

    @entry_point(fixes=POPULATION_FIT_FIXES)
    def fit(
        self,
        epochs: int | None = None,
        *,
        steps: int | None = None,
        steps_per_epoch: int | None = None,
        resume: bool = False,
        allow: Collection[str] = (),
    ) -> list[History]:
        """Train all members; see `Learner.fit` for what each of them does.

        The members run their handlers one after the other, in the order of their numbers, and wait for each other
        before every window of steps. If the fit of one member raises an exception, the others stop after the current
        window, and the exception is raised here, with a note that names the member. Ctrl-C and SIGTERM end all fits, as
        they end the fit of one Learner.

        Args:
            epochs: Number of epochs to train, in addition to those before.
            steps: Number of steps to train, instead of epochs.
            steps_per_epoch: Length of an epoch (steps), for endless streams.
            resume: Continue the runs in the directories of the members' Checkpointers. All members continue from the
                newest step that each of them has saved, or begin if there is none. Members that had stopped early stay
                stopped.
            allow: With `resume`, the paths at which this program differs from the saved run on purpose; see
                `Learner.restore`.

        Returns:
            The history of each member.

        Raises:
            DeclarationError: An argument is not valid, or a member is fitting already. Or the members have trained
                different numbers of epochs, for example after `SuccessiveHalving`, and a callback compares them.
            CheckpointError: `resume` is set, and no step was saved by all members.
            Exception: An exception of a handler, with a note that names the member.
        """
        refuse_while_importing()
        FitLength(epochs, steps, steps_per_epoch, owner="population")  # raises the errors of these arguments
        check_resume(resume, "population[0]")
        check_allowed(allow, 'population.fit(10, resume=True, allow=("data",))')
        for core in self._cores:
            core.refuse_while_running("population.fit(...)")
            core.ensure_built(core.phase_set.training()[0])
        check_members(self._cores, self._labels, self._checked)
        if resume:
            records = [own[-1] for own in self._callbacks]
            resume_members(self._cores, self._labels, records, allow)
        elif allow:
            raise DeclarationError(
                "`fit` was given `allow` without `resume=True`.",
                why="`allow` names differences from the run that is resumed",
                fix=f"write `population.fit(..., resume=True, allow={tuple(allow)!r})`",
            )
        else:
            self._refuse_different_epochs()

        def fit(learner: Learner) -> None:
            learner.fit(epochs, steps=steps, steps_per_epoch=steps_per_epoch, resume=resume)

        began, since = time.monotonic(), [learner.step for learner in self._members]
        try:
            with caught_interrupts() as interrupt, calling_line():
                session = Session(self._members, self._labels, self._steps, self._meeting)
                errors = session.run(fit, interrupt)
        finally:
            for core in self._cores:
                unlock_run(core)
        self._show_ending(errors, interrupt, since, time.monotonic() - began)
        self._raise(errors)
        if interrupt.requested and not interrupt.preempted:
            raise KeyboardInterrupt
        return [learner.history for learner in self._members]

    def _refuse_different_epochs(self) -> None:
        """Refuse another fit after members were stopped, if callbacks would compare them with the others."""
        if not any(core.state.fit.ended for core in self._cores):
            return  # the callbacks themselves refuse members that were trained alone
        epochs = [core.state.progress.epoch for core in self._cores]
        comparing = [c for c in self._callbacks[0] if not isinstance(c, PopulationTable | PopulationRecord)]
        if comparing and len(set(epochs)) > 1:
            first, other = epochs.index(min(epochs)), epochs.index(max(epochs))
            raise DeclarationError(
                f"`fit` would train all members, but {self._labels[first]} is at epoch {epochs[first]}, and "
                f"{self._labels[other]} is at epoch {epochs[other]}.",
                why=f"{comparing[0]!r} compares members at the same epoch",
                fix=[
                    f"train one member further, e.g. `population[{other}].fit(5)`; `population.best()` returns the "
                    "number of the best one",
                    "build a new `Population`, and train it for all epochs in one `fit`",
                ],
            )

    def _show_ending(
        self, errors: list[BaseException | None], interrupt: Interrupt, since: list[int], seconds: float
    ) -> None:
        """Print how the fit ended, below the table if there is one."""
        table = next((callback for callback in self._callbacks[0] if isinstance(callback, PopulationTable)), None)
        if table is None:
            return
        signal = "SIGTERM" if interrupt.preempted else "Ctrl-C" if interrupt.requested else None
        lines = ending_lines(
            self._members,
            self._labels,
            errors,
            interrupted=signal,
            since=since,
            seconds=seconds,
            best=table.call_of_best(),
        )
        show_block(console_for(table.file), lines)

    def _raise(self, errors: list[BaseException | None]) -> None:
        """Raise the first error of a member. Those of Ctrl-C are the same for all members."""
        failed = [
            (label, error)
            for label, error in zip(self._labels, errors, strict=True)
            if error is not None and not isinstance(error, KeyboardInterrupt)
        ]
        if not failed:
            return
        (label, error), *others = failed
        error.add_note(f"raised in {label}; the other members have stopped")
        for other, failure in others:
            if failure is not error:
                error.add_note(f"and in {other}: {type(failure).__name__}: {failure}")
        raise error


def _as_callbacks(callbacks: Any) -> list[PopulationCallback]:
    items: list[Any] = (
        list(callbacks) if isinstance(callbacks, Iterable) and not isinstance(callbacks, str) else [callbacks]
    )
    for item in items:
        if not isinstance(item, PopulationCallback):
            raise DeclarationError(
                f"`callbacks` of `Population` takes callbacks that compare the members, not {item!r}.",
                why="all other callbacks belong to the members, which each need their own instances",
                fix="put it into the `callbacks` of the Learner that the factory returns",
            )
    return items


def _default_table(members: list[Learner]) -> list[PopulationCallback]:
    """Return the table, if the members record a loss that it can show."""
    names = set.intersection(*(_recorded(learner) for learner in members))
    for phase in ("validation", "training"):
        if phase in names:
            return [PopulationTable("loss", phase=phase)]
    return []


def _recorded(learner: Learner) -> set[str]:
    """Return the names of the phases whose loss a member records."""
    core = learner._core
    return {
        type(phase).name
        for phase in core.phases
        if type(phase).name in core.streams
        and any("loss" in (d.callback.provided_metrics(type(phase)) or ()) for d in core.graph.declared)
    }
