"""Notes on exceptions of Equinox modules that do not fit how fluxcb calls them, and a warning about unused flags."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from fluxcb._step_arguments import TRAIN_FLAGS
from fluxcb._tracebacks import warn_user
from fluxcb._traced_values import shapes
from fluxcb.models._keywords import accepted_keywords, boolean_options

__all__ = ["explaining_call", "warn_about_flags"]

# Messages of JAX and Equinox for an array with too few axes.
_TOO_FEW_AXES = re.compile(r"has ndim 0|rank should be at least 1|needs to have rank")
_NO_KEY = "Dropout requires a key"
_MISSING_KEY = re.compile(r"missing 1 required (?:positional|keyword-only) argument: '(\w*(?:key|rng)\w*)'")
_KEY_NAME = re.compile(r"key|rng|random", re.IGNORECASE)


def warn_about_flags(module: Any) -> None:
    """Warn about an argument of the module's call that selects training mode, because fluxcb does not pass it."""
    for name, default in boolean_options(module.__call__).items():
        if name in (*TRAIN_FLAGS, "inference"):
            call = f"{type(module).__qualname__}.__call__"
            warn_user(
                f"The parameter `{name}` of `{call}` is always {default}, in training and in evaluation. Remove it: "
                "fluxcb sets the `inference` attributes of the layers with `eqx.nn.inference_mode`.",
                UserWarning,
            )


@contextlib.contextmanager
def explaining_call(module: Any, x: Any, *, mapped: bool) -> Iterator[None]:
    """Add a note with a fix to an exception of the module's call.

    Args:
        module: The module.
        x: The inputs of the call.
        mapped: Whether the adapter maps the module over the batch.
    """
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        if advice := _advice(error, module, x, mapped):
            error.add_note(f"fix: {advice}")
        raise


def _advice(error: Exception, module: Any, x: Any, mapped: bool) -> str | None:
    text, call = str(error), f"{type(module).__qualname__}.__call__"
    if _NO_KEY in text:
        keywords = accepted_keywords(module.__call__)
        if "key" in keywords:
            return f"in `{call}`, pass `key=key`, or a key split from it, to each layer that uses dropout"
        other = sorted(name for name in keywords if _KEY_NAME.search(name))
        named = f"rename the parameter `{other[0]}` of" if other else "add a parameter `key=None` to"
        to = " to `key`" if other else ", and pass it on to each layer that uses dropout"
        return f"{named} `{call}`{to}: fluxcb passes random keys only to a parameter with this name"
    if missing := _MISSING_KEY.search(text):
        return f"if `{missing[1]}` is the random key of `{call}`, rename the parameter to `key`"
    if mapped and _TOO_FEW_AXES.search(text):
        return (
            f"fluxcb maps the module over the batch, so `{call}` gets one example, {shapes(x)}. If the module uses "
            "`jax.vmap` to map over the batch itself, remove it, or pass `fluxcb.models.equinox(model, vmap=False)`"
        )
    return None
