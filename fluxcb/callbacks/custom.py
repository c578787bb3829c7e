"""`CustomCallback`: a callback from a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from fluxcb._declare.access import Permission, line_to_add
from fluxcb._declare.callback import Callback
from fluxcb._declare.dispatch import Entry, check_pair
from fluxcb._declare.events import Event, is_concrete
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import Schedule
from fluxcb._declare.signatures import runs_later
from fluxcb._errors import DeclarationError
from fluxcb._typing import StatePath

__all__ = ["CustomCallback"]


class CustomCallback(Callback):
    """Run a function at one event, without a class.

    Args:
        fn: `fn(learner)`; for a traced event it is traced into the step.
        event: Event class.
        phase: Phase class; also its subclasses.
        access: What `fn` touches, as `stateaccess` would return it.
        name: What it is called in messages; the function's name by default.

    Access:
        What `access` says.

    Runs:
        `event` x `phase` (host or traced, as the event is).

    Cost:
        That of a handler with this access.

    Raises:
        DeclarationError: `fn` does not take one argument, or there is no such event or phase.

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
        if not callable(fn) or isinstance(fn, type):
            raise DeclarationError(
                f"`CustomCallback` takes a function of the learner, not {fn!r}.",
                fix="write `CustomCallback(lambda learner: ..., StepEnd)`",
            )
        try:
            inspect.signature(fn).bind(None)
        except TypeError:
            raise DeclarationError(
                f"The function `{self.name}{inspect.signature(fn)}` must take one argument, the learner.",
                where=where,
                fix="write `def fn(learner):`, or a Callback with `@on`, whose handlers get event and phase, too",
            ) from None
        if later := runs_later(fn):
            raise DeclarationError(
                f"The function `{self.name}` is {later}; it must run when it is called.",
                where=where,
                why="its call would return at once, and nothing would ever run its body",
                fix="write a plain `def fn(learner):`, without `async` and `yield`",
            )
        event, phase = check_pair(event, phase, where)
        if not is_concrete(event):
            raise DeclarationError(
                f"`CustomCallback` needs one event; {event.__name__} stands for all of them.",
                where=where,
                fix="name the event, e.g. `StepEnd`",
            )
        self.fn = fn
        self.access = {} if access is None else access
        self._entry = Entry(event, phase, "run")

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what the function touches, as it was given."""
        return self.access

    def how_to_declare(self, path: StatePath, permission: Permission) -> str:
        """Return the edit of the argument `access` that adds a path."""
        function = getattr(self.fn, "__name__", "")
        phase = "" if self._entry.phase is Phase else f", {self._entry.phase.__name__}"
        start = f"CustomCallback({function if function.isidentifier() else 'fn'}, {self._entry.event.__name__}{phase}"
        added = line_to_add(path, permission)
        if self.access:
            return f"add `{added}` to the argument `access`: `{start}, access={{...}})`"
        return f"write `{start}, access={added})`"

    def run(self, event: Event, phase: Phase, learner: Any) -> None:
        """Call the function."""
        self.fn(learner)

    def handlers(self) -> list[Entry]:
        """Return its one handler."""
        return [*super().handlers(), self._entry]

    def entry_for(self, event: type[Event], phase: type[Phase]) -> tuple[Callback, Entry, tuple[Schedule, ...]] | None:
        """Return its one handler where it applies."""
        if issubclass(event, self._entry.event) and issubclass(phase, self._entry.phase):
            return self, self._entry, ()
        return super().entry_for(event, phase)

    def __repr__(self) -> str:
        phase = "" if self._entry.phase is Phase else f", {self._entry.phase.__name__}"
        return f"CustomCallback({self.name}, {self._entry.event.__name__}{phase})"
