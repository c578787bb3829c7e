"""The values that handlers receive, and may not change in place, because the change would have no effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from fluxcb._attributes import attributes
from fluxcb._declare.access import Write, code_reading, dotted
from fluxcb._declare.declared import Declared
from fluxcb._errors import AccessError
from fluxcb._typing import PyTree, StatePath

__all__ = ["LentValues"]


class _Lent(NamedTuple):
    """One value that a handler has received. `content` returns its leaves and its structure."""

    declared: Declared
    where: str
    path: StatePath
    value: Any
    content: Callable[[Any], tuple[list[Any], Any]]
    leaves: list[Any]
    structure: Any


class LentValues:
    """The values that the running handler received: copies of parts of the state, and the user's model and optimizer.

    The backends of handlers add them, and verify them after each handler. The copies are plain pytrees, because
    `jax.tree.map` does not accept a read-only mapping next to a dict. A write into a copy therefore cannot be refused
    immediately. It is detected afterwards, at the cost of one flatten per read.

    Attributes:
        entries: The values. An empty list costs the engine one truth test per handler.
    """

    def __init__(self) -> None:
        self.entries: list[_Lent] = []

    def lend(self, declared: Declared, value: PyTree, path: StatePath, where: str = "") -> PyTree:
        """Return a value in new containers; a single array is returned as it is.

        Args:
            declared: The callback that receives it.
            value: The value.
            path: Its path.
            where: The location of the handler, for the error.
        """
        leaves, structure = jax.tree.flatten(value)
        # A JAX array cannot be changed in place, and NumPy raises an error for a read-only array.
        if len(leaves) == 1 and leaves[0] is value:
            return value
        fresh = jax.tree.unflatten(structure, leaves)
        self.entries.append(_Lent(declared, where, path, fresh, jax.tree.flatten, leaves, structure))
        return fresh

    def lend_object(self, declared: Declared, value: Any, path: StatePath) -> Any:
        """Return an object of the user, whose attributes must not change."""
        self.entries.append(_Lent(declared, declared.where, path, value, attributes, *attributes(value)))
        return value

    def forget(self) -> None:
        """Forget the values."""
        self.entries = []

    def verify(self) -> None:
        """Check the values for changes, which would have no effect, and forget them.

        Raises:
            AccessError: One was changed.
        """
        # Forgotten first, so that one mistake is reported once.
        entries, self.entries = self.entries, []
        for lent in entries:
            now, structure = lent.content(lent.value)
            # Compared by identity: arrays are immutable, so a write replaces a leaf, and tracers have no known values.
            if structure == lent.structure and all(a is b for a, b in zip(now, lent.leaves, strict=True)):
                continue
            raise _object_changed(lent, now, structure) if lent.content is attributes else _copy_changed(lent)


def _copy_changed(lent: _Lent) -> AccessError:
    return AccessError(
        f"{lent.declared.label} writes into the container that it read from `{dotted(lent.path)}`.",
        where=lent.where,
        why="reading returns a copy, so the change would be lost",
        fix=f"declare Write(), change a copy, and assign it: `learner.{dotted(lent.path)} = copy`",
    )


def _object_changed(lent: _Lent, now: list[Any], names: list[str]) -> AccessError:
    before = dict(zip(lent.structure, lent.leaves, strict=True))
    after = dict(zip(names, now, strict=True))
    changed = [name for name in {**after, **before} if name not in before or before[name] is not after.get(name)]
    declare = lent.declared.how_to_declare(("hyperparams", "learning_rate"), Write())
    rate = f"to change the learning rate, assign `learner.hyperparams.learning_rate`, and {declare}"
    return AccessError(
        f"{lent.declared.label} changes `{code_reading(lent.path)}{changed[0]}`.",
        where=lent.where,
        why=f"the compiled steps use the {lent.path[0]} as it was when they were traced, so the change has no effect",
        fix=rate
        if lent.path[0] == "optimizer"
        else [
            "change it before the Learner is built",
            "change it after `fit`, on `model = learner.get_model()`, and call `learner.set_model(model)`",
        ],
    )
