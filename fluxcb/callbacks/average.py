"""`ParameterEMA`: an exponential moving average of the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxcb._declare.access import Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.dispatch import Entry
from fluxcb._declare.events import EpochBegin, EpochEnd, Event, FitEnd, TracedEvent, UpdateEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, AbstractValidationPhase, Phase
from fluxcb._declare.schedules import Schedule
from fluxcb._errors import DeclarationError

__all__ = ["ParameterEMA"]

_RESTORE = {"params": Write()}


class ParameterEMA(Callback):
    """Average the parameters over the steps, and validate with the average.

    After each update, `ema <- decay * ema + (1 - decay) * params`, from the parameters at the start. With
    `debias=True` the start has no weight: `ema` is the average from zero divided by `1 - decay**n`, after `n` updates.
    `cbstate.ema["params"]` always is the average itself. Steps that were skipped (`step.skip`) leave it alone.

    Args:
        decay: Weight of the past, at least 0 and below 1.
        debias: Whether to correct for the start.
        validate: Whether validation runs with the average; the training parameters are put back after it, bit for bit.

    Access:
        params: Read (traced), Write (host, for validation).
        step.skip: Read.
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

    def __init__(self, decay: float = 0.999, *, debias: bool = False, validate: bool = True) -> None:
        if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise DeclarationError(f"`decay` of ParameterEMA must be at least 0 and below 1, not {decay!r}.")
        self.decay = decay
        self.debias = debias
        self.validate = validate
        self._training_params: Any = None

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        params = Write() if self.validate else Read()
        return {"params": params, "step": {"skip": Read()}, "cbstate": {"ema": Write()}}

    # Without validation the host handlers are not there at all, so that they order and conflict with nobody.

    def handlers(self) -> list[Entry]:
        """Return the handlers that this instance has."""
        return [entry for entry in super().handlers() if self.validate or entry.traced]

    def entry_for(self, event: type[Event], phase: type[Phase]) -> tuple[Callback, Entry, tuple[Schedule, ...]] | None:
        """Return who handles a moment; nobody at host events if it does not validate."""
        return super().entry_for(event, phase) if self.validate or issubclass(event, TracedEvent) else None

    def init(self, learner: Any) -> None:
        """Create `cbstate.ema`."""
        import jax.numpy as jnp

        if "ema" not in learner.cbstate:
            learner.cbstate.ema = {"params": learner.params, "updates": jnp.zeros((), jnp.int32)}

    @on(
        UpdateEnd,
        AbstractTrainingPhase,
        access={"params": Read(), "step": {"skip": Read()}, "cbstate": {"ema": Write()}},
    )
    def average(self, event: Event, phase: Phase, learner: Any) -> None:
        """Take in the updated parameters."""
        import jax
        import jax.numpy as jnp

        old = learner.cbstate.ema
        updates = old["updates"] + 1
        # The weight of the new parameters that keeps `ema` equal to the average from zero over 1 - decay**n.
        weight = (
            1 - self.decay if not self.debias else (1 - self.decay) / (1 - self.decay ** updates.astype(jnp.float32))
        )
        params = jax.tree.map(lambda e, p: (e + weight * (p - e)).astype(e.dtype), old["params"], learner.params)
        new = {"params": params, "updates": updates}
        if "skip" in learner.step:
            skip = learner.step.skip
            new = jax.tree.map(lambda n, o: jnp.where(skip, o, n), new, old)
        learner.cbstate.ema = new

    @on(EpochBegin, AbstractValidationPhase, access={**_RESTORE, "cbstate": {"ema": Read()}})
    def swap_in(self, event: Event, phase: Phase, learner: Any) -> None:
        """Validate with the average."""
        if self._training_params is None:
            self._training_params = learner.params
        learner.params = learner.cbstate.ema["params"]

    @on(EpochEnd, AbstractValidationPhase, access=_RESTORE)
    def swap_out(self, event: Event, phase: Phase, learner: Any) -> None:
        """Put the training parameters back."""
        self._restore(learner)

    @on(FitEnd, Phase, access=_RESTORE)
    def swap_out_after_failure(self, event: Event, phase: Phase, learner: Any) -> None:
        """Put the training parameters back where an error left validation without its EpochEnd."""
        self._restore(learner)

    def _restore(self, learner: Any) -> None:
        if self._training_params is not None:
            learner.params = self._training_params
            self._training_params = None

    def __repr__(self) -> str:
        flags = (", debias=True" if self.debias else "") + (", validate=False" if not self.validate else "")
        return f"ParameterEMA({self.decay}{flags})"
