"""Trials, which train a set of callbacks for a few steps, each time with a new Learner."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fluxcb._declare.callback import Callback, unwrap
from fluxcb._errors import DeclarationError, FluxcbError
from fluxcb._tools.comparing import is_data, leaves
from fluxcb._tools.raised import problems_of
from fluxcb._tools.restoring import fields

if TYPE_CHECKING:
    from fluxcb._run.learner import Learner

__all__ = ["Trial", "TrialError", "Trials", "shorten_validation", "steps_of"]

_WHY = "an audit trains and compares several Learners, none of which other code uses"
_FIX = "declare a function that builds new callbacks, a new model and a new Learner at each call"


class TrialError(Exception):
    """A Learner cannot be built or trained, so there is nothing more to check."""

    def __init__(self, problems: list[FluxcbError]) -> None:
        super().__init__(problems)
        self.problems = problems


@dataclass(frozen=True)
class Trial:
    """A Learner that was trained.

    Attributes:
        learner: The Learner.
        steps: Number of steps that it ran.
        state: The leaves of its train state.
        before: Its callbacks' fields with plain data, before the training.
        after: The same fields after the training.
    """

    learner: Learner
    steps: int
    state: list[tuple[str, Any]]
    before: list[dict[str, Any]]
    after: list[dict[str, Any]]

    @property
    def callbacks(self) -> list[Callback]:
        """Its callbacks, in list order."""
        return list(self.learner.callbacks)


class Trials:
    """Builds Learners and trains them.

    Args:
        make: Returns a new Learner.
        steps: Number of steps of each training, and maximum number of validation steps.

    Attributes:
        first: The trial with the unchanged Learner.

    Raises:
        TrialError: The Learner cannot be built twice, or cannot be trained.
    """

    def __init__(self, make: Callable[[], Learner], steps: int) -> None:
        self._make = make
        self.steps = steps
        learner = self._made("Building the Learner", own=True)
        self._spare: Learner | None = self.made()
        self._require_new(learner, self._spare)
        learner.callbacks.measure()
        self.first = self._train(learner, steps, f"Training for {steps_of(steps)}", own=True)

    def made(self) -> Learner:
        """Return another new Learner.

        Raises:
            TrialError: The Learner cannot be built.
        """
        return self._made("Building the Learner a second time, which succeeded the first time,", own=False)

    @cached_property
    def again(self) -> Trial:
        """The repetition of the first trial.

        Raises:
            TrialError: The training failed.
        """
        return self._train(self._next(), self.steps, "Training a second time, which succeeded the first time,")

    def arranged(
        self,
        how: str,
        arrange: Callable[[list[Any]], list[Any]],
        steps: int | None = None,
        steps_per_call: int | None = None,
    ) -> Trial:
        """Train with another arrangement of the callbacks, as if the Learner had been built with it.

        Args:
            how: The arrangement in words, for messages.
            arrange: Returns the new arrangement of a list of callbacks.
            steps: Number of steps, if it differs from the other trials.
            steps_per_call: Number of steps per call, if it differs from the Learner's own. Ignored on accelerators,
                where only single steps are known to give the same bits.

        Raises:
            TrialError: The training failed.
        """
        learner, doing = self._next(), f"{how}, which succeeded otherwise,"
        state, programs = learner._state, learner._core.engine.programs
        try:
            state.cbstate = {}
            if state.train.built:
                state.train.carry = {**state.train.carry, "cbstate": {}}
            programs._steps.clear()  # otherwise, the remaining handlers would not be traced again
            learner.callbacks.set(arrange(learner.callbacks._items))
        except Exception as error:
            raise TrialError(problems_of(error, f"Building the Learner {doing}")) from error
        if steps_per_call is not None:
            programs.steps_per_call = steps_per_call if _on_cpu(learner) else 1
        return self._train(learner, steps or self.steps, f"Training {doing}")

    def _next(self) -> Learner:
        spare, self._spare = self._spare, None
        return spare or self.made()

    def _made(self, doing: str, *, own: bool) -> Learner:
        try:
            return self._make()
        except Exception as error:
            raise TrialError(problems_of(error, doing, own=own)) from error

    def _require_new(self, first: Learner, second: Learner) -> None:
        if second is first:
            what = "The set is a single Learner, so it cannot be audited."
            raise TrialError([DeclarationError(what, why=_WHY, fix=[_FIX, "check it at level `trace`"])])
        expected, names = (
            [type(unwrap(callback)).__name__ for callback in learner.callbacks] for learner in (first, second)
        )
        if expected != names:
            what = (
                f"The second Learner has different callbacks: [{', '.join(names)}] instead of [{', '.join(expected)}]."
            )
            raise TrialError([DeclarationError(what, why=_WHY, fix=_FIX)])

    def _train(self, learner: Learner, steps: int, doing: str, *, own: bool = False) -> Trial:
        callbacks, done = list(learner.callbacks), learner.step
        before = [fields(callback, is_data) for callback in callbacks]
        try:
            shorten_validation(learner, self.steps)
            learner.fit(steps=steps)
        except Exception as error:
            raise TrialError(problems_of(error, doing, own=own)) from error
        after = [fields(callback, is_data) for callback in callbacks]
        return Trial(learner, learner.step - done, leaves(learner.state), before, after)


def steps_of(count: int) -> str:
    """Return `1 step`, `2 steps`."""
    return f"{count} step{'s' if count != 1 else ''}"


class _First:
    """The first batches of a data source."""

    def __init__(self, source: Any, count: int) -> None:
        self.source, self.count = source, count

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self.source), self.count)


def shorten_validation(learner: Learner, count: int) -> None:
    """Limit the number of batches in epochs that do not train. Handlers see the original data source."""
    from fluxcb._run.batch_stream import BatchStream

    core = learner._core
    for phase in core.phases:
        stream = core.streams.get(type(phase).name)
        # Limiting an iterator would lose batches, because the Learner has already read its first batch.
        if stream is not None and not type(phase).trains and not isinstance(stream.source, Iterator):
            core.streams[type(phase).name] = BatchStream(_First(stream.source, count), stream.name)


def _on_cpu(learner: Learner) -> bool:
    import jax

    if not learner._state.train.built:
        return jax.default_backend() == "cpu"
    return all(device.platform == "cpu" for device in learner._state.train.carry["counters"].devices())
