"""Trials: a set of callbacks trained a few steps, again and again, each time on a new Learner."""

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

_WHY = "an audit trains several Learners and compares them; it trains none that others use"
_FIX = "declare a function that builds the callbacks, the model and the Learner anew each time it is called"


class TrialError(Exception):
    """There is nothing more to be found: a Learner cannot be built, or does not train."""

    def __init__(self, problems: list[FluxcbError]) -> None:
        super().__init__(problems)
        self.problems = problems


@dataclass(frozen=True)
class Trial:
    """A Learner that was trained.

    Attributes:
        learner: The Learner.
        steps: How many steps it ran.
        state: The leaves of its train state.
        before: Its callbacks' fields of plain data, before the training.
        after: The same after it.
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
    """Makes Learners and trains them.

    Args:
        make: Returns a new Learner.
        steps: Steps of a training; validation has as many at most.

    Attributes:
        first: The Learner as it is, trained.

    Raises:
        TrialError: It cannot be built twice, or does not train.
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
            TrialError: It cannot be built.
        """
        return self._made("Building the Learner anew, which went well the first time,", own=False)

    @cached_property
    def again(self) -> Trial:
        """The first training once more.

        Raises:
            TrialError: It failed.
        """
        return self._train(self._next(), self.steps, "Training a second time, which went well the first time,")

    def arranged(
        self,
        how: str,
        arrange: Callable[[list[Any]], list[Any]],
        steps: int | None = None,
        steps_per_call: int | None = None,
    ) -> Trial:
        """Train with the callbacks in another arrangement, as if the Learner had been built so.

        Args:
            how: What messages call it.
            arrange: Returns the arrangement of a callbacks list.
            steps: Steps of the training, if not as in the others.
            steps_per_call: Steps of a call, if not the Learner's own; not on accelerators, where only single steps are
                known to give the same bits.

        Raises:
            TrialError: It failed.
        """
        learner, doing = self._next(), f"{how}, which went well otherwise,"
        state, programs = learner._state, learner._parts.engine.programs
        try:
            state.cbstate = {}
            if state.built:
                state.carry = {**state.carry, "cbstate": {}}
            programs._steps.clear()  # else handlers that are still there would not be traced again
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
            what = "This Learner is made once and kept, so it cannot be audited."
            raise TrialError([DeclarationError(what, why=_WHY, fix=[_FIX, "check it at level `trace`"])])
        had, has = ([type(unwrap(callback)).__name__ for callback in of.callbacks] for of in (first, second))
        if had != has:
            what = f"Built anew, the Learner has other callbacks: [{', '.join(has)}] instead of [{', '.join(had)}]."
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
    """Let epochs that do not train end after some batches; handlers see the data source as it is."""
    from fluxcb._run.feed import Feed

    parts = learner._parts
    for phase in parts.phases:
        feed = parts.feeds.get(type(phase).name)
        # An iterator cannot be cut without losing batches: the Learner has looked at its first one already.
        if feed is not None and not type(phase).trains and not isinstance(feed.source, Iterator):
            parts.feeds[type(phase).name] = Feed(_First(feed.source, count), feed.name)


def _on_cpu(learner: Learner) -> bool:
    import jax

    if not learner._state.built:
        return jax.default_backend() == "cpu"
    return all(device.platform == "cpu" for device in learner._state.carry["counters"].devices())
