"""Checks of gradients: what handlers write to the loss, gradients and inputs, and what a phase differentiates."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax

from fluxcb._compile.carry_paths import replaced
from fluxcb._declare.declared import BoundHandler
from fluxcb._declare.events import Event
from fluxcb._declare.phases import Phase
from fluxcb._errors import TraceError
from fluxcb._tracebacks import warn_user
from fluxcb._typing import PyTree, StatePath

__all__ = ["Differentiated", "GradWrites", "InputWrites", "LossWrites"]


class LossWrites:
    """The writes of handlers to `step.loss` while one step is traced.

    Inside a gradient, the written loss passes through an identity function. JAX calls its backward rule if, and only
    if, the differentiated value depends on it. Outside a gradient, a phase may use the loss in any way (evolution
    strategies weight noise by it), so it only has to be read.

    Args:
        phase: The phase whose `step` is traced.

    Attributes:
        changed_by: The last handler that changed a value of the step inside the latest gradient, or None.
    """

    def __init__(self, phase: Phase) -> None:
        self._phase = phase
        self.changed_by: BoundHandler | None = None
        # Stacks, because a function that is differentiated may call `learner.grad` itself.
        self._tokens: list[Any] = []
        self._unfollowed: list[dict[object, tuple[Event, BoundHandler]]] = []
        self._unread: tuple[Event, BoundHandler] | None = None

    def open_gradient(self, token: Any) -> None:
        """Begin a gradient closure. `token` is an additional argument that is differentiated.

        With the token, the check also works for a loss that depends on no parameter.
        """
        # `value_fn` calls the function of the outermost gradient again, so a change in any gradient inside it counts.
        if not self._tokens:
            self.changed_by = None
        self._tokens.append(token)
        # Writes inside this gradient that its value does not depend on, as far as is known.
        self._unfollowed.append({})

    def close_gradient(self) -> None:
        """End the innermost gradient closure, once its gradient has been taken.

        Raises:
            TraceError: The gradient does not depend on a loss that a handler has written inside the closure.
        """
        self._tokens.pop()
        # JAX has run the backward pass, so the entries that remain belong to losses that it did not reach.
        for event, handler in self._unfollowed.pop().values():
            raise TraceError(
                f"`{self._name}.step` takes a gradient that does not depend on the loss that "
                f"{handler.declared.label} has replaced.",
                where=[f"{self._name}.step", handler.where],
                why=f"the value that the handler wrote to `step.loss` at {event!r} would be lost",
                fix=[
                    f"emit {event!r} in the function that is given to `learner.grad`, and return `learner.step.loss` "
                    "from it",
                    "combine several losses into one sum; use `jax.lax.stop_gradient` to keep a loss from changing "
                    "a part",
                ],
            )

    @property
    def inside(self) -> bool:
        """Whether a gradient closure is being traced."""
        return bool(self._tokens)

    def written(self, loss: Any, event: Event, handler: BoundHandler) -> Any:
        """Return the loss to use after the handlers of an event. `handler` was the last to replace it."""
        if not self._tokens:
            self._unread = event, handler
            return loss
        # The rejected alternative compares the value that the phase returns with the loss by identity. It would reject
        # sums of losses, and losses of events that are emitted in another closure.
        unfollowed, entry = self._unfollowed[-1], object()
        unfollowed[entry] = event, handler
        # The identity adds no operation to the compiled step.
        return _watched((loss, self._tokens[-1]), lambda: unfollowed.pop(entry, None))[0]

    def read(self) -> None:
        """Record that the phase reads `step.loss`."""
        self._unread = None

    def finish(self) -> None:
        """Check the writes outside of gradients at the end of the step.

        Raises:
            TraceError: The phase trains, and has not read the loss.
        """
        # Without training, no gradient uses the loss, and handlers after the step see the replaced one.
        if self._unread is None or not type(self._phase).trains:
            return
        event, handler = self._unread
        raise TraceError(
            f"`{self._name}.step` emits {event!r} outside of its gradient, and does not use the loss that "
            f"{handler.declared.label} has replaced.",
            where=[f"{self._name}.step", handler.where],
            why="the value that the handler wrote to `step.loss` would be lost",
            fix=[
                f"emit {event!r} in the function that is given to `learner.grad`, and return `learner.step.loss` "
                "from it",
                f"without `learner.grad`: compute the update from `learner.step.loss`, read after {event!r}",
            ],
        )

    @property
    def _name(self) -> str:
        return type(self._phase).__name__


class GradWrites:
    """The writes of handlers to `step.grads` while one step is traced. The phase must update with these gradients.

    Args:
        phase: The phase whose `step` is traced.

    Attributes:
        changed_by: The last handler that replaced the gradients, or None.
    """

    def __init__(self, phase: Phase) -> None:
        self._phase = phase
        self._unread: tuple[Event, BoundHandler] | None = None
        self.changed_by: BoundHandler | None = None

    def written(self, event: Event, handler: BoundHandler) -> None:
        """Record that a handler has replaced `step.grads`."""
        # `read` leaves `changed_by` as it is: `value_fn` cannot repeat the change even if the phase uses it.
        self._unread, self.changed_by = (event, handler), handler

    def read(self) -> None:
        """Record that the phase reads `step.grads`."""
        self._unread = None

    def finish(self) -> None:
        """Check at the end of the step that written gradients have been read.

        Raises:
            TraceError: The phase trains, and has not read them.
        """
        if self._unread is None or not type(self._phase).trains:
            return
        event, handler = self._unread
        name = type(self._phase).__name__
        raise TraceError(
            f"`{name}.step` does not use the gradients that {handler.declared.label} has replaced at {event!r}.",
            where=[f"{name}.step", handler.where],
            why="the value that the handler wrote to `step.grads` would be lost",
            fix=[
                f"read `learner.step.grads` after {event!r}, and update with it: `learner.update(learner.step.grads)`",
                "call `learner.apply_updates()`, which reads it",
            ],
        )


class InputWrites:
    """The writes of handlers to `step.batch` and `step.xs` while one step is traced.

    Args:
        phase: The phase whose `step` is traced.
    """

    def __init__(self, phase: Phase) -> None:
        self._phase = phase
        self._unread: dict[str, tuple[Event, BoundHandler]] = {}

    def written(self, paths: Iterable[StatePath], event: Event, handler: BoundHandler) -> None:
        """Record the values of the step that a handler has replaced."""
        self._unread.update({path[1]: (event, handler) for path in paths if path[1] in ("batch", "xs")})

    def read(self, name: str) -> None:
        """Record that the phase reads a value of the step."""
        self._unread.pop(name, None)

    def finish(self) -> None:
        """Warn at the end of the step about written values that the phase has not read."""
        phase = type(self._phase)
        for name, (event, handler) in self._unread.items():
            # In a phase that provides `xs`, the model gets `xs` instead of the batch.
            splits = name == "batch" and any("xs" in names for names in phase.provides.values())
            warn_user(
                f"{handler.declared.label} replaces `step.{name}` at {event!r}, but `{phase.__name__}.step` does not "
                f"read it after this event, so the model gets the old value. "
                + ("Write `step.xs` instead." if splits else f"Read `learner.step.{name}` after {event!r}."),
                UserWarning,
            )


class Differentiated:
    """What a function that a phase differentiates does with the differentiated parameters.

    Args:
        phase: The phase.
        wrt: The differentiated part, such as `params.generator`.
    """

    def __init__(self, phase: Phase, wrt: str) -> None:
        self._phase, self._wrt = phase, wrt
        self._path = tuple(wrt.split("."))
        self._followed: set[str] = set()

    def watched(self, value: PyTree, how: str) -> PyTree:
        """Return arrays that the function uses, unchanged. A gradient that depends on one of them is noted.

        Args:
            value: The arrays.
            how: How the function gets them: `state`, `argument` or `read`.
        """
        return _watched(value, lambda: self._followed.add(how))

    def read(self, name: str, value: PyTree) -> PyTree:
        """Return a part of the train state that the function reads from the learner."""
        if name != self._path[0]:
            return value
        # Only the part that is differentiated. The other parameters are constants of this gradient.
        part = value
        for key in self._path[1:]:
            part = part[key]
        return replaced(value, self._path[1:], self.watched(part, "read"))

    def check(self) -> None:
        """Check the gradient after it was taken.

        Raises:
            TraceError: It depends on no parameter.
        """
        # Zero gradients cannot be detected from values while tracing, and they may be correct at run time.
        if not self._followed:
            raise _independent_loss(self._wrt, self._phase)
        # Not `state`: a handler that reads the parameters inside the gradient uses them through the state alone.
        if {"argument", "read"} <= self._followed:
            root = self._path[0]
            warn_user(
                f"`{type(self._phase).__name__}.step` differentiates a function that uses its argument and also reads "
                f"`learner.{root}`. Inside the function, `learner.{root}` has the differentiated values, so the "
                f"gradient flows through both. Read `learner.{root}` before `learner.grad` if these values are "
                "constants, such as those of a target. Otherwise, use only the argument.",
                UserWarning,
            )


def _watched(tree: PyTree, reached: Callable[[], Any]) -> PyTree:
    """Return the arrays unchanged. `reached()` is called when a gradient is taken that depends on one of them."""

    # `jax.custom_jvp` would not work: its rule runs in the forward pass, for every value that is differentiated.
    @jax.custom_vjp
    def same(tree: PyTree) -> PyTree:
        return tree

    def backward(_: None, cotangents: PyTree) -> tuple[PyTree]:
        reached()  # JAX calls this rule only if there is a cotangent
        return (cotangents,)

    same.defvjp(lambda tree: (tree, None), backward)
    return same(tree)


def _independent_loss(wrt: str, phase: Phase) -> TraceError:
    """Return the error for a loss that does not depend on what it is differentiated by."""
    return TraceError(
        f"The loss does not depend on `{wrt}`.",
        where=f"{type(phase).__name__}.step",
        why="its gradient is zero everywhere, so training would have no effect",
        fix=[
            "compute the loss from the model's outputs or from the parameters",
            "if it already is: comparisons, `argmax`, `round` and `jax.lax.stop_gradient` block gradients",
        ],
    )
