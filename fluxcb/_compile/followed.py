"""Whether gradients follow what handlers write to the loss; where they do not, the write would be lost silently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from fluxcb._declare.declared import Handler
from fluxcb._declare.events import Event
from fluxcb._declare.phases import Phase
from fluxcb._errors import TraceError
from fluxcb._typing import PyTree

__all__ = ["LossWrites", "watched"]


class LossWrites:
    """What handlers write to `step.loss` while one step is traced.

    Inside a gradient, the loss they leave is an identity whose backward rule JAX calls if, and only if, what is
    differentiated depends on it. Outside, a phase may use the loss in any way (evolution strategies weigh noise by it),
    so there it need only be read.

    Args:
        phase: The phase whose `step` is traced.
    """

    def __init__(self, phase: Phase) -> None:
        self._phase = phase
        self._tokens: list[Any] = []
        self._unfollowed: list[dict[object, tuple[Event, Handler]]] = []
        self._unread: tuple[Event, Handler] | None = None

    def open_gradient(self, token: Any) -> None:
        """Begin a gradient closure; `token` is an argument that is differentiated, too.

        It lets a loss be watched that depends on no parameter.
        """
        self._tokens.append(token)
        self._unfollowed.append({})

    def close_gradient(self) -> None:
        """End the innermost gradient closure, once its gradient has been taken.

        Raises:
            TraceError: The gradient does not depend on a loss that a handler has written in it.
        """
        self._tokens.pop()
        for event, handler in self._unfollowed.pop().values():
            raise TraceError(
                f"`{self._name}.step` takes a gradient that does not follow the loss that "
                f"{handler.declared.label} has replaced.",
                where=[f"{self._name}.step", handler.where],
                why=f"what the handler wrote to `step.loss` at {event!r} would be lost",
                fix=[
                    f"emit {event!r} in the function that is given to `learner.grad`, and return `learner.step.loss` "
                    "from it",
                    "make several losses one sum, with `jax.lax.stop_gradient` where one must not move a part",
                ],
            )

    def written(self, loss: Any, event: Event, handler: Handler) -> Any:
        """Return the loss to go on with, after the handlers of an event; `handler` was the last to replace it."""
        if not self._tokens:
            self._unread = event, handler
            return loss
        unfollowed, entry = self._unfollowed[-1], object()
        unfollowed[entry] = event, handler
        return watched((loss, self._tokens[-1]), lambda: unfollowed.pop(entry, None))[0]

    def read(self) -> None:
        """Note that the phase reads `step.loss`."""
        self._unread = None

    def finish(self) -> None:
        """Check, at the end of the step, what was written outside of gradients.

        Raises:
            TraceError: The phase trains, and has not looked at it.
        """
        if self._unread is None or not type(self._phase).trains:
            return
        event, handler = self._unread
        raise TraceError(
            f"`{self._name}.step` emits {event!r} outside of its gradient, and does not use the loss that "
            f"{handler.declared.label} has replaced.",
            where=[f"{self._name}.step", handler.where],
            why="what the handler wrote to `step.loss` would be lost",
            fix=[
                f"emit {event!r} in the function that is given to `learner.grad`, and return `learner.step.loss` "
                "from it",
                f"without `learner.grad`: compute the update from `learner.step.loss`, read after {event!r}",
            ],
        )

    @property
    def _name(self) -> str:
        return type(self._phase).__name__


def watched(tree: PyTree, reached: Callable[[], Any]) -> PyTree:
    """Return the arrays as they are; `reached()` is called when a gradient is taken that leads through one of them."""

    @jax.custom_vjp
    def same(tree: PyTree) -> PyTree:
        return tree

    def backward(_: None, cotangents: PyTree) -> tuple[PyTree]:
        reached()  # JAX asks only where there is a cotangent
        return (cotangents,)

    same.defvjp(lambda tree: (tree, None), backward)
    return same(tree)
