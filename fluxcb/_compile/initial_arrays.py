"""Warnings about steps that use the initial parameters as constants, and about a module that is edited later."""

from __future__ import annotations

import weakref
from typing import Any

import jax

from fluxcb._attributes import numbers_in
from fluxcb._compile.step import TracedStep
from fluxcb._tracebacks import warn_user
from fluxcb._typing import PyTree

__all__ = ["InitialArrays"]


class InitialArrays:
    """The arrays of the parameters that a user has passed, of which the carry has copies.

    Args:
        params: The parameters.
        model: The model that they belong to, or None for those of a loss function.
    """

    def __init__(self, params: PyTree = None, model: Any = None) -> None:
        # Weak references, because the carry has copies, and the originals may take as much memory.
        self._paths = {
            id(leaf): (weakref.ref(leaf), jax.tree_util.keystr(path, simple=True, separator="."))
            for path, leaf in jax.tree_util.tree_leaves_with_path(params)
            if isinstance(leaf, jax.Array)
        }
        self._of_model = model is not None
        # Only the arrays of a module of Flax NNX can be replaced by others.
        is_module = bool(self._paths) and self._paths.keys() <= {id(leaf) for leaf in jax.tree.leaves(model)}
        self._module = weakref.ref(model) if is_module and hasattr(model, "__weakref__") else None
        self._arrays = [array for array, _ in self._paths.values()]
        self._numbers = numbers_in(model) if self._module is not None else {}

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

    def warn_if_edited(self) -> None:
        """Warn once if the module has other arrays or numbers now, because the Learner does not use them."""
        module = self._module() if self._module is not None else None
        if module is None:
            return
        arrays, numbers = {id(leaf) for leaf in jax.tree.leaves(module)}, numbers_in(module)
        changed = next((name for name, number in self._numbers.items() if numbers.get(name, number) != number), None)
        if all(id(array()) in arrays for array in self._arrays) and changed is None:
            return
        self._module = None
        name = type(module).__name__
        if changed is None:
            warn_user(
                f"The module `{name}` has other parameters than when it was passed to the Learner, and the Learner "
                "trains a copy without them. To train them, assign the module: `learner.model = module`.",
                UserWarning,
            )
        else:
            warn_user(
                f"The module `{name}` has another `{changed}` than when it was passed to the Learner "
                f"({self._numbers[changed]}, and now {numbers[changed]}), and the Learner trains a copy with the "
                "earlier value. Between two fits, assign the module: `learner.model = module`. During a fit, keep the "
                "value in a variable of the module, which is a part of `model_state` that a callback can write.",
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
