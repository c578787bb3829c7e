"""`Snapshot`: what is saved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fluxcb._typing import PyTree

__all__ = ["VALIDATED", "Snapshot", "is_key", "text_of"]

VALIDATED = "validated"
"""The value of `average=` that selects the parameters that validation measured."""


@dataclass(frozen=True)
class Snapshot:
    """Everything a training needs to go on as if it had never stopped.

    Attributes:
        step: Finished training steps.
        epoch: Number of the epoch at hand, or of the last one.
        trees: `params`, `model_state`, `opt_state`, and `cbstate`, a mapping of the entries that ride in the carry:
            pytrees of arrays.
        host: The rest as JSON: counters, position, random key, the host's `cbstate`, callbacks' states, data positions.
        arrays: The arrays in it, by the names under which it speaks of them.
        about: What the run is made of, as JSON: callbacks, data, programs, versions.
        average: Name of the `cbstate` entry with the average that validation measures, or None.
        averages: The same for each phase and each `InferenceRunner`, by name.
    """

    step: int
    epoch: int
    trees: Mapping[str, PyTree]
    host: Mapping[str, Any]
    arrays: Mapping[str, Any]
    about: Mapping[str, Any]
    average: str | None = None
    averages: Mapping[str, str | None] = field(default_factory=dict)


def is_key(leaf: Any) -> bool:
    """Tell whether an array holds typed random keys."""
    import jax

    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def text_of(leaf: Any) -> str:
    """Return what manifests and messages say of an array: `float32[32, 10]`."""
    return f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]"
