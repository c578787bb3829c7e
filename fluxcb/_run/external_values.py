"""The values that a hand-written loop reports: announced once, and checked at each step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluxcb._declare.state import ENGINE_STEP_NAMES
from fluxcb._errors import DeclarationError, did_you_mean
from fluxcb._traced_values import describe

__all__ = ["checked_values", "declared_values"]


def declared_values(values: Any) -> dict[str, Any]:
    """Return the specs of the values that a loop announces, given examples.

    Raises:
        DeclarationError: `values` does not map names to arrays.
    """
    example = 'write e.g. `callbacks_as_hook(callbacks, {"loss": 0.0})`'
    # Callbacks read the values as attributes, such as `step.loss`.
    if not isinstance(values, Mapping) or not all(isinstance(name, str) and name.isidentifier() for name in values):
        raise DeclarationError(
            f"`values` of `callbacks_as_hook` must map names to examples of their values, not {values!r}.", fix=example
        )
    specs = {}
    for name, value in values.items():
        if name in ENGINE_STEP_NAMES:
            raise DeclarationError(
                f"`callbacks_as_hook` cannot take a value with the name `{name}`.",
                # Without the details after a semicolon, such as the effect of a flag.
                why=f"`step.{name}` is {ENGINE_STEP_NAMES[name].split(';')[0]}",
                fix="use another name",
            )
        try:
            specs[name] = jax.tree.map(_spec, value)
        except TypeError:
            raise DeclarationError(
                f"The value `{name}` of `callbacks_as_hook` must be an array, a number or a pytree of them, "
                f"not {value!r}.",
                fix=example,
            ) from None
    return specs


def _spec(value: Any) -> jax.ShapeDtypeStruct:
    # `jnp.asarray` gives a Python number the dtype that it would have in the loop's step.
    array = value if isinstance(value, jax.ShapeDtypeStruct) else jnp.asarray(value)
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def checked_values(values: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reported values as arrays of the announced dtypes.

    Raises:
        DeclarationError: The values differ from the announced ones.
    """
    if not isinstance(values, Mapping):
        raise DeclarationError(
            f"`after_step` takes a mapping of values by name, not {values!r}.",
            fix="write e.g. `hook.after_step(step, {'loss': loss})`",
        )
    if set(values) != set(known):
        given = next((name for name in values if name not in known), None)
        raise DeclarationError(
            f"`after_step` was given the values {_listed(values)}, not {_listed(known)}."
            f"{did_you_mean(given, known) if given is not None else ''}",
            why="callbacks were checked, and traced handlers compiled, for the values that were announced",
            fix="announce the reported values: `callbacks_as_hook(callbacks, {...})`",
        )
    checked: dict[str, Any] = {}
    for name, spec in known.items():
        value = values[name]
        if _is_exactly(value, spec):  # the usual case, at a tenth of the cost of `jax.tree`
            checked[name] = value
            continue
        arrays = jax.tree.map(_as_array, value)
        # NumPy creates numbers of 64 bits, of which JAX keeps 32 by default.
        found = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)), arrays)
        if not _fits(found, spec):
            raise DeclarationError(
                f"`after_step` was given {_described(found)} as `{name}`; {_described(spec)} was announced.",
                fix=f"announce such a value: `callbacks_as_hook(callbacks, {{{name!r}: {_example(found)}}})`",
            )
        checked[name] = jax.tree.map(lambda x, s: x if x.dtype == s.dtype else x.astype(s.dtype), arrays, spec)
    return checked


def _example(found: Any) -> str:
    """Return the source of a value of these shapes and dtypes."""
    if not isinstance(found, jax.ShapeDtypeStruct):
        return "..."
    if found.shape == () and found.dtype == jnp.float32:
        return "0.0"
    return f"jax.ShapeDtypeStruct({found.shape}, '{found.dtype}')"


def _is_exactly(value: Any, spec: Any) -> bool:
    if not isinstance(value, jax.Array) or not isinstance(spec, jax.ShapeDtypeStruct):
        return False
    return value.shape == spec.shape and value.dtype == spec.dtype


def _as_array(value: Any) -> Any:
    """Return a device array as it is, and anything else as a NumPy array, for which nothing is compiled."""
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return value
    array = np.asarray(value)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype))


# In this order, each kind converts to those after it without losing more than precision.
_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def _fits(found: Any, spec: Any) -> bool:
    """Return whether values fit a spec: the same shapes, and dtypes that convert without loss of kind."""
    if jax.tree.structure(found) != jax.tree.structure(spec):
        return False
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(spec), strict=True)
    # A loop may report an int for a float, but not a float for an int, which would be truncated.
    return all(one.shape == other.shape and _kind(one) <= _kind(other) for one, other in pairs)


def _kind(spec: Any) -> int:
    kinds = (i for i, kind in enumerate(_KINDS) if jnp.issubdtype(spec.dtype, kind))
    return next(kinds, len(_KINDS))  # texts and other objects fit nothing


def _described(spec: Any) -> str:
    return describe(spec) if hasattr(spec, "dtype") else str(jax.tree.map(describe, spec))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"
