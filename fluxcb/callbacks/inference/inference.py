"""`InferenceRunner`, which computes statistics on other data during training, on any schedule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fluxcb._declare.access import Append, Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, Trigger
from fluxcb._declare.handlers import Handler, on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase, ValidationPhase, named_phase
from fluxcb._errors import DeclarationError, did_you_mean
from fluxcb.callbacks.arguments import nonempty_text, require
from fluxcb.callbacks.by_phase import ByPhase
from fluxcb.callbacks.inference.inference_data import InferenceData
from fluxcb.callbacks.inference.inferencer import Inferencer
from fluxcb.callbacks.metrics.metric_values import EpochValues, StepValues
from fluxcb.callbacks.metrics.recorder import leading_axis

__all__ = ["InferenceRunner"]

Evaluate = Callable[[Any], Mapping[str, Any]]


class InferenceRunner(Callback):
    """Compute statistics of the model on other data, after each epoch or on the schedule of a wrapper.

    `every(InferenceRunner(...), steps=100)` computes the statistics every 100 training steps. Parameters, optimizer
    state, counters, random keys and training data remain unchanged, bit for bit.

    Each batch runs through the compiled step of `phase`, including the traced handlers of that phase. Host handlers do
    not run. The inferencers get the values on the host. Their statistics are stored in three places:

    - `cbstate.metrics_epoch[name]`, by epoch. Callbacks can watch them there:
      `EarlyStopping(3, metric="error", phase="inference")`.
    - `cbstate.inference[name]`, by training step.
    - `cbstate.monitors`, as `<name>/<statistic>`, if there is a `Monitors`.

    Args:
        data: The batches, as an iterable that can be iterated repeatedly. If it has a length, the length must be
            correct.
        inferencers: One `Inferencer`, or several.
        name: The name under which the statistics are stored, like the name of a phase. Each runner needs its own name.
        phase: The phase whose step is computed. It must not train.
        average: The `cbstate` entry whose parameters are used instead of `params`, such as `ema` or `swa`.

    Access:
        evaluation: Read.
        params, model_state: Read (borrowed); if `average` is given, cbstate.<average> instead of params.
        cbstate.metrics_epoch: Append.
        cbstate.inference.<name>: Write.
        cbstate.monitors: Append (optional).

    Runs:
        Trigger x AbstractTrainingPhase (host).

    Cost:
        One compiled call per batch, and the transfer of the values that the inferencers fetch. One compiled program per
        batch shape.

    Raises:
        DeclarationError: `data` cannot be iterated repeatedly, or shuffles although an inferencer needs the order.
            `inferencers` contains something else, or `name` is not a valid name. During training: a statistic is not a
            number, two statistics have the same name, or a fetched value does not exist.
        DataError: `data` has no batches, or their number differs from its length.
        Exception: Any exception that the data, the model or an inferencer raises, with a note that names this runner.

    Example:
        >>> import numpy as np
        >>> from fluxcb import every
        >>> from fluxcb.callbacks import InferenceRunner, ScalarStats
        >>> from fluxcb.testing import testlearner
        >>> xs, ys = np.float32([[0], [1], [2]]), np.float32([[-1], [2], [9]])  # y = 3 x - 1, except the last
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
        fits = isinstance(name, str) and name and not {".", "/"} & {*name}
        why = "it is the first part of the names of the statistics, as in `test/loss`"
        require(bool(fits), name, f"`name` of `{cls}`", "a name without `.` and `/`", 'name="test"', why)
        self.inference_name = name
        if any(isinstance(item, Inferencer) for item in (data if isinstance(data, list | tuple) else (data,))):
            raise DeclarationError(
                f"`{cls}` received inferencers as its data.",
                why="its first argument is the data, and its second one the inferencers",
                fix=f"swap the two arguments: `{cls}(data, inferencers)`",
            )
        self.inferencers = tuple(inferencers) if isinstance(inferencers, Iterable) else (inferencers,)
        for inferencer in self.inferencers or (None,):
            fits = isinstance(inferencer, Inferencer)
            if isinstance(inferencer, type) and issubclass(inferencer, Inferencer):
                raise DeclarationError(
                    f"`{cls}` received the class `{inferencer.__name__}`, not an instance of it.",
                    fix=f"write `{inferencer.__name__}(...)`",
                )
            if inspect.isfunction(inferencer):
                raise DeclarationError(
                    f"`{cls}` received the function `{inferencer.__name__}`, which is not an `Inferencer`.",
                    why="metrics belong to `Metrics(...)`, which measures them on the data of the Learner",
                    fix=[
                        "for the accuracy, write `ClassificationError()`, which gives the error rate",
                        "define a subclass of `Inferencer` for another statistic",
                    ],
                )
            require(fits, inferencer, f"Each inferencer of `{cls}`", "an `Inferencer`", '[ScalarStats("loss")]')
        self.phase = ValidationPhase() if phase is None else phase
        fits, expected = isinstance(self.phase, Phase), "an instance of a phase that does not train"
        fits = fits and not type(self.phase).trains
        require(fits, phase, f"`phase` of `{cls}`", expected, "phase=ValidationPhase()")
        if average is not None:
            nonempty_text(
                average, f"`average` of `{cls}`", "the name of averaged parameters in `cbstate`", 'average="ema"'
            )
        self.average = average
        self.measured_with = {name: average}
        self._data = InferenceData(data, repr(self))
        ordered = [inferencer for inferencer in self.inferencers if inferencer.keeps_order]
        if ordered and self._data.shuffles:
            raise DeclarationError(
                f"The data of {self!r} is an `ArrayLoader` that shuffles.",
                why=f"{ordered[0]!r} would get the examples in random order, and not in the order of the arrays",
                fix="build the loader with `shuffle=False`",
            )

    @property
    def data(self) -> Any:
        """The data."""
        return self._data.source

    def output_locations(self) -> Iterable[Path | str]:
        """Return the paths that the inferencers write to."""
        return [location for inferencer in self.inferencers for location in inferencer.output_locations()]

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the paths that the callback reads and writes."""
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

    # `init` may create the whole of `metrics_epoch`, but the handler appends to one entry only. With this narrower
    # access, only readers of that entry have to run after it.

    def handlers(self) -> list[Handler]:
        """Return the handlers, with access to the entry of this runner in `cbstate.metrics_epoch`."""
        return [self._narrowed(handler) for handler in super().handlers()]

    def _narrowed(self, handler: Handler) -> Handler:
        if handler.access is not None:
            return handler
        access = self.stateaccess()
        shared = {**access["cbstate"], "metrics_epoch": {self.inference_name: Append()}}
        return replace(handler, access={**access, "cbstate": shared})

    def init(self, learner: LearnerView) -> None:
        """Create `cbstate.metrics_epoch` if it does not exist, and the entries with the name of this runner."""
        if "metrics_epoch" not in learner.cbstate:
            learner.cbstate.metrics_epoch = ByPhase(EpochValues)
        # An empty entry tells `Watched.at` that values will come, for example if this runner is not due in each epoch.
        learner.cbstate.metrics_epoch.entry(self.inference_name)
        if self.inference_name not in learner.cbstate.inference:
            learner.cbstate.inference[self.inference_name] = StepValues()

    @on(Trigger, AbstractTrainingPhase)
    def infer(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Run over the data and store the statistics. If the round fails, nothing is stored."""
        progress = learner.progress
        statistics = self._round(self.evaluate(learner), progress.epoch)
        log = learner.cbstate.inference[self.inference_name]
        log.cut(progress.step - 1)  # later values remain if the Learner returned to an earlier state
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
        """Return the names of the step values that the inferencers fetch, without duplicates."""
        paths = [path for inferencer in self.inferencers for path in inferencer.fetches()]
        return tuple(dict.fromkeys(path.split(".")[0] for path in paths))

    def parameters(self, learner: LearnerView) -> Any:
        """Return the parameters to evaluate: `params`, or those of `average`."""
        return learner.params if self.average is None else learner.cbstate[self.average]["params"]

    def evaluate(self, learner: LearnerView) -> Evaluate:
        """Return a function that computes the step values of a batch."""
        return learner.evaluation(self.phase, self.parameters(learner), learner.model_state, self.names())

    # -- a round ----------------------------------------------------------------------------

    def _round(self, evaluate: Evaluate, epoch: int) -> dict[str, float]:
        try:
            for inferencer in self.inferencers:
                self._call(inferencer, "before")
            pending: tuple[Mapping[str, Any], int, int] | None = None
            for number, batch in enumerate(self._data.batches(epoch), 1):
                try:
                    values = evaluate(batch)
                except BaseException as error:
                    error.add_note(f"raised when {self!r} computed batch {number} of its data")
                    raise
                # JAX dispatches asynchronously: the device computes this batch while the host processes the previous
                # one.
                if pending is not None:
                    self._deliver(*pending)
                pending = values, leading_axis(batch), number
            if pending is not None:
                self._deliver(*pending)
            return self._statistics()
        except BaseException:
            for inferencer in self.inferencers:
                inferencer.abandon()
            raise

    def _deliver(self, values: Mapping[str, Any], samples: int, number: int) -> None:
        """Copy the values of a batch to the host, and pass them to the inferencers."""
        import jax

        try:  # errors of an asynchronous computation are raised here
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
                        f"Two inferencers of {self!r} return a statistic called `{name}`.",
                        why="statistics are stored by name",
                        fix="rename one, or move one to its own `InferenceRunner` with another `name`",
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
            f"The statistic `{name}` of {inferencer!r} must be one number, not {value!r}.",
            where=f"{type(inferencer).__name__}.after",
            fix="return a number, or leave the statistic out",
        )

    def _call(self, inferencer: Inferencer, method: str, *arguments: Any) -> Any:
        try:
            return getattr(inferencer, method)(*arguments)
        except BaseException as error:
            error.add_note(f"raised in `{method}` of {inferencer!r}, an inferencer of {self!r}")
            raise

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inference_name!r})"


def _part(values: Mapping[str, Any], path: str, inferencer: Inferencer) -> Any:
    """Return the step value at a dotted path, such as `aux.logits`.

    Raises:
        DeclarationError: There is no value at the path.
    """
    value: Any = values
    for position, name in enumerate(path.split(".")):
        known = list(value) if isinstance(value, Mapping) else []
        try:
            value = value[name] if isinstance(value, Mapping) else getattr(value, name)
        except (KeyError, AttributeError):
            parent = ".".join(path.split(".")[:position])
            kind = type(value).__name__
            raise DeclarationError(
                f"{inferencer!r} fetches `{path}`, but `{parent}` has no `{name}`.{did_you_mean(name, known)}",
                why=f"`{parent}` has {', '.join(map(str, known))}" if known else f"`{parent}` is of type {kind}",
                fix="fetch " + (" or ".join(f"`{parent}.{name}`" for name in known) or f"all of it: `{parent}`"),
            ) from None
    return value
