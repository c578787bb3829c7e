"""Values of the carry: their paths, and checks of the values that replace them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fluxcb._compile.arrays import differences
from fluxcb._compile.hyperparams import HyperparamIndex
from fluxcb._declare.access import Access, dotted, writes
from fluxcb._errors import TraceError
from fluxcb._traced_values import describe
from fluxcb._typing import PyTree, StatePath

__all__ = [
    "below",
    "check_loss",
    "conforming",
    "names_in",
    "no_part_to_differentiate",
    "part_of",
    "replaced",
    "root_of",
    "same_form",
    "writable_roots",
]


def root_of(path: StatePath) -> StatePath:
    """Return the path of the whole value that contains a path: `step.x`, `cbstate.x`, `params`, ..."""
    if path[0] == "hyperparams":
        # Optax stores injected hyperparameters in the optimizer state.
        return ("opt_state",)
    return path[:2] if path[0] in ("step", "cbstate") else path[:1]


def replaced(old: Any, rest: StatePath, value: Any) -> Any:
    """Return `old` with the part at `rest` replaced. Containers on the path are copied instead of changed."""
    if not rest:
        return value
    # The copy keeps the state before the write intact, which `learner.grad` and scheduled handlers restore.
    if isinstance(old, Mapping):
        return {**old, rest[0]: replaced(old.get(rest[0]), rest[1:], value)}
    # Apart from mappings, only named tuples have named parts that can be replaced.
    return old._replace(**{rest[0]: replaced(getattr(old, rest[0]), rest[1:], value)})


def part_of(carry: Mapping[str, Any], hyperparams: HyperparamIndex, path: StatePath) -> PyTree:
    """Return the value at a path of the carry (arrays, tracers or specs).

    Raises:
        LookupError, AttributeError: The path does not exist.
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


def names_in(value: Any) -> Iterator[str]:
    """Iterate over the names of a value's parts: keys of a mapping, or attributes."""
    # A named tuple has no `__dict__`.
    if not isinstance(value, Mapping) and hasattr(value, "_fields"):
        return iter(value._fields)
    return iter(value if isinstance(value, Mapping) else getattr(value, "__dict__", ()))


def writable_roots(access: Access, existing: Iterable[StatePath]) -> list[StatePath]:
    """Return the roots that a traced handler may write.

    Args:
        access: What the handler has declared.
        existing: The roots that exist when the handler runs.
    """
    roots: dict[StatePath, None] = {}
    for path, permission in access.items():
        # These are no values of the step, so `cond` does not return them.
        if not writes(permission) or path[0] in ("control", "data", "model", "callbacks"):
            continue
        # A permission on the whole namespace includes all names that exist at this point.
        if path[0] in ("step", "cbstate") and len(path) == 1:
            roots.update(dict.fromkeys(r for r in existing if r[0] == path[0] and r != ("step", "batch")))
        else:
            roots[root_of(path)] = None
    return list(roots)


def no_part_to_differentiate(wrt: str, container: Any) -> TraceError:
    """Return the error for an argument `wrt` of `learner.grad` that names no part of the state."""
    first = wrt.partition(".")[0]
    names = sorted(map(str, container)) if isinstance(container, Mapping) else []
    return TraceError(
        f"`learner.grad(..., wrt={wrt!r})` does not name a part of `{first}`"
        + (f", which has {', '.join(names)}." if names else "."),
        fix='write `wrt="params"`' + (f' or e.g. `wrt="{first}.{names[0]}"`' if names else ""),
    )


def check_loss(loss: Any) -> None:
    """Check that a loss can be differentiated.

    Raises:
        TraceError: It is not a real floating-point scalar.
    """
    # Checked before `jax.grad`, whose own errors do not mention the loss function or the phase.
    shape, dtype = getattr(loss, "shape", None), getattr(loss, "dtype", None)
    if shape == () and dtype is not None and jnp.issubdtype(dtype, jnp.floating):
        return
    fix = "take the mean over the batch: `jnp.mean(loss)`" if shape else "return a real floating-point scalar"
    if isinstance(loss, tuple):
        fix = "return only the loss; a loss function `loss_fn(model, batch)` can also return `(loss, aux)`"
    raise TraceError(
        f"The loss must be one real floating-point number, float[], but is {describe(loss)}.",
        why="training differentiates the loss, and only a real scalar has a gradient",
        fix=fix,
    )


def conforming(old: PyTree, new: PyTree, what: str, where: Any = (), fix: str = "") -> PyTree:
    """Return `new` with the exact dtypes of `old`. Python numbers and weak types take the old dtype.

    Args:
        old: The value that is replaced.
        new: The value that replaces it.
        what: The beginning of the message.
        where: The locations in the user's code, if they are known.
        fix: How to assign such a value, if it is not an entry that `init` creates.

    Raises:
        TraceError: The structure, a shape or a dtype differs.
    """
    if jax.tree.structure(old) == jax.tree.structure(new):  # Python numbers take the old dtype
        new = jax.tree.map(lambda o, n: jnp.asarray(n, o.dtype) if isinstance(n, bool | int | float) else n, old, new)
    # XLA would report such a change as a mismatch in the body of the loop, without the handler that caused it.
    wrong = differences(old, new)
    if wrong:
        raise TraceError(
            f"{what}: {wrong[0]}.",
            where=[*([where] if isinstance(where, str) else where), *wrong[1:5]],
            why="the structure, shapes and dtypes of the carry are fixed when the step is compiled",
            fix=fix
            or "keep the same structure, shapes and dtypes, e.g. with `.astype(old.dtype)`, or create the value "
            "with the new ones in `init`",
        )
    return jax.tree.map(_strong, old, new)


def same_form(path: StatePath) -> str:
    """Return how a handler assigns a path with the structure, shapes and dtypes that it has; empty for `cbstate`."""
    name = dotted(path)
    if path == ("step", "loss"):
        return "assign one number, e.g. with `jnp.mean(...)`"
    if path[0] == "cbstate":  # the fix of `conforming`, because `init` chooses the structure
        return ""
    return (
        "compute each array from the old one, with the same dtype: "
        f"`learner.{name} = jax.tree.map(lambda old: ..., learner.{name})`"
    )


def _strong(old: Any, new: Any) -> Any:
    # A weak type would change the dtype promotion of later operations.
    return jax.lax.convert_element_type(new, old.dtype) if getattr(new, "weak_type", False) else new
