"""A warning about modules whose dropout or batch normalization is in evaluation mode during training."""

from __future__ import annotations

from typing import Any

from fluxcb._step_arguments import TRAIN_FLAGS
from fluxcb._tracebacks import warn_user
from fluxcb.models._keywords import mode_options

__all__ = ["OPTIONS", "LayerModes"]


OPTIONS = {"Dropout": "deterministic", "BatchNorm": "use_running_average"}
"""Layers, and for each the option that is true in evaluation."""


class LayerModes:
    """The modes in which one call of a module in training has called its layers.

    Args:
        library: How messages refer to the library: `Linen` or `NNX`.
        prefix: The usual name of the package of its layers.
        adapter: The name of the adapter in `fluxcb.models`.
    """

    def __init__(self, library: str, prefix: str, adapter: str) -> None:
        self._library, self._prefix, self._adapter = library, prefix, adapter
        self._modes: dict[str, set[bool]] = {layer: set() for layer in OPTIONS}

    def add(self, layer: str, *, evaluates: bool) -> None:
        """Record a call of a layer."""
        self._modes[layer].add(evaluates)

    def clear(self) -> None:
        """Forget the recorded calls."""
        for modes in self._modes.values():
            modes.clear()

    def evaluating(self, layer: str) -> bool:
        """Return whether a layer was called, and always in evaluation mode."""
        return self._modes[layer] == {True}

    def training(self, layer: str) -> bool:
        """Return whether a layer was called in training mode."""
        return False in self._modes[layer]

    def warn(self, module: Any) -> bool:
        """Warn if the layers of a module without a train flag were in evaluation mode.

        Nothing else would show that the flag of the module has an unknown name. There is no warning if only some layers
        were in evaluation mode, or for batch normalization in a module without options, because it may be frozen on
        purpose.

        Args:
            module: The module, or its class.

        Returns:
            Whether there was a warning.
        """
        kind = module if isinstance(module, type) else type(module)
        options = mode_options(kind.__call__)
        for layer in OPTIONS:
            if self.evaluating(layer) and (options or layer == "Dropout"):
                self._warn(layer, kind, options)
                return True
        return False

    def warn_of(self, layer: str, module: Any, options: dict[str, bool]) -> None:
        """Warn that a layer was in evaluation mode.

        Args:
            layer: The layer.
            module: The module.
            options: The booleans of the call of the module that change the mode, with their defaults.
        """
        self._warn(layer, type(module), options)

    def _warn(self, layer: str, kind: type, options: dict[str, bool]) -> None:
        option = OPTIONS[layer]
        warn_user(
            f"In training, the {self._library} module `{kind.__qualname__}` calls `{self._prefix}.{layer}` with "
            f"`{option}=True`, because fluxcb knows no train flag of its call. "
            f"{self._advice(kind.__qualname__, option, options)}",
            UserWarning,
        )

    def _advice(self, name: str, option: str, options: dict[str, bool]) -> str:
        call = f"{name}.__call__"
        if not options:
            return f"Add a parameter `train` to `{call}`, and write `{option}=not train`."
        flag = next(iter(options))
        if options[flag]:  # the default is for evaluation, so the option is true in evaluation
            return f"If `{flag}` is true in evaluation, rename this parameter of `{call}` to `deterministic`."
        names = ", ".join(name for name, inverted in TRAIN_FLAGS.items() if not inverted)
        return (
            f"If `{flag}` is true in training, pass `fluxcb.models.{self._adapter}(module, {flag!r})` as the model, or "
            f"rename this parameter to one of {names}."
        )
