"""`InferenceRunner`: statistics of other data, on any schedule, with the training untouched."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fluxcb._declare.access import Append, Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.dispatch import Entry
from fluxcb._declare.events import Event, Trigger
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase, ValidationPhase, named_phase
from fluxcb._declare.schedules import Schedule
from fluxcb._errors import DeclarationError, did_you_mean
from fluxcb.callbacks.by_phase import ByPhase
from fluxcb.callbacks.inference_data import InferenceData
from fluxcb.callbacks.inferencer import Inferencer
from fluxcb.callbacks.metric_values import EpochValues, StepValues
from fluxcb.callbacks.recorder import leading_axis

__all__ = ["InferenceRunner"]

Evaluate = Callable[[Any], Mapping[str, Any]]


class InferenceRunner(Callback):
    """Compute statistics of other data with the model as it is: after each epoch, or when a wrapper says so.

    `every(InferenceRunner(...), steps=100)` computes them every 100 training steps. Parameters, optimizer, counters,
    random keys and data of the training stay as they are to the last bit.

    Each batch goes through the step of `phase`, compiled, with the traced handlers of that phase; host handlers do not
    run. The inferencers get the values on the host. Their statistics are in `cbstate.metrics_epoch[name]`, where those
    who watch metrics look (`EarlyStopping(3, metric="error", phase="inference")`), with steps in
    `cbstate.inference[name]`, and go to `cbstate.monitors` as `<name>/<statistic>` if there is a `Monitors`.

    Args:
        data: Batches, anything that can be iterated again and again. Its length may be unknown; if it says one, it has
            to be true.
        inferencers: An inferencer, or several.
        name: What the statistics are kept under, as if it were a phase: each runner has its own.
        phase: The phase whose step is computed; it must not train.
        average: Name of the `cbstate` entry with the parameters to use, `ema` or `swa`, instead of the training's.

    Access:
        evaluation: Read.
        params, model_state: Read (borrowed); cbstate.<average> instead of params, if there is one.
        cbstate.metrics_epoch: Append.
        cbstate.inference.<name>: Write.
        cbstate.monitors: Append (optional).

    Runs:
        Trigger x AbstractTrainingPhase (host).

    Cost:
        One compiled call per batch, and what the inferencers fetch of it. A program per shape of a batch.

    Raises:
        DeclarationError: The data cannot be iterated again; something is no inferencer; the name is none. While
            training: a statistic is no number, two have one name, or a value does not exist.
        DataError: The data has no batches, or another number of them than it says.
        Exception: Whatever the data, the model or an inferencer raised, with a note that names this runner.

    Example:
        >>> import numpy as np
        >>> from fluxcb import every
        >>> from fluxcb.callbacks import InferenceRunner, ScalarStats
        >>> from fluxcb.testing import testlearner
        >>> xs, ys = np.float32([[0], [1], [2]]), np.float32([[-1], [2], [9]])  # y = 3 x - 1, but for the last
        >>> batches = [(xs[:2], ys[:2]), (xs[2:], ys[2:])]
        >>> runner = InferenceRunner(batches, ScalarStats("loss"), name="odd")
        >>> learner = testlearner(every(runner, steps=100))
        >>> history = learner.fit(steps=300)
        >>> log = learner.cbstate["inference"]["odd"]
        >>> log.steps, [round(loss, 1) for loss in log["loss"]]  # (0 + 0 + 4 ** 2) / 3
        ([100, 200, 300], [5.3, 5.3, 5.3])

    Source:
        tensorpack, `InferenceRunner`.
    """

    def __init__(
        self,
        data: Any,
        inferencers: Inferencer | Iterable[Inferencer],
        *,
        name: str = "inference",
        phase: Phase | None = None,
        average: str | None = None,
    ) -> None:
        cls = type(self).__name__
        if not isinstance(name, str) or not name or "." in name or "/" in name:
            raise DeclarationError(
                f"`name` of `{cls}` must be a name without `.` and `/`, not {name!r}.",
                why="the statistics are kept under it, and named by it: `test/loss`",
                fix='e.g. `name="test"`',
            )
        self.inference_name = name
        self.inferencers = tuple(inferencers) if isinstance(inferencers, Iterable) else (inferencers,)
        for inferencer in self.inferencers or (None,):
            if not isinstance(inferencer, Inferencer):
                raise DeclarationError(
                    f"`{cls}` takes inferencers, not {inferencer!r}.", fix='e.g. `[ScalarStats("loss")]`'
                )
        self.phase = ValidationPhase() if phase is None else phase
        if not isinstance(self.phase, Phase) or type(self.phase).trains:
            raise DeclarationError(
                f"`phase` of `{cls}` must be an instance of a phase that does not train, not {phase!r}.",
                fix="e.g. `phase=ValidationPhase()`",
            )
        if average is not None and not isinstance(average, str):
            raise DeclarationError(
                f"`average` of `{cls}` must be the name of averaged parameters in `cbstate`, not {average!r}.",
                fix='e.g. `average="ema"`',
            )
        self.average = average
        self.measured_with = {name: average}
        self._data = InferenceData(data, repr(self))

    @property
    def data(self) -> Any:
        """The data."""
        return self._data.source

    def output_locations(self) -> Iterable[Path | str]:
        """Return the locations that the inferencers write to."""
        return [place for inferencer in self.inferencers for place in inferencer.output_locations()]

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        borrowed, shared = Read(borrow=True), {}
        if self.average is not None:
            shared = {self.average: borrowed}
        return {
            "evaluation": Read(),
            **({} if self.average is not None else {"params": borrowed}),
            "model_state": borrowed,
            "cbstate": {
                **shared,
                "metrics_epoch": Append(),
                "inference": {self.inference_name: Write()},
                "monitors": Append(optional=True),
            },
        }

    def metric_phases(self) -> Collection[type[Phase]]:
        """Return a phase class with the name of this runner."""
        return (named_phase(self.inference_name),)

    def provided_metrics(self, phase: type[Phase]) -> Collection[str] | None:
        """Return the names of the statistics for the phase with this runner's name, or None if they are not known."""
        if phase.name != self.inference_name:
            return ()
        names: list[str] = []
        for inferencer in self.inferencers:
            statistics = inferencer.statistics()
            if statistics is None:
                return None
            names += statistics
        return names

    def logged_names(self, metrics: Mapping[type[Phase], Collection[str]]) -> Collection[str] | None:
        """Return the names under which the statistics are logged."""
        names = self.provided_metrics(named_phase(self.inference_name))
        return None if names is None else [f"{self.inference_name}/{name}" for name in names]

    # `init` may create all of `metrics_epoch`. The handler only adds to one part, so readers of that part run later.

    def handlers(self) -> list[Entry]:
        """Return the handlers with their access."""
        return [self._narrowed(entry) for entry in super().handlers()]

    def entry_for(self, event: type[Event], phase: type[Phase]) -> tuple[Callback, Entry, tuple[Schedule, ...]] | None:
        """Return the handler of a moment with its access."""
        found = super().entry_for(event, phase)
        return found and (found[0], self._narrowed(found[1]), found[2])

    def _narrowed(self, entry: Entry) -> Entry:
        if entry.access is not None:
            return entry
        access = self.stateaccess()
        shared = {**access["cbstate"], "metrics_epoch": {self.inference_name: Append()}}
        return replace(entry, access={**access, "cbstate": shared})

    def init(self, learner: Any) -> None:
        """Create `cbstate.metrics_epoch`, if there is no `Metrics`, and entries there and in `cbstate.inference`."""
        if "metrics_epoch" not in learner.cbstate:
            learner.cbstate.metrics_epoch = ByPhase(EpochValues)
        learner.cbstate.metrics_epoch.entry(self.inference_name)  # empty: values are to come, as `Watched.at` reads it
        if self.inference_name not in learner.cbstate.inference:
            learner.cbstate.inference[self.inference_name] = StepValues()

    @on(Trigger, AbstractTrainingPhase)
    def infer(self, event: Event, phase: Phase, learner: Any) -> None:
        """Go through the data, and note the statistics; of a round that fails, none is noted."""
        progress = learner.progress
        statistics = self._round(self.evaluate(learner), progress.epoch)
        log = learner.cbstate.inference[self.inference_name]
        log.cut(progress.step - 1)  # where the Learner was set back, these steps come again
        log.add([progress.step], {name: [value] for name, value in statistics.items()})
        log.seen = progress.step
        entry = learner.cbstate.metrics_epoch[self.inference_name]
        entry.cut(progress.epoch)
        for name, value in statistics.items():
            entry.add(name, progress.epoch, value)
        if "monitors" in learner.cbstate:
            for name, value in statistics.items():
                learner.cbstate.monitors.put_scalar(f"{self.inference_name}/{name}", value)

    def names(self) -> tuple[str, ...]:
        """Return the step values that the inferencers need, each once."""
        paths = [path for inferencer in self.inferencers for path in inferencer.fetches()]
        return tuple(dict.fromkeys(path.split(".")[0] for path in paths))

    def parameters(self, learner: Any) -> Any:
        """Return the parameters to compute with."""
        return learner.params if self.average is None else learner.cbstate[self.average]["params"]

    def evaluate(self, learner: Any) -> Evaluate:
        """Return what computes the step values of a batch."""
        return learner.evaluation(self.phase, self.parameters(learner), learner.model_state, self.names())

    # -- a round ----------------------------------------------------------------------------

    def _round(self, evaluate: Evaluate, epoch: int) -> dict[str, float]:
        try:
            for inferencer in self.inferencers:
                self._call(inferencer, "before")
            waiting: tuple[Mapping[str, Any], int, int] | None = None
            for number, batch in enumerate(self._data.batches(epoch), 1):
                try:
                    values = evaluate(batch)
                except BaseException as error:
                    error.add_note(f"raised when {self!r} computed batch {number} of its data")
                    raise
                # The device computes this batch while the host looks at the one before.
                if waiting is not None:
                    self._deliver(*waiting)
                waiting = values, leading_axis(batch), number
            if waiting is not None:
                self._deliver(*waiting)
            return self._statistics()
        except BaseException:
            for inferencer in self.inferencers:
                inferencer.abandon()
            raise

    def _deliver(self, values: Mapping[str, Any], samples: int, number: int) -> None:
        """Hand the values of a batch to the inferencers."""
        import jax

        try:
            on_host = jax.device_get(dict(values))
        except BaseException as error:
            error.add_note(f"raised when {self!r} computed batch {number} of its data")
            raise
        for inferencer in self.inferencers:
            fetched = {path: _part(on_host, path, inferencer) for path in inferencer.fetches()}
            self._call(inferencer, "on_fetches", fetched, samples)

    def _statistics(self) -> dict[str, float]:
        statistics: dict[str, float] = {}
        for inferencer in self.inferencers:
            for name, value in (self._call(inferencer, "after") or {}).items():
                if name in statistics:
                    raise DeclarationError(
                        f"Two inferencers of {self!r} have a statistic `{name}`.",
                        why="statistics are kept by name",
                        fix="give one another name, or put it into an `InferenceRunner` of its own",
                    )
                statistics[name] = self._number(inferencer, name, value)
        return statistics

    def _number(self, inferencer: Inferencer, name: str, value: Any) -> float:
        import numpy as np

        try:
            array = np.asarray(value)
            if array.shape == () and array.dtype.kind not in "USO":
                return float(array)
        except (TypeError, ValueError):
            pass
        raise DeclarationError(
            f"The statistic `{name}` of {inferencer!r} is {value!r}, and not one number.",
            where=f"{type(inferencer).__name__}.after",
            fix="return a number, or leave it out",
        )

    def _call(self, inferencer: Inferencer, method: str, *arguments: Any) -> Any:
        try:
            return getattr(inferencer, method)(*arguments)
        except BaseException as error:
            error.add_note(f"raised in `{method}` of {inferencer!r}, of {self!r}")
            raise

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inference_name!r})"


def _part(values: Mapping[str, Any], path: str, inferencer: Inferencer) -> Any:
    """Return a part of the step values, `aux.logits`."""
    found: Any = values
    for position, name in enumerate(path.split(".")):
        known = list(found) if isinstance(found, Mapping) else []
        try:
            found = found[name] if isinstance(found, Mapping) else getattr(found, name)
        except (KeyError, AttributeError):
            whole = ".".join(path.split(".")[:position])
            raise DeclarationError(
                f"{inferencer!r} fetches `{path}`, and `{whole}` has no `{name}`.{did_you_mean(name, known)}",
                why=f"`{whole}` has {', '.join(map(str, known))}" if known else f"`{whole}` is {type(found).__name__}",
                fix="name what there is",
            ) from None
    return found
