"""A warning about a step that uses the initial parameters, which are constants, in place of the trained ones."""

from __future__ import annotations

import weakref
from typing import Any

import jax

from fluxcb._compile.step import TracedStep
from fluxcb._tracebacks import warn_user
from fluxcb._typing import PyTree

__all__ = ["InitialArrays"]


class InitialArrays:
    """The arrays of the parameters that a user has passed, of which the carry has copies.

    Args:
        params: The parameters.
        of_model: Whether they belong to a model, and not to a loss function.
    """

    def __init__(self, params: PyTree = None, *, of_model: bool = True) -> None:
        # Weak references, because the carry has copies, and the originals may take as much memory.
        self._paths = {
            id(leaf): (weakref.ref(leaf), jax.tree_util.keystr(path, simple=True, separator="."))
            for path, leaf in jax.tree_util.tree_leaves_with_path(params)
            if isinstance(leaf, jax.Array)
        }
        self._of_model = of_model

    def warn_if_used(self, step: TracedStep) -> None:
        """Warn once if a step uses some of the arrays: its loss function, a metric, or a traced handler does."""
        used = sorted(_constants(step.jaxpr) & self._paths.keys())
        paths = [path for array, path in map(self._paths.__getitem__, used) if array() is not None]
        if not paths:
            return
        self._paths = {}
        shown = ", ".join(f"`{path}`" for path in sorted(paths)[:3]) + (", ..." if len(paths) > 3 else "")
        trained = (
            "write `def loss_fn(model, batch):`" if self._of_model else "use the first argument of the loss function"
        )
        warn_user(
            f"The step of {type(step.phase).__name__} uses initial parameters ({shown}) as constants, which get no "
            "gradient and never change, because fluxcb trains copies of them. The loss function, a metric, or a traced "
            f"handler finds them in a variable. To use the trained parameters, {trained}. If the initial ones are "
            f"intended, use copies: `jax.tree.map(jnp.copy, {'module' if self._of_model else 'params'})`.",
            UserWarning,
        )


def _constants(jaxpr: Any) -> set[int]:
    """Return the identities of the arrays that a closed jaxpr contains, also in the functions that it calls."""
    found = {id(constant) for constant in getattr(jaxpr, "consts", ())}
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
                    found |= _constants(inner)
    return found
