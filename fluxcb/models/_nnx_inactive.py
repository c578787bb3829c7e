"""Layers of Flax NNX modules that record their modes."""

from __future__ import annotations

from typing import Any

from flax import nnx

from fluxcb.models._inactive_layers import OPTIONS, LayerModes

__all__ = ["evaluating_layer", "record_modes"]


def record_modes(module: Any) -> LayerModes:
    """Make the layers of a module record the modes in which they are called.

    Subclasses of the layers of Flax stay as they are, and so does the state of the module.

    Returns:
        The record.
    """
    modes = LayerModes("NNX", "nnx", "nnx")
    for _, layer in nnx.iter_modules(module):
        recording = _RECORDING.get(type(layer))
        if recording is not None:
            object.__setattr__(layer, "__class__", recording)
        if isinstance(layer, RecordingDropout | RecordingBatchNorm):
            layer.modes = modes
    return modes


def evaluating_layer(module: Any) -> tuple[str, str] | None:
    """Return the path of a layer that is in evaluation mode while others are in training mode, and its option.

    Returns:
        None if all layers of the module have the same mode.
    """
    modes: dict[bool, tuple[str, str]] = {}
    for path, layer in nnx.iter_modules(module):
        if isinstance(layer, nnx.Dropout | nnx.BatchNorm):
            option = OPTIONS["Dropout" if isinstance(layer, nnx.Dropout) else "BatchNorm"]
            if isinstance(mode := getattr(layer, option), bool):
                modes.setdefault(mode, (".".join(map(str, path)), option))
    return modes.get(True) if len(modes) == 2 else None


class RecordingDropout(nnx.Dropout):
    """A dropout layer that records its mode."""

    modes: LayerModes

    def __call__(self, inputs: Any, *, deterministic: bool | None = None, rngs: Any = None) -> Any:
        """Return the outputs of the layer."""
        if self.rate != 0:
            self.modes.add(
                "Dropout", evaluates=_is_true(self.deterministic if deterministic is None else deterministic)
            )
        return super().__call__(inputs, deterministic=deterministic, rngs=rngs)


class RecordingBatchNorm(nnx.BatchNorm):
    """A batch normalization layer that records its mode."""

    modes: LayerModes

    def __call__(self, x: Any, use_running_average: bool | None = None, **kwargs: Any) -> Any:
        """Return the outputs of the layer."""
        used = self.use_running_average if use_running_average is None else use_running_average
        self.modes.add("BatchNorm", evaluates=_is_true(used))
        return super().__call__(x, use_running_average, **kwargs)


_RECORDING: dict[type, type] = {nnx.Dropout: RecordingDropout, nnx.BatchNorm: RecordingBatchNorm}


def _is_true(option: Any) -> bool:
    return option is True  # not a traced value, which is no decision
