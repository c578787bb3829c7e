"""Access to the state from outside handlers: detected writes into returned copies, and refusals during a run."""

from __future__ import annotations

from typing import Any

import jax

from fluxcb._errors import AccessError, DeclarationError
from fluxcb._tracebacks import warn_user
from fluxcb._typing import PyTree

__all__ = ["ReturnedCopies", "read_ahead", "used_while_running", "warn_of_source"]

_AHEAD = "the device runs ahead of the handlers, so the train state is not that of the handler's step"


class ReturnedCopies:
    """The copies of the train state that the Learner has returned since it last trained.

    `learner.params` is a plain pytree with the structure that `jax.tree` and optax expect, so it cannot refuse
    `learner.params["w"] = w` itself. Each copy is therefore kept until the Learner is used again, and then compared. A
    copy is a second set of arrays, so none is kept while the Learner trains.
    """

    def __init__(self) -> None:
        self._copies: list[tuple[str, PyTree, list[Any], Any]] = []

    def add(self, name: str, tree: PyTree) -> PyTree:
        """Register a copy, and return it.

        Args:
            name: The name of the property.
            tree: The copy.
        """
        leaves, structure = jax.tree.flatten(tree)
        # A single array is immutable.
        if not jax.tree_util.treedef_is_leaf(structure):
            self._copies.append((name, tree, leaves, structure))
        return tree

    def forget(self) -> None:
        """Forget the copies."""
        self._copies = []

    def verify(self) -> None:
        """Check the copies for changes, and forget them.

        Raises:
            AccessError: A copy was changed.
        """
        # Forgotten first, so that one mistake is reported once.
        copies, self._copies = self._copies, []
        for name, tree, leaves, structure in copies:
            now, now_structure = jax.tree.flatten(tree)
            # By identity, because a comparison of the values would read all arrays from the device.
            if now_structure == structure and all(a is b for a, b in zip(now, leaves, strict=True)):
                continue
            raise AccessError(
                f"A container that `learner.{name}` returned was changed, which does not change the Learner.",
                why=f"`learner.{name}` returns a copy",
                fix=[
                    f"assign the changed container: `{name} = learner.{name}`, then change it, "
                    f"then `learner.{name} = {name}`",
                    f"to change a container for another purpose: `{name} = jax.tree.map(lambda x: x, learner.{name})`",
                ],
            )


def used_while_running(what: str) -> DeclarationError:
    """Return the error for a change of the state during a running epoch or fit."""
    return DeclarationError(
        f"`learner.{what}` was used while this Learner is running.",
        why=_AHEAD,
        fix="change state in a handler that declares it, or between two calls of `fit`",
    )


def warn_of_source(what: str) -> None:
    """Warn that a data source reads a counter of the training after the first batch of a pass."""
    warn_user(
        f"A data source reads `learner.{what}` after the first batch of a pass. Batches are read many steps before "
        "they are used, so the number is too low, by an amount that depends on timing. Count the batches in the "
        "source.",
        UserWarning,
    )


def read_ahead(what: str, *, by_source: bool) -> DeclarationError:
    """Return the error for reading the state while the device is ahead: by a data source, or a handler.

    Args:
        what: What is read, such as `params`.
        by_source: Whether a data source reads it. Otherwise, a handler has not declared to read it.
    """
    if by_source:
        return DeclarationError(
            f"A data source reads `learner.{what}` after the first batch of a pass.",
            why="batches are read many steps before they are used, and how many depends on the time that they take",
            fix=[
                "read it at EpochBegin, in a handler, or in the source before its first batch",
                "write the loop yourself, and pass each batch to `learner.run_step(phase, batch)`",
            ],
        )
    return DeclarationError(
        f"A step's handler reads `learner.{what}` from the Learner itself, not from its argument `learner`.",
        why=_AHEAD,
        fix="declare it in `stateaccess`, and read it from the handler's argument",
    )
