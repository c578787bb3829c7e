"""Recording the modes of the layers of a Flax Linen module."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from fluxcb._interruptions import is_interruption
from fluxcb.models._inactive_layers import OPTIONS, LayerModes
from fluxcb.models._keywords import defaults_of

__all__ = ["noticing_inactive_layers"]


@contextlib.contextmanager
def noticing_inactive_layers(module: Any, call: Callable[..., Any]) -> Iterator[None]:
    """Warn if the layers of a module without a train flag are in evaluation mode during training.

    Args:
        module: The module.
        call: Calls the module as the step does. It takes more keyword arguments of the module.
    """
    modes = LayerModes("Linen", "nn", "linen")
    with _recording(modes):
        yield
    if not modes.warn(module) and modes.evaluating("BatchNorm"):
        found = {
            name: default for name, default in defaults_of(module.__call__).items() if _trains(call, name, default)
        }
        if found:
            booleans = {name: default for name, default in found.items() if isinstance(default, bool)}
            modes.warn_of("BatchNorm", module, booleans)


def _trains(call: Callable[..., Any], name: str, default: Any) -> bool:
    """Return whether another value of an option puts batch normalization in training mode.

    The name of the option does not have to say so: `learn=False`, `frozen=True`, `phase="eval"`.
    """
    values = [not default] if isinstance(default, bool) else ["train", "training"] if isinstance(default, str) else []
    for value in values:
        modes = LayerModes("Linen", "nn", "linen")
        try:
            with _recording(modes):
                jax.eval_shape(functools.partial(call, **{name: value}))
        except Exception as error:
            if is_interruption(error):
                raise
            continue  # the module does not know this value, or the call lacks what it needs with it
        if modes.training("BatchNorm"):
            return True
    return False


@contextlib.contextmanager
def _recording(modes: LayerModes) -> Iterator[None]:
    """Record the modes of the layers of the modules that run in the block."""
    from flax import linen as nn

    def look(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context: Any) -> Any:
        layer = context.module
        if context.method_name == "__call__" and isinstance(layer, nn.BatchNorm):
            modes.add("BatchNorm", evaluates=_is_set(layer, OPTIONS["BatchNorm"], args, kwargs))
        elif context.method_name == "__call__" and isinstance(layer, nn.Dropout) and layer.rate:
            modes.add("Dropout", evaluates=_is_set(layer, OPTIONS["Dropout"], args, kwargs))
        return call(*args, **kwargs)

    with nn.intercept_methods(look):
        yield


def _is_set(layer: Any, option: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return the value of an option, which is an argument of the call or a field of the layer."""
    passed = kwargs.get(option, args[1] if len(args) > 1 else None)
    return (getattr(layer, option) if passed is None else passed) is True
