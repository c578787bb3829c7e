"""Errors of Python code that needs the value of a traced array, which has none while a step is traced."""

from __future__ import annotations

from collections.abc import Sequence

from fluxcb._errors import TraceError

__all__ = ["USE_JNP", "needs_value", "needs_value_error"]

USE_JNP = (
    "use only jax.numpy: write `jnp.where(condition, a, b)` instead of `if`, and do not call float() or format values"
)
"""The first fix of these errors."""


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
    text = f"{what} needs a value in Python: {str(error).splitlines()[0]}"
    made = TraceError(text, where=where, why=why, fix=fix)
    # The notes name the functions of the user that were called, with the shapes of their arguments.
    for note in getattr(error, "__notes__", ()):
        made.add_note(note)
    return made
