"""Optimizers by name, each of which owns a part of the parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import jax
import optax

from fluxcb._compile.carry_paths import below, names_in
from fluxcb._declare.access import dotted
from fluxcb._errors import DeclarationError
from fluxcb._typing import PyTree, StatePath

__all__ = ["NamedOptimizers", "refuse_unused"]


class NamedOptimizers(Mapping[str, optax.GradientTransformation]):
    """Several optimizers by name.

    An optimizer whose name is a dotted path of a part of the parameters owns this part. An optimizer with any other
    name owns all of the parameters. Its state is `opt_state[name]`.

    Args:
        optimizers: The optimizers by name.
    """

    def __init__(self, optimizers: Mapping[str, optax.GradientTransformation]) -> None:
        self._optimizers = dict(optimizers)

    def __getitem__(self, name: str) -> optax.GradientTransformation:
        return self._optimizers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._optimizers)

    def __len__(self) -> int:
        return len(self._optimizers)

    def init(self, params: PyTree) -> dict[str, PyTree]:
        """Return the initial state of each optimizer, by name."""
        return {
            # Each optimizer sees only its part, so `opt_state` has no entries for the rest of the parameters.
            name: optimizer.init(below(params, self.part(name, params)))
            for name, optimizer in self._optimizers.items()
        }

    def part(self, name: str, params: PyTree) -> StatePath:
        """Return the path of the part of `params` that an optimizer owns: `()` for all of it."""
        # The name alone determines the part, so the Learner needs no separate argument for it.
        path = tuple(name.split("."))
        value = params
        for entry in path:
            # An array and a method have attributes as well, but these are not parts.
            if jax.tree_util.all_leaves([value]) or entry not in set(names_in(value)):
                return ()
            value = below(value, (entry,))
        return path

    def owned(self, params: PyTree) -> dict[str, str]:
        """Return the part that each optimizer owns, for messages: `{"d": "params.d"}`."""
        return {name: dotted(("params", *self.part(name, params))) for name in self}


def refuse_unused(optimizer: Any, used: Collection[str]) -> None:
    """Raise an error for an optimizer that no phase uses.

    Args:
        optimizer: The optimizer, or optimizers, of the Learner.
        used: Names of the optimizers that the training phases use.

    Raises:
        DeclarationError: There is such an optimizer.
    """
    # A single optimizer may be unused, e.g. in a phase that computes its own updates.
    unused = [name for name in optimizer if name not in used] if isinstance(optimizer, NamedOptimizers) else []
    if unused:
        raise DeclarationError(
            f"The optimizer {unused[0]!r} is not used by any phase.",
            why="it would never update the parameters that it owns",
            fix=[
                f"call `learner.update(grads, optimizer={unused[0]!r})` in the step of a phase, "
                "and list this phase in `phases=`",
                f"remove {unused[0]!r} from `optimizer=`",
            ],
        )
