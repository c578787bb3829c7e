"""`CustomCallback`: run a function as a callback."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fluxcb._declare.access import Permission, line_to_add
from fluxcb._declare.callback import Callback
from fluxcb._declare.control import refuse_unraised
from fluxcb._declare.events import Event, is_concrete
from fluxcb._declare.handlers import Handler, check_pair
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import Phase
from fluxcb._errors import DeclarationError
from fluxcb._typing import StatePath
from fluxcb.callbacks.arguments import function_of, result_of

__all__ = ["CustomCallback"]


class CustomCallback(Callback):
    """Run a function at one event, without defining a class.

    Args:
        fn: `fn(learner)`. If the event is traced, the function is traced into the step. It must return None. The result
            of a lambda is ignored.
        event: The event class.
        phase: The phase class; includes its subclasses.
        access: The state that `fn` reads and writes, in the format of `stateaccess`.
        name: The name of the callback in messages; the name of the function by default.

    Access:
        The paths in `access`.

    Runs:
        `event` x `phase` (host or traced, depending on the event).

    Cost:
        That of a handler with this access.

    Raises:
        DeclarationError: `fn` does not take one argument, `event` is not an event, or `phase` is not a phase. During
            training: `fn` returns a value.

    Example:
        >>> import jax.numpy as jnp, optax, fluxcb
        >>> from fluxcb.callbacks import CustomCallback
        >>> from fluxcb.events import StepEnd
        >>> losses = []
        >>> learner = fluxcb.Learner.from_loss(
        ...     {"w": jnp.ones(())},
        ...     lambda params, batch, key: jnp.mean(params["w"] * batch),
        ...     optax.sgd(0.5),
        ...     data=[jnp.ones(2)] * 2,
        ...     default_callbacks=False,
        ...     callbacks=[
        ...         CustomCallback(
        ...             lambda learner: losses.append(float(learner.step.loss)),
        ...             StepEnd,
        ...             access={"step": {"loss": fluxcb.Read()}},
        ...             name="losses",
        ...         )
        ...     ],
        ... )
        >>> history = learner.fit(1)
        >>> losses
        [1.0, 0.5]

    Source:
        FluxTraining.jl, `CustomCallback`.
    """

    access_argument = "access"

    def __init__(
        self,
        fn: Callable[[Any], None],
        event: type[Event],
        phase: type[Phase] = Phase,
        *,
        access: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        self.name = name or getattr(fn, "__name__", type(fn).__name__)
        where = f"CustomCallback({self.name}, ...)"
        function_of(fn, "`fn` of `CustomCallback`", "learner")
        refuse_unraised(fn)
        event, phase = check_pair(event, phase, where)
        if not is_concrete(event):
            raise DeclarationError(
                f"`CustomCallback` requires a single event, but {event.__name__} stands for several.",
                where=where,
                fix="pass an event such as `StepEnd`",
            )
        self.fn = fn
        self.access = {} if access is None else access
        self._handler = Handler(event, phase, "run")

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the `access` argument."""
        return self.access

    def how_to_declare(self, path: StatePath, permission: Permission) -> str:
        """Return the edit of the `access` argument that declares a path."""
        function = getattr(self.fn, "__name__", "")
        phase = "" if self._handler.phase is Phase else f", {self._handler.phase.__name__}"
        start = f"CustomCallback({function if function.isidentifier() else 'fn'}, {self._handler.event.__name__}{phase}"
        added = line_to_add(path, permission)
        if self.access:
            return f"add `{added}` to the argument `access`: `{start}, access={{...}})`"
        return f"write `{start}, access={added})`"

    def run(self, event: Event, phase: Phase, learner: LearnerView) -> Any:
        """Call the function."""
        return result_of(self.fn, self.fn(learner))

    def handlers(self) -> list[Handler]:
        """Return the handler that calls the function."""
        return [*super().handlers(), self._handler]

    def __repr__(self) -> str:
        phase = "" if self._handler.phase is Phase else f", {self._handler.phase.__name__}"
        return f"CustomCallback({self.name}, {self._handler.event.__name__}{phase})"
