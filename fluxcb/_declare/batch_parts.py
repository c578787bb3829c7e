"""The parts of a batch: the inputs of the model, and the targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["BatchParts"]


@dataclass(frozen=True)
class BatchParts:
    """Splits batches into inputs and targets.

    Without functions, a pair is `(inputs, targets)`, and any other batch consists of inputs only.

    Args:
        inputs: Returns the inputs of a batch, or None for the default.
        targets: Returns the targets of a batch, or None for the default.
    """

    inputs: Callable[[Any], Any] | None = None
    targets: Callable[[Any], Any] | None = None

    def __call__(self, batch: Any) -> tuple[Any, Any]:
        """Return `(inputs, targets)`. The targets are None if they are not known."""
        pair = isinstance(batch, tuple | list) and len(batch) == 2
        xs, ys = batch if pair else (batch, None)
        if self.inputs is not None:
            xs = self.inputs(batch)
        if self.targets is not None:
            ys = self.targets(batch)
        return xs, ys

    def inputs_of(self, batch: Any) -> Any:
        """Return the inputs of a batch, which may have no targets."""
        if self.inputs is not None:
            return self.inputs(batch)
        return BatchParts()(batch)[0]
