"""Values of the carry: where they lie, and what may take their place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fluxcb._compile.arrays import describe, differences
from fluxcb._compile.hyperparams import HyperparamIndex
from fluxcb._errors import TraceError
from fluxcb._typing import PyTree, StatePath

__all__ = ["below", "check_loss", "conforming", "part_of", "replaced", "root_of", "watched"]


def root_of(path: StatePath) -> StatePath:
    """Return the path of the whole value that a path lies in: `step.x`, `cbstate.x`, `params`, ..."""
    if path[0] == "hyperparams":
        return ("opt_state",)
    return path[:2] if path[0] in ("step", "cbstate") else path[:1]


def replaced(old: Any, rest: StatePath, value: Any) -> Any:
    """Return `old` with the part at `rest` replaced; containers on the way are copied, not changed."""
    if not rest:
        return value
    if isinstance(old, Mapping):
        return {**old, rest[0]: replaced(old.get(rest[0]), rest[1:], value)}
    return old._replace(**{rest[0]: replaced(getattr(old, rest[0]), rest[1:], value)})


def part_of(carry: Mapping[str, Any], hyperparams: HyperparamIndex, path: StatePath) -> PyTree:
    """Return the value at a path of the carry (arrays, tracers or specs).

    Raises:
        LookupError, AttributeError: There is no such path.
    """
    if path[0] == "hyperparams":
        return hyperparams.get(carry["opt_state"], path[1])
    root = root_of(path)
    value = carry["cbstate"][path[1]] if path[0] == "cbstate" else carry[path[0]]
    return below(value, path[len(root) :])


def below(value: Any, rest: StatePath) -> Any:
    """Return the part of a value at the rest of a path, through mappings and attributes."""
    for part in rest:
        value = value[part] if isinstance(value, Mapping) else getattr(value, part)
    return value


def check_loss(loss: Any) -> None:
    """Check that a loss can be differentiated.

    Raises:
        TraceError: It is no real floating-point scalar.
    """
    shape, dtype = getattr(loss, "shape", None), getattr(loss, "dtype", None)
    if shape == () and dtype is not None and jnp.issubdtype(dtype, jnp.floating):
        return
    fix = "take the mean over the batch: `jnp.mean(loss)`" if shape else "return a real floating-point scalar"
    raise TraceError(
        f"The loss must be one real floating-point number, float[], but is {describe(loss)}.",
        why="its gradient is what training follows",
        fix=fix,
    )


def watched(loss: Any, follows: list[bool]) -> Any:
    """Return the loss; differentiating it notes in `follows` that something which is differentiated leads to it."""

    @jax.custom_jvp
    def same(x: Any) -> Any:
        return x

    @same.defjvp
    def rule(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Any, Any]:
        follows.append(True)  # JAX asks only for what carries a tangent
        return primals[0], tangents[0]

    return same(loss)


def conforming(old: PyTree, new: PyTree, what: str, where: Any = ()) -> PyTree:
    """Return `new` with the old one's exact types; Python numbers and weak types take the old dtype.

    Raises:
        TraceError: Structure, shape or dtype differ; the message begins with `what`.
    """
    if jax.tree.structure(old) == jax.tree.structure(new):  # Python numbers take the old dtype
        new = jax.tree.map(lambda o, n: jnp.asarray(n, o.dtype) if isinstance(n, bool | int | float) else n, old, new)
    wrong = differences(old, new)
    if wrong:
        raise TraceError(
            f"{what}: {wrong[0]}.",
            where=[*([where] if isinstance(where, str) else where), *wrong[1:5]],
            why="the carry of a compiled step keeps its structure, shapes and dtypes",
            fix="return what came in, e.g. with `.astype(old.dtype)`, or create it right in `init`",
        )
    return jax.tree.map(_strong, old, new)


def _strong(old: Any, new: Any) -> Any:
    return jax.lax.convert_element_type(new, old.dtype) if getattr(new, "weak_type", False) else new
