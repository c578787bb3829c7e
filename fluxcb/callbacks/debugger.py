"""`Debugger`: stop in a debugger where a step does what it should not."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from fluxcb._declare.access import Permission, Read, line_to_add
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, StepEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._errors import DeclarationError
from fluxcb._typing import StatePath

__all__ = ["Debugger"]


def loss_is_not_finite(learner: Any) -> bool:
    """Tell whether the step's loss is NaN or infinite."""
    return not math.isfinite(learner.step.loss)


class Debugger(Callback):
    """Call `breakpoint()` after each training step at which a condition holds.

    In the debugger, `learner` is what the condition was given: it shows what `access` declares, as it was after this
    step. Declare what you want to look at there, such as `{"step": {"loss": Read(), "grads": Read()}}`; parameters
    (`{"params": Read()}`), too, but then each step waits for the one before. `breakpoint()` obeys `PYTHONBREAKPOINT`:
    with `PYTHONBREAKPOINT=0` nothing happens.

    Args:
        condition: `condition(learner) -> bool`; that the loss is NaN or infinite by default.
        access: What `condition` reads, and what you want to look at, as `stateaccess` would return it; the loss by
            default.

    Access:
        What `access` says; step.loss: Read by default.

    Runs:
        StepEnd x AbstractTrainingPhase (host).

    Cost:
        That of fetching what `access` says, and of one call per step.

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

    main_thread = True  # where the terminal is

    def __init__(
        self, condition: Callable[[Any], Any] = loss_is_not_finite, *, access: Mapping[str, Any] | None = None
    ) -> None:
        try:
            inspect.signature(condition).bind(None)
        except TypeError:
            raise DeclarationError(
                f"`Debugger` takes a function of the learner, not {condition!r}.",
                fix="e.g. `Debugger(lambda learner: learner.step.loss > 100)`",
            ) from None
        self.condition = condition
        self.access = {"step": {"loss": Read()}} if access is None else access

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads, as it was given."""
        return self.access

    def how_to_declare(self, path: StatePath, permission: Permission) -> str:
        """Return the edit of the argument `access` that adds a path."""
        added = line_to_add(path, permission)
        return f"add `{added}` to the argument `access`" if self.access else f"pass the argument `access={added}`"

    @on(StepEnd, AbstractTrainingPhase)
    def look(self, event: Event, phase: Phase, learner: Any) -> None:
        """Call the debugger if the condition holds."""
        if self.condition(learner):
            breakpoint()

    def __repr__(self) -> str:
        return f"Debugger({getattr(self.condition, '__name__', repr(self.condition))})"
