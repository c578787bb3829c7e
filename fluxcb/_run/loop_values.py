"""What a hand-written loop hands over to callbacks: announced once, and checked at each step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fluxcb._compile.arrays import describe
from fluxcb._declare.state import ENGINE_STEP_NAMES
from fluxcb._errors import DeclarationError, did_you_mean

__all__ = ["announced", "handed_over"]


def announced(values: Any) -> dict[str, Any]:
    """Return the specs of the values that a loop says it will hand over, given examples.

    Raises:
        DeclarationError: They are no names with arrays.
    """
    example = 'write e.g. `callbacks_as_hook(callbacks, {"loss": 0.0})`'
    if not isinstance(values, Mapping) or not all(isinstance(name, str) and name.isidentifier() for name in values):
        raise DeclarationError(
            f"`values` of `callbacks_as_hook` must map names to examples of their values, not {values!r}.", fix=example
        )
    specs = {}
    for name, value in values.items():
        if name in ENGINE_STEP_NAMES:
            raise DeclarationError(
                f"`callbacks_as_hook` cannot hand over a value called `{name}`.",
                why=f"`step.{name}` is {ENGINE_STEP_NAMES[name].split(';')[0]}",
                fix="give it another name",
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
    array = value if isinstance(value, jax.ShapeDtypeStruct) else jnp.asarray(value)
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def handed_over(values: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that a loop hands over as arrays of the announced dtypes.

    Raises:
        DeclarationError: They are others than were announced.
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
            fix="announce what the loop hands over: `callbacks_as_hook(callbacks, {...})`",
        )
    arrays = {name: jax.tree.map(jnp.asarray, values[name]) for name in known}
    for name, spec in known.items():
        found = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays[name])
        if not _fits(found, spec):
            raise DeclarationError(
                f"`after_step` was given {_described(found)} as `{name}`; {_described(spec)} was announced.",
                fix=f"announce what the loop hands over: `callbacks_as_hook(callbacks, {{{name!r}: ...}})`",
            )
    return jax.tree.map(lambda x, spec: x.astype(spec.dtype), arrays, dict(known))


_KINDS = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)


def _fits(found: Any, spec: Any) -> bool:
    """Tell whether values can stand for others: of the same shapes, and of dtypes that hold no more."""
    if jax.tree.structure(found) != jax.tree.structure(spec):
        return False
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(spec), strict=True)
    return all(one.shape == other.shape and _kind(one) <= _kind(other) for one, other in pairs)


def _kind(spec: Any) -> int:
    return next(i for i, kind in enumerate(_KINDS) if jnp.issubdtype(spec.dtype, kind))


def _described(spec: Any) -> str:
    return describe(spec) if hasattr(spec, "dtype") else str(jax.tree.map(describe, spec))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"
