"""`ParameterEMA` and `StochasticWeightAveraging`, which average the parameters over the updates."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from fluxcb._declare.access import Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import EpochBegin, EpochEnd, Event, FitEnd, UpdateEnd
from fluxcb._declare.handlers import Handler, on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, AbstractValidationPhase, Phase
from fluxcb._declare.resolution import NotDefined, Resolution
from fluxcb._declare.schedules import positive
from fluxcb._errors import ConflictError
from fluxcb._tracebacks import warn_user
from fluxcb.callbacks.arguments import finite_number

__all__ = ["ParameterEMA", "StochasticWeightAveraging"]

_RESTORE = {"params": Write()}


def _averaging(entry: str) -> dict[str, Any]:
    return {"params": Read(), "step": {"skip": Read(), "hold": Read()}, "cbstate": {entry: Write()}}


def _swapping(entry: str) -> dict[str, Any]:
    return {**_RESTORE, "cbstate": {entry: Read()}}


class _ParameterAverage(Callback):
    """Keep an average in `cbstate.<entry>["params"]` and move it toward the parameters at each update.

    Subclasses name their entry in `entry`, and return the weight of the new parameters from `weight`.
    """

    entry: ClassVar[str]

    def __init__(self, *, validate: bool) -> None:
        self.validate = validate
        self.parameter_average = self.entry
        self.validates_with = self.entry if validate else None
        self._training_params: Any = None  # set while validation runs with the average
        self._restored: list[Any] | None = None  # their leaves, if a checkpoint from within a validation was loaded

    def weight(self, updates: Any) -> Any:
        """Return the weight of the new parameters (float32[]) at update number `updates` (int32[], starting at 1)."""
        raise NotImplementedError

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the paths that the callback reads and writes."""
        return {**_averaging(self.entry), "params": Write() if self.validate else Read()}

    def resolveconflict(self, other: Callback) -> Resolution:
        """Refuse another average in the same entry, or one that also replaces the parameters for validation."""
        if isinstance(other, _ParameterAverage) and other.entry == self.entry:
            name = type(other).__name__
            raise ConflictError(
                f"{self!r} and {other!r} both keep their average in `cbstate.{self.entry}`.",
                why="each of them would continue from the average of the other",
                fix=[
                    "remove one of the two from the callbacks list",
                    f'give one its own entry: `class Second{name}({name}): entry = "second_{self.entry}"`, and pass '
                    "`validate=False` to it",
                ],
            )
        # No order would help: after validation, the first callback would restore the trained parameters, and the second
        # one would then restore the first one's average.
        if isinstance(other, _ParameterAverage) and self.validate and other.validate:
            raise ConflictError(
                f"{self!r} and {other!r} both replace the parameters for validation.",
                where=[f"{type(callback).__name__}(validate=True)" for callback in (self, other)],
                why="one validation can use only one average",
                fix=f"pass `validate=False` to {type(self).__name__} or to {type(other).__name__}; it still averages",
            )
        return NotDefined()

    # With `validate=False`, the host handlers are removed, so that they cannot conflict with other callbacks.

    def handlers(self) -> list[Handler]:
        """Return the handlers with access to the entry of this class; host handlers only with `validate=True`."""
        access = {"average": _averaging(self.entry), "swap_in": _swapping(self.entry)}
        return [
            replace(handler, access=access.get(handler.name)) if handler.access is None else handler
            for handler in super().handlers()
            if self.validate or handler.traced
        ]

    def init(self, learner: LearnerView) -> None:
        """Create `cbstate.<entry>`, with the average at the initial parameters."""
        import jax.numpy as jnp

        if self.entry not in learner.cbstate:
            learner.cbstate[self.entry] = {"params": learner.params, "updates": jnp.zeros((), jnp.int32)}

    @on(UpdateEnd, AbstractTrainingPhase)
    def average(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Move the average toward the updated parameters."""
        import jax
        import jax.numpy as jnp

        old = learner.cbstate[self.entry]
        updates = old["updates"] + 1
        weight = self.weight(updates)

        def moved(e: Any, p: Any) -> Any:
            # `e + 1 * (p - e)` may round differently from `p`, so a weight of 1 is handled separately.
            return jnp.where(weight < 1, e + weight * (p - e), p).astype(e.dtype)

        params = jax.tree.map(moved, old["params"], learner.params)
        new = {"params": params, "updates": updates}
        for flag in ("skip", "hold"):  # a skipped or held step does not update the parameters
            if flag in learner.step:
                new = jax.tree.map(functools.partial(jnp.where, getattr(learner.step, flag)), old, new)
        learner.cbstate[self.entry] = new

    @on(EpochBegin, AbstractValidationPhase)
    def swap_in(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Replace the parameters by the average for validation."""
        # If training parameters are stored already, `params` is the average, which must not replace them.
        if self._training_params is None and self._restored is None:
            self._training_params = learner.params
        learner.params = learner.cbstate[self.entry]["params"]

    @on(EpochEnd, AbstractValidationPhase, access=_RESTORE)
    def swap_out(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Restore the training parameters."""
        self._restore(learner)

    @on(FitEnd, Phase, access=_RESTORE)
    def swap_out_after_failure(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Restore the training parameters if an exception ended validation before EpochEnd."""
        self._restore(learner)

    def _restore(self, learner: LearnerView) -> None:
        import jax

        if self._restored is not None:
            learner.params = jax.tree.unflatten(jax.tree.structure(learner.params), self._restored)
        elif self._training_params is not None:
            learner.params = self._training_params
        self._training_params = self._restored = None

    def state_dict(self) -> dict[str, Any]:
        """Return the leaves of the training parameters during validation, and None otherwise."""
        import jax

        leaves = self._restored if self._training_params is None else jax.tree.leaves(self._training_params)
        return {"training_params": leaves}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the leaves of the training parameters; `swap_out` assigns them when the validation ends."""
        self._training_params, self._restored = None, state["training_params"]


class ParameterEMA(_ParameterAverage):
    """Keep an exponential moving average of the parameters, and validate with it.

    After each update, `ema <- decay * ema + (1 - decay) * params`. The average starts at the initial parameters. With
    `debias=True`, the initial parameters have no weight: after `n` updates, `ema` is the average that starts at zero,
    divided by `1 - decay**n`. In both cases, `cbstate.ema["params"]` contains the average that validation uses. Skipped
    and held steps (`step.skip`, `step.hold`) do not change it.

    The average has the dtypes of the parameters. In bfloat16 and float16, small changes round to nothing, so a `decay`
    close to 1 causes a warning.

    If validation runs with the average, `learner.model`, `learner.predict` and `fluxcb.checkpoints.load_model` also
    use the average.

    To keep a second average, define a subclass that has its own entry: `entry = "slow_ema"`.

    Args:
        decay: Weight of the previous average, at least 0 and below 1. In `optax.incremental_update`, `step_size` is
            `1 - decay`.
        debias: Whether to remove the weight of the initial parameters.
        validate: Whether validation runs with the average. The training parameters are restored afterward, bit for bit.

    Access:
        params: Read (traced), Write (host, for validation).
        step.skip, step.hold: Read.
        cbstate.ema: Write (traced), Read (host).

    Runs:
        UpdateEnd x AbstractTrainingPhase (traced).
        EpochBegin, EpochEnd x AbstractValidationPhase (host, if `validate`).
        FitEnd x Phase (host, if `validate`): restores the training parameters if validation failed.

    Cost:
        A copy of the parameters in the carry, and two copies of them per validation epoch. Does not shorten windows.

    Raises:
        DeclarationError: `decay` is outside [0, 1).

    Warns:
        UserWarning: `decay` is above 0 and at most 0.1, which is probably meant as `1 - decay`.
        UserWarning: The parameters are bfloat16 or float16, and `decay` is so close to 1 that the average barely moves.

    Example:
        >>> from fluxcb.callbacks import ParameterEMA
        >>> ParameterEMA(0.99), ParameterEMA(0.99, debias=True)
        (ParameterEMA(0.99), ParameterEMA(0.99, debias=True))

    Source:
        Polyak and Juditsky (1992); for `debias`, Kingma and Ba (2015), algorithm 1. tensorpack,
        `MovingAverageSummary`.
    """

    entry = "ema"

    def __init__(self, decay: float = 0.999, *, debias: bool = False, validate: bool = True) -> None:
        super().__init__(validate=validate)
        self.decay = finite_number(decay, "`decay` of ParameterEMA", least=0, below=1)
        self.debias = debias
        # 0 is no mistake: the average then equals the current parameters.
        if 0 < decay <= 0.1:
            warn_user(
                f"`{type(self).__name__}({decay})` keeps only {100 * decay:.3g} % of the average at each update, so it "
                f"is nearly equal to the current parameters. If {decay} is meant as the weight of the new parameters, "
                f"like `step_size` of `optax.incremental_update`, write `{type(self).__name__}({1 - decay:.6g})`.",
                UserWarning,
            )

    def init(self, learner: LearnerView) -> None:
        """Create `cbstate.ema`, and warn if its numbers are too coarse for `decay`."""
        import jax
        import jax.numpy as jnp

        if self.entry not in learner.cbstate:
            dtypes = {leaf.dtype for leaf in jax.tree.leaves(learner.params)}
            for dtype in sorted((d for d in dtypes if d in (jnp.bfloat16, jnp.float16)), key=str):
                self._warn_of_rounding(dtype.name, float(jnp.finfo(dtype).eps))
        super().init(learner)

    def _warn_of_rounding(self, dtype: str, eps: float) -> None:
        if 1 - self.decay < eps:
            warn_user(
                f"{self!r} keeps the average in {dtype}, like the parameters. An update moves it by "
                f"{1 - self.decay:.2g} of the difference to the parameters, which {dtype} mostly rounds to no change. "
                "Keep the parameters in float32 and convert them in the model, e.g. with "
                f"`w.astype(jnp.{dtype})`, or write `ParameterEMA({math.floor((1 - eps) * 1000) / 1000})`.",
                UserWarning,
            )

    def weight(self, updates: Any) -> Any:
        """Return `1 - decay`; with `debias`, `(1 - decay) / (1 - decay**n)`."""
        import jax.numpy as jnp

        # The second weight follows from dividing the update of the average that starts at zero by `1 - decay**n`. The
        # entry can therefore contain the corrected average, and readers need no correction.
        return 1 - self.decay if not self.debias else (1 - self.decay) / (1 - self.decay ** updates.astype(jnp.float32))

    def __repr__(self) -> str:
        flags = (", debias=True" if self.debias else "") + (", validate=False" if not self.validate else "")
        return f"ParameterEMA({self.decay}{flags})"


class StochasticWeightAveraging(_ParameterAverage):
    """Average the parameters at regular intervals, starting at a given update, and validate with the average.

    At the updates `start`, `start + every`, ..., `swa <- (swa * n + params) / (n + 1)`, where `n` is the number of
    parameter sets averaged so far. Before `start`, `cbstate.swa["params"]` equals the current parameters. Skipped and
    held steps (`step.skip`, `step.hold`) do not count as updates.

    This callback does not set the learning rate. The paper uses a constant or cyclic learning rate from `start` on;
    use a `Scheduler` for that. It does not recompute batch statistics either. Those of the trained parameters do not
    fit the average, so a network with batch normalization gives worse results with the average until you recompute
    them, as docs/how-to/average-the-parameters.md shows.

    If validation runs with the average, `learner.model`, `learner.predict` and `fluxcb.checkpoints.load_model` also
    use the average.

    Args:
        start: Number of the first update to average, at least 1.
        every: Interval (updates). To average once per epoch, as the paper does, pass the number of steps per epoch.
        validate: Whether validation runs with the average. The training parameters are restored afterward, bit for bit.

    Access:
        params: Read (traced), Write (host, for validation).
        step.skip, step.hold: Read.
        cbstate.swa: Write (traced), Read (host).

    Runs:
        UpdateEnd x AbstractTrainingPhase (traced).
        EpochBegin, EpochEnd x AbstractValidationPhase (host, if `validate`).
        FitEnd x Phase (host, if `validate`): restores the training parameters if validation failed.

    Cost:
        A copy of the parameters in the carry, and two copies of them per validation epoch. Does not shorten windows.

    Raises:
        DeclarationError: `start` or `every` is not an integer of at least 1.

    Warns:
        UserWarning: With `validate=True`, the training changes the model state, such as batch statistics.

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
        """Return 1 up to update `start`, then `1 / n` at each averaged update and 0 at all others."""
        import jax.numpy as jnp

        since = updates - self.start
        share = 1 / (since // self.every + 1).astype(jnp.float32)
        return jnp.where(since <= 0, 1.0, jnp.where(since % self.every == 0, share, 0.0))

    def __repr__(self) -> str:
        flags = "" if self.validate else ", validate=False"
        return f"StochasticWeightAveraging({self.start}, every={self.every}{flags})"
