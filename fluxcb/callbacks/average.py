"""`ParameterEMA` and `StochasticWeightAveraging`: averages of the parameters over the updates."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from fluxcb._declare.access import Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.dispatch import Entry
from fluxcb._declare.events import EpochBegin, EpochEnd, Event, FitEnd, TracedEvent, UpdateEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, AbstractValidationPhase, Phase
from fluxcb._declare.resolution import NotDefined, Resolution
from fluxcb._declare.schedules import Schedule, positive
from fluxcb._errors import ConflictError
from fluxcb.callbacks.arguments import number_between

__all__ = ["ParameterEMA", "StochasticWeightAveraging"]

_RESTORE = {"params": Write()}


def _averaging(entry: str) -> dict[str, Any]:
    return {"params": Read(), "step": {"skip": Read(), "hold": Read()}, "cbstate": {entry: Write()}}


def _swapping(entry: str) -> dict[str, Any]:
    return {**_RESTORE, "cbstate": {entry: Read()}}


class _ParameterAverage(Callback):
    """An average in `cbstate.<entry>["params"]`, moved a part of the way to the parameters at each update.

    Subclasses say how far in `weight`, and declare `average` and `swap_in` with the access of their entry.
    """

    entry: ClassVar[str]

    def __init__(self, *, validate: bool) -> None:
        self.validate = validate
        self.validates_with = self.entry if validate else None
        self._training_params: Any = None  # while a validation has the average
        self._restored: list[Any] | None = None  # their leaves, behind a pause in the middle of it

    def weight(self, updates: Any) -> Any:
        """Return the weight of the new parameters at an update, given its number (int32[], from 1), as float32[]."""
        raise NotImplementedError

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return {**_averaging(self.entry), "params": Write() if self.validate else Read()}

    def resolveconflict(self, other: Callback) -> Resolution:
        """Refuse another average that also replaces the parameters for validation."""
        # No order would help: after validation, the first callback would restore the trained parameters, and the second
        # one would then restore the first one's average. Two averages in the same entry are an ordinary conflict.
        if isinstance(other, _ParameterAverage) and other.entry != self.entry and self.validate and other.validate:
            raise ConflictError(
                f"{self!r} and {other!r} both replace the parameters for validation.",
                where=[f"{type(callback).__name__}(validate=True)" for callback in (self, other)],
                why="one validation can use only one average",
                fix=f"pass `validate=False` to {type(self).__name__} or to {type(other).__name__}; it still averages",
            )
        return NotDefined()

    # Without validation the host handlers are not there at all, so that they order and conflict with nobody.

    def handlers(self) -> list[Entry]:
        """Return the handlers that this instance has."""
        return [entry for entry in super().handlers() if self.validate or entry.traced]

    def entry_for(self, event: type[Event], phase: type[Phase]) -> tuple[Callback, Entry, tuple[Schedule, ...]] | None:
        """Return who handles a moment; nobody at host events if it does not validate."""
        return super().entry_for(event, phase) if self.validate or issubclass(event, TracedEvent) else None

    def init(self, learner: Any) -> None:
        """Create the entry."""
        import jax.numpy as jnp

        if self.entry not in learner.cbstate:
            learner.cbstate[self.entry] = {"params": learner.params, "updates": jnp.zeros((), jnp.int32)}

    @on(UpdateEnd, AbstractTrainingPhase)
    def average(self, event: Event, phase: Phase, learner: Any) -> None:
        """Take in the updated parameters."""
        import jax
        import jax.numpy as jnp

        old = learner.cbstate[self.entry]
        updates = old["updates"] + 1
        weight = self.weight(updates)

        def moved(e: Any, p: Any) -> Any:  # a weight of 1 gives the parameters to the last bit
            return jnp.where(weight < 1, e + weight * (p - e), p).astype(e.dtype)

        params = jax.tree.map(moved, old["params"], learner.params)
        new = {"params": params, "updates": updates}
        for flag in ("skip", "hold"):  # a step that is no update
            if flag in learner.step:
                new = jax.tree.map(functools.partial(jnp.where, getattr(learner.step, flag)), old, new)
        learner.cbstate[self.entry] = new

    @on(EpochBegin, AbstractValidationPhase)
    def swap_in(self, event: Event, phase: Phase, learner: Any) -> None:
        """Validate with the average."""
        if self._training_params is None and self._restored is None:
            self._training_params = learner.params
        learner.params = learner.cbstate[self.entry]["params"]

    @on(EpochEnd, AbstractValidationPhase, access=_RESTORE)
    def swap_out(self, event: Event, phase: Phase, learner: Any) -> None:
        """Put the training parameters back."""
        self._restore(learner)

    @on(FitEnd, Phase, access=_RESTORE)
    def swap_out_after_failure(self, event: Event, phase: Phase, learner: Any) -> None:
        """Put the training parameters back where an error left validation without its EpochEnd."""
        self._restore(learner)

    def _restore(self, learner: Any) -> None:
        import jax

        if self._restored is not None:
            learner.params = jax.tree.unflatten(jax.tree.structure(learner.params), self._restored)
        elif self._training_params is not None:
            learner.params = self._training_params
        self._training_params = self._restored = None

    def state_dict(self) -> dict[str, Any]:
        """Return the training parameters, while a validation has the average in their place."""
        import jax

        held = self._restored if self._training_params is None else jax.tree.leaves(self._training_params)
        return {"training_params": held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them back, to put them in place when that validation ends."""
        self._training_params, self._restored = None, state["training_params"]


class ParameterEMA(_ParameterAverage):
    """Average the parameters over the updates, and validate with the average.

    After each update, `ema <- decay * ema + (1 - decay) * params`, from the parameters at the start. With
    `debias=True` the start has no weight: `ema` is the average from zero divided by `1 - decay**n`, after `n` updates.
    `cbstate.ema["params"]` always is the average itself. Steps that are no updates (`step.skip`,
    `step.hold`) do not change it. If validation runs with the average, `learner.model`, `learner.predict` and
    `fluxcb.checkpoints.load_model` also use the average.

    Args:
        decay: Weight of the past, at least 0 and below 1.
        debias: Whether to correct for the start.
        validate: Whether validation runs with the average; the training parameters are put back after it, bit for bit.

    Access:
        params: Read (traced), Write (host, for validation).
        step.skip, step.hold: Read.
        cbstate.ema: Write (traced), Read (host).

    Runs:
        UpdateEnd x AbstractTrainingPhase (traced).
        EpochBegin, EpochEnd x AbstractValidationPhase (host, if `validate`).
        FitEnd x Phase (host, if `validate`): puts the parameters back if validation failed.

    Cost:
        A copy of the parameters in the carry. Two copies of them per validation epoch. Bounds no window.

    Raises:
        DeclarationError: `decay` is outside [0, 1).

    Example:
        >>> from fluxcb.callbacks import ParameterEMA
        >>> ParameterEMA(0.99), ParameterEMA(0.99, debias=True)
        (ParameterEMA(0.99), ParameterEMA(0.99, debias=True))

    Source:
        Polyak and Juditsky (1992); the correction is that of Kingma and Ba (2015), algorithm 1. tensorpack,
        `MovingAverageSummary`.
    """

    entry = "ema"

    def __init__(self, decay: float = 0.999, *, debias: bool = False, validate: bool = True) -> None:
        super().__init__(validate=validate)
        self.decay = number_between(0, 1, decay, "`decay` of ParameterEMA")
        self.debias = debias

    def weight(self, updates: Any) -> Any:
        """Return `1 - decay`, or what keeps the entry equal to the average from zero over `1 - decay**n`."""
        import jax.numpy as jnp

        return 1 - self.decay if not self.debias else (1 - self.decay) / (1 - self.decay ** updates.astype(jnp.float32))

    @on(UpdateEnd, AbstractTrainingPhase, access=_averaging(entry))
    def average(self, event: Event, phase: Phase, learner: Any) -> None:
        """Take in the updated parameters."""
        super().average(event, phase, learner)

    @on(EpochBegin, AbstractValidationPhase, access=_swapping(entry))
    def swap_in(self, event: Event, phase: Phase, learner: Any) -> None:
        """Validate with the average."""
        super().swap_in(event, phase, learner)

    def __repr__(self) -> str:
        flags = (", debias=True" if self.debias else "") + (", validate=False" if not self.validate else "")
        return f"ParameterEMA({self.decay}{flags})"


class StochasticWeightAveraging(_ParameterAverage):
    """Average the parameters of every so many updates from some update on, and validate with the average.

    `swa <- (swa * n + params) / (n + 1)` at the updates `start`, `start + every`, ..., with `n` the number of
    parameter sets in it so far. Until `start`, `cbstate.swa["params"]` are the parameters themselves. Steps that were
    skipped or held (`step.skip`, `step.hold`) are no updates. The learning rate stays what the optimizer or a
    `Scheduler` makes it; the paper's is constant or cyclic from `start` on. Batch statistics stay those of the
    training: a network with batch normalization needs a pass over the data with the average before it is used. If
    validation runs with the average, `learner.model`, `learner.predict` and `fluxcb.checkpoints.load_model` also use
    the average.

    Args:
        start: Number of the first update whose parameters count, at least 1.
        every: Period (updates); the steps of an epoch, to average once an epoch as the paper does.
        validate: Whether validation runs with the average; the training parameters are put back after it, bit for bit.

    Access:
        params: Read (traced), Write (host, for validation).
        step.skip, step.hold: Read.
        cbstate.swa: Write (traced), Read (host).

    Runs:
        UpdateEnd x AbstractTrainingPhase (traced).
        EpochBegin, EpochEnd x AbstractValidationPhase (host, if `validate`).
        FitEnd x Phase (host, if `validate`): puts the parameters back if validation failed.

    Cost:
        A copy of the parameters in the carry. Two copies of them per validation epoch. Bounds no window.

    Raises:
        DeclarationError: `start` or `every` is no whole number of at least 1.

    Example:
        >>> from fluxcb.callbacks import StochasticWeightAveraging
        >>> from fluxcb.testing import testlearner
        >>> learner = testlearner(StochasticWeightAveraging(start=5, every=4))  # epochs have 4 steps
        >>> history = learner.fit(3)  # averages the parameters after steps 5 and 9
        >>> sorted(learner.cbstate["swa"]), learner.cbstate["swa"]["updates"].item()
        (['params', 'updates'], 12)

    Source:
        Izmailov et al. (2018), Averaging Weights Leads to Wider Optima, algorithm 1, arXiv:1803.05407.
    """

    entry = "swa"

    def __init__(self, start: int, every: int = 1, *, validate: bool = True) -> None:
        super().__init__(validate=validate)
        self.start = positive(start, "`start` of StochasticWeightAveraging (updates)")
        self.every = positive(every, "`every` of StochasticWeightAveraging (updates)")

    def weight(self, updates: Any) -> Any:
        """Return 1 up to the first, then `1 / n` at every one that counts and 0 at the others."""
        import jax.numpy as jnp

        since = updates - self.start
        share = 1 / (since // self.every + 1).astype(jnp.float32)
        return jnp.where(since <= 0, 1.0, jnp.where(since % self.every == 0, share, 0.0))

    @on(UpdateEnd, AbstractTrainingPhase, access=_averaging(entry))
    def average(self, event: Event, phase: Phase, learner: Any) -> None:
        """Take in the updated parameters."""
        super().average(event, phase, learner)

    @on(EpochBegin, AbstractValidationPhase, access=_swapping(entry))
    def swap_in(self, event: Event, phase: Phase, learner: Any) -> None:
        """Validate with the average."""
        super().swap_in(event, phase, learner)

    def __repr__(self) -> str:
        flags = "" if self.validate else ", validate=False"
        return f"StochasticWeightAveraging({self.start}, every={self.every}{flags})"
