"""`Debugger`: open a debugger after a step that meets a condition."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from fluxcb._declare.access import Read
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, StepEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb.callbacks.arguments import function_of

__all__ = ["Debugger"]


def loss_is_not_finite(learner: LearnerView) -> bool:
    """Return whether the loss of the step is NaN or infinite."""
    return not math.isfinite(learner.step.loss)


class Debugger(Callback):
    """Call `breakpoint()` after each training step for which a condition is true.

    In the debugger, `learner` is the view that was passed to the condition. It shows the state that `access` declares,
    as of the end of this step. Declare there what you want to inspect, for example `{"step": {"loss": Read(), "grads":
    Read()}}`. You can also declare parameters (`{"params": Read()}`), but then each step waits for the previous one to
    finish. `breakpoint()` obeys `PYTHONBREAKPOINT`; `PYTHONBREAKPOINT=0` disables the debugger.

    Args:
        condition: `condition(learner) -> bool`. By default, it is true if the loss is NaN or infinite.
        access: The state that `condition` reads and that you want to inspect, in the format of `stateaccess`. By
            default, the loss.

    Access:
        The paths in `access`; by default, step.loss: Read.

    Runs:
        StepEnd x AbstractTrainingPhase (host).

    Cost:
        One call per step, and fetching the values that `access` declares.

    Raises:
        DeclarationError: `condition` does not take one argument.

    Example:
        >>> import sys, jax.numpy as jnp, optax, fluxcb
        >>> from fluxcb.callbacks import Debugger
        >>> learner = fluxcb.Learner.from_loss(
        ...     {"w": jnp.ones(())},
        ...     lambda params, batch, key: jnp.mean(params["w"] * batch),
        ...     optax.sgd(0.5),
        ...     data=[jnp.ones(2)] * 4,
        ...     callbacks=[Debugger(lambda learner: learner.step.loss < 0)],
        ...     default_callbacks=False,
        ... )
        >>> hook, sys.breakpointhook = sys.breakpointhook, lambda: print("here is the debugger")
        >>> history = learner.fit(1)  # the losses are 1, 0.5, 0 and -0.5
        here is the debugger
        >>> sys.breakpointhook = hook

    Source:
        tensorpack, `TFLocalCLIDebugHook`.
    """

    main_thread = True  # a debugger needs the terminal

    access_argument = "access"

    def __init__(
        self, condition: Callable[[Any], Any] = loss_is_not_finite, *, access: Mapping[str, Any] | None = None
    ) -> None:
        example = "lambda learner: learner.step.loss > 100"
        self.condition = function_of(condition, "`condition` of `Debugger`", "learner", example=example)
        self.access = {"step": {"loss": Read()}} if access is None else access

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the `access` argument."""
        return self.access

    @on(StepEnd, AbstractTrainingPhase)
    def look(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Open the debugger if the condition is true."""
        if self.condition(learner):
            breakpoint()

    def __repr__(self) -> str:
        return f"Debugger({getattr(self.condition, '__name__', repr(self.condition))})"
