"""Values in messages without tracers, and errors of Python code that needs the value of a traced array."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fluxcb._errors import TraceError

__all__ = ["USE_JNP", "describe", "needs_value", "needs_value_error", "shapes"]

USE_JNP = (
    "use only jax.numpy: write `jnp.where(condition, a, b)` instead of `if`, and do not call float() or format values"
)
"""The first fix of these errors."""

_SHOWN = 6  # maximum number of parts of a container that a message lists
_REPRS = (
    (re.compile(r"\b\w*Tracer\((\w+\[[\d,]*\])\)|\bTraced<(\w+\[[\d,]*\])>(?:with<\w+>)?"), r"\1\2"),
    (re.compile(r"'?\b\w*Tracer\b'?(?:\.__format__)?(?: object)?"), "a traced array"),
)
"""The texts of tracers in messages of JAX and Python, with what replaces them."""


def describe(x: Any) -> str:
    """Return the dtype and shape of an array as text, such as `float32[32, 10]`, or what another value is."""
    if hasattr(x, "dtype") and hasattr(x, "shape"):
        return f"{x.dtype}[{', '.join(map(str, x.shape))}]"
    # The repr of a tracer names classes of JAX. Users cannot look them up, and their names change.
    if isinstance(x, str) and "Tracer(" in x:
        return "a str with the repr of a traced array"
    if x is None:
        return "None"
    if isinstance(x, bool | int | float | complex | str | bytes):
        return f"{type(x).__name__} {x!r}"
    return shapes(x)


def shapes(value: Any) -> str:
    """Return the shapes in a pytree for messages: `(float32[32, 64], int32[32])`, `{"image": float32[8, 28, 28]}`."""
    import jax
    import numpy as np

    # These values are often flags or options, which matter more than their types.
    if value is None or isinstance(value, bool | int | float | str | np.generic):
        return repr(value)
    if isinstance(value, Mapping):
        parts = [f'"{key}": {shapes(part)}' for key, part in list(value.items())[:_SHOWN]]
        return "{" + ", ".join(parts + ["..."] * (len(value) > _SHOWN)) + "}"
    if hasattr(value, "_fields"):
        parts = [f"{name}={shapes(getattr(value, name))}" for name in value._fields[:_SHOWN]]
        return f"{type(value).__name__}({', '.join(parts)})"
    if isinstance(value, tuple | list):
        parts = [shapes(part) for part in value[:_SHOWN]] + ["..."] * (len(value) > _SHOWN)
        inside = ", ".join(parts)
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' * (len(value) == 1)})"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return describe(value)
    if not jax.tree_util.all_leaves([value]):
        return f"{type(value).__name__}({', '.join(map(shapes, jax.tree.leaves(value)[:_SHOWN]))})"
    return type(value).__name__


def needs_value(error: Exception) -> bool:
    """Return whether JAX or Python raised an error because it needs the value of a tracer."""
    import jax

    kinds = (
        jax.errors.ConcretizationTypeError,
        jax.errors.TracerArrayConversionError,
        jax.errors.TracerIntegerConversionError,
        jax.errors.UnexpectedTracerError,
    )
    # NumPy and Python raise a plain TypeError for some uses of a tracer, e.g. `range(tracer)`.
    text = str(error)
    return isinstance(error, kinds) or (
        isinstance(error, TypeError)
        and "Tracer" in text
        and ("__format__" in text or "cannot be interpreted as an integer" in text)
    )


def needs_value_error(what: str, error: Exception, where: Sequence[str], why: str, fix: Sequence[str]) -> TraceError:
    """Return the error for an error that `needs_value` has recognized, with its notes.

    Args:
        what: The subject of the message: "The metric `kl`".
        error: The error of JAX or Python.
        where: The locations.
        why: The reason why there is no value.
        fix: The fixes.
    """
    # Only the first line, because the advice of JAX that follows is for plain functions.
    reason = str(error).splitlines()[0]
    for pattern, replacement in _REPRS:
        reason = pattern.sub(replacement, reason)
    text = f"{what} needs a value in Python: {reason}"
    made = TraceError(text, where=where, why=why, fix=fix)
    # The notes name the functions of the user that were called, with the shapes of their arguments.
    for note in getattr(error, "__notes__", ()):
        made.add_note(note)
    return made
