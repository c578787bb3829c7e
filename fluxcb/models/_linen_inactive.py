"""A warning about Linen modules whose dropout or batch normalization is in evaluation mode during training."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

from fluxcb._step_arguments import TRAIN_FLAGS
from fluxcb._tracebacks import warn_user
from fluxcb.models._keywords import boolean_options

__all__ = ["noticing_inactive_layers"]


_OPTIONS = {"nn.Dropout": "deterministic", "nn.BatchNorm": "use_running_average"}
"""Layers, and for each the option that is true in evaluation."""

_MODE = re.compile(r"train|eval|infer|determin|running|mode|test", re.IGNORECASE)


@contextlib.contextmanager
def noticing_inactive_layers(module: Any) -> Iterator[None]:
    """Warn if the layers of a module without a train flag are in evaluation mode during training.

    Nothing else would show that the flag of the module has an unknown name. There is no warning if only some layers are
    in evaluation mode, or for an `nn.BatchNorm` in a module without options, because it may be frozen on purpose.

    Args:
        module: The module.
    """
    from flax import linen as nn

    modes: dict[str, set[bool]] = {layer: set() for layer in _OPTIONS}

    def look(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context: Any) -> Any:
        layer = context.module
        if context.method_name == "__call__" and isinstance(layer, nn.BatchNorm):
            modes["nn.BatchNorm"].add(_is_set(layer, _OPTIONS["nn.BatchNorm"], args, kwargs))
        elif context.method_name == "__call__" and isinstance(layer, nn.Dropout) and layer.rate:
            modes["nn.Dropout"].add(_is_set(layer, _OPTIONS["nn.Dropout"], args, kwargs))
        return call(*args, **kwargs)

    with nn.intercept_methods(look):
        yield
    options = {name: default for name, default in boolean_options(module.__call__).items() if _MODE.search(name)}
    for layer, option in _OPTIONS.items():
        if modes[layer] == {True} and (options or layer == "nn.Dropout"):
            warn_user(
                f"In training, the Linen module `{type(module).__qualname__}` calls `{layer}` with `{option}=True`, "
                f"because fluxcb knows no train flag of its call. {_advice(module, option, options)}",
                UserWarning,
            )
            return


def _is_set(layer: Any, option: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return the value of an option, which is an argument of the call or a field of the layer."""
    passed = kwargs.get(option, args[1] if len(args) > 1 else None)
    return (getattr(layer, option) if passed is None else passed) is True


def _advice(module: Any, option: str, options: dict[str, bool]) -> str:
    call = f"{type(module).__qualname__}.__call__"
    if not options:
        return f"Add a parameter `train` to `{call}`, and write `{option}=not train`."
    name = next(iter(options))
    if options[name]:  # the default is for evaluation, so the option is true in evaluation
        return f"If `{name}` is true in evaluation, rename this parameter of `{call}` to `deterministic`."
    return (
        f"If `{name}` is true in training, pass `fluxcb.models.linen(module, {name!r})` as the model, or rename this "
        f"parameter to one of {', '.join(flag for flag, inverted in TRAIN_FLAGS.items() if not inverted)}."
    )
