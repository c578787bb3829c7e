"""Recording the modes of the layers of a Flax Linen module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from fluxcb.models._inactive_layers import OPTIONS, LayerModes

__all__ = ["noticing_inactive_layers"]


@contextlib.contextmanager
def noticing_inactive_layers(module: Any) -> Iterator[None]:
    """Warn if the layers of a module without a train flag are in evaluation mode during training."""
    from flax import linen as nn

    modes = LayerModes("Linen", "nn", "linen")

    def look(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context: Any) -> Any:
        layer = context.module
        if context.method_name == "__call__" and isinstance(layer, nn.BatchNorm):
            modes.add("BatchNorm", evaluates=_is_set(layer, OPTIONS["BatchNorm"], args, kwargs))
        elif context.method_name == "__call__" and isinstance(layer, nn.Dropout) and layer.rate:
            modes.add("Dropout", evaluates=_is_set(layer, OPTIONS["Dropout"], args, kwargs))
        return call(*args, **kwargs)

    with nn.intercept_methods(look):
        yield
    modes.warn(module)


def _is_set(layer: Any, option: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return the value of an option, which is an argument of the call or a field of the layer."""
    passed = kwargs.get(option, args[1] if len(args) > 1 else None)
    return (getattr(layer, option) if passed is None else passed) is True
